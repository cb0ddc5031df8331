"""Requests with adapters of their own, in one batch, alone, and against merged models."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from mt_infer import Completion, Engine, EngineOptions, Sampling
from mt_model import GPT, Kernels, ModelConfig, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from torch import Tensor

CONFIG = gpt(
    vocab_size=64,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_sequence_length=64,
    init_std=0.15,
)
LAYERS = ("mixer.qkv", "mixer.out", "feed_forward.up", "feed_forward.down")
RANKS = (1, 2, 3, 4, 6, 8, 12, 16)
PROMPTS = [[(7 * i + 3 * j) % 61 for j in range(4 + 3 * i)] for i in range(len(RANKS) + 1)]
LONG = [(7 * i + i * i) % 61 for i in range(64)]  # enough for ranks of cp to share it
NAMES = [f"rank {rank}" for rank in RANKS]


def model(
    state: ParallelState | None = None,
    dtype: torch.dtype = torch.float32,
    layers: range | None = None,
    attention: str = "invariant",
) -> GPT:
    kernels = Kernels(attention=attention)
    return GPT(CONFIG, state, layers=layers, dtype=dtype, seed=3, kernels=kernels).eval()


def adapter(rank: int, config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    """A drawn adapter by the names of PEFT."""
    draw, found = torch.Generator().manual_seed(rank), {}
    params = dict(GPT(config, device="meta").named_parameters())
    for name in (f"layers.{i}.{layer}" for i in range(2) for layer in LAYERS):
        shape = params[f"{name}.weight"].shape
        into = shape[1:].numel() if name.endswith("out") else shape[-1]
        for part, size in (("A", (rank, into)), ("B", (shape.numel() // into, rank))):
            values = torch.randn(size, generator=draw) / 8
            found[f"base_model.model.{name}.lora_{part}.weight"] = values
    return found


def merged(tensors: dict[str, Tensor]) -> GPT:
    made = model()
    with torch.no_grad():
        for a, b in pairwise(tensors):
            if ".lora_A" in a:
                weight = made.get_parameter(
                    a[len("base_model.model.") :].split(".lora")[0] + ".weight"
                )
                weight += (tensors[b] @ tensors[a]).view_as(weight)
    return made


def engine(made: GPT | None = None, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"blocks": 80, "block_size": 4, **options}
    return Engine(made or model(), options=EngineOptions(**sizes))


def asked() -> list[Sampling]:
    return [Sampling(seed=i, max_tokens=6, logprobs=0) for i in range(len(PROMPTS))]


def whole(found: list[Completion]) -> list[tuple[list[int], list[float] | None]]:
    return [(each.tokens, each.logprobs) for each in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_adapters_in_a_batch_are_merged_models_and_themselves_alone_in_every_bit(
    dtype,
) -> None:
    busy = {"max_batch_tokens": 24, "blocks": 28, "speculate": "ngram"}
    made, lone = engine(model(dtype=dtype), **busy), engine(model(dtype=dtype))
    for name, rank in zip(NAMES, RANKS, strict=True):
        made.load_adapter(name, adapter(rank))
    together = made.generate(PROMPTS, asked(), adapter=[*NAMES, None])
    assert made.stats()["adapters"] == 8
    assert made.stats()["evictions"] > 0
    for index, (name, rank) in enumerate(zip(NAMES, RANKS, strict=True)):
        lone.load_adapter(name, adapter(rank))
        alone = lone.generate(PROMPTS[index], asked()[index], adapter=name)
        assert whole(alone) == whole(together[index : index + 1])
        if dtype == torch.float32:
            text = PROMPTS[index] + together[index].tokens
            logits = merged(adapter(rank)).logits(torch.tensor([text]))[0, :-1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
            torch.testing.assert_close(lone.score(text, adapter=name), expected, rtol=0, atol=1e-5)
            assert (lone.score(text) - expected).abs().max() > 0.01
        lone.remove_adapter(name)
        assert lone.stats()["adapters"] == 0
    assert whole(together[-1:]) == whole(lone.generate(PROMPTS[-1], asked()[-1]))


def test_adapters_come_and_go_while_requests_run() -> None:
    made = engine()
    with pytest.raises(ValueError, match="'a'"):
        made.generate([1, 2], adapter="a")
    made.load_adapter("a", adapter(4))
    text, how = list(range(1, 14)), Sampling(seed=1, max_tokens=9, logprobs=0)
    first = whole(made.generate(text, how, adapter="a"))
    assert made.stats()["prefix_tokens"] == 0
    assert whole(made.generate(text, how, adapter="a")) == first
    assert made.stats()["prefix_tokens"] == 12
    plain = whole(made.generate(text, how))
    assert made.stats()["prefix_tokens"] == 12
    streams = [made.stream(text, how, adapter="a") for _ in range(2)]
    begun = [next(each) for each in streams]
    made.load_adapter("a", adapter(2))
    assert made.stats()["adapters"] == 2
    second = whole(made.generate(text, how, adapter="a"))
    made.remove_adapter("a")
    ended = [[delta, *each][-1].completion for delta, each in zip(begun, streams, strict=True)]
    assert [whole([each]) for each in ended] == [first, first]
    assert made.stats()["adapters"] == 0
    assert first != second != plain != first
    other = engine()
    other.load_adapter("b", adapter(2))
    assert whole(other.generate(text, how, adapter="b")) == second
    with pytest.raises(ValueError, match="load_adapter"):
        made.remove_adapter("a")


def test_new_weights_keep_the_adapters() -> None:
    made, trained = engine(), model()
    made.load_adapter("a", adapter(4))
    made.score(PROMPTS[2], adapter="a")
    with torch.no_grad():
        for param in trained.parameters():
            param *= 1.1
    made.update_weights(dict(trained.named_parameters()))
    expected = engine(trained)
    expected.load_adapter("b", adapter(4))
    found = made.score(PROMPTS[2], adapter="a")
    assert torch.equal(found, expected.score(PROMPTS[2], adapter="b"))


def on_two_ranks(layout: str, tensors: dict[str, Tensor]) -> list[Tensor] | None:
    with ParallelState(ParallelLayout(**{layout: 2})) as state:
        layers = range(state.index("pp"), state.index("pp") + 1) if layout == "pp" else None
        made = model(state, torch.float64, layers, "auto")
        engine = Engine(made, options=EngineOptions(blocks=16, max_batch_tokens=64), state=state)
        if state.rank > 0:
            engine.serve()
            return None
        with engine:
            engine.load_adapter("a", tensors, alpha=6)
            return [engine.score(LONG, adapter="a"), engine.score(LONG)]


@pytest.mark.parametrize("layout", ["tp", "pp", "cp"])
def test_ranks_that_share_a_model_share_adapters(ranks, layout) -> None:
    scores, _ = ranks(2, partial(on_two_ranks, layout, adapter(3)))
    lone = engine(model(dtype=torch.float64))
    lone.load_adapter("a", adapter(3), alpha=6)
    for found, name in zip(scores, ("a", None), strict=True):
        torch.testing.assert_close(found, lone.score(LONG, adapter=name))


def write(folder: Path, tensors: dict[str, Tensor], rank: int) -> None:
    """Write an adapter as PEFT does."""
    entries, data = {}, b""
    for name, x in tensors.items():
        start, data = len(data), data + x.numpy().tobytes()
        place = {"dtype": "F32", "shape": list(x.shape)}
        entries[name] = place | {"data_offsets": [start, len(data)]}
    header = json.dumps(entries).encode()
    folder.mkdir()
    size = len(header).to_bytes(8, "little")
    (folder / "adapter_model.safetensors").write_bytes(size + header + data)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_the_command_uses_an_adapter(folder, generate, tmp_path) -> None:
    write(tmp_path / "own", adapter(2, Engine.from_folder(folder).model.config), 2)
    made = Engine.from_folder(folder, adapters={"own": tmp_path / "own"})
    texts = [
        made.generate("to be", Sampling(seed=0), adapter=name)[0].text for name in ("own", None)
    ]
    assert texts[0] != texts[1]
    code, out, _ = generate(folder, "--adapter", tmp_path / "own")
    assert (code, out) == (0, f"{texts[0]}\n")
    code, _, err = generate(folder, "--adapter", tmp_path / "other")
    assert code == 1
    assert "adapter_model.safetensors" in err
    code, _, err = generate(folder, "--adapter", tmp_path / "own", "--cuda-graphs")
    assert code == 2
    assert "--adapter" in err
