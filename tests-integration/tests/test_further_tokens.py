"""Multi-token prediction from YAML to generation: every layout against one process."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

STEPS = 3
MODEL = [
    "model.mtp={depths: 2, weight: 0.3}",
    "model.tied=false",
    "model.dropout=0.1",
    "data.packing=documents",
    "training.dtype=fp64",
    f"training.steps={STEPS}",
    "optimizer.warmup=2",
    "evaluation.max_windows=5",
]
SP = "parallel.sequence_parallel=true"
PP = "parallel.pp=2"
# Processes, micro-batch size and overrides by name.
ROWS = {
    "tp2-sp": (2, 4, ["parallel.tp=2", SP]),
    "cp2": (2, 8, ["parallel.cp=2"]),
    "pp2": (2, 2, [PP, "pipeline.layout=Ett|ttmmL"]),
    "full-dp2": (2, 2, ["data_parallel.strategy=full", "training.recompute=full"]),
    "dualpipe-v": (2, 2, [PP, "pipeline.schedule=dualpipe-v"]),
}
CAMPAIGN = {
    "tp2-pp2-sp-cp2": (8, 2, ["parallel.tp=2", PP, "parallel.cp=2", SP]),
    "tp2": (2, 8, ["parallel.tp=2", "training.recompute=selective"]),
    "tp2-cp2": (4, 4, ["parallel.tp=2", "parallel.cp=2", SP]),
    "pp4": (4, 1, ["parallel.pp=4"]),
    "dualpipe": (2, 2, [PP, "pipeline.schedule=dualpipe"]),
    "zb-v": (2, 1, [PP, "pipeline.schedule=zb-v", "training.recompute=full"]),
    "interleaved": (2, 2, [PP, "pipeline.schedule=interleaved", "pipeline.chunks=2"]),
    "v-half": (4, 1, [PP, "pipeline.schedule=v-half", "data_parallel.strategy=optimizer"]),
    "tp2-sp-dualpipe": (4, 2, ["parallel.tp=2", SP, PP, "pipeline.schedule=dualpipe"]),
}


def losses(run):
    """Every loss of every step and evaluation, by name."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{n: x for n, x in row.items() if n == "step" or n.endswith("loss")} for row in rows]


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    made = {}

    def run(*options):
        if options not in made:
            out = tmp_path_factory.mktemp("one")
            made[options] = tiny.train(out, *MODEL, *options)
        return made[options]

    return run


def test_each_module_has_its_loss_in_nats_per_label(one_process):
    first, *_, last = losses(one_process())
    names = {"loss", "mtp_1_loss", "mtp_2_loss", "total_loss"}
    assert first.keys() == {"step", *names}
    assert last.keys() == {"step", *(f"val_{name}" for name in names)}
    further = first["mtp_1_loss"] + first["mtp_2_loss"]
    assert first["total_loss"] == pytest.approx(first["loss"] + 0.15 * further, rel=1e-14)
    # A mean over its own labels: what a model that knows nothing says of each.
    for name in names - {"total_loss"}:
        assert first[name] == pytest.approx(np.log(384), rel=0.01)


@pytest.mark.parametrize(
    "row", [*ROWS, *(pytest.param(row, marks=pytest.mark.campaign) for row in CAMPAIGN)]
)
def test_modules_train_like_one_process(row, tiny, one_process, tmp_path, arrays):
    nproc, micro, options = {**ROWS, **CAMPAIGN}[row]
    run = tiny.train(tmp_path, *MODEL, *options, f"training.micro_batch_size={micro}", nproc=nproc)
    for ours, theirs in zip(losses(run), losses(one_process()), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    parameters, wanted = arrays(run, STEPS), arrays(one_process(), STEPS)
    assert parameters.keys() == wanted.keys()
    for name, value in parameters.items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-9, err_msg=name)


def test_means_of_micro_batches_and_clipped_scores_are_those_of_one_process(
    tiny, one_process, tmp_path
):
    options = ["training.micro_batch_size=2", "training.loss_mean=micro-batches"]
    options += ["model.qk_norm=none", "optimizer.qk_clip={threshold: 0.01}"]
    run = tiny.train(tmp_path, *MODEL, *options, "parallel.cp=2", nproc=2)
    for ours, theirs in zip(losses(run), losses(one_process(*options)), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)


def test_generation_reads_a_run_without_its_modules(one_process, arrays):
    import torch
    from mt_infer import load_run
    from mt_model import GPT, MTPConfig
    from mt_parallel_state import ParallelLayout, ParallelState

    run, tokens = one_process(), torch.arange(12)[None]
    loaded = load_run(run, ParallelState(ParallelLayout()), dtype="fp64")
    assert not any(name.startswith("mtp") for name, _ in loaded.model.named_parameters())
    trained = GPT(replace(loaded.config, mtp=MTPConfig(depths=2)), dtype=torch.float64)
    values = {name.removeprefix("model/"): x for name, x in arrays(run, STEPS).items()}
    assert values.keys() == {name for name, _ in trained.named_parameters()}
    trained.load_state_dict({name: torch.from_numpy(x) for name, x in values.items()})
    assert torch.equal(loaded.model.logits(tokens), trained.logits(tokens))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("Ettttm|mL", "stage 0 has 1 modules that predict further tokens"),
        ("Ett|ttmL", "stage 1 has 1 modules .* model.mtp gives 2 to the last stage"),
    ],
)
def test_modules_elsewhere_than_on_the_last_stage_are_refused(layout, text, tiny):
    from mt_train import ConfigError, load_config

    with pytest.raises(ConfigError, match=text):
        load_config(tiny.config, [*MODEL, PP, f"pipeline.layout={layout}"]).check_world(2)
