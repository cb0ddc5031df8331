"""A killed run that goes on with other layouts consumes the samples of an undisturbed run."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from mt_data import IndexedDataset
from mt_testing import KillAt, RankDied

STEPS, BATCH, LENGTH = 24, 8, 64
OPTIONS = (
    f"training={{steps: {STEPS}, global_batch_size: {BATCH}, micro_batch_size: 2, "
    f"sequence_length: {LENGTH}, dtype: fp32}}",
    "model.num_layers=2",
    "checkpoint={every: 3, keep: 2}",
    "evaluation={every: 10, max_windows: 4}",
    "logging.every=1",
)
LAYOUTS = (
    (1,),
    (2,),
    (2, "parallel.tp=2"),
    (2, "parallel.pp=2", "training.micro_batch_size=1"),
    (2, "parallel.cp=2"),
    (4,),
)
POINTS = ("train.forward_backward", "train.update", "evaluate.chunk", "save.data", "save.manifest")
SHARDS = 6
SCENES = ("phases", "ahead")
# Each case has ten kills; CI has one in each scene.
CASES = [
    pytest.param(scene, seed, kills, marks=marks)
    for scene in SCENES
    for seed, kills, marks in (
        (0, 1, ()),
        *((n, 10, pytest.mark.campaign) for n in range(1, 11)),
    )
]


def kill_after(seconds: float) -> Callable[[], Callable[[], None]]:
    """Return a function by which its process is killed at some moment, in whatever it does then.

    It returns a function that calls this off.
    """

    def start() -> Callable[[], None]:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        return timer.cancel

    return start


def drawn_kill(draw: random.Random, nproc: int) -> dict[str, Any]:
    """Return the arguments of `train` that kill a rank, at a random moment or a named point."""
    rank, point, nth = draw.randrange(nproc), draw.choice(POINTS), draw.randint(1, 4)
    seconds = draw.uniform(0.05, 1.0)
    if draw.random() < 0.5:
        return {"begin": kill_after(seconds), "rank": rank}
    only_first = point == "save.manifest"
    return {"on_event": KillAt(point, rank=0 if only_first else rank, nth=nth)}


@pytest.fixture(scope="session")
def scenes(tiny, short, tmp_path_factory) -> dict[str, tuple[str, ...]]:
    """Options of a run whose sources change twice, and of one whose corpus is built beside it.

    Both go through the end of an epoch.
    """
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(5)
    words = ["def", "return", "self", "import", "value", "for"]
    texts = [f"{n} " + " ".join(draw.choices(words, k=2)) for n in range(1300)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    phases = "[{from: 75, weights: [1, 1]}, {from: 133, weights: [0, 1]}]"
    train = f"data.train=[{short / 'a'},{short / 'b'}]"
    corpus = (
        f"corpus: {folder / 'texts.jsonl'}, tokenizer: {tiny.config.parent}/data/tokenizer.json"
    )
    return {
        "phases": (train, "data.weights=[1,0]", f"data.phases={phases}"),
        "ahead": (f"data={{{corpus}, shard_bytes: 6500, build: ahead}}",),
    }


@pytest.fixture(scope="session")
def undisturbed(tiny, short, scenes, tmp_path_factory, losses, consumed):
    """The samples and losses of each scene's run on one rank, that of a corpus with all shards."""
    found = {}
    for scene, data in scenes.items():
        folder = tmp_path_factory.mktemp(scene)
        (folder / "log").mkdir()
        before = ("data.build=before",) if scene == "ahead" else ()
        overrides = (*data, *before, *OPTIONS)
        tiny.train_recorded(folder / "run", folder / "log" / "one", overrides, (1,))
        steps = consumed(folder / "log")
        assert [int(n) for step in sorted(steps) for n in steps[step]] == [*range(STEPS * BATCH)]
        places = [short / "a"]
        if scene == "ahead":
            shards = (folder / "run" / "data").glob("shard-?????.idx")
            places = [shard.with_suffix("") for shard in shards]
            assert len(places) == SHARDS
        epoch = sum((IndexedDataset(place).num_tokens - 1) // LENGTH for place in places)
        taken = STEPS * BATCH if scene == "ahead" else 104  # as many as the run takes of `a`
        assert taken - 60 < epoch < taken, "the run goes through the end of an epoch"
        found[scene] = steps, losses(folder / "run")
    return found


@pytest.mark.parametrize(("scene", "seed", "kills"), CASES)
def test_kills_and_other_layouts_change_no_consumed_sample(
    scene, seed, kills, tiny, scenes, undisturbed, tmp_path, losses, consumed, record_property
) -> None:
    draw, overrides = random.Random(f"{scene} {seed}"), (*scenes[scene], *OPTIONS)
    expected, expected_losses = undisturbed[scene]
    killed = changes = partial = 0
    for number in itertools.count():  # a run that ends before its kill comes is followed by another
        out, log, layouts = tmp_path / f"run{number}", tmp_path / f"log{number}", []
        log.mkdir()
        while True:
            layouts.append(draw.choice([each for each in LAYOUTS if each not in layouts[-1:]]))
            how = drawn_kill(draw, layouts[-1][0]) if killed < kills else {}
            try:
                how = {**how, "layout": layouts[-1]}
                tiny.train_recorded(out, log / str(len(layouts)), overrides, **how)
            except RankDied:
                killed += 1
                partial += 0 < len([*(out / "data").glob("shard-?????.idx")]) < SHARDS
            else:
                break
        changes += len(layouts) - 1
        assert consumed(log) == expected
        assert losses(out) == pytest.approx(expected_losses, rel=1e-4)
        if killed == kills:
            break
    record_property("kills", killed)
    record_property("goings on with another layout", changes)
    record_property("kills with some shards built", partial if scene == "ahead" else "-")
