"""Splitting the model over ranks or stages changes no number: fp64, to 1e-10."""

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from mt_context_parallel import shard
from mt_model import (
    GPT,
    DynamicScaling,
    GatedDeltaNetConfig,
    Mamba2Config,
    RopeConfig,
    encoder_decoder_layers,
    gpt,
)
from mt_parallel_state import (
    ParallelLayout,
    ParallelState,
    global_shape_of,
    offsets_of,
    sharding_of,
    shardings,
)
from mt_tensor_parallel import adapters as adapters_of
from mt_tensor_parallel import add_lora, set_lora_step
from mt_testing import sample
from routed import RoutedConfig

TINY = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_layers": 3,
    "num_heads": 4,
    "ffn_size": 24,
    "max_sequence_length": 16,
    "init_std": 0.3,
}
VARIANTS = {
    "gqa": {"num_kv_heads": 2},
    "one_kv_head": {"num_kv_heads": 1, "qk_norm": "head", "bias": True, "attention_dropout": 0.1},
    "untied_dropout": {"tied": False, "dropout": 0.2, "attention_dropout": 0.2},
    "qk_norm": {"qk_norm": "head", "num_kv_heads": 2, "dropout": 0.1},
    "gate_whole_norm": {"num_kv_heads": 2, "output_gate": True, "qk_norm": "whole"},
    "gpt2": {
        "positions": "learned",
        "norm": "layer",
        "activation": "gelu",
        "gated": False,
        "bias": True,
        "dropout": 0.1,
    },
    "losses": {"num_kv_heads": 2},
    "padded": {"vocab_size": 49, "vocab_multiple": 4, "tied": False},
    "ropes": {"num_kv_heads": 2},
    "relative": {"score_bias": {"type": "relative", "buckets": 4, "max_distance": 5}},
    "gemma2": {
        "num_kv_heads": 2,
        "norms": "sandwich",
        "norm_zero_centered": True,
        "activation": "gelu_tanh",
        "embedding_scale": 4.0,
        "logit_softcap": 3.0,
        "z_loss": 1e-2,
        "dropout": 0.1,
    },
    "bert": {
        "positions": "learned",
        "norm": "layer",
        "norms": "post",
        "gated": False,
        "bias": True,
        "embedding_norm": True,
        "token_types": 3,
        "head_transform": "gelu",
        "head_bias": True,
        "pooled_head": {"num_classes": 3, "loss_weight": 2.0},
        "dropout": 0.1,
    },
    "neox": {"norm": "layer", "parallel": True, "bias": True, "tied": False, "dropout": 0.1},
    "phi": {
        "norm": "layer",
        "parallel": True,
        "shared_norm": True,
        "tied": False,
        "head_bias": True,
        "logit_scale": 0.3,
        "residual_scale": 0.5,
    },
    "mtp": {"num_kv_heads": 2, "dropout": 0.1, "mtp": {"depths": 2, "weight": 0.6}},
    "mtp_untied": {"tied": False, "norms": "sandwich", "mtp": {"depths": 1}, "z_loss": 1e-2},
    "olmo2": {"norms": "output", "clamp": 0.5, "up_offset": 1.0, "activation": "gelu_quick"},
    "t5": {
        "positions": "none",
        "score_bias": {"type": "relative", "buckets": 6, "max_distance": 9},
        "attention_scale": 1.0,
        "dropout": 0.1,
        "attention_dropout": 0.1,
    },
}
FED = ("t5", "phi", "qk_norm")
ROPES = (
    RopeConfig(theta=50.0, scaling=DynamicScaling(factor=2.0, original_length=4)),
    None,
    RopeConfig(fraction=0.5, interleaved=True),
)
_MAMBA = Mamba2Config(num_heads=4, head_dim=4, state_size=4, num_groups=2, chunk_size=4)
# Mixers of the second and third of three layers.
RECURRENT = {
    "mamba2": (_MAMBA, replace(_MAMBA, num_groups=4, norm_before_gate=True)),
    "no_mixer": (_MAMBA, None),
    "shared_groups": (_MAMBA, replace(_MAMBA, num_groups=1, bias=True)),
    "delta_net": (
        GatedDeltaNetConfig(num_key_heads=4, num_value_heads=4, key_dim=3, value_dim=4),
        GatedDeltaNetConfig(
            num_key_heads=4, num_value_heads=8, key_dim=3, value_dim=2, chunk_size=4
        ),
    ),
}


def config_of(variant):
    """With "losses" the second and third of three layers return losses, with "ropes" all differ.

    With "t5" the first layer is an encoder's. Layers of `FED` variants have feed-forward dropout.
    """
    config = gpt(**{**TINY, **VARIANTS.get(variant, {})})
    if variant in FED:
        fed = (replace(x, feed_forward=replace(x.feed_forward, dropout=0.3)) for x in config.layers)
        config = replace(config, layers=tuple(fed))
    if variant == "t5":
        kinds = config.layers[0].mixer, config.layers[0].feed_forward
        layers = encoder_decoder_layers(*kinds, encoder=1, decoder=1)
        return replace(config, layers=layers, encoder_layers=1)
    if variant == "ropes":
        pairs = zip(config.layers, ROPES, strict=True)
        layers = [replace(a, mixer=replace(a.mixer, rope=rope)) for a, rope in pairs]
        return replace(config, layers=tuple(layers))
    if variant in RECURRENT:
        first, *others = config.layers
        each = zip(others, RECURRENT[variant], strict=True)
        return replace(config, layers=(first, *(replace(x, mixer=mixer) for x, mixer in each)))
    if variant != "losses":
        return config
    first, *others = config.layers
    routed = [replace(layer, feed_forward=RoutedConfig(width=24)) for layer in others]
    return replace(config, layers=(first, *routed))


def batch():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 48, (2, 9), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[1, 3] = -100
    return {"tokens": tokens[:, :-1], "labels": labels, "sample_ids": torch.tensor([3, 8])}


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2, 2]])


def encoder_batch():
    """Longer than the decoder's tokens; one row is padded on both sides."""
    tokens = torch.randint(0, 48, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, :3] = mask[1, -4:] = False
    return {"encoder_tokens": tokens, "encoder_mask": mask}


def spread(model, layout, rank):
    """Give norms and biases values that depend on the global index alone, for any layout."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(("bias", "A_log", ".D")) or "norm" in name:
                shape, starts = global_shape_of(param, layout), offsets_of(param, layout, rank)
                index = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
                for dim, (start, size) in enumerate(zip(starts, param.shape, strict=True)):
                    index = index.narrow(dim, start, size)
                param += 0.1 * torch.sin(index + len(name))


def build(config, state, **rest):
    model = config.build(state, dtype=torch.float64, seed=11, **rest)
    spread(model, state.layout, state.rank)
    return model


def gradients(config, state, stages, **rest):
    """Each loss, in the order of its weights, the count and the models with gradients."""
    models = [build(config, state, layers=layers, **rest) for layers in stages]
    data, received, sent, losses, weights = batch(), [None], [], [], config.loss_weights
    if config.token_types:
        data["token_types"] = data["tokens"] % config.token_types
    if config.mtp is not None:
        data["documents"] = DOCUMENTS
    if config.pooled_head is not None:
        data["sequence_labels"] = torch.tensor([2, 0])
    if config.encoder_layers:
        data |= encoder_batch()
    for name in data.keys() & {"tokens", "labels", "token_types", "encoder_tokens"}:
        data[name] = shard(data[name], state.group("cp"))
    for model in models:
        output = model(received[-1], data)
        if isinstance(output, dict):
            losses.append(output)
            continue
        x, inner = output if isinstance(output, tuple) else (output, {})
        losses.append(inner)
        sent.append(x)
        received.append(x.detach().requires_grad_())
    for named, x, next_in in zip(
        losses[::-1], [None, *sent[::-1]], [None, *received[:0:-1]], strict=True
    ):
        weighed = [weights[name] * value for name, value in named.items() if name in weights]
        total = [sum(weighed)] if weighed else []
        roots = [*total, *([] if x is None else [x])]
        grads = [*map(torch.ones_like, total), *([] if x is None else [next_in.grad])]
        torch.autograd.backward(roots, grads)
    values = [sum(named[n].detach() for named in losses if n in named) for n in weights]
    return torch.stack(values), int(losses[-1]["tokens"]), models


def finish(models, state):
    """Sum what the sharding records call partial, and add the parts of a tied embedding."""
    grads, owners = {}, {}
    for model in models:
        for name, param in model.named_parameters():
            record, grad = sharding_of(param), param.grad.clone()
            if "tp" in record.partial_grad and state.size("tp") > 1:
                dist.all_reduce(grad, group=state.group("tp"))
            if name in grads:
                assert record.partial_grad in (("embedding",), ("pp",))
                assert record.is_copy
                grads[name] += grad
            else:
                assert not record.is_copy
                grads[name], owners[name] = grad, param
    offsets = {n: offsets_of(p, state.layout, state.rank) for n, p in owners.items()}
    return grads, offsets


def on_context_rank(variant, tp, cp, algorithms):
    """One rank of tp x cp: loss, count and gradients summed over the context group."""
    state = ParallelState(ParallelLayout(tp=tp, cp=cp))
    loss, tokens, models = gradients(
        config_of(variant),
        state,
        [range(3)],
        sequence_parallel=tp > 1,
        context_algorithm=algorithms,
        context_inner_size=2,
    )
    grads, offsets = finish(models, state)
    tokens = torch.tensor(tokens)
    for part in (loss, tokens, *grads.values()):
        dist.all_reduce(part, group=state.group("cp"))
    return loss, int(tokens), grads, offsets


def on_rank(variant, tp, stages, sequence_parallel, recompute="none"):
    state = ParallelState(ParallelLayout(tp=tp))
    loss, tokens, models = gradients(
        config_of(variant),
        state,
        stages,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    return (loss, tokens, *finish(models, state))


def assert_equal_to_one_rank(results, variant):
    loss, tokens, grads, _ = on_rank(variant, 1, [range(3)], False)
    for got_loss, got_tokens, got_grads, offsets in results:
        assert got_tokens == tokens
        assert torch.allclose(got_loss, loss, rtol=1e-10, atol=0)
        assert got_grads.keys() == grads.keys()
        for name, grad in got_grads.items():
            box = tuple(slice(o, o + s) for o, s in zip(offsets[name], grad.shape, strict=True))
            expected = grads[name][box]
            assert (grad - expected).norm() <= 1e-10 * expected.norm(), name


@pytest.mark.parametrize(
    ("sequence_parallel", "variant"),
    sample(product((False, True), (*VARIANTS, *RECURRENT)), every=3),
)
def test_tensor_parallel_matches_one_rank(ranks, variant, sequence_parallel):
    results = ranks(2, on_rank, variant, 2, [range(3)], sequence_parallel)
    assert results[0][2]["layers.0.mixer.out.weight"].shape[1] <= 2
    assert_equal_to_one_rank(results, variant)


RECOMPUTED = (
    *("untied_dropout", "gpt2", "losses", "gemma2", "bert", "neox", "phi"),
    *(*RECURRENT, "relative", "t5"),
)
PLACES = ((1, False), (2, False), (2, True))


@pytest.mark.parametrize(
    ("variant", "recompute", "tp", "sequence_parallel"),
    sample(
        ((v, r, *p) for v, r, p in product(RECOMPUTED, ("selective", "full"), PLACES)), every=11
    ),
)
def test_recomputation_changes_no_number(ranks, variant, recompute, tp, sequence_parallel):
    results = ranks(tp, on_rank, variant, tp, [range(3)], sequence_parallel, recompute)
    assert_equal_to_one_rank(results, variant)


def compiled_differences(variant, sequence_parallel):
    """Return the relative differences of loss and gradients, compiled from eager."""
    state = ParallelState(ParallelLayout(tp=2))
    config = config_of(variant)
    last = config.layers[-1]
    positions = "none" if variant in RECURRENT else config.positions
    config = replace(config, layers=(last,), positions=positions)
    model = build(config, state, sequence_parallel=sequence_parallel)
    results = []
    for module in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        losses, weights = module(None, batch()), config.loss_weights
        loss = sum(weight * losses[name] for name, weight in weights.items())
        loss.backward()
        results.append([loss.detach(), *(param.grad for param in model.parameters())])
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(*reversed(results), strict=True)
    )


@pytest.mark.campaign
# Dynamo itself looks at .grad where a graph breaks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("variant", "sequence_parallel"),
    [
        ("gqa", False),
        ("gqa", True),
        ("one_kv_head", True),
        ("losses", True),
        ("shared_groups", True),
        ("delta_net", False),
    ],
)
def test_compiled_ranks_compute_what_eager_ones_compute(ranks, variant, sequence_parallel):
    assert max(ranks(2, compiled_differences, variant, sequence_parallel, timeout=300)) < 1e-12


@pytest.mark.parametrize(
    ("sequence_parallel", "variant"),
    sample(product((False, True), ("gqa", "one_kv_head", "gate_whole_norm", *RECURRENT)), every=2),
)
def test_more_ranks_than_key_value_heads_match_one_rank(ranks, variant, sequence_parallel):
    results = ranks(4, on_rank, variant, 4, [range(3)], sequence_parallel)
    assert_equal_to_one_rank(results, variant)


CONTEXTS = (
    (1, 2, "ring"),
    (1, 4, "ulysses"),
    (1, 4, "hierarchical"),
    (2, 2, "all_gather"),
    (1, 4, ["ring", "hierarchical", "all_gather"]),
)


@pytest.mark.parametrize(
    ("variant", "tp", "cp", "algorithms"),
    sample(((variant, *place) for variant, place in product(VARIANTS, CONTEXTS)), every=8),
)
def test_context_parallel_matches_one_rank(ranks, variant, tp, cp, algorithms):
    # The one label that does not count makes the context ranks' counts differ.
    results = ranks(tp * cp, on_context_rank, variant, tp, cp, algorithms)
    assert_equal_to_one_rank(results, variant)


def logit_gradients(tp, sequence_parallel):
    """Logits of tokens alone and, from a loss of the caller's own, each gradient."""
    state = ParallelState(ParallelLayout(tp=tp))
    model = build(gpt(**TINY, tied=False), state, sequence_parallel=sequence_parallel)
    data = batch()
    logits = model(data["tokens"])
    rows = torch.log_softmax(logits, -1).gather(2, data["labels"].clamp(min=0)[..., None])
    loss = -rows[..., 0][data["labels"] != -100].sum()
    loss.backward()
    return (loss.detach(), int((data["labels"] != -100).sum()), *finish([model], state)), logits


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_logits_of_tokens_are_whole_and_have_gradients_on_every_rank(ranks, sequence_parallel):
    (loss, tokens, grads, _), expected = logit_gradients(1, False)
    for (got, got_tokens, got_grads, offsets), logits in ranks(
        2, logit_gradients, 2, sequence_parallel
    ):
        assert (got_tokens, logits.shape) == (tokens, (2, 8, 48))
        assert torch.allclose(logits, expected, rtol=1e-10, atol=1e-12)
        assert torch.allclose(got, loss, rtol=1e-10, atol=0)
        for name, grad in got_grads.items():
            box = tuple(slice(o, o + s) for o, s in zip(offsets[name], grad.shape, strict=True))
            assert (grad - grads[name][box]).norm() <= 1e-10 * grads[name][box].norm(), name


def context_errors():
    state = ParallelState(ParallelLayout(cp=2))
    config, data, messages = gpt(**TINY), batch(), []
    short = {name: x[:, :3] if x.dim() == 2 else x for name, x in data.items()}
    for action in (
        lambda: GPT(config, state)(None, short),
        lambda: GPT(config, state).logits(data["tokens"]),
        lambda: GPT(config, state, context_algorithm=["ring"]),
        lambda: GPT(config, state, context_algorithm="hierarchical", context_inner_size=3),
        lambda: GPT(config, state, context_algorithm="star"),
    ):
        with pytest.raises(ValueError, match=r".+") as caught:
            action()
        messages.append(str(caught.value))
    return messages


def test_context_parallel_misuse_is_refused(ranks):
    length, logits, layers, inner, name = ranks(2, context_errors)[0]
    assert "sequence length 6 does not divide by 4" in length
    assert "Nearest that does: 4 or 8" in length
    assert "Build the model with cp=1" in logits
    assert "1 algorithms, but the model has 3 layers" in layers
    assert "context_inner_size=3 does not divide cp=2" in inner
    assert "use one of [1, 2]" in inner
    assert "got 'star'" in name


@pytest.mark.parametrize(
    ("cuts", "variant"),
    sample(product(((0, 2, 3), (0, 1, 2, 3)), (*VARIANTS, *RECURRENT)), every=3),
)
def test_stages_match_the_whole_model(variant, cuts):
    stages = [range(a, b) for a, b in pairwise(cuts)]
    assert_equal_to_one_rank([on_rank(variant, 1, stages, False)], variant)


def test_stages_of_a_split_model_match_one_rank(ranks):
    results = ranks(2, on_rank, "gqa", 2, [range(1), range(1, 3)], True)
    assert_equal_to_one_rank(results, "gqa")


def generate(tp, kv_heads):
    state = ParallelState(ParallelLayout(tp=tp))
    model = GPT(gpt(**TINY, num_kv_heads=kv_heads), state, seed=11)
    tokens = batch()["tokens"][:, :4]
    cache = model.new_cache(batch_size=2, max_length=16)
    logits = model.logits(tokens, cache=cache)
    first = logits
    for _ in range(11):
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
        logits = model.logits(tokens[:, -1:], cache=cache)
    return first, tokens


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_tensor_parallel_decoding_equals_one_rank(ranks, kv_heads):
    first, tokens = generate(1, kv_heads)
    assert first.shape == (2, 4, 48)
    for got_first, got_tokens in ranks(2, generate, 2, kv_heads):
        assert torch.allclose(got_first, first, rtol=1e-4, atol=1e-5)
        assert torch.equal(got_tokens, tokens)


def test_adapters_go_on_a_model_with_more_ranks_than_key_value_heads(ranks):
    def loss(tp):
        state = ParallelState(ParallelLayout(tp=tp))
        model = build(gpt(**TINY, num_kv_heads=1), state)
        add_lora(model, rank=2, dropout=0.3)
        set_lora_step(model, 0)
        torch.manual_seed(100 * state.rank)  # masks do not ask for equal seeds
        with torch.no_grad():
            for _, adapter in adapters_of(model):
                adapter.a.fill_(0.05)
                adapter.b.fill_(0.05)
        return model(None, batch())["lm"].detach()

    expected = loss(1)
    for got in ranks(4, loss, 4):
        assert torch.allclose(got, expected, rtol=1e-10, atol=0)


def adapters(variant, tp, sequence_parallel):
    """Gradients of adapters on every linear layer, summed where the records say so."""
    state = ParallelState(ParallelLayout(tp=tp))
    model = build(config_of(variant), state, sequence_parallel=sequence_parallel)
    add_lora(model, rank=2)
    with torch.no_grad():
        for _, adapter in adapters_of(model):
            adapter.b.fill_(0.05)
    model(None, batch())["lm"].backward()
    grads = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            grads[name] = param.grad
            if "tp" in sharding_of(param).partial_grad and tp > 1:
                dist.all_reduce(grads[name], group=state.group("tp"))
    params = {name: param for name, param in model.named_parameters() if name in grads}
    return grads, {n: offsets_of(p, state.layout, state.rank) for n, p in params.items()}


@pytest.mark.parametrize("variant", ["gqa", *RECURRENT])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_adapters_of_a_split_model_match_one_rank(ranks, variant, sequence_parallel):
    expected, _ = adapters(variant, 1, False)
    assert len(expected) > 20
    for grads, offsets in ranks(2, adapters, variant, 2, sequence_parallel):
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            box = tuple(slice(o, o + s) for o, s in zip(offsets[name], grad.shape, strict=True))
            want = expected[name][box]
            assert (grad - want).norm() <= 1e-9 * want.norm(), name


def sequence_error():
    state = ParallelState(ParallelLayout(tp=2))
    data = {k: v[:, :7] if v.dim() == 2 else v for k, v in batch().items()}
    model = GPT(gpt(**TINY), state, sequence_parallel=True)
    messages = []
    for action in (lambda: model(None, data), lambda: model.logits(data["tokens"])):
        try:
            action()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_sequence_parallel_misuse_is_refused(ranks):
    for messages in ranks(2, sequence_error):
        assert "sequence length 7 does not divide by 2, " in messages[0]
        assert "Nearest that does: 6 or 8" in messages[0]
        assert "logits() needs a model built with sequence_parallel=False" in messages[1]


def indivisible():
    state = ParallelState(ParallelLayout(tp=2))
    try:
        GPT(gpt(**{**TINY, "num_heads": 3, "head_dim": 2, "num_kv_heads": 3}), state)
    except ValueError as error:
        return str(error)


def test_heads_that_do_not_divide_are_refused(ranks):
    for message in ranks(2, indivisible):
        assert "num_heads=3 does not divide by tp=2" in message
        assert "Nearest num_heads that does: 2 or 4" in message


def test_a_model_answers_for_its_records_when_its_parameters_are_new(ranks):
    def body():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        layout = ParallelLayout(tp=2)
        with ParallelState(layout, device="cpu") as state:
            model = GPT(gpt(**TINY), state, sequence_parallel=True)
            before = {name: sharding_of(param) for name, param in model.named_parameters()}
            assert len(set(map(repr, before.values()))) > 2
            model.to("meta").to_empty(device="cpu")
            assert shardings(model) == before
            for name, param in model.named_parameters():
                assert sharding_of(param) == before[name]
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            assert shardings(model) == before

    ranks(2, body)
