"""Keys and values in low precision: the same text on every layout."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mt_infer import Generator, Sampling
from mt_model import GPT, KVCache, LayerConfig, Mamba2Config, MLPConfig, calibrate_kv_cache, gpt
from mt_parallel_state import ParallelLayout, ParallelState
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
    formats, write = [], KVCache.write

    def told(self: KVCache, *given: Any) -> None:
        formats.append({str(each) for each in self.formats.values()})
        write(self, *given)

    monkeypatch.setattr(KVCache, "write", told)
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
    write_run, tmp_path, generate, monkeypatch
) -> None:
    mixer = Mamba2Config(num_heads=4, head_dim=8, state_size=8)
    layers = [LayerConfig(mixer=mixer, feed_forward=MLPConfig(ffn_size=48))]
    sizes = {"vocab_size": 264, "hidden_size": 16, "max_sequence_length": 16}
    config = gpt(**sizes, positions="none", layers=layers)
    monkeypatch.setattr("mt_infer.loading.load_weights", None)
    code, out, err = generate(write_run(tmp_path, config), "--kv-cache-dtype", "fp8")
    assert (code, out) == (2, "")
    assert err.startswith("mt-infer: --kv-cache-dtype fp8: no layer of this model keeps keys")
