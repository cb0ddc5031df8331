"""Keys and values in low precision: the same text on every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mt_infer import Generator, Sampling, load_run
from mt_infer.cli import main
from mt_model import (
    GPT,
    LayerConfig,
    Mamba2Config,
    MLAConfig,
    MLPConfig,
    Pages,
    RopeConfig,
    calibrate_kv_cache,
    gpt,
)
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import QuantizedLinear
from mt_schedule import split_layers

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "max_sequence_length": 32}
CONFIG = gpt(**SIZES, num_layers=2, num_heads=4, num_kv_heads=2, init_std=0.5)
GREEDY = Sampling(temperature=0)


def tokens(model: GPT, kind: str, sampling: Sampling = GREEDY, **how: Any) -> list[int]:
    tokenizer = cast("Any", SimpleNamespace(vocab_size=60, eod_id=-1))
    how |= {"config": model.config, "tokenizer": tokenizer, "kv_cache_dtype": kind}
    return list(Generator(model=model, **how).tokens([5, 9, 3], 24, sampling))


def two_ranks(kind: str, pp: int, schemes: Any, *, cuda_graphs: bool) -> list[int]:
    with ParallelState(ParallelLayout(tp=2 // pp, pp=pp)) as state:
        layers = split_layers(2, pp)[state.index("pp")]
        model = GPT(CONFIG, state, layers=layers, seed=1).eval()
        model.kv_schemes = {i: scheme for i, scheme in schemes.items() if i in layers}
        return tokens(model, kind, stages=state.group("pp"), cuda_graphs=cuda_graphs)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kind", ["fp8", pytest.param("int8", marks=pytest.mark.campaign), "auto"])
def test_two_ranks_give_the_tokens_of_one_process(ranks, kind, pp) -> None:
    model = GPT(CONFIG, seed=1).eval()
    calibrated = [torch.arange(24).view(2, 12)]
    schemes = calibrate_kv_cache(model, calibrated, "fp8-head") if kind == "auto" else {}
    model.kv_schemes = schemes
    expected = tokens(model, kind)
    assert tokens(model, kind, cuda_graphs=True) == expected
    assert len(set(expected)) > 3
    for cuda_graphs in (False, True):
        for found in ranks(2, partial(two_ranks, kind, pp, schemes, cuda_graphs=cuda_graphs)):
            assert found == expected


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_command_keeps_codes(saved_run, generate, monkeypatch, kind) -> None:
    formats, write = [], Pages.write

    def told(self: Pages, *given: Any) -> None:
        formats.append({str(each) for each in self.formats.values()})
        write(self, *given)

    monkeypatch.setattr(Pages, "write", told)
    options = ("--max-tokens", 8, "--greedy")
    assert generate(saved_run, *options, "--kv-cache-dtype", kind)[0] == 0
    assert formats.pop() == {f"{kind}-token"}
    assert generate(saved_run, *options)[0] == 0
    assert formats.pop() == set()


def test_processes_are_told_of_the_format(saved_run, generate, monkeypatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("mt_parallel_state.launch", lambda *call: calls.append(call) or 0)
    generate(saved_run, "--nproc", 2, "--kv-cache-dtype", "fp8")
    assert "--kv-cache-dtype=fp8" in calls[0][1]


def test_a_format_that_no_cache_has_is_refused(saved_run, generate) -> None:
    code, out, err = generate(saved_run, "--kv-cache-dtype", "mxfp4")
    assert (code, out) == (2, "")
    assert "mxfp4" in err


def test_a_model_without_attention_is_refused_before_its_weights_are_read(
    write_run, tmp_path, generate, quantize, monkeypatch
) -> None:
    mixer = Mamba2Config(num_heads=4, head_dim=8, state_size=8)
    layers = [LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=48))]
    sizes = {"vocab_size": 264, "hidden_size": 16, "max_sequence_length": 16}
    config = gpt(**sizes, positions="none", layers=layers)
    monkeypatch.setattr("mt_infer.engine.weights.built_model", None)
    run, says = write_run(tmp_path / "run", config), "no layer of this model keeps keys and values"
    code, out, err = generate(run, "--kv-cache-dtype", "fp8")
    assert (code, out) == (2, "")
    assert err.startswith(f"mt-infer: --kv-cache-dtype fp8: {says}")
    code, out, err = quantize(run, tmp_path / "low", "--kv-cache-dtype", "fp8-head")
    assert (code, out) == (2, "")
    assert err.startswith(f"mt-infer: --kv-cache-dtype fp8-head: {says}")


RULES = """
rules:
  - {type: Attention, kv_cache: int8-tensor}
  - {name: "*.feed_forward.*", weight: int8}
"""


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text("to be or not to be that is the question " * 20)
    return tmp_path / "text.txt"


@pytest.fixture
def quantize(capsys) -> Callable[..., tuple[object, str, str]]:
    """Exit code, stdout and stderr of `mt-infer quantize`."""

    def call(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["quantize", *map(str, arguments)])
        return stop.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("options", "format", "low"),
    [
        (("--recipe", "int8", "--kv-cache-dtype", "fp8-head"), "fp8-head", 4),
        (("--config", "rules.yaml"), "int8-tensor", 2),
        (("--kv-cache-dtype", "fp8-tensor"), "fp8-tensor", 0),
    ],
)
def test_a_folder_generates_with_the_scales_that_were_calibrated(
    saved_run, quantize, generate, text, tmp_path, monkeypatch, options, format, low
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rules.yaml").write_text(RULES)
    given = ("--calibration", text, "--samples", 4, "--length", 12)
    code, out, err = quantize(saved_run, "low", *options, *given)
    assert code == 0, err
    assert f"layers with keys and values in {format}: 1\n" in out
    with ParallelState(ParallelLayout(), device="cpu") as state:
        generator = load_run(Path("low"), state)
        model = generator.model
        assert sum(isinstance(m, QuantizedLinear) for m in model.modules()) == low
        tokens = torch.tensor(generator.tokenizer.encode(text.read_text()))
        starts = [i * (len(tokens) // 12) // 4 * 12 for i in range(4)]
        batches = [tokens[None, start : start + 12] for start in starts]
        expected = calibrate_kv_cache(model, batches, format)[0].scales
        found = model.kv_schemes[0]
        assert str(found.format) == format
        for kind in ("key", "value"):
            scales = (getattr(each, kind) for each in (found.scales, expected))
            torch.testing.assert_close(*scales, rtol=1e-5, atol=0)
        whole = generator.complete("to be", Sampling(temperature=0, max_tokens=8)).text
        kept = generator.model.new_cache(batch_size=1, max_length=4)
        assert {str(each) for each in kept.formats.values()} == {format}
    for more in ((), ("--cuda-graphs",)):
        code, out, err = generate(Path("low"), "--greedy", "--max-tokens", 8, *more)
        assert (code, out.removesuffix("\n")) == (0, whole), err


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("{type: Attention, kv_cache: fp8-head}", (), "name one with --calibration"),
        ("{type: Attention, kv_cache: fp8}", (), "use fp8-head"),
        ("{type: Attention, kv_cache: nvfp4}", (), "unknown format of keys and values 'nvfp4'"),
        (
            '{name: "*.feed_forward", kv_cache: fp8-head}',
            (),
            "layers.0.feed_forward, which keeps no keys and values; name what does, such as "
            "layers.0.mixer",
        ),
        ("{weight: int8}", ("--kv-cache-dtype", "fp8-head"), "name one with --calibration"),
    ],
)
def test_a_mistake_in_the_rules_of_a_cache_is_one_message(
    saved_run, quantize, tmp_path, rule, options, message
) -> None:
    (tmp_path / "rules.yaml").write_text(f"rules:\n  - {rule}\n")
    given = ("--config", tmp_path / "rules.yaml", *options)
    code, out, err = quantize(saved_run, tmp_path / "low", *given)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1 or "rules.yaml" in err
    assert not (tmp_path / "low").exists()


def test_layers_that_would_keep_other_formats_are_refused_before_one_is_rounded(
    write_run, quantize, tmp_path, text
) -> None:
    sizes = {"vocab_size": 264, "hidden_size": 16, "max_sequence_length": 16}
    run = write_run(tmp_path / "run", gpt(**sizes, num_layers=2, num_heads=4))
    rules = "rules:\n  - {name: layers.1.mixer, kv_cache: fp8-head}\n  - {weight: int8}\n"
    (tmp_path / "rules.yaml").write_text(rules)
    given = ("--config", tmp_path / "rules.yaml", "--calibration", text)
    code, out, err = quantize(run, tmp_path / "low", *given)
    assert (code, out) == (1, "")
    assert "would be kept in fp8-head and full" in err


def test_a_latent_has_one_scale(write_run, quantize, tmp_path, text, monkeypatch) -> None:
    mixer = MLAConfig(
        num_heads=4, kv_lora_rank=16, nope_head_dim=8, rope_head_dim=4, v_head_dim=8,
        rope=RopeConfig(),
    )  # fmt: skip
    layers = [LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=48))]
    sizes = {"vocab_size": 264, "hidden_size": 16, "max_sequence_length": 16}
    run = write_run(tmp_path / "run", gpt(**sizes, layers=layers))
    (tmp_path / "rules.yaml").write_text("rules: [{type: LatentAttention, kv_cache: fp8-head}]")
    given = ("--calibration", text)
    code, _, err = quantize(run, tmp_path / "low", "--config", tmp_path / "rules.yaml", *given)
    assert code == 1
    assert "layer 0 keeps one latent for all heads, for which a folder has one scale" in err
    schemes: list[Any] = []
    monkeypatch.setattr(
        "mt_infer.quantization.save_pretrained", lambda model, *_, **__: schemes.append(model)
    )
    assert quantize(run, tmp_path / "low", "--kv-cache-dtype", "fp8-head", *given)[0] == 0
    assert [str(each.format) for each in schemes[0].kv_schemes.values()] == ["fp8-tensor"]
