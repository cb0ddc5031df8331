"""The model against a separate one written with einsum, and its behaviour on one rank."""

import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from mt_model import GPT, AttentionConfig, LayerConfig, MLPConfig, gpt, preset
from mt_parallel_state import ParallelLayout, ParallelState, sharding_of
from torch.utils._python_dispatch import TorchDispatchMode

TINY = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_layers": 3,
    "num_heads": 4,
    "ffn_size": 24,
    "max_sequence_length": 32,
    "init_std": 0.3,
}
VARIANTS = {
    "llama": {"num_kv_heads": 2, "tied": False},
    "qwen": {"num_kv_heads": 1, "qk_norm": "head", "head_dim": 6, "rope_theta": 50.0},
    "neox": {"rope": {"theta": 30.0, "fraction": 0.5}},
    "gptj": {"rope": {"fraction": 0.7, "interleaved": True}, "head_dim": 6, "qk_norm": "head"},
    "gpt2": {
        "positions": "learned",
        "norm": "layer",
        "activation": "gelu_tanh",
        "gated": False,
        "bias": True,
    },
    "plain": {"positions": "none", "activation": "relu2", "gated": False},
    "gemma2": {
        "num_kv_heads": 2,
        "qk_norm": "head",
        "norm_zero_centered": True,
        "norms": "sandwich",
        "activation": "gelu_tanh",
        "embedding_scale": 4.0,
        "logit_softcap": 3.0,
        "z_loss": 1e-2,
    },
    "olmo2": {"norms": "output", "qk_norm": "head", "tied": False},
    "bert": {
        "positions": "learned",
        "norm": "layer",
        "norms": "post",
        "activation": "gelu",
        "gated": False,
        "bias": True,
        "embedding_norm": True,
        "token_types": 2,
        "head_transform": "gelu",
        "head_bias": True,
    },
    "pythia": {
        "norm": "layer",
        "parallel": True,
        "activation": "gelu",
        "gated": False,
        "bias": True,
        "tied": False,
    },
    "phi": {
        "norm": "layer",
        "parallel": True,
        "shared_norm": True,
        "activation": "relu",
        "gated": False,
        "bias": True,
        "tied": False,
        "head_bias": True,
        "logit_softcap": 2.0,
    },
    "cohere": {
        "norm": "layer",
        "norm_bias": False,
        "parallel": True,
        "shared_norm": True,
        "logit_scale": 0.0625,
        "z_loss": 1e-3,
    },
    "olmo": {"norm": "layer", "norm_weight": False, "norms": "sandwich", "parallel": True},
    "nemotron": {"norm": "layer", "norm_zero_centered": True, "activation": "relu2"},
    "granite": {
        "norm_rounds_first": True,
        "residual_scale": 0.22,
        "logit_scale": 0.125,
        "embedding_scale": 12.0,
        "attention_scale": 0.4,
    },
    "gptoss": {"activation": "gelu_quick", "clamp": 0.7, "up_offset": 1.0, "bias": True},
}
SCALED = {
    "interleaved": True,
    "scaling": {"type": "dynamic", "factor": 4.0, "original_length": 5},
}


def batch(rows=2, length=9, vocab=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 2] = -100
    return {"tokens": tokens[:, :-1], "labels": labels, "sample_ids": torch.arange(rows) + 5}


def double(config, **rest):
    model = GPT(config, dtype=torch.float64, **rest)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # so that biases and norm weights are tested too
        for param in model.parameters():
            if param.dim() == 1 or (param == 0).all():
                param += 0.2 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    return model


def oracle_norm(p, name, x, form):
    if form.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.pow(2).mean(-1, keepdim=True) + form.eps) ** 0.5
    if f"{name}.weight" in p:
        x = x * (p[f"{name}.weight"] + (1 if form.zero_centered else 0))
    return x + p.get(f"{name}.bias", torch.tensor(0.0))


def oracle_turn(x, rope):
    x, rest = x.tensor_split((int(x.shape[-1] * rope.fraction),), dim=-1)
    half = x.shape[-1] // 2
    frequency = rope.theta ** -(torch.arange(half, dtype=torch.float64) / half)
    phase = torch.exp(1j * torch.arange(x.shape[1])[:, None] * frequency)[:, None, None, :]
    if rope.interleaved:
        z = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * phase
        return torch.cat((torch.view_as_real(z).flatten(-2), rest), dim=-1)
    z = torch.complex(x[..., :half], x[..., half:]) * phase
    return torch.cat((z.real, z.imag, rest), dim=-1)


def oracle_attention(p, name, x, mixer, form):
    length = x.shape[1]
    qkv = torch.einsum("bsh,gpdh->bsgpd", x, p[f"{name}.qkv.weight"])
    qkv = qkv + p.get(f"{name}.qkv.bias", torch.tensor(0.0))
    query, key, value = qkv[..., :-2, :], qkv[..., -2:-1, :], qkv[..., -1, :]
    if mixer.qk_norm == "head":
        query = oracle_norm(p, f"{name}.q_norm", query, replace(form, kind="rms"))
        key = oracle_norm(p, f"{name}.k_norm", key, replace(form, kind="rms"))
    if mixer.rope is not None:
        query, key = oracle_turn(query, mixer.rope), oracle_turn(key, mixer.rope)
    scores = torch.einsum("bsgpd,btgd->bgpst", query, key[..., 0, :])
    scores = scores * (mixer.scale or mixer.head_dim**-0.5)
    future = torch.arange(length)[None, :] > torch.arange(length)[:, None]
    weights = torch.exp(scores).masked_fill(future, 0)
    weights = weights / weights.sum(-1, keepdim=True)
    mixed = torch.einsum("bgpst,btgd->bsgpd", weights, value)
    out = torch.einsum("bsnd,hnd->bsh", mixed.flatten(2, 3), p[f"{name}.out.weight"])
    return out + p.get(f"{name}.out.bias", torch.tensor(0.0))


def oracle_mlp(p, name, x, mlp):
    act = {
        "silu": lambda t: t * torch.sigmoid(t),
        "relu": lambda t: t.clamp(min=0),
        "relu2": lambda t: t.clamp(min=0) ** 2,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "gelu_quick": lambda t: t / (1 + torch.exp(-1.702 * t)),
    }[mlp.activation]
    zero = torch.tensor(0.0)
    if mlp.gated:
        both = torch.einsum("bsh,pfh->bspf", x, p[f"{name}.up.weight"])
        gate, up = (both + p.get(f"{name}.up.bias", zero)).unbind(2)
        if mlp.clamp is not None:
            gate, up = gate.clamp(max=mlp.clamp), up.clamp(-mlp.clamp, mlp.clamp)
        hidden = act(gate) * (up + mlp.up_offset)
    else:
        hidden = act(x @ p[f"{name}.up.weight"].T + p.get(f"{name}.up.bias", zero))
    return hidden @ p[f"{name}.down.weight"].T + p.get(f"{name}.down.bias", zero)


def oracle_layer(p, name, x, layer, form):
    """Written out for each place of the norms."""
    scale = layer.residual_scale

    def branch(which, x):
        if which == "mixer":
            return oracle_attention(p, f"{name}.mixer", x, layer.mixer, form)
        return oracle_mlp(p, f"{name}.feed_forward", x, layer.feed_forward)

    def before(which, x):
        which = "mixer" if layer.shared_norm else which
        return oracle_norm(p, f"{name}.{which}_norm", x, form)

    def after(which, x):
        return oracle_norm(p, f"{name}.{which}_output_norm", x, form)

    def added(which, x):
        match layer.norms:
            case "pre":
                return scale * branch(which, before(which, x))
            case "output":
                return scale * after(which, branch(which, x))
            case "sandwich":
                return scale * after(which, branch(which, before(which, x)))

    if layer.norms == "post":
        x = after("mixer", x + scale * branch("mixer", x))
        return after("feed_forward", x + scale * branch("feed_forward", x))
    if layer.parallel:
        return x + added("mixer", x) + added("feed_forward", x)
    x = x + added("mixer", x)
    return x + added("feed_forward", x)


def oracle_logits(p, config, batch):
    x = config.embedding_scale * p["embedding.weight"][batch["tokens"]]
    if config.positions == "learned":
        x = x + p["embedding.positions.weight"][: batch["tokens"].shape[1]]
    if config.token_types:
        x = x + p["embedding.types.weight"][batch["token_types"]]
    if config.embedding_norm:
        x = oracle_norm(p, "embedding.norm", x, config.norm)
    for i, layer in enumerate(config.layers):
        x = oracle_layer(p, f"layers.{i}", x, layer, config.norm)
    if config.final_norm:
        x = oracle_norm(p, "final_norm", x, config.norm)
    if config.head_transform is not None:
        x = F.gelu(x @ p["head.transform.weight"].T + p["head.transform.bias"])
        x = oracle_norm(p, "head.transform.norm", x, config.norm)
    head = p["embedding.weight"] if config.tied else p["head.weight"]
    logits = config.logit_scale * (x @ head.T) + p.get("head.bias", torch.tensor(0.0))
    cap = config.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients_match_the_oracle(variant):
    config = gpt(**{**TINY, **VARIANTS[variant]})
    model, data = double(config), batch()
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    if config.token_types:
        data["token_types"] = torch.randint(0, config.token_types, data["tokens"].shape)
    expected = oracle_logits(params, config, data)
    no_labels = {name: x for name, x in data.items() if name != "labels"}
    assert torch.allclose(model(None, no_labels), expected, rtol=1e-11, atol=1e-11)
    output = model(None, data)
    rows = -torch.log_softmax(expected, -1).gather(2, data["labels"].clamp(min=0)[..., None])
    total = rows[..., 0][data["labels"] != -100].sum()
    assert output["tokens"] == 17
    assert torch.allclose(output["lm"], total, rtol=1e-12)
    objective, weights = output["lm"], config.loss_weights
    if config.z_loss:
        square = expected.logsumexp(-1).square()[data["labels"] != -100].sum()
        assert torch.allclose(output["z"], square, rtol=1e-12)
        objective, total = objective + weights["z"] * output["z"], total + config.z_loss * square
    assert weights.keys() == output.keys() - {"tokens"}
    objective.backward()
    total.backward()
    for name, param in model.named_parameters():
        assert torch.allclose(param.grad, params[name].grad, rtol=1e-9, atol=1e-11), name


def test_parameter_names_are_global_and_complete():
    model = GPT(gpt(**TINY, tied=False, qk_norm="head"), layers=range(2, 3))
    layer = "mixer_norm.weight mixer.qkv.weight mixer.out.weight mixer.q_norm.weight"
    layer += " mixer.k_norm.weight feed_forward_norm.weight feed_forward.up.weight"
    names = {f"layers.2.{n}" for n in [*layer.split(), "feed_forward.down.weight"]}
    assert {n for n, _ in model.named_parameters()} == names | {"final_norm.weight", "head.weight"}
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


def test_initial_values_have_the_configured_spread():
    config = gpt(
        vocab_size=512, hidden_size=128, num_layers=2, num_heads=4, bias=True, norm="layer"
    )
    params = dict(GPT(config, seed=3).named_parameters())
    for name in (
        "embedding.weight",
        "layers.0.mixer.qkv.weight",
        "layers.1.feed_forward.up.weight",
    ):
        assert params[name].std().item() == pytest.approx(0.02, rel=0.03), name
        assert abs(params[name].mean().item()) < 5e-4
    for name in ("layers.0.mixer.out.weight", "layers.1.feed_forward.down.weight"):
        assert params[name].std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.03), name
    assert (params["layers.0.feed_forward_norm.weight"] == 1).all()
    assert (params["layers.0.feed_forward.up.bias"] == 0).all()
    again = dict(GPT(config, seed=3).named_parameters())
    other = dict(GPT(config, seed=4).named_parameters())
    assert torch.equal(again["embedding.weight"], params["embedding.weight"])
    assert not torch.equal(other["embedding.weight"], params["embedding.weight"])


def test_embeddings_and_head_may_have_a_spread_of_their_own():
    sizes = {"vocab_size": 512, "hidden_size": 128, "num_layers": 1, "num_heads": 4}
    config = gpt(**sizes, tied=False, init_std=0.01, embedding_std=0.3, positions="learned")
    for name, param in GPT(config, seed=3).named_parameters():
        if name in ("embedding.weight", "head.weight", "embedding.positions.weight"):
            assert param.std().item() == pytest.approx(0.3, rel=0.03), name
        elif name.endswith(("qkv.weight", "up.weight")):
            assert param.std().item() == pytest.approx(0.01, rel=0.03), name


def test_bf16_parameters_are_the_rounded_fp32_ones():
    config = gpt(**TINY)
    narrow, wide = GPT(config, dtype=torch.bfloat16), GPT(config)
    for a, b in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16())


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_decoding_equals_running_the_whole_prefix(variant):
    config = gpt(**{**TINY, **VARIANTS[variant]})
    model = GPT(config)
    prompt = batch(rows=3, length=5)["tokens"]
    tokens = prompt
    for _ in range(12):
        tokens = torch.cat((tokens, model.logits(tokens)[:, -1:].argmax(-1)), dim=1)
    cache = model.new_cache(batch_size=3, max_length=20)
    logits = model.logits(prompt, cache=cache)
    cached = prompt
    for _ in range(12):
        cached = torch.cat((cached, logits[:, -1:].argmax(-1)), dim=1)
        logits = model.logits(cached[:, -1:], cache=cache)
    assert torch.equal(cached, tokens)


def test_prefill_in_pieces_equals_one_prefill():
    model = double(gpt(**TINY))
    tokens = batch(length=11)["tokens"]
    cache = model.new_cache(batch_size=2, max_length=11)
    ends = pairwise((0, 4, 5, 11))
    pieces = [model.logits(tokens[:, a:b], cache=cache) for a, b in ends]
    assert cache.length == 11
    whole = model.logits(tokens)
    assert torch.allclose(torch.cat(pieces, 1), whole, rtol=1e-12, atol=1e-12)
    fed = {"tokens": tokens, "cache": model.new_cache(batch_size=2, max_length=11)}
    assert torch.allclose(model(None, fed), whole[:, -1:], rtol=1e-12)


def dropped(*, feed_forward=0.0, **rates):
    config = gpt(**TINY, **rates)
    fed = replace(config.layers[0].feed_forward, dropout=feed_forward)
    return replace(config, layers=(replace(config.layers[0], feed_forward=fed),) * 3)


def test_dropout_depends_on_the_sample_and_not_on_the_batch():
    model, data = double(dropped(dropout=0.2, attention_dropout=0.1)), batch(rows=4)
    whole = model(None, data)["lm"]
    halves = [{k: v[i : i + 2] for k, v in data.items()} for i in (0, 2)]
    parts = sum(model(None, half)["lm"] for half in halves)
    assert torch.allclose(whole, parts, rtol=1e-12)
    again = {**data, "sample_ids": data["sample_ids"] + 100}
    assert not torch.allclose(model(None, again)["lm"], whole, rtol=1e-4)


@pytest.mark.parametrize(
    "rates", [{"dropout": 0.3}, {"attention_dropout": 0.3}, {"feed_forward": 0.3}]
)
def test_dropout_is_off_in_evaluation_and_unbiased_in_training(rates):
    torch.manual_seed(0)
    model, data = double(dropped(**rates)), batch()
    plain = double(dropped())
    model.eval()
    expected = plain(None, data)["lm"]
    assert torch.allclose(model(None, data)["lm"], expected, rtol=1e-12)
    model.train()
    assert not torch.allclose(model(None, data)["lm"], expected, rtol=1e-4)
    del data["sample_ids"]
    with pytest.raises(ValueError, match=r"dropout in training needs batch\['sample_ids'\]"):
        model(None, data)


def test_dropout_sites_drop_the_configured_share_independently():
    from mt_model.block.dropout import DropoutSite, hidden_index

    index = hidden_index(torch.arange(50), torch.arange(8), 32, 64)
    ones = torch.ones(index.shape)
    sites = [
        DropoutSite(0.25, seed=s, layer=layer, name=n)
        for s, layer, n in [(0, 0, "mixer"), (0, 1, "mixer"), (1, 0, "mixer"), (0, 0, "embedding")]
    ]
    masks = [site(ones, index) for site in sites]
    for mask in masks:
        assert sorted(set(mask.flatten().tolist())) == pytest.approx([0, 4 / 3])
        assert mask.mean().item() == pytest.approx(1, abs=0.02)
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert (a * b).mean().item() == pytest.approx(1, abs=0.03)


# Dynamo itself looks at .grad where a graph breaks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("layers", "blocks"),
    [
        *((layers, {"num_kv_heads": 2, "qk_norm": "head"}) for layers in (None, range(1, 2))),
        (range(2, 3), {"num_kv_heads": 2, "qk_norm": "head"}),
        (range(2, 3), VARIANTS["gemma2"]),
        (range(2, 3), VARIANTS["phi"]),
        (range(1, 2), VARIANTS["bert"]),
        (range(1, 2), {"rope": SCALED, "score_bias": {"type": "relative", "table": None}}),
        (range(2, 3), {"positions": "none", "score_bias": {"type": "relative"}}),
    ],
)
def test_stage_compiles_to_the_same_numbers(layers, blocks):
    config = gpt(**{**TINY, **blocks})
    model, data = double(config, layers=layers), batch()
    x = None if layers is None else torch.randn(2, 9, 16, dtype=torch.float64)
    torch.compiler.reset()  # a function that other tests compiled often is compiled no more
    # The embedding checks its ids, which breaks the graph once.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=layers is not None)

    def run(module):
        model.zero_grad()
        out = module(x, data)
        (out if isinstance(out, torch.Tensor) else out["lm"]).sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        return (out if isinstance(out, torch.Tensor) else out["lm"]).detach(), grads

    value, grads = run(model)
    compiled_value, compiled_grads = run(compiled)
    assert torch.allclose(value, compiled_value, rtol=1e-12)
    for name, grad in grads.items():
        assert torch.allclose(compiled_grads[name], grad, rtol=1e-9, atol=1e-12), name


def test_meta_device_builds_without_memory():
    model = GPT(preset("llama3-70b"), layers=range(40, 41), device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert model.layers["40"].mixer.qkv.weight.shape == (8, 10, 128, 8192)


def test_misuse_is_refused_with_the_reason():
    config = gpt(**TINY)
    model, data = GPT(config), batch()
    long = torch.zeros(1, 33, dtype=torch.long)
    with pytest.raises(ValueError, match="33 tokens are more than max_sequence_length=32"):
        model(None, {"tokens": long, "labels": long})
    with pytest.raises(ValueError, match="33 tokens are more than max_sequence_length=32"):
        model.logits(long)
    with pytest.raises(ValueError, match=r"every stage needs batch\['tokens'\]"):
        model(None, {})
    with pytest.raises(ValueError, match=r"layers=range\(2, 5\) is not a range"):
        GPT(config, layers=range(2, 5))
    with pytest.raises(ValueError, match="only the first stage starts from tokens"):
        GPT(config, layers=range(1, 3))(None, data)
    with pytest.raises(ValueError, match="this stage holds layers 1 to 2 of 3"):
        GPT(config, layers=range(1, 3)).logits(data["tokens"])
    small = model.new_cache(batch_size=2, max_length=8)
    with pytest.raises(ValueError, match=r"9 tokens are more than the cache holds \(8\)"):
        model.logits(data["tokens"], cache=small)
    with pytest.raises(ValueError, match="max_length=33 is not between 1 and"):
        model.new_cache(batch_size=1, max_length=33)


def test_pipeline_layout_needs_the_layers_of_the_stage():
    class TwoStages(ParallelState):
        def __init__(self):
            pass

        def size(self, axis):
            return {"pp": 2}.get(axis, 1)

    with pytest.raises(ValueError, match="the layout has pp=2 stages, so say which layers"):
        GPT(gpt(**TINY), TwoStages())


def test_two_models_live_side_by_side():
    data, config = batch(), gpt(**TINY)
    state = ParallelState(ParallelLayout())
    first, second = GPT(config, state), GPT(config, state, seed=1)
    alone = first(None, data)["lm"]
    second(None, data)
    assert torch.equal(first(None, data)["lm"], alone)


def kept_bytes(recompute):
    """Bytes of activations that a training step holds between forward and backward."""
    model, kept = GPT(gpt(**TINY), recompute=recompute), {}
    tokens = torch.zeros(2, 16, dtype=torch.long)
    weights = {param.untyped_storage()._cdata for param in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage()._cdata, t), lambda t: t
    ):
        model(None, {"tokens": tokens, "labels": tokens})
    return sum(t.untyped_storage().size() for ptr, t in kept.items() if ptr not in weights)


def test_recomputation_keeps_less():
    nothing, selective, full = (kept_bytes(how) for how in ("none", "selective", "full"))
    assert full < 0.5 * selective
    assert selective < 0.9 * nothing
    with pytest.raises(
        ValueError, match=r"recompute must be one of .* or a RecomputePlan, got 'all'"
    ):
        GPT(gpt(**TINY), recompute="all")


def test_tokens_alone_give_logits_and_with_labels_the_losses():
    model, data = double(gpt(**TINY, num_kv_heads=2)), batch()
    tokens, labels = data["tokens"], data["labels"]
    logits = model(tokens)
    assert torch.allclose(logits, model.logits(tokens), rtol=1e-12)
    assert torch.equal(logits, model(None, {"tokens": tokens}))
    output, expected = model(tokens, labels=labels), model(None, data)
    assert torch.equal(output["lm"], expected["lm"])
    ours = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    ours.backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    expected["lm"].backward()
    for name, param in model.named_parameters():
        assert torch.allclose(found[name], param.grad, rtol=1e-9, atol=1e-12), name


def test_sample_ids_go_with_tokens():
    model, data = double(gpt(**TINY, dropout=0.2)), batch()
    tokens, rest = data["tokens"], {key: data[key] for key in ("labels", "sample_ids")}
    assert torch.equal(model(tokens, **rest)["lm"], model(None, data)["lm"])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, d: m(None), TypeError, r"model\(tokens\) needs int64 tokens .* got None"),
        (lambda m, d: m("text"), TypeError, "tokens must be a tensor of integers.* got str"),
        (lambda m, d: m(d["tokens"].float()), TypeError, "tokens must be .*got torch.float32"),
        (lambda m, d: m(d["tokens"][0]), ValueError, r"tokens must be \[B, S\].*got \(9,\)"),
        (lambda m, d: m(d["tokens"][:, :0]), ValueError, r"at least one token, got \(2, 0\)"),
        (
            lambda m, d: m(d["tokens"], labels=d["labels"][:1]),
            ValueError,
            r"labels must be \(2, 9\)",
        ),
        (lambda m, d: m(d["tokens"], labels=3), TypeError, "labels must be .*got int"),
        (lambda m, d: m(None, d["tokens"]), TypeError, "batch must be a mapping"),
        (lambda m, d: m(None, d, labels=d["labels"]), ValueError, "in the batch, or tokens"),
        (
            lambda m, d: m(d["tokens"], sample_ids=d["tokens"]),
            ValueError,
            r"sample_ids must be \(2,",
        ),
        (lambda m, d: m.logits(d["tokens"][0]), ValueError, r"tokens must be \[B, S\]"),
        (lambda m, d: m.logits(d["tokens"], cache=3), TypeError, "cache must be a KVCache"),
        (lambda m, d: m.new_cache(batch_size=0, max_length=3), ValueError, "batch_size=0"),
        (
            lambda m, d: m.new_cache(batch_size=1, max_length="3"),
            TypeError,
            "max_length must be an int, got '3'",
        ),
        (lambda m, d: GPT("gpt2"), TypeError, "config must be a ModelConfig.* got str"),
        (lambda m, d: GPT(m.config, layers=[0, 1]), ValueError, r"layers=\[0, 1\] is not a range"),
        (lambda m, d: GPT(m.config, dtype="fp32"), TypeError, "dtype must be one of .* got 'fp32'"),
        (lambda m, d: GPT(m.config, 3), TypeError, "state must be a ParallelState.* got 3"),
        (lambda m, d: GPT(m.config, seed="a"), TypeError, "seed must be an int or None, got 'a'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call(GPT(gpt(**TINY)), batch())


def test_building_and_running_imports_nothing_slow():
    code = """
import sys
import torch
before = set(sys.modules)
from mt_model import GPT, gpt
model = GPT(gpt(vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, qk_norm="head"))
cache = model.new_cache(batch_size=1, max_length=8)
model.logits(torch.zeros(1, 4, dtype=torch.long), cache=cache)
new = set(sys.modules) - before
assert not {"sympy", "torch._dynamo", "torch._inductor", "numpy"} & new, sorted(new)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Device:
    """A query that says it is on a device this machine need not have."""

    def __init__(self, kind):
        self.device = torch.device(kind)


def test_attention_to_a_cache_never_takes_cudnn(monkeypatch):
    from mt_model.attend.kernels import steady_kernels
    from torch.nn.attention import SDPBackend

    asked = []
    monkeypatch.setattr("torch.nn.attention.sdpa_kernel", asked.append)
    steady_kernels(Device("cuda"))
    assert asked[0]
    assert SDPBackend.CUDNN_ATTENTION not in asked[0]
    with steady_kernels(Device("cpu")):
        assert len(asked) == 1


def test_attention_to_a_cache_asks_for_steady_kernels_and_training_does_not(monkeypatch):
    from mt_model.attend import kernels

    asked, real = [], kernels.steady_kernels
    monkeypatch.setattr(kernels, "steady_kernels", lambda q: asked.append(q.shape[1]) or real(q))
    model, tokens = GPT(gpt(**TINY)), batch()["tokens"]
    cache = model.new_cache(batch_size=2, max_length=12)
    model.logits(tokens, cache=cache)
    model.logits(tokens[:, :2], cache=cache)  # a CPU has a kernel of its own for one
    assert asked == [9, 9, 9, 2, 2, 2]
    model(tokens)
    assert len(asked) == 6


class LargestIndex(TorchDispatchMode):
    """A mode that notes the largest new int64 tensor."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.int64:
            self.largest = max(self.largest, out.untyped_storage().nbytes() // 8)
        return out


def test_attention_dropout_makes_no_index_of_all_weights():
    rows, heads, length = 2, 4, 1200
    sizes = {**TINY, "num_layers": 1, "max_sequence_length": length, "num_heads": heads}
    model = GPT(gpt(**sizes, attention_dropout=0.1))
    with LargestIndex() as seen:
        model(None, batch(rows, length))["lm"].backward()
    assert length < seen.largest <= 1 << 22
    assert seen.largest < rows * heads * length**2 / 2


def test_attention_dropout_is_the_function_of_sample_head_query_and_key():
    from mt_parallel_state import hash_key, random_uniform

    sizes = {"vocab_size": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
    model = GPT(gpt(**sizes, positions="none", attention_dropout=0.4), dtype=torch.float64, seed=3)
    attention = model.layers["0"].mixer
    x, ids = torch.randn(2, 5, 8, dtype=torch.float64), torch.tensor([4, 9])
    data = {"tokens": torch.zeros(2, 5, dtype=torch.long), "sample_ids": ids}
    _, shared = model.begin(None, data)
    query, key, value = attention.qkv(x).unbind(3)
    scores = torch.einsum("bsnd,btnd->bnst", query, key) / 2
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    index = torch.arange(2 * 5 * 5).view(2, 5, 5) + ids[:, None, None, None] * (2 * 5 * 5)
    kept = random_uniform(hash_key("dropout", 3, 0, "scores"), index) >= 0.4
    mixed = torch.einsum("bnst,btnd->bsnd", weights * kept / 0.6, value)
    assert torch.allclose(attention(x, shared), attention.out(mixed), rtol=1e-12)


@pytest.mark.parametrize("is_gated", [False, True])
def test_dropout_in_a_feed_forward_is_the_function_of_sample_token_and_element(is_gated):
    from mt_parallel_state import hash_key, random_uniform

    sizes = {"vocab_size": 16, "hidden_size": 8, "max_sequence_length": 7}
    mixer = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4)
    mlp = MLPConfig(ffn_size=12, gated=is_gated, dropout=0.4)
    layers = [LayerConfig(mixer=mixer, feed_forward=mlp)]
    config = gpt(**sizes, positions="none", layers=layers)
    model = GPT(config, dtype=torch.float64, seed=3)
    feed = model.layers["0"].feed_forward
    x, ids = torch.randn(2, 5, 8, dtype=torch.float64), torch.tensor([4, 9])
    data = {"tokens": torch.zeros(2, 5, dtype=torch.long), "sample_ids": ids}
    _, shared = model.begin(None, data)
    up = feed.up(x)
    between = F.silu(up[..., 0, :]) * up[..., 1, :] if is_gated else F.silu(up)
    index = torch.arange(5 * 12).view(5, 12) + ids[:, None, None] * (7 * 12)
    kept = random_uniform(hash_key("dropout", 3, 0, "ffn"), index) >= 0.4
    assert 0.3 < kept.double().mean() < 0.9
    expected = feed.down(between * kept / 0.6)
    assert torch.allclose(feed(x, shared), expected, rtol=1e-12, atol=1e-14)
    model.eval()
    _, shared = model.begin(None, data)
    assert torch.allclose(feed(x, shared), feed.down(between), rtol=1e-12, atol=1e-14)


def test_weights_that_are_loaded_cost_no_initial_values(monkeypatch):
    config = gpt(vocab_size=48, hidden_size=16, num_layers=2, num_heads=4, max_sequence_length=16)
    seeded = GPT(config)

    def fail(*_, **__):
        raise AssertionError("initial values were computed")

    monkeypatch.setattr("mt_model.stack.initialization.initialize_", fail)
    loaded = GPT(config, seed=None)
    loaded.load_state_dict(seeded.state_dict())
    tokens = torch.arange(9)[None]
    assert torch.equal(loaded(tokens), seeded(tokens))
    for (name, ours), theirs in zip(loaded.named_parameters(), seeded.parameters(), strict=True):
        assert sharding_of(ours) == sharding_of(theirs), name


@pytest.mark.parametrize("tied", [False, True])
def test_padding_of_the_vocabulary_takes_part_in_nothing(tied):
    plain = gpt(**{**TINY, "vocab_size": 49, "tied": tied})
    padded = replace(plain, vocab_multiple=8)
    assert (padded.vocab_rows, plain.vocab_rows) == (56, 49)
    first, second, filled = double(plain), double(padded), double(padded)
    assert padded.num_parameters == sum(p.numel() for p in second.parameters())
    paddings = [p[first.get_parameter(n).shape[0] :] for n, p in filled.named_parameters()]
    with torch.no_grad():
        for padding in paddings:
            padding.fill_(7.0)
    data = batch()
    scores = [model(data["tokens"]) for model in (first, second, filled)]
    losses = [model(None, data)["lm"] for model in (first, second, filled)]
    for loss in losses:
        loss.backward()
    # With 49 rows BLAS may add in another order than with 56 (on AMD it does, by 9e-16).
    near = partial(torch.testing.assert_close, rtol=1e-13, atol=1e-13)
    for short, zeros, sevens in (scores, losses):
        near(zeros, short)
        assert torch.equal(zeros, sevens)
    for name, param in second.named_parameters():
        rows = first.get_parameter(name)
        near(param.grad[: rows.shape[0]], rows.grad)
        assert torch.equal(param.grad, filled.get_parameter(name).grad), name
        assert not param.grad[rows.shape[0] :].any()
        assert not param[rows.shape[0] :].any()
    assert any(padding.numel() for padding in paddings)
    with pytest.raises(ValueError, match="token id 49 is outside the vocabulary"):
        second(torch.tensor([[49]]))
