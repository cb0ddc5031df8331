"""Multi-token prediction: equal to a plain reference, document by document, in fp64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from mt_model import (
    GPT,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MTPConfig,
    OffloadConfig,
    RecomputePlan,
    RecomputeRule,
    expected_bytes,
    gpt,
)
from routed import RoutedConfig

TINY = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 24,
    "max_sequence_length": 16,
    "init_std": 0.3,
}
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 3], [0] * 7 + [1] * 5])


def batch(*, packed):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 48, (2, 13), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[1, 2] = -100
    data = {"tokens": tokens[:, :-1], "labels": labels}
    if packed:
        ends = F.pad(DOCUMENTS[:, 1:] != DOCUMENTS[:, :-1], (0, 1))
        labels[ends] = -100
        data["documents"] = DOCUMENTS
        data["positions"] = torch.tensor(
            [[*range(4), *range(6), 0, 0], [*range(7), *range(5)]], dtype=torch.long
        )
    return data


def rms(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turned(x):
    """Rotate heads [T, N, 4] by their places."""
    angles = torch.arange(len(x))[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def plain_layer(x, p):
    """One layer of one document [T, 16], with two query heads for each of two key heads."""
    groups = torch.einsum("th,gnch->tgnc", rms(x, p["mixer_norm.weight"]), p["mixer.qkv.weight"])
    query, key, value = groups[:, :, :2].flatten(1, 2), groups[:, :, 2], groups[:, :, 3]
    query, key = turned(query), turned(key).repeat_interleave(2, dim=1)
    scores = torch.einsum("snc,tnc->nst", query, key) / 2
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    seen = torch.einsum("nst,tnc->snc", scores.softmax(-1), value.repeat_interleave(2, dim=1))
    x = x + torch.einsum("snc,hnc->sh", seen, p["mixer.out.weight"])
    gate, up = torch.einsum(
        "th,ufh->utf", rms(x, p["feed_forward_norm.weight"]), p["feed_forward.up.weight"]
    )
    return x + F.linear(F.silu(gate) * up, p["feed_forward.down.weight"])


def under(p, prefix):
    return {name.removeprefix(prefix): x for name, x in p.items() if name.startswith(prefix)}


def plain_losses(p, tokens, labels, depths):
    """Sums and counts of one document, of next tokens and of those further on."""
    table = p["embedding.weight"]
    head = p.get("head.weight", table)
    x = table[tokens]
    for layer in range(2):
        x = plain_layer(x, under(p, f"layers.{layer}."))
    x = rms(x, p["final_norm.weight"])
    sums = [F.cross_entropy(x @ head.T, labels, reduction="sum")]
    counts = [(labels != -100).sum()]
    for k in range(1, depths + 1):
        left = max(len(tokens) - k, 0)
        q = under(p, f"mtp.{k - 1}.")
        e = table[tokens[k:]]
        both = torch.cat(
            (rms(x[:left], q["hidden_norm.weight"]), rms(e, q["embedding_norm.weight"])), -1
        )
        x = rms(plain_layer(both @ q["projection.weight"].T, under(q, "layer.")), q["norm.weight"])
        sums.append(F.cross_entropy(x @ head.T, labels[k:], reduction="sum"))
        counts.append((labels[k:] != -100).sum())
    return torch.stack(sums), torch.stack(counts)


@pytest.mark.parametrize(("tied", "packed"), [(True, True), (False, False)])
def test_losses_and_gradients_are_those_of_a_plain_reference(tied, packed):
    config = gpt(**TINY, tied=tied, mtp=MTPConfig(depths=3, weight=0.3))
    model = GPT(config, dtype=torch.float64, seed=5)
    data = batch(packed=packed)
    losses = model(None, data)
    documents = data.get("documents", torch.zeros_like(data["tokens"]))
    p = {n: x.detach().clone().requires_grad_() for n, x in model.named_parameters()}
    sums, counts = 0, 0
    for row, own in enumerate(documents):
        for document in own.unique():
            here = own == document
            found = plain_losses(p, data["tokens"][row, here], data["labels"][row, here], 3)
            sums, counts = sums + found[0], counts + found[1]
    names = ["lm", "mtp_1", "mtp_2", "mtp_3"]
    assert list(config.loss_weights) == names
    assert torch.allclose(torch.stack([losses[name] for name in names]), sums, rtol=1e-12)
    assert [losses[config.loss_counts[name]].item() for name in names] == counts.tolist()
    weights = torch.tensor(list(config.loss_weights.values()), dtype=torch.float64)
    assert weights.tolist() == pytest.approx([1, 0.1, 0.1, 0.1])
    (sums / counts * weights).sum().backward()
    total = sum(
        w * losses[n] / losses[config.loss_counts[n]] for n, w in config.loss_weights.items()
    )
    total.backward()
    for name, param in model.named_parameters():
        expected = p[name].grad
        assert (param.grad - expected).norm() <= 1e-11 * expected.norm(), name


def test_a_document_in_a_row_of_others_learns_as_if_it_stood_alone():
    """Also the losses of layers, which are of all tokens: those that the end leaves without one."""
    layer = gpt(**TINY).layers[0]
    module = replace(layer, feed_forward=RoutedConfig(width=4))
    model = GPT(gpt(**TINY, mtp=MTPConfig(depths=2, layer=module)), dtype=torch.float64)
    data = batch(packed=True)
    together, apart = model(None, data), []
    for row, own in enumerate(data["documents"]):
        for document in own.unique():
            one = {name: x[row, own == document][None] for name, x in data.items()}
            apart.append(model(None, one))
    assert {"aux", "z", "mtp_2", "tokens_2"} <= together.keys()
    for name, value in together.items():
        assert torch.allclose(value.double(), sum(each[name].double() for each in apart)), name


def test_scores_and_generation_are_those_of_a_model_without_modules():
    config = gpt(**TINY, mtp=MTPConfig())
    model, plain = GPT(config, seed=1), GPT(replace(config, mtp=None), seed=1)
    tokens = batch(packed=False)["tokens"]
    assert torch.equal(model(tokens), plain(tokens))
    cache, other = (m.new_cache(batch_size=2, max_length=16) for m in (model, plain))
    for part in tokens.split(6, dim=1):
        assert torch.equal(model.logits(part, cache=cache), plain.logits(part, cache=other))
    losses = plain(tokens, labels=tokens)
    assert torch.equal(model(tokens, labels=tokens)["lm"], losses["lm"])
    assert list(losses) == ["lm", "tokens"]


def test_parameters_and_operations_are_counted_and_shown():
    module = LayerConfig(mixer=None, feed_forward=MLPConfig(ffn_size=8))
    for mtp in (MTPConfig(depths=2), MTPConfig(layer=module), {"depths": 3, "weight": 1.0}):
        for rest in ({}, {"norm": "layer", "final_norm": False, "tied": False, "logit_scale": 0.5}):
            config = gpt(**TINY, **rest, mtp=mtp)
            params = GPT(config, device="meta").parameters()
            assert config.num_parameters == sum(param.numel() for param in params)
            assert ModelConfig.from_dict(config.to_dict()) == config
            assert gpt(**config.to_dict()) == config
    plain, config = gpt(**TINY), gpt(**TINY, mtp=MTPConfig(depths=2))
    layer = plain.layers[0]
    of_layer = sum(e.flops_per_token(16, 12) for e in layer.entries)
    more = config.flops_per_token(12) - plain.flops_per_token(12)
    assert more == 2 * (of_layer + 6 * 16 * 48 + 6 * 2 * 16 * 16)
    row = next(line for line in str(config).splitlines() if line.startswith("mtp 1-2"))
    assert row.split()[2] == f"{config.num_parameters - plain.num_parameters:,}"
    assert "attention(num_heads=4" in row


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="depths: 0 is too small; use 1 or more"):
        MTPConfig(depths=0)
    with pytest.raises(ValueError, match="weight: expected a number, found nan"):
        MTPConfig(weight=float("nan"))
    with pytest.raises(ValueError, match="repeat=2; a module has one layer"):
        MTPConfig(layer=replace(gpt(**TINY).layers[0], repeat=2))
    with pytest.raises(ValueError, match=r"mtp\.depth: unknown key.* Did you mean"):
        gpt(**TINY, mtp={"depth": 1})
    with pytest.raises(ValueError, match="causal=False and sees the tokens"):
        gpt(**TINY, causal=False, mtp={})
    with pytest.raises(ValueError, match="hidden_size=18 does not divide by tp=4"):
        gpt(**{**TINY, "hidden_size": 18, "head_dim": 4, "num_kv_heads": 4}, mtp={}).check_split(4)
    model = GPT(gpt(**TINY, mtp={}))
    given = {"embeddings": torch.zeros(1, 4, 16), "labels": torch.zeros(1, 4, dtype=torch.long)}
    with pytest.raises(
        ValueError, match=r"the batch has embeddings alone\. Give batch\['tokens'\]"
    ):
        model(None, given)
    assert model(None, {**given, "tokens": given["labels"]})["tokens_1"] == 3
    one = torch.zeros(1, 1, dtype=torch.long)
    assert model(one, labels=one)["tokens_1"] == 0


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_pass_in_parts_is_the_pass(recompute):
    model = GPT(gpt(**TINY, mtp={"depths": 2}), recompute=recompute, dtype=torch.float64)
    data, grads = batch(packed=True), []
    for run in (lambda: model(None, data), lambda: through(model.parts(data))):
        model.zero_grad()
        losses = run()
        sum(losses[name] for name in model.config.loss_weights).backward()
        grads.append([param.grad.clone() for param in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*grads, strict=True))


def test_layers_of_modules_follow_a_plan_and_are_measured():
    config = gpt(**TINY, mtp={"depths": 2})
    rules = (RecomputeRule(layers=(2,)),)
    plan = RecomputePlan(rules=rules, offload=OffloadConfig(layers=(3,), min_bytes=0))
    model = GPT(config, recompute=plan, dtype=torch.float64)
    data = batch(packed=False)
    expected = expected_bytes(model, data)
    with model.watch_activations() as kept:
        losses = model(None, data)
    assert expected == kept
    assert kept.keys() == {0, 1, 2, 3}
    assert kept[2].device < kept[0].device / 4
    assert kept[3].host > 0
    plain = GPT(config, dtype=torch.float64)
    for module, found in ((model, losses), (plain, plain(None, data))):
        sum(found[name] for name in config.loss_weights).backward()
        assert all(param.grad is not None for param in module.parameters())
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, other.grad)
    with pytest.raises(ValueError, match="4 is no layer; the model has layers 0 to 3"):
        GPT(config, recompute=RecomputePlan(rules=(RecomputeRule(layers=(4,)),)))


def through(parts):
    state = None
    for part in parts:
        state = part(state)
    return state
