"""Mamba-2 and the gated delta net: against transformers, step by step, packed and counted."""

import math
from dataclasses import replace

import pytest
import torch
from mt_model import (
    GPT,
    AttentionConfig,
    GatedDeltaNetConfig,
    LayerConfig,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
    NormConfig,
    preset,
    validate_context,
    validate_split,
)
from mt_parallel_state import sharding_of

MAMBA = Mamba2Config(num_heads=6, head_dim=4, state_size=5, num_groups=2, chunk_size=4)
DELTA = GatedDeltaNetConfig(
    num_key_heads=2, num_value_heads=6, key_dim=4, value_dim=3, chunk_size=4
)
ATTENTION = AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=4)
MLP = MLPConfig(ffn_size=24, gated=False, activation="relu2")
MIXERS = {
    "mamba2": (MAMBA,),
    "mamba2_all": (
        replace(
            MAMBA, num_groups=1, bias=True, conv_bias=False, norm_before_gate=True, max_dt=0.05
        ),
        replace(MAMBA, num_groups=6, conv_size=1, min_dt=0.02, head_dim=1),
    ),
    "delta_net": (DELTA,),
    "delta_net_equal": (replace(DELTA, num_value_heads=2, conv_size=2),),
    "hybrid": (MAMBA, ATTENTION, DELTA),
    "one_branch_each": (MAMBA, None, None, ATTENTION),  # None is a feed-forward alone
}


def config_of(mixers, feed_forward=MLP):
    layers = tuple(
        LayerConfig(
            mixer=mixer,
            feed_forward=feed_forward if mixer is None or None not in mixers else None,
        )
        for mixer in mixers
    )
    return ModelConfig(
        vocab_size=32,
        hidden_size=12,
        max_sequence_length=64,
        layers=layers,
        norm=NormConfig(eps=1e-6),
        positions="none",
        init_std=0.4,
    )


def model_of(name, dtype=torch.float64):
    model = GPT(config_of(MIXERS[name]), dtype=dtype, seed=5)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if key.endswith(("norm.weight", ".D", "bias")):
                param += 0.2 * torch.arange(param.numel(), dtype=param.dtype).view_as(param).sin()
    return model


def tokens_of(*shape):
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", MIXERS)
def test_counts_are_those_of_the_model(name):
    config = config_of(MIXERS[name])
    model = GPT(config)
    assert config.num_parameters == sum(param.numel() for param in model.parameters())
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_operations_are_counted_by_the_recurrence():
    hidden, inner, shared = 12, 24, 20
    projections = 6 * hidden * (2 * inner + shared + 6) + 6 * inner * hidden
    assert MAMBA.flops_per_token(12, 99) == projections + 24 * (inner + shared) + 12 * inner * 5
    keys, values = 8, 18
    projections = 6 * hidden * (2 * keys + 2 * values + 12) + 6 * values * hidden
    expected = projections + 24 * (2 * keys + values) + 18 * values * 4
    assert DELTA.flops_per_token(12, 99) == expected


@pytest.mark.parametrize("name", MIXERS)
def test_generation_step_by_step_equals_the_whole_pass(name):
    model, tokens = model_of(name), tokens_of(3, 13)
    expected = model.logits(tokens)
    cache = model.new_cache(batch_size=3, max_length=16)
    for _ in range(2):  # a cache may be used again
        cache.length = 0
        ends = ((0, 1), (1, 6), (6, 7), (7, 8), (8, 11), (11, 12), (12, 13))
        pieces = [model.logits(tokens[:, a:b], cache=cache) for a, b in ends]
        assert torch.allclose(torch.cat(pieces, 1), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("cached", [False, True])
def test_padding_in_front_changes_nothing(name, cached):
    model, tokens, length = model_of(name), tokens_of(1, 9), 6
    for real in (1, 2, 5):
        expected = model.logits(tokens[:, : real + 3])[:, real - 1 :]
        padded = torch.cat((tokens_of(1, length - real), tokens[:, : real + 3]), 1)
        mask = torch.arange(padded.shape[1])[None] >= length - real
        if not cached:
            found = model.logits(padded, mask=mask)[:, length - 1 :]
        else:
            cache = model.new_cache(batch_size=1, max_length=16)
            found = [model.logits(padded[:, :length], cache=cache, mask=mask[:, :length])[:, -1:]]
            found += [model.logits(padded[:, i : i + 1], cache=cache) for i in range(6, 9)]
            found = torch.cat(found, 1)
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-10)


def test_padding_behind_tokens_is_refused_where_a_state_would_have_it():
    model, tokens = model_of("hybrid"), tokens_of(1, 4)
    cache = model.new_cache(batch_size=1, max_length=16)
    with pytest.raises(ValueError, match=r"layer 0 keeps a state.*put all padding in front"):
        model.logits(tokens, cache=cache, mask=torch.tensor([[True, True, True, False]]))
    model.logits(tokens, cache=cache)
    with pytest.raises(ValueError, match=r"give no more of it later"):
        model.logits(tokens, cache=cache, mask=torch.tensor([[False, True, True, True]]))


def test_the_state_of_a_cache_is_fp32_and_does_not_grow_with_the_length():
    model = model_of("hybrid", torch.bfloat16)
    small, large = (model.new_cache(batch_size=2, max_length=n) for n in (8, 64))
    for layer in (0, 2):
        for name, tensor in small.layers[layer].items():
            assert tensor.shape == large.layers[layer][name].shape
            assert tensor.dtype == (torch.float32 if name == "state" else torch.bfloat16)
    tokens = tokens_of(2, 8)
    exact = model_of("hybrid").logits(tokens)
    found = [model.logits(tokens[:, :5], cache=small)]
    found += [model.logits(tokens[:, i : i + 1], cache=small) for i in range(5, 8)]
    found, whole = torch.cat(found, 1).double(), model.logits(tokens).double()
    assert (found - whole).norm() <= 0.05 * whole.norm()
    # Step by step it is about as exact as in one pass: how products of bf16 round is the CPU's.
    usual = (whole - exact).norm()
    assert usual <= 0.03 * exact.norm()
    assert (found - exact).norm() <= 2 * usual


@pytest.mark.parametrize("name", MIXERS)
def test_packed_documents_do_not_reach_each_other(name):
    model, tokens = model_of(name), tokens_of(1, 13)
    cuts = ((0, 2), (2, 3), (3, 9), (9, 13))
    documents = torch.cat([torch.full((1, b - a), i) for i, (a, b) in enumerate(cuts)], 1)
    labels = tokens_of(2, 13)[1:]
    losses = model(None, {"tokens": tokens, "labels": labels, "documents": documents})
    losses["lm"].backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    total = sum(model(tokens[:, a:b], labels=labels[:, a:b])["lm"] for a, b in cuts)
    total.backward()
    assert torch.allclose(losses["lm"], total, rtol=1e-11, atol=0)
    for key, param in model.named_parameters():
        assert (param.grad - grads[key]).norm() <= 1e-9 * param.grad.norm(), key


@torch.no_grad()
def test_initial_values_are_those_published():
    mixer = replace(MAMBA, num_heads=64, head_dim=8)
    model = GPT(config_of((mixer, replace(DELTA, num_value_heads=64))), seed=1)
    mamba, delta = (layer.mixer for layer in model.stage_layers())
    rates = mamba.A_log.exp()
    assert rates.min() >= 1
    assert rates.max() <= 16
    assert rates.mean() == pytest.approx(8.5, abs=1.5)
    assert torch.equal(mamba.D, torch.ones(64))
    steps = torch.nn.functional.softplus(mamba.dt_bias)
    assert 0.001 * 0.999 <= steps.min() <= steps.max() <= 0.1 * 1.001
    assert steps.log().mean() == pytest.approx((math.log(0.001) + math.log(0.1)) / 2, abs=0.5)
    assert mamba.conv_x.weight.abs().max() <= 0.5
    assert mamba.conv_x.weight.std() == pytest.approx(1 / math.sqrt(12), rel=0.05)
    assert torch.equal(delta.dt_bias, torch.ones(64))
    assert delta.A_log.exp().max() <= 16
    assert delta.A_log.exp().mean() == pytest.approx(8, abs=1.5)
    floor = GPT(config_of((replace(mixer, init_dt_floor=0.05),)))
    bias = next(floor.stage_layers()).mixer.dt_bias
    assert torch.nn.functional.softplus(bias).min() >= 0.05 * 0.999


@pytest.mark.parametrize("name", ["mamba2", "delta_net"])
def test_what_decays_is_fp32_and_what_is_a_matrix_says_so(name):
    model = GPT(config_of(MIXERS[name]), dtype=torch.bfloat16)
    params = dict(next(model.stage_layers()).mixer.named_parameters())
    wide = {n for n, p in params.items() if p.dtype == torch.float32}
    matrices = {n for n, p in params.items() if sharding_of(p).matrix is not None}
    if name == "mamba2":
        assert wide == {"A_log", "D", "dt_bias"}
        assert matrices == {"zx.weight", "bc.weight", "dt.weight", "out.weight"}
    else:
        assert wide == {"A_log", "dt_bias"}
        assert matrices == {"qkvz.weight", "ba.weight", "out.weight"}
    decays = {n for n, p in params.items() if p.dim() > 1 and not n.endswith("bias")}
    convolutions = {n for n in params if n.startswith("conv") and n.endswith("weight")}
    assert decays == matrices | convolutions


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (MAMBA, {"num_groups": 4}, r"num_groups: 4 does not divide num_heads=6.*smaller.*: 3\."),
        (MAMBA, {"max_dt": 0.1, "min_dt": 0.2}, r"max_dt: 0.1 is below min_dt=0.2; swap them"),
        (MAMBA, {"init_dt_min": 0.2}, r"init_dt_max: 0.1 is below init_dt_min=0.2; swap them"),
        (MAMBA, {"state_size": 0}, r"state_size: 0"),
        (MAMBA, {"conv_size": 65}, r"conv_size: 65"),
        (DELTA, {"num_key_heads": 4}, r"num_key_heads: 4 does not divide.*smaller that does: 3\."),
        (DELTA, {"chunk_size": 0}, r"chunk_size: 0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(config, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


def test_a_layer_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"mixer: None, and so is feed_forward; a layer has one"):
        LayerConfig(mixer=None)
    with pytest.raises(ValueError, match=r"parallel: True, but there is only one branch"):
        LayerConfig(mixer=None, feed_forward=MLP, parallel=True)
    assert "  -  " in str(config_of(MIXERS["one_branch_each"]))


def test_layouts_that_do_not_fit_say_what_does():
    validate_split(config_of((MAMBA, replace(MAMBA, num_groups=1, state_size=6), DELTA)), 2)
    for mixer, tp, message in (
        (MAMBA, 4, "num_heads=6 does not divide by tp=4"),
        (replace(MAMBA, num_heads=12, num_groups=3), 4, "num_groups=3 does not divide by tp=4"),
        (replace(MAMBA, num_groups=1), 2, "state_size=5 does not divide by tp=2"),
        (DELTA, 4, "num_key_heads=2 does not divide by tp=4"),
    ):
        with pytest.raises(ValueError, match=rf"{message}.*nearest tp.*layer 0"):
            validate_split(config_of((mixer,)), tp)
    for mixer in (MAMBA, DELTA):
        with pytest.raises(ValueError, match=r"Config needs whole sequences; use cp=1 \(layer 0"):
            validate_context(config_of((mixer,)), ["ring"], cp=2)


def test_the_published_shapes_are_presets():
    config = preset("mamba2-1.3b", max_sequence_length=4096)
    assert (config.num_layers, config.positions, config.max_sequence_length) == (48, "none", 4096)
    assert config.layers[0].mixer == Mamba2Config(num_heads=64, head_dim=64, state_size=128)
    assert config.num_parameters == 1_343_757_312


def transformers_mamba(config, hidden):
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config as Theirs
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    theirs = Theirs(
        hidden_size=hidden,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        expand=config.inner_size // hidden,
        state_size=config.state_size,
        n_groups=config.num_groups,
        conv_kernel=config.conv_size,
        use_conv_bias=config.conv_bias,
        use_bias=config.bias,
        chunk_size=4,
        layer_norm_epsilon=1e-6,
        time_step_limit=(config.min_dt, config.max_dt or float("inf")),
        num_hidden_layers=1,
        vocab_size=32,
    )
    return theirs, Mamba2Mixer(theirs, layer_idx=0)


def copy_to_transformers(ours, theirs):
    """Give transformers' mixer the values of ours: z, x, B, C and dt are one projection there."""
    with torch.no_grad():
        for part in ("weight", "bias"):
            zx, bc, dt = (getattr(getattr(ours, n), part) for n in ("zx", "bc", "dt"))
            if zx is not None:
                rows = [zx.flatten(0, 2), bc.flatten(0, 2), dt]
                getattr(theirs.in_proj, part).copy_(torch.cat(rows))
        if ours.out.bias is not None:
            theirs.out_proj.bias.copy_(ours.out.bias)
        x, bc = ours.conv_x, ours.conv_bc
        theirs.conv1d.weight[:, 0] = torch.cat((x.weight.flatten(0, 1), bc.weight.flatten(0, 2)))
        if x.bias is not None:
            theirs.conv1d.bias.copy_(torch.cat((x.bias.flatten(), bc.bias.flatten())))
        theirs.out_proj.weight.copy_(ours.out.weight.flatten(1))
        theirs.norm.weight.copy_(ours.norm.weight)
        for name in ("A_log", "D", "dt_bias"):
            getattr(theirs, name).copy_(getattr(ours, name))


def outputs(mixer, x, **options):
    y = mixer(x, **options)
    y = y[0] if isinstance(y, tuple) else y
    (grad,) = torch.autograd.grad((y * torch.arange(y.numel()).view_as(y).sin()).sum(), x)
    return y, grad


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_mamba2_computes_what_transformers_computes(bias, groups):
    config = replace(MAMBA, num_groups=groups, bias=bias, conv_bias=not bias, max_dt=0.08)
    model = GPT(replace(config_of((config,)), init_std=0.4), seed=2)
    ours = next(model.stage_layers()).mixer
    _, theirs = transformers_mamba(config, 12)
    copy_to_transformers(ours, theirs)
    torch.manual_seed(0)
    x = torch.randn(2, 11, 12, requires_grad=True)
    _, shared = model.begin(None, {"tokens": tokens_of(2, 11)})
    y, grad = outputs(ours, x, shared=shared)
    expected, expected_grad = outputs(theirs, x)
    assert (y - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (grad - expected_grad).abs().max() <= 1e-5 * expected_grad.abs().max()


def test_mamba2_steps_are_those_of_transformers():
    from transformers.cache_utils import DynamicCache

    model = GPT(config_of((MAMBA,)), seed=2)
    ours = next(model.stage_layers()).mixer
    theirs_config, theirs = transformers_mamba(MAMBA, 12)
    copy_to_transformers(ours, theirs)
    torch.manual_seed(0)
    x = torch.randn(2, 9, 12)
    cache, kept = model.new_cache(batch_size=2, max_length=16), DynamicCache(config=theirs_config)
    with torch.no_grad():
        for a, b in ((0, 6), (6, 7), (7, 8), (8, 9)):
            _, shared = model.begin(None, {"tokens": tokens_of(2, b - a), "cache": cache})
            y, expected = ours(x[:, a:b], shared), theirs(x[:, a:b], cache_params=kept)
            cache.length = b
            assert (y - expected).abs().max() <= 1e-5 * expected.abs().max()


def transformers_delta_net(config, hidden):
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    theirs = Qwen3NextConfig(
        hidden_size=hidden,
        linear_num_key_heads=config.num_key_heads,
        linear_num_value_heads=config.num_value_heads,
        linear_key_head_dim=config.key_dim,
        linear_value_head_dim=config.value_dim,
        linear_conv_kernel_dim=config.conv_size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        vocab_size=32,
    )
    return theirs, Qwen3NextGatedDeltaNet(theirs, layer_idx=0)


def copy_delta_net(ours, theirs):
    q, k, v, _ = ours.config.parts
    with torch.no_grad():
        theirs.in_proj_qkvz.weight.copy_(ours.qkvz.weight.flatten(0, 1))
        theirs.in_proj_ba.weight.copy_(ours.ba.weight.flatten(0, 1))
        parts = ours.conv.weight.split((q, k, v), 1)
        theirs.conv1d.weight[:, 0] = torch.cat([part.flatten(0, 1) for part in parts])
        theirs.out_proj.weight.copy_(ours.out.weight.flatten(1))
        theirs.norm.weight.copy_(ours.norm.weight)
        for name in ("A_log", "dt_bias"):
            getattr(theirs, name).copy_(getattr(ours, name))


@pytest.mark.parametrize("keys", [2, 3, 6])
def test_the_delta_net_computes_what_transformers_computes(keys):
    from transformers.cache_utils import DynamicCache

    config = replace(DELTA, num_key_heads=keys)
    model = GPT(config_of((config,)), seed=2)
    ours = next(model.stage_layers()).mixer
    theirs_config, theirs = transformers_delta_net(config, 12)
    copy_delta_net(ours, theirs)
    torch.manual_seed(0)
    x = torch.randn(2, 11, 12, requires_grad=True)
    _, shared = model.begin(None, {"tokens": tokens_of(2, 11)})
    y, grad = outputs(ours, x, shared=shared)
    expected, expected_grad = outputs(theirs, x)
    assert (y - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (grad - expected_grad).abs().max() <= 1e-5 * expected_grad.abs().max()
    cache, kept = model.new_cache(batch_size=2, max_length=16), DynamicCache(config=theirs_config)
    with torch.no_grad():
        for a, b in ((0, 6), (6, 7), (7, 8), (8, 11)):
            _, shared = model.begin(None, {"tokens": tokens_of(2, b - a), "cache": cache})
            y, want = ours(x[:, a:b], shared), theirs(x[:, a:b], cache_params=kept)
            cache.length = b
            assert (y - want).abs().max() <= 1e-5 * want.abs().max()
