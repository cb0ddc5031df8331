"""Where a run is, as a function of its progress; clocks that stop."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from mt_train import load_config
from mt_train.training.progress import Course, Progress, StepMeter

TINY = Path(__file__).parents[1] / "examples" / "tiny.yaml"


def course(*overrides: str) -> Course:
    return Course(load_config(TINY, list(overrides)).config)


def test_time_may_shorten_a_run_but_not_its_warm_up() -> None:
    run = course("training.steps=100", "training.time_budget=10", "optimizer.warmup=10")
    progress = Progress(step=2, elapsed=3.0)  # by time 30 steps are gone
    assert run.position(progress) == 30
    assert run.learning_rate(progress) == run.schedule.at(3)
    assert run.schedule.at(3) < run.schedule.at(31)
    assert not run.finished(progress)
    assert run.finished(Progress(step=2, elapsed=10.0))


def test_skipped_steps_count_to_the_end_and_not_in_the_schedule() -> None:
    run = course("training.steps=100", "optimizer.warmup=10")
    plain, skipped = Progress(step=7), Progress(step=30, skipped=23)
    assert run.learning_rate(skipped) == run.learning_rate(plain) == run.schedule.at(8)
    assert run.share(skipped) == 0.3
    assert run.finished(Progress(step=100, skipped=99))
    assert not run.finished(Progress(step=99))
    timed = course("training.steps=100", "training.time_budget=10", "optimizer.warmup=10")
    assert timed.learning_rate(Progress(step=60, skipped=30, elapsed=5.0)) == timed.schedule.at(51)


@pytest.mark.parametrize(("steps", "warmup"), [(5, 4), (1, 0), (3, 10)])
@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_the_given_warm_up_is_taken_and_the_last_step_has_a_rate(steps, warmup, kind) -> None:
    run = course(
        f"training.steps={steps}", f"optimizer.warmup={warmup}", f"optimizer.schedule={kind}"
    )
    rates = [run.learning_rate(Progress(step=step)) for step in range(steps)]
    assert all(rate > 0 for rate in rates)
    for step, rate in enumerate(rates[:warmup], 1):
        assert rate == pytest.approx(3e-3 * step / warmup)


def test_a_skipped_step_moves_no_schedule_and_still_is_a_step() -> None:
    run = course(
        "training.steps=100",
        "optimizer.warmup=10",
        "optimizer.weight_decay_schedule=linear",
        "optimizer.weight_decay_end=0.5",
    )
    for step, skipped in ((5, 2), (50, 7)):
        here, plain = Progress(step=step, skipped=skipped), Progress(step=step - skipped)
        assert run.learning_rate(here) == run.learning_rate(plain)
        assert run.weight_decay(here) == run.weight_decay(plain)
        assert run.share(here) == step / 100


def test_weight_decay_goes_from_its_start_to_its_end() -> None:
    run = course(
        "training.steps=100",
        "optimizer.weight_decay=0.1",
        "optimizer.weight_decay_end=0.3",
        "optimizer.weight_decay_schedule=linear",
    )
    assert run.weight_decay(Progress(step=49)) == pytest.approx(0.2)
    assert run.weight_decay(Progress(step=99)) == pytest.approx(0.3)
    assert course("optimizer.weight_decay=0.1").weight_decay(Progress(step=7)) == 0.1


def test_the_time_left_is_what_is_left_of_the_steps_at_this_speed() -> None:
    run = course("training.steps=100")
    assert run.seconds_left(Progress(step=25, elapsed=5.0)) == pytest.approx(15.0)
    assert run.seconds_left(Progress(step=200, elapsed=5.0)) == 0
    assert run.share(Progress(step=25)) == 0.25


def test_the_clock_stands_between_steps_and_carries_the_update() -> None:
    meter = StepMeter()
    meter.start()
    time.sleep(0.02)
    assert 0.02 <= meter.lap() < 0.1
    time.sleep(0.02)  # the update
    meter.stop()
    time.sleep(0.3)  # an evaluation
    meter.start()
    assert 0.02 <= meter.lap() < 0.2
