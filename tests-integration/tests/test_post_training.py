"""Models quantised after training: the gain of each method over round-to-nearest."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mt_quant import QuantizationConfig, QuantizedLinear, Rule, fold_scales, quantize
from torch import Tensor, nn

VOCABULARY, LENGTH = 96, 48
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "quantization.py"


def transformers_model(family: str) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    config = getattr(transformers, f"{family}Config")(**sizes, tie_word_embeddings=False)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def mt_model(**form: Any) -> nn.Module:
    from mt_model import GPT, gpt

    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_size": 128}
    return GPT(gpt(vocab_size=VOCABULARY, max_sequence_length=64, **sizes, **form), seed=5)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: transformers_model("Llama"),
    "Qwen2": lambda: transformers_model("Qwen2"),
    "GPTNeoX": lambda: transformers_model("GPTNeoX"),
    "mt gpt": lambda: mt_model(gated=False, activation="gelu", bias=True, norm="layer"),
    "mt llama": lambda: mt_model(num_kv_heads=2),
}


def tokens(rows: int, *, seed: int) -> Tensor:
    """Tokens of which some are far more frequent, and followed by like ones."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(rows, LENGTH, generator=generator).abs() * 4
    return steps.cumsum(1).long() % VOCABULARY


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y if isinstance(y, Tensor) else y.logits


WEIGHTS = ("int4-g32", "int4-channel")


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        pytest.param(name, weight, marks=() if (i + j) % 2 == 0 else pytest.mark.campaign)
        for i, name in enumerate(MODELS)
        for j, weight in enumerate(WEIGHTS)
    ],
)
def test_gptq_and_awq_change_logits_less_than_round_to_nearest(name: str, weight: str) -> None:
    model = MODELS[name]().eval()
    held_out, calibration = tokens(8, seed=1), list(tokens(64, seed=2).split(16))
    expected = logits_of(model, held_out)
    errors = {}
    for method in ("rtn", "gptq", "awq"):
        rules = (
            Rule(name="re:.*head.*|.*embed_out", optional=True),
            Rule(weight=weight, method=method),
        )
        made = quantize(copy.deepcopy(model), QuantizationConfig(rules=rules), calibration)
        assert sum(isinstance(m, QuantizedLinear) for m in made.modules()) >= 8
        errors[method] = float((logits_of(made, held_out) - expected).square().mean())
    assert errors["gptq"] < 0.9 * errors["rtn"], errors
    assert errors["awq"] < errors["rtn"], errors


@pytest.mark.campaign
def test_a_trained_model_loses_little_and_less_with_methods_that_read_its_inputs(
    tmp_path: Path, cli
) -> None:
    out = tmp_path / "quantization.json"
    result = cli(sys.executable, SCRIPT, "--out", out, timeout=900)
    assert result.returncode == 0, result.stderr
    found: dict[str, dict[str, float]] = {}
    for row in json.loads(out.read_text())["results"]:
        if row["weight"] is not None and "input" not in row and "options" not in row:
            found.setdefault(row["weight"], {})[row["method"]] = row["worse_by"]
    assert max(found["int8"].values()) < 0.005
    nearest, *others = (found["int4-g64"][method] for method in ("rtn", "awq", "gptq"))
    assert max(others) < min(0.03, 0.7 * nearest), found
    with_zeros = found["int4-g64-asym"]
    assert max(with_zeros.values()) < 0.03, found
    assert with_zeros["gptq"] < with_zeros["rtn"], found


FORMS: dict[str, dict[str, Any]] = {
    "gpt": {"gated": False, "activation": "gelu", "bias": True, "norm": "layer"},
    "llama": {"num_kv_heads": 2},
    "gated attention": {"num_kv_heads": 2, "output_gate": True, "norm_zero_centered": True},
    "one norm for both": {"parallel": True, "shared_norm": True, "norm": "layer"},
    "norms behind too": {"norms": "sandwich", "qk_norm": "head", "clamp": 7.0},
}


@pytest.mark.parametrize(
    ("form", "tp"),
    [
        pytest.param(form, tp, marks=() if tp == (2, 4)[i % 2] else pytest.mark.campaign)
        for i, form in enumerate(FORMS)
        for tp in (1, 2, 4)
    ],
)
def test_scales_folded_into_any_layout_leave_the_output(ranks, form: str, tp: int) -> None:
    arguments = FORMS[form]

    def body() -> None:
        from mt_model import GPT, gpt
        from mt_parallel_state import ParallelLayout, ParallelState

        sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "ffn_size": 128}
        config = gpt(vocab_size=96, max_sequence_length=64, **sizes, **arguments)
        with ParallelState(ParallelLayout(tp=tp), device="cpu") as state, torch.no_grad():
            model = GPT(config, state, dtype=torch.float64, seed=3)
            for name, param in model.named_parameters():
                if "norm" in name:
                    param.add_(torch.linspace(0, 4, param.numel(), dtype=param.dtype))
            x = torch.arange(4 * 48).view(4, 48) * 7 % 96
            before, weights = model(x), copy.deepcopy(model.state_dict())
            inputs = list(model.shared_inputs())
            fold_scales(model, inputs, [x], by="smoothquant")
            changed = {n for n, v in model.state_dict().items() if not torch.equal(v, weights[n])}
            assert {
                f"layers.{i}.mixer.{n}.weight" for i in (0, 1) for n in ("qkv", "out")
            } < changed
            after = model(x)
            assert float((after - before).norm() / before.norm()) < 1e-12

    ranks(tp, body)
