"""fp16, its loss scale and skipped steps: the same on every layout, and saved with the run."""

from __future__ import annotations

import gc
import json
import math
import random

import numpy as np
import pytest

# name: (processes, data-parallel size, overrides)
LAYOUTS = {
    "dp2": (2, 2, []),
    "tp2-sp": (2, 1, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "pp2": (2, 1, ["parallel.pp=2"]),
    "cp2": (2, 1, ["parallel.cp=2"]),
    "dp2-optimizer": (2, 2, ["data_parallel.strategy=optimizer"]),
    "dp2-full": (2, 2, ["data_parallel.strategy=full"]),
    "tp2-pp2-zb-v": (4, 1, ["parallel.tp=2", "parallel.pp=2", "pipeline.schedule=zb-v"]),
    "pp2-dp2-gradients": (
        4,
        2,
        ["parallel.pp=2", "data_parallel.strategy=optimizer_gradients"],
    ),
}


def sampled(*names):
    """These always, the others in campaigns."""
    return [n if n in names else pytest.param(n, marks=pytest.mark.campaign) for n in LAYOUTS]


DYNAMIC = ("optimizer.loss_scale={initial: 1024, growth_interval: 3, hysteresis: 1}",)
SHORT = ("training.steps=8", "evaluation.max_windows=1")


def rows(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "loss" in row]


def options(layout):
    _, dp, overrides = LAYOUTS[layout]
    return [*overrides, f"training.micro_batch_size={8 // dp // 2}", "parallel.bucket_size=5000"]


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """One process in fp64 without a loss scale."""
    return tiny.train(tmp_path_factory.mktemp("plain"), "training.dtype=fp64", *SHORT)


@pytest.fixture(scope="module")
def half(tiny, tmp_path_factory):
    """One process in fp16."""
    out = tmp_path_factory.mktemp("half")
    return tiny.train(out, "training.dtype=fp16", "optimizer.loss_scale=1024", *SHORT)


@pytest.mark.parametrize("layout", sampled("tp2-sp", "dp2-full"))
def test_a_scaled_loss_gives_the_numbers_of_one_process_without(
    layout, tiny, plain, tmp_path, losses, arrays
) -> None:
    """In fp64 a power of two as the scale is exact: every gradient has it, once."""
    run = tiny.train(
        tmp_path,
        "training.dtype=fp64",
        *DYNAMIC,
        *SHORT,
        *options(layout),
        nproc=LAYOUTS[layout][0],
    )
    np.testing.assert_allclose(list(losses(run).values()), list(losses(plain).values()), rtol=1e-10)
    norms = [[row["grad_norm"] for row in rows(each)] for each in (run, plain)]
    np.testing.assert_allclose(*norms, rtol=1e-9)
    wanted = arrays(plain, step=8)
    for name, value in arrays(run, step=8).items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-9, err_msg=name)
    scales = [1024, 1024, 1024, 2048, 2048, 2048, 4096, 4096]
    assert [row["loss_scale"] for row in rows(run)] == scales


# What rounding to 11 bits moves in eight steps.
@pytest.mark.parametrize("layout", sampled("pp2", "dp2-optimizer"))
def test_fp16_trains_on_every_layout_like_on_one_process(
    layout, tiny, half, tmp_path, losses, arrays
) -> None:
    run = tiny.train(
        tmp_path,
        "training.dtype=fp16",
        "optimizer.loss_scale=1024",
        *SHORT,
        *options(layout),
        nproc=LAYOUTS[layout][0],
    )
    ours, theirs = losses(run), losses(half)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=2e-3)
    assert [row["skipped_steps"] for row in rows(run)] == [0] * 8
    norms = [[row["grad_norm"] for row in rows(each)] for each in (run, half)]
    np.testing.assert_allclose(*norms, rtol=2e-2)


def test_a_run_in_fp16_generates_with_the_weights_that_it_trained(half, arrays) -> None:
    from mt_infer import Sampling, load_run
    from mt_parallel_state import ParallelLayout, ParallelState

    loaded = load_run(half, ParallelState(ParallelLayout()), dtype="fp16")
    saved = arrays(half, step=8)
    for name, param in loaded.model.named_parameters():
        np.testing.assert_array_equal(
            param.detach().numpy(), saved[f"model/{name}"].astype(np.float16)
        )
    texts = [
        loaded.complete("def ", Sampling(temperature=temperature, max_tokens=8, seed=0)).text
        for temperature in (0, 5.0)
    ]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("dp2-full", "pp2"),
        pytest.param("tp2-sp", "dp2-optimizer", marks=pytest.mark.campaign),
    ],
)
def test_the_scale_goes_on_where_it_was_on_another_layout(
    first, second, tiny, plain, tmp_path, losses
) -> None:
    common = ("training.dtype=fp64", *DYNAMIC, *SHORT)
    saved = tiny.train(
        tmp_path / "saved",
        *common,
        *options(first),
        "checkpoint.every=5",
        nproc=LAYOUTS[first][0],
    )
    step = saved / "checkpoints" / "step_00000005"
    rest = tiny.train(
        tmp_path / "rest",
        *common,
        *options(second),
        f"checkpoint.load={step}",
        nproc=LAYOUTS[second][0],
    )
    assert [row["loss_scale"] for row in rows(rest)] == [2048, 4096, 4096]
    whole = losses(plain)
    np.testing.assert_allclose(
        list(losses(rest).values()), [whole[number] for number in (6, 7, 8)], rtol=1e-10
    )


class Spoiler:
    """Spoils a gradient of one rank at one step, and sees that nothing changed by that step."""

    def __init__(self, *, rank: int, step: int, value: float, pick: float) -> None:
        self.rank, self.step, self.value, self.pick = rank, step, value, pick

    def __call__(self, event: str) -> None:
        if event not in ("train.update", "train.forward_backward"):
            return
        gc.collect()
        (trainer,) = (o for o in gc.get_objects() if type(o).__name__ == "Trainer")
        number = trainer.progress.step + 1
        if event == "train.update" and number == self.step:
            self.before = self.state_of(trainer)
            pieces = trainer.optimizer.shards
            if trainer.state.rank == self.rank and pieces:
                piece = pieces[int(self.pick * len(pieces))]
                piece.grad.view(-1)[int(self.pick * piece.grad.numel())] = self.value
        if event == "train.forward_backward" and number == self.step + 1:
            after = self.state_of(trainer)
            assert trainer.progress.skipped == 1
            assert after[1] == self.before[1]
            assert all((a == b).all() for a, b in zip(after[0], self.before[0], strict=True))

    def state_of(self, trainer):
        inner = trainer.optimizer.inner
        values = []
        for piece in trainer.optimizer.shards:
            moments = [inner.moment(piece.name, key) for key in inner.moments(piece.name)]
            values += [piece.param.detach(), inner.master(piece.name), *moments]
        rates = [(group["lr"], group["weight_decay"]) for group in inner.param_groups]
        return [value.clone() for value in values], (rates, trainer.optimizer.step_count)


def drawn(number):
    draw = random.Random(number)
    layout = draw.choice([name for name in LAYOUTS if number >= 4 or LAYOUTS[name][0] == 2])
    return layout, {
        "rank": draw.randrange(LAYOUTS[layout][0]),
        "step": draw.randint(2, 4),
        "value": draw.choice((math.nan, math.inf)),
        "pick": draw.random(),
    }


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=() if n < 1 else pytest.mark.campaign) for n in range(40)],
)
def test_a_spoilt_gradient_is_skipped_everywhere_and_named(number, tiny, tmp_path) -> None:
    layout, place = drawn(number)
    run = tiny.train(
        tmp_path,
        "training.dtype=fp16",
        *DYNAMIC,
        "training.steps=5",
        "evaluation.max_windows=1",
        *options(layout),
        nproc=LAYOUTS[layout][0],
        on_event=Spoiler(**place),
    )
    found, step = rows(run), place["step"]
    assert [row["step"] for row in found if "skipped" in row] == [step]
    text = found[step - 1]["skipped"]
    assert text.startswith(f"step {step}: gradient norm ")
    what = "nan" if math.isnan(place["value"]) else "inf"
    assert f": rank {place['rank']} " in text
    # What is spoilt is a sum already where ranks share samples or sequences.
    ending = f" {what} in the sum, of gradients that were finite on all ranks"
    assert text.endswith(ending if "dp2" in layout or "cp2" in layout else (f" {what}", ending))
    assert found[step]["lr"] == found[step - 1]["lr"]
    scale, clean, scales = 1024, 0, []
    for each in range(1, 6):
        scales.append(scale)
        clean = 0 if each == step else clean + 1
        if each == step:
            scale //= 2
        elif clean == 3:
            scale, clean = scale * 2, 0
    assert [row["loss_scale"] for row in found] == scales
