import math

import pytest
import torch
from mt_data_parallel import GradBuffer
from mt_optim import clip_grad_norm, grad_norm
from mt_parallel_state import ParallelLayout, ParallelState, PartitionSpec, shard_param
from torch import nn

SHAPE = (4, 8)


def logical(name, dtype=torch.float64):
    """The whole gradient of a parameter, equal on every rank."""
    seed = sum(map(ord, name))
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def sharded(name, state, spec=None, *, dtype=torch.float64, is_copy=False):
    """This rank's shard of a parameter with its gradient."""
    spec = spec or PartitionSpec()
    layout = state.layout
    offsets = spec.offsets(SHAPE, layout, layout.coordinates(state.rank))
    local = spec.local_shape(SHAPE, layout)
    box = tuple(slice(o, o + n) for o, n in zip(offsets, local, strict=True))
    param = nn.Parameter(torch.zeros(local, dtype=dtype))
    param.grad = logical(name, dtype)[box].clone()
    return name, shard_param(param, spec, is_copy=is_copy)


def expected_norm(names):
    return torch.cat([logical(name).flatten() for name in names]).norm().item()


def test_one_rank_equals_torch_clip_grad_norm():
    state = ParallelState(ParallelLayout())
    for max_norm in (0.5, 1e3):
        ours = [nn.Parameter(torch.zeros(s)) for s in ((300, 40), (7,), (2, 3, 5))]
        theirs = [nn.Parameter(torch.zeros(p.shape)) for p in ours]
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        named = [(str(i), p) for i, p in enumerate(ours)]
        norm = clip_grad_norm(named, state, max_norm)
        reference = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        assert norm == pytest.approx(reference.item(), rel=1e-6)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-6, atol=0)


def test_the_rule_is_max_norm_over_norm_plus_1e_minus_6_and_never_scales_up():
    state = ParallelState(ParallelLayout())
    param = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    param.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert clip_grad_norm([("w", param)], state, 10.0) == 5.0
    assert param.grad.tolist() == [3.0, 4.0]
    assert clip_grad_norm([("w", param)], state, math.inf) == 5.0
    clip_grad_norm([("w", param)], state, 1.0)
    assert param.grad.tolist() == pytest.approx([3 / 5.000001, 4 / 5.000001], rel=1e-15)


def test_shards_are_added_and_replicas_counted_once(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=2, dp=2)) as state:
            return grad_norm(
                [
                    sharded("column", state, PartitionSpec("tp")),
                    sharded("row", state, PartitionSpec(None, "tp")),
                    sharded("norm", state),
                ],
                state,
            )

    norms = ranks(4, body)
    assert norms[0] == pytest.approx(expected_norm(["column", "row", "norm"]), rel=1e-14)
    assert len(set(norms)) == 1


def test_stages_are_added_and_tied_copies_left_out(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=2, pp=2)) as state:
            stage = state.index("pp")
            return grad_norm(
                [
                    sharded("tied", state, PartitionSpec("tp"), is_copy=stage == 1),
                    sharded(f"layers.{stage}", state, PartitionSpec(None, "tp")),
                    sharded(f"norms.{stage}", state),
                ],
                state,
            )

    norms = ranks(4, body)
    names = ["tied", "layers.0", "layers.1", "norms.0", "norms.1"]
    assert norms[0] == pytest.approx(expected_norm(names), rel=1e-14)
    assert len(set(norms)) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "dp": 2, "ep": 2, "etp": 1},  # experts spread over other ranks than tp
        {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
        {"tp": 1, "dp": 4, "ep": 2, "etp": 1},
        {"tp": 1, "dp": 2, "pp": 2, "ep": 2, "etp": 1},
        {"tp": 2, "dp": 2, "ep": 1, "etp": 2},
    ],
)
def test_experts_are_counted_once_in_their_own_factorisation(ranks, sizes):
    def body(sizes):
        with ParallelState(ParallelLayout(**sizes)) as state:
            stage = state.index("pp")
            return grad_norm(
                [
                    sharded(f"{stage}.experts", state, PartitionSpec("ep", "etp")),
                    sharded(f"{stage}.router", state),
                    sharded(f"{stage}.qkv", state, PartitionSpec(None, "tp")),
                    sharded(f"{stage}.shared", state, PartitionSpec("ep")),
                ],
                state,
            )

    norms = ranks(4, body, sizes)
    kinds = ["experts", "router", "qkv", "shared"]
    names = [f"{stage}.{kind}" for stage in range(sizes.get("pp", 1)) for kind in kinds]
    assert norms[0] == pytest.approx(expected_norm(names), rel=1e-14)
    assert len(set(norms)) == 1


def test_clipping_scales_shards_copies_and_replicas_alike(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=2, pp=2)) as state:
            named = [
                sharded("tied", state, PartitionSpec("tp"), is_copy=state.index("pp") == 1),
                sharded("norm", state, is_copy=state.index("pp") == 1),
            ]
            before = [p.grad.clone() for _, p in named]
            norm = clip_grad_norm(named, state, 0.5)
            return norm, [(p.grad / b).unique() for (_, p), b in zip(named, before, strict=True)]

    expected = expected_norm(["tied", "norm"])
    for norm, factors in ranks(4, body):
        assert norm == pytest.approx(expected, rel=1e-14)
        for factor in factors:
            torch.testing.assert_close(
                factor, torch.full_like(factor, 0.5 / (expected + 1e-6)), rtol=1e-12, atol=0
            )


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_non_finite_gradient_on_one_rank_is_seen_by_all_and_changes_none(ranks, poison):
    def body(poison):
        with ParallelState(ParallelLayout(tp=2, pp=2)) as state:
            stage = state.index("pp")
            named = [sharded(f"w{stage}", state, PartitionSpec("tp"))]
            if state.rank == 3:
                named[0][1].grad[0, 0] = poison
            before = named[0][1].grad.clone()
            norm = clip_grad_norm(named, state, 1e-3)
            return norm, torch.equal(named[0][1].grad.nan_to_num(), before.nan_to_num())

    for norm, untouched in ranks(4, body, poison):
        assert not math.isfinite(norm)
        assert untouched


def test_the_fp32_norm_of_a_large_tensor_is_good_to_1e_minus_7():
    state = ParallelState(ParallelLayout())
    param = nn.Parameter(torch.zeros(3_000_001))
    param.grad = torch.randn(3_000_001) * 1e-3
    exact = param.grad.double().norm().item()
    assert grad_norm([("w", param)], state) == pytest.approx(exact, rel=1e-7)


def test_bf16_gradients_are_squared_in_fp32():
    state = ParallelState(ParallelLayout())
    param = nn.Parameter(torch.zeros(9000, dtype=torch.bfloat16))
    param.grad = torch.randn(9000).bfloat16()
    exact = param.grad.double().norm().item()
    assert grad_norm([("w", param)], state) == pytest.approx(exact, rel=2e-7)
    clip_grad_norm([("w", param)], state, 1.0)
    assert param.grad.double().norm().item() == pytest.approx(1.0, rel=1e-2)


def test_the_gradient_buffer_is_what_gets_measured_and_clipped():
    state = ParallelState(ParallelLayout())
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    with GradBuffer([("w", param)], group=None) as buffer:
        buffer.start(1)
        (param * torch.tensor([3.0, 4.0])).sum().backward()
        buffer.finish()
        assert clip_grad_norm([("w", param)], state, 2.5) == 5.0
        assert param.main_grad.tolist() == pytest.approx([1.5, 2.0], rel=1e-6)


def test_no_gradients_at_all_is_norm_zero():
    state = ParallelState(ParallelLayout())
    assert clip_grad_norm([("w", nn.Parameter(torch.zeros(2)))], state, 1.0) == 0.0
    assert grad_norm([], state) == 0.0


def test_bad_arguments_are_named():
    state = ParallelState(ParallelLayout())
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"max_norm must be positive .* got {bad}"):
            clip_grad_norm([], state, bad)


def test_a_parameter_listed_twice_is_refused():
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    with pytest.raises(ValueError, match="'b' is listed twice, also as 'a'"):
        grad_norm([("a", param), ("b", param)], ParallelState(ParallelLayout()))
