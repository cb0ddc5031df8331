"""Runs that are trained with the rounding of a recipe: the layout changes nothing, and what
mt-infer quantize then writes computes the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mt_infer import load_run
from mt_infer.cli import main
from mt_model import fake_quantize
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import QuantizationConfig

SIZES = ["model.hidden_size=64", "model.head_dim=32", "model.num_kv_heads=4"]
SIZES += ["model.ffn_size=128", "model.num_layers=2", "training.sequence_length=64"]
COMMON = [*SIZES, "training.steps=3", "evaluation.max_windows=4", "optimizer.warmup=1"]
COMMON += ["training.micro_batch_size=2"]
SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, ["parallel.tp=2"]),
    "tp2-sp": (2, ["parallel.tp=2", SEQUENCE_PARALLEL]),
    "pp2": (2, ["parallel.pp=2"]),
    "cp2": (2, ["parallel.cp=2", "training.sequence_length=128"]),
    "dp2": (2, []),
    "optimizer_gradients": (2, ["data_parallel.strategy=optimizer_gradients"]),
    "full": (2, ["data_parallel.strategy=full"]),
    "recompute": (1, ["training.recompute=full"]),
    "dualpipe": (2, ["parallel.pp=2", "pipeline.schedule=dualpipe"]),
    "tp2-sp-pp2": (4, ["parallel.tp=2", "parallel.pp=2", SEQUENCE_PARALLEL]),
}
RULES = {
    "int8": "{weight: int8}",
    "int8-inputs": "{weight: int8, input: int8}",
    "int8-tensor": "{weight: int8-tensor}",
    "int4-g32-asym": "{weight: int4-g32-asym}",
    "fp8-inputs": "{weight: fp8, input: fp8}",
    "mxfp8": "{weight: mxfp8, input: mxfp8}",
    "nvfp4": "{weight: nvfp4}",
    "keys-and-values": "{weight: int8, kv_cache: fp8}",
}
IN_CI = {
    ("int8-inputs", "tp2-sp"),
    ("fp8-inputs", "full"),
    ("keys-and-values", "tp2-sp-pp2"),
}
GRID = [
    pytest.param(rule, layout, marks=() if (rule, layout) in IN_CI else pytest.mark.campaign)
    for rule in RULES
    for layout in LAYOUTS
]


MIXTURE = "model.moe={num_experts: 4, top_k: 2, ffn_size: 64}"
OF_EXPERTS: dict[str, tuple[int, int, list[str]]] = {  # ranks, and those with own batches
    "ep2": (2, 2, ["parallel.ep=2"]),
    "tp2": (2, 1, ["parallel.tp=2"]),
    "tp2-ep2": (2, 1, ["parallel.tp=2", "parallel.ep=2"]),
    "tp2-ep2-etp2": (4, 2, ["parallel.tp=2", "parallel.ep=2", "parallel.etp=2"]),
    "ep2-pp2": (4, 2, ["parallel.pp=2", "parallel.ep=2"]),
    "full": (2, 2, ["parallel.ep=2", "data_parallel.strategy=full"]),
}


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    """Files with the rules: heads stay."""
    folder = tmp_path_factory.mktemp("rules")
    for name, rule in RULES.items():
        text = f"rules: [{{name: '*head*', optional: true}}, {rule}]"
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """One process with the same rules."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*given: str) -> Path:
        if given not in made:
            made[given] = tiny.train(tmp_path_factory.mktemp("one"), *given)
        return made[given]

    return get


def options(rules: Path, name: str, dtype: str, *more: str) -> tuple[str, ...]:
    given = f"quantization.config={rules / name}.yaml"
    return (*COMMON, given, f"training.dtype={dtype}", *more)


@pytest.mark.parametrize(("rule", "layout"), GRID)
def test_every_layout_trains_like_one_process_with_the_same_rules(
    rule, layout, tiny, rules, reference, tmp_path, losses, held_out, arrays
) -> None:
    nproc, overrides = LAYOUTS[layout]
    sizes = [x for x in overrides if x.startswith("training.sequence")]
    run = tiny.train(tmp_path, *options(rules, rule, "fp64", *overrides), nproc=nproc)
    one = reference(*options(rules, rule, "fp64", *sizes))
    assert list(losses(run)) == [1, 2, 3]
    found, expected = ([*losses(each).values(), held_out(each)] for each in (run, one))
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    ours, theirs = arrays(run, 3), arrays(one, 3)
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-6, atol=1e-9, err_msg=name)


IN_CI_OF_EXPERTS = {("int8-inputs", "tp2-ep2-etp2")}
GRID_OF_EXPERTS = [
    pytest.param(
        rule, layout, marks=() if (rule, layout) in IN_CI_OF_EXPERTS else pytest.mark.campaign
    )
    for rule in RULES
    for layout in OF_EXPERTS
]


@pytest.mark.parametrize(("rule", "layout"), GRID_OF_EXPERTS)
def test_experts_are_rounded_alike_on_every_layout(
    rule, layout, tiny, rules, reference, tmp_path, losses, held_out, arrays
) -> None:
    nproc, replicas, overrides = OF_EXPERTS[layout]
    sizes = [MIXTURE, f"training.micro_batch_size={4 // replicas}"]
    given = options(rules, rule, "fp64", MIXTURE)
    run = tiny.train(tmp_path, *given, *sizes, *overrides, nproc=nproc)
    one = reference(*given, MIXTURE, "training.micro_batch_size=4")
    plain = reference(*COMMON, "training.dtype=fp64", MIXTURE, "training.micro_batch_size=4")
    found, expected = ([*losses(each).values(), held_out(each)] for each in (run, one))
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert held_out(plain) != held_out(one)
    ours, theirs = arrays(run, 3), arrays(one, 3)
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("rule", "layout"),
    [
        ("int4-g32-asym", "full"),
        pytest.param("int8", "tp2-sp", marks=pytest.mark.campaign),
    ],
)
def test_a_run_goes_on_with_the_bits_of_one_that_was_not_disturbed(
    rule, layout, tiny, rules, tmp_path, losses, arrays
) -> None:
    nproc, overrides = LAYOUTS[layout]
    given = options(rules, rule, "bf16", *overrides, "optimizer.schedule=constant")
    whole = tiny.train(tmp_path / "whole", *given, "training.steps=4", nproc=nproc)
    run = tmp_path / "run"
    tiny.train(run, *given, "training.steps=2", nproc=nproc)
    tiny.train(run, *given, "training.steps=4", nproc=nproc)
    assert losses(run) == losses(whole)
    found, expected = (arrays(each, 4, prefix="") for each in (run, whole))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize(
    "rule", [pytest.param("int8", marks=pytest.mark.campaign), "int4-g32-asym", "fp8-inputs"]
)
def test_the_quantised_folder_computes_what_was_trained(
    rule, tiny, rules, reference, tmp_path, capsys
) -> None:
    run = reference(*options(rules, rule, "fp32"))
    file = str(rules / f"{rule}.yaml")
    with pytest.raises(SystemExit) as stop:
        main(["quantize", str(run), str(tmp_path / "low"), "--config", file])
    assert stop.value.code == 0, capsys.readouterr().err
    tokens = torch.arange(128).view(2, 64) * 7 % 300
    batch = {"labels": tokens.roll(-1, dims=1)}
    with ParallelState(ParallelLayout(), device="cpu") as state, torch.no_grad():
        trained = load_run(run, state, dtype="fp64").model
        plain = trained(tokens, **batch)["lm"]
        fake_quantize(trained, QuantizationConfig.from_yaml(file).decide(trained))
        expected = trained(tokens, **batch)["lm"]
        found = load_run(tmp_path / "low", state, dtype="fp64").model(tokens, **batch)["lm"]
    assert float(expected) != float(plain)
    assert float(found) == pytest.approx(float(expected), rel=2e-6)


def test_the_quantised_folder_of_a_mixture_computes_what_was_trained(
    tiny, rules, reference, tmp_path, capsys
) -> None:
    run, file = (
        reference(*options(rules, "int8-inputs", "fp32", MIXTURE)),
        rules / "int8-inputs.yaml",
    )
    with pytest.raises(SystemExit) as stop:
        main(["quantize", str(run), str(tmp_path / "low"), "--config", str(file)])
    assert stop.value.code == 0, capsys.readouterr().err
    tokens = torch.arange(128).view(2, 64) * 7 % 300
    batch = {"labels": tokens.roll(-1, dims=1)}
    with ParallelState(ParallelLayout(), device="cpu") as state, torch.no_grad():
        trained, named = (load_run(run, state).model for _ in range(2))
        named.unfuse_experts()
        made = fake_quantize(trained, QuantizationConfig.from_yaml(file).decide(named))
        assert sum(".experts." in name for name in made) == 16
        expected = trained(tokens, **batch)["lm"]
        found = load_run(tmp_path / "low", state).model(tokens, **batch)["lm"]
    assert float(found) == pytest.approx(float(expected), rel=2e-6)
