"""The layer on one rank against its formula, and what it refuses."""

import pytest
import torch
from mt_moe import (
    Capacity,
    ExpertOptions,
    MoELayer,
    MoEOptions,
    RouterOptions,
    RoutingError,
)
from mt_parallel_state import PartitionSpec, sharding_of
from plain import F64, assert_same, drawn, gradients, plain_layer

EXPERTS = [
    ExpertOptions(),
    ExpertOptions(activation="gelu", bias=True),
    ExpertOptions(activation="gelu_tanh"),
    ExpertOptions(activation="gelu_quick", bias=True, clamp=0.4, up_offset=1.0),  # GPT-OSS's form
    ExpertOptions(activation="relu2", gated=False),
    ExpertOptions(activation="relu", gated=False, bias=True),
    ExpertOptions(multiple=8, bias=True),
]


def made(dtype=F64, seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 12, "ffn_size": 20, "num_experts": 6}
    return MoELayer(**sizes, options=MoEOptions(**options), dtype=dtype)


@pytest.mark.parametrize("experts", EXPERTS, ids=lambda o: f"{o.activation}-{o.multiple}")
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_the_layer_equals_its_formula_with_all_gradients(experts, top_k):
    router = RouterOptions(top_k=top_k, normalize=top_k > 1, dtype=F64)
    layer = made(experts=experts, router=router)
    x, grad = drawn(2, 9, 12).requires_grad_(), drawn(2, 9, 12, seed=1)
    output = layer(x).hidden
    found = gradients(output, grad, layer, x)
    routed = layer.router(x)
    expected = plain_layer(x.flatten(0, 1), layer, routed.weights, routed.experts).view_as(x)
    assert_same({"y": output}, {"y": expected})
    assert_same(found, gradients(expected, grad, layer, x))


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("latent_size", [None, 8])
def test_weights_may_scale_what_experts_are_given(top_k, latent_size):
    router = RouterOptions(top_k=top_k, score="sigmoid", normalize=False, dtype=F64)
    layer = made(
        experts=ExpertOptions(bias=True), router=router, latent_size=latent_size, scale_input=True
    )
    x, grad = drawn(2, 9, 12).requires_grad_(), drawn(2, 9, 12, seed=1)
    valid = torch.arange(9).expand(2, 9) < 8
    output = layer(x, valid=valid).hidden
    routed = layer.router(x, valid=valid)
    inner = x if layer.to_latent is None else layer.to_latent(x)
    expected = plain_layer(inner.flatten(0, 1), layer, routed.weights, routed.experts)
    expected = expected.view(2, 9, -1)
    expected = expected if layer.from_latent is None else layer.from_latent(expected)
    assert_same({"y": output}, {"y": expected})
    found, wanted = (gradients(y, grad, layer, x) for y in (output, expected))
    assert_same(found, wanted)
    x.data[0, 3, 2] = torch.nan
    with pytest.raises(RoutingError, match="not finite"):
        layer(x)


@pytest.mark.parametrize("experts", EXPERTS[:3] + EXPERTS[6:], ids=lambda o: o.activation)
def test_gradcheck(experts):
    layer = made(experts=experts, router=RouterOptions(dtype=F64), shared_size=4, shared_gate=True)
    x = drawn(5, 12).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: layer(v).hidden, (x,))


def test_shared_expert_and_latent_projections_are_what_their_names_say():
    layer = made(router=RouterOptions(dtype=F64), shared_size=8, shared_gate=True, latent_size=6)
    x = drawn(2, 7, 12)
    routed = layer.router(x)
    inner = plain_layer(layer.to_latent(x).flatten(0, 1), layer, routed.weights, routed.experts)
    up = layer.shared.up(x)
    dense = layer.shared.down(torch.nn.functional.silu(up[..., 0, :]) * up[..., 1, :])
    dense = dense * torch.sigmoid(x @ layer.shared.gate.T)
    expected = layer.from_latent(inner.view(2, 7, 6)) + dense
    assert_same({"y": layer(x).hidden}, {"y": expected})
    assert layer.experts.up.weight.shape == (6, 2, 20, 6)


def test_tokens_that_are_none_change_nothing_for_the_others():
    losses = {"aux": 0.1, "sequence_aux": 0.2, "z": 0.3}
    layer = made(router=RouterOptions(dtype=F64, losses=losses))
    x = drawn(2, 9, 12)
    valid = torch.arange(9).expand(2, 9) < 6
    whole, short = layer(x, valid=valid), layer(x[:, :6])
    assert_same({"y": whole.hidden[:, :6]}, {"y": short.hidden})
    assert not whole.hidden[:, 6:].any()
    for name, loss in whole.losses.items():
        assert int(loss.count) == 12
        torch.testing.assert_close(loss.sum, short.losses[name].sum, rtol=1e-13, atol=0)


def test_records_say_which_dims_are_experts():
    layer = made(experts=ExpertOptions(bias=True), router=RouterOptions(linear_bias=True))
    specs = {n: sharding_of(p).spec for n, p in layer.named_parameters()}
    assert specs["experts.up.weight"] == PartitionSpec("ep", None, "etp")
    assert specs["experts.up.bias"] == PartitionSpec("ep", None, "etp")
    assert specs["experts.down.weight"] == PartitionSpec("ep", None, "etp")
    assert specs["experts.down.bias"] == PartitionSpec("ep")
    assert specs["router.weight"] == specs["router.bias"] == PartitionSpec()


def test_one_seed_gives_one_layer_and_meta_draws_nothing():
    assert_same(dict(made().named_parameters()), dict(made().named_parameters()), tolerance=0)
    state = torch.get_rng_state()
    empty = MoELayer(12, 20, 6, device="meta")
    assert all(param.is_meta for param in empty.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("where", ["weight", "input"])
def test_a_router_that_makes_nan_is_an_error(where):
    layer = made()
    x = drawn(3, 12)
    with torch.no_grad():
        (layer.router.weight if where == "weight" else x)[0, 0] = torch.nan
    with pytest.raises(RoutingError, match="not finite"):
        layer(x)


@pytest.mark.parametrize(
    ("sizes", "options", "kind", "words"),
    [
        ((12, 20, 0), {}, ValueError, "num_experts must be at least 1"),
        ((12.0, 20, 6), {}, TypeError, "hidden_size"),
        ((12, 20, 1), {}, ValueError, "top_k=2 is more than the 1 experts"),
        ((12, 20, 6), {"shared_gate": True}, ValueError, "set shared_size"),
        ((12, 20, 6), {"latent_size": 0}, ValueError, "latent_size"),
        ((12, 20, 6), {"dispatcher": "fast"}, ValueError, "auto, local, all_to_all"),
        ((12, 20, 6), {"capacity": 1.5}, TypeError, "capacity"),
    ],
)
def test_errors_of_the_constructor_say_what_is_wrong(sizes, options, kind, words):
    with pytest.raises(kind, match=words):
        MoELayer(*sizes, options=MoEOptions(**options))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Capacity(factor=0), "capacity of 0"),
        (lambda: Capacity(factor=1, policy="last"), "policy"),
        (lambda: ExpertOptions(activation="relu"), "with gated=True"),
        (lambda: ExpertOptions(gated=False, clamp=7.0), "use gated=True"),
        (lambda: ExpertOptions(multiple=0), "multiple"),
        (lambda: ExpertOptions(kernel="cutlass"), "must be one of"),
    ],
)
def test_errors_of_options_say_what_is_wrong(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("x", "valid", "words"),
    [
        (torch.ones(12), None, r"\[B, S, hidden\]"),
        (torch.ones(2, 12).long(), None, "floating"),
        (torch.ones(2, 11), None, r"\[T, 12\]"),
        (torch.ones(2, 12), torch.ones(3, dtype=torch.bool), "valid"),
    ],
)
def test_errors_of_forward_say_what_is_wrong(x, valid, words):
    with pytest.raises(ValueError, match=words):
        made(dtype=torch.float32)(x, valid=valid)
