"""Texts whose middle is filled in train alike on every layout, and resume on another."""

from __future__ import annotations

import json

import pytest

LAYOUTS = {
    "cp2": (2, ["parallel.cp=2"]),
    "tp2": (2, ["parallel.tp=2"]),
    "pp2": (2, ["parallel.pp=2", "training.micro_batch_size=4"]),
    "dp2": (2, ["training.micro_batch_size=2"]),
    "packed-cp2": (2, ["parallel.cp=2", "data.packing=documents"]),
}
IN_CI = ("packed-cp2",)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    texts = (f"def f{n}(x):\n    return x + {n}  # \u65e5\n" * (1 + n % 4) for n in range(60))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = f"data={{corpus: {path}, vocab_size: 300, fim: {{rate: 0.8}}}}"
    return [data, "training.dtype=fp64", "optimizer.schedule=constant"]


@pytest.fixture(scope="module")
def whole(tiny, options, tmp_path_factory):
    """The run on one process, by its packing, once."""
    known = {}

    def run(*packing):
        if packing not in known:
            known[packing] = tiny.train(tmp_path_factory.mktemp("one"), *options, *packing)
        return known[packing]

    return run


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=() if n in IN_CI else pytest.mark.campaign) for n in LAYOUTS],
)
def test_every_layout_has_the_same_texts(tiny, options, whole, tmp_path, losses, layout) -> None:
    nproc, own = LAYOUTS[layout]
    packing = [each for each in own if each.startswith("data.")]
    tiny.train(tmp_path / "run", *options, *packing, "training.steps=5")
    run = tiny.train(tmp_path / "run", *options, *own, nproc=nproc)
    expected = losses(whole(*packing))
    assert losses(run) == pytest.approx(expected, rel=1e-9)
    assert expected[8] < expected[1]
