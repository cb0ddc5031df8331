"""Rows with padding have the same results as alone, on every layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from mt_context_parallel import shard
from mt_model import GPT, Mamba2Config, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import sample

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"ffn_size": 24, "max_sequence_length": 32, "init_std": 0.3}
VARIANTS = {
    "rope": {},
    "learned, window": {"positions": "learned", "window": 3},
    "sinks, cap": {"sinks": "learned", "softcap": 2.0, "positions": "none"},
    "alibi, window": {"score_bias": {"type": "alibi"}, "positions": "none", "window": 4},
    "relative": {"score_bias": {"type": "relative", "buckets": 6, "max_distance": 7}},
    "both ways": {"causal": False, "window": 4, "positions": "learned"},
}
LENGTHS, LENGTH = (8, 3, 5), 8
SIDES = ("left", "right")


def model_of(name: str, state: ParallelState | None = None, **rest) -> GPT:
    return GPT(gpt(**SIZES, **VARIANTS[name]), state, dtype=torch.float64, seed=11, **rest)


def padded(side: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 48, (3, LENGTH), generator=generator)
    place, length = torch.arange(LENGTH), torch.tensor(LENGTHS)[:, None]
    mask = place >= LENGTH - length if side == "left" else place < length
    labels = torch.where(mask, tokens.flip(0) % 7, -100)
    return {"tokens": torch.where(mask, tokens, 0), "mask": mask, "labels": labels}


def loss_of(name: str, side: str, tp: int, cp: int, cuts: tuple[int, ...]):
    """The loss over a context group and the gradient of a weight, through stages run in turn."""
    state = ParallelState(ParallelLayout(tp=tp, cp=cp))
    data, x, models = padded(side), None, []
    for key in ("tokens", "labels"):
        data[key] = shard(data[key], state.group("cp"))
    for start, stop in pairwise(cuts):
        rest = {"layers": range(start, stop), "sequence_parallel": tp > 1}
        models.append(model_of(name, state, **rest))
        x = models[-1](x, data)
    x["lm"].backward()
    found = torch.stack((x["lm"].detach(), models[-1].final_norm.weight.grad.square().sum()))
    if tp * cp == 1:
        return found
    total = found[:1].clone()
    if cp > 1:
        torch.distributed.all_reduce(total, group=state.group("cp"))
    return total


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", VARIANTS)
def test_padded_rows_are_what_they_are_alone(name: str, side: str) -> None:
    model, data = model_of(name), padded(side)
    logits = model(None, {"tokens": data["tokens"], "mask": data["mask"]})
    losses = model(None, data)
    losses["lm"].backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    total = 0.0
    for row, seen in enumerate(data["mask"]):
        alone = {
            "tokens": data["tokens"][row, seen][None],
            "labels": data["labels"][row, seen][None],
        }
        expected = model(alone["tokens"])
        assert torch.allclose(logits[row, seen], expected[0], rtol=1e-10, atol=1e-12)
        loss = model(None, alone)["lm"]
        loss.backward()
        total += loss.detach()
    assert torch.allclose(losses["lm"], total, rtol=1e-11)
    for key, param in model.named_parameters():
        assert torch.allclose(grads[key], param.grad, rtol=1e-9, atol=1e-11), key


LAYOUTS = product(("learned, window", "both ways"), SIDES, ((2, 1), (1, 2), (2, 2)))


@pytest.mark.parametrize(("name", "side", "axes"), sample(LAYOUTS, every=5))
def test_padding_is_the_same_on_every_layout(ranks, name, side, axes) -> None:
    tp, cp = axes
    expected = loss_of(name, side, 1, 1, (0, 2))
    assert torch.allclose(loss_of(name, side, 1, 1, (0, 1, 2)), expected, rtol=1e-12)
    for found in ranks(tp * cp, loss_of, name, side, tp, cp, (0, 1, 2)):
        assert torch.allclose(found, expected[:1], rtol=1e-10)


CAUSAL = [name for name in VARIANTS if name != "both ways"]


@pytest.mark.parametrize(
    ("name", "side", "cuts"), sample(product(CAUSAL, SIDES, ((0, 2), (0, 1, 2))), every=3)
)
def test_padded_prompts_go_on_as_they_do_alone(name: str, side: str, cuts) -> None:
    data = padded(side)
    stages = [model_of(name, layers=range(a, b)).eval() for a, b in pairwise(cuts)]
    whole = model_of(name).eval()
    caches = [stage.new_cache(batch_size=3, max_length=14) for stage in stages]
    texts = [data["tokens"][row, seen] for row, seen in enumerate(data["mask"])]
    fed = {"tokens": data["tokens"], "mask": data["mask"]}
    with torch.no_grad():
        for _ in range(6):
            x = None
            for stage, cache in zip(stages, caches, strict=True):
                x = stage(x, {**fed, "cache": cache})
            expected = torch.stack([whole.logits(text[None])[0, -1] for text in texts])
            assert torch.allclose(x[:, 0], expected, rtol=1e-10, atol=1e-12)
            fed = {"tokens": x.argmax(-1)}
            texts = [torch.cat((text, new)) for text, new in zip(texts, fed["tokens"], strict=True)]


def test_logits_of_padded_rows_take_the_mask() -> None:
    model, data = model_of("rope").eval(), padded("left")
    cache = model.new_cache(batch_size=3, max_length=8)
    found = model.logits(data["tokens"], cache=cache, mask=data["mask"])
    expected = model.logits(data["tokens"], mask=data["mask"])
    assert torch.isfinite(found).all()
    assert torch.allclose(found[data["mask"]], expected[data["mask"]], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"mask": torch.ones(3, 8)},
            TypeError,
            "mask must be a tensor of bool, True where a token",
        ),
        ({"mask": torch.ones(3, 4).bool()}, ValueError, r"mask must be \[B, 8\], of whole seq"),
        ({"mask": torch.ones(2, 8).bool()}, ValueError, r"mask must be \(3, 8\) here"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(change, error, message) -> None:
    with pytest.raises(error, match=message):
        model_of("rope")(None, {**padded("left"), **change})


def test_a_state_of_all_tokens_takes_no_padding_behind_them() -> None:
    config = gpt(**SIZES)
    mixer = Mamba2Config(num_heads=4, head_dim=4, state_size=4, num_groups=2)
    layers = (config.layers[0], replace(config.layers[1], mixer=mixer))
    model, data = GPT(replace(config, layers=layers)).eval(), padded("right")
    cache = model.new_cache(batch_size=3, max_length=8)
    with pytest.raises(ValueError, match="layer 1 keeps a state of the tokens, and the mask has"):
        model.logits(data["tokens"], cache=cache, mask=data["mask"])
    assert model.logits(data["tokens"], cache=cache).isfinite().all()


def test_what_sees_both_ways_or_packs_documents_has_no_cache() -> None:
    with pytest.raises(NotImplementedError, match="sees tokens yet to come"):
        model_of("both ways").new_cache(batch_size=1, max_length=4)
    model = model_of("rope").eval()
    batch = {"tokens": torch.ones(1, 2).long(), "documents": torch.zeros(1, 2).long()}
    with pytest.raises(ValueError, match="documents do not go with a cache"):
        model(None, {**batch, "cache": model.new_cache(batch_size=1, max_length=4)})
