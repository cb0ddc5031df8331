"""Compiled layers: how often torch compiles, and the numbers of the eager run."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

# Dynamo itself looks at .grad of what enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
LAYERS = ("model.num_layers=3", "training.steps=2")


@pytest.fixture
def compile_counts(monkeypatch):
    """Compile with a backend that takes no seconds, and return what dynamo counts."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    torch._dynamo.reset()


def assert_close(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-10, atol=1e-12, err_msg=name)


RECOMPUTE = {  # and how many graphs that takes
    "none": ((), 1),
    "full": (("training.recompute=full",), 2),
    "two_layers": (("training.recompute={rules: [{first: 2}]}",), 3),
}


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        pytest.param(*each, id=name, marks=() if name == "full" else pytest.mark.campaign)
        for name, each in RECOMPUTE.items()
    ],
)
def test_like_layers_are_compiled_once_and_train_like_eager_ones(
    options, kinds, compile_counts, tiny, tmp_path, losses, weights, rows
) -> None:
    eager = tiny.run(tmp_path / "eager", *LAYERS, *options)
    seen = []
    compiled = tiny.run(
        tmp_path / "run",
        "training.compile=true",
        *LAYERS,
        *options,
        on_event=lambda name: seen.append((name, *compile_counts())),
    )
    assert_close(losses(tmp_path / "run"), losses(tmp_path / "eager"))
    assert_close(weights(tmp_path / "run", 2), weights(tmp_path / "eager", 2))
    assert compiled.evaluation["val_loss"] == pytest.approx(eager.evaluation["val_loss"], rel=1e-10)
    # One graph of the layer with gradients, made in the first step, for two micro-batches of each
    # step and all layers; for recomputation and evaluation one without, and one where its input is
    # the result of such a layer.
    assert {tuple(counts) for name, *counts in seen if name == "train.update"} == {(kinds, 0)}
    assert compile_counts()[1] == 0
    first, *others = (row for row in rows(tmp_path / "run") if "loss" in row)
    assert first["first_step_seconds"] == first["seconds"]
    assert not any("first_step_seconds" in row for row in others)
