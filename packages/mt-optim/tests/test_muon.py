"""Muon against torch.optim.Muon, against its formula, and split against whole."""

import pytest
import torch
from mt_optim import (
    Muon,
    NamedOptimizer,
    OptimizerConfig,
    Orthogonalization,
    build_optimizer,
    is_hidden_matrix,
)
from mt_optim.rules.muon import AdaptiveMuonRule
from mt_parallel_state import (
    MatrixSpec,
    ParallelLayout,
    ParallelState,
    PartitionSpec,
    mark_matrix,
    shard_param,
)
from torch import nn

STEPS = 10
EXACT = Orthogonalization(dtype=torch.float64, extra_scale=0.2)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16)).to(dtype)


def train(model, *optimizers):
    for step in range(STEPS):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x.to(model[0].weight.dtype)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["shape_scaling", "spectral"])
def test_muon_is_bit_equal_to_torch(nesterov, scale):
    ours, theirs = make_model(), make_model()
    how = Orthogonalization(scale=scale, extra_scale=0.2 if scale == "spectral" else 1.0)
    train(
        ours,
        Muon(
            [{"params": ours.named_parameters(), "nesterov": nesterov}],
            lr=0.02,
            orthogonalization=how,
        ),
    )
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    adjust = {"shape_scaling": "original", "spectral": "match_rms_adamw"}[scale]
    train(
        theirs,
        torch.optim.Muon(matrices, lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust),
        torch.optim.AdamW(vectors, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    )
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_large_tall_matrix_is_bit_equal_too() -> None:
    """A product of so many rows is cut into sums whose order depends on how its factors lie."""
    mine, other = (nn.Parameter(torch.ones(1536, 512)) for _ in range(2))
    mine.grad = torch.randn(1536, 512, generator=torch.Generator().manual_seed(0))
    other.grad = mine.grad.clone()
    how = Orthogonalization(scale="shape_scaling")
    Muon([mine], lr=1.0, orthogonalization=how).step()
    torch.optim.Muon([other], lr=1.0).step()
    assert torch.equal(mine, other)


@pytest.mark.parametrize("coefficients", ["simple", "quintic"])
@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_singular_values_go_to_one(coefficients, shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    x = left @ torch.diag(torch.linspace(0.1, 1, min(shape), dtype=torch.float64)) @ right
    y = Orthogonalization(coefficients=coefficients, dtype=torch.float64).apply(x)
    values = torch.linalg.svdvals(y)
    bound = {"simple": (0.65, 1.25), "quintic": (0.8, 1.2)}[coefficients]
    assert bound[0] < values.min()
    assert values.max() < bound[1]
    inner = left.T @ y @ right.T  # the singular vectors stay
    torch.testing.assert_close(inner, torch.diag(inner.diagonal()), rtol=0, atol=1e-10)


def test_a_step_is_the_polynomial_of_the_singular_values():
    x = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    a, b, c = 2.0, -1.5, 0.5
    how = Orthogonalization(coefficients=[(a, b, c), (1.5, -0.5, 0.0)], steps=3, dtype=x.dtype)
    s = values / x.norm()
    for triple in ((a, b, c), (1.5, -0.5, 0.0), (a, b, c)):
        s = triple[0] * s + triple[1] * s**3 + triple[2] * s**5
    torch.testing.assert_close(how.apply(x), left @ torch.diag(s) @ right, rtol=1e-12, atol=1e-13)


def test_the_scales_are_those_of_the_papers():
    for scale, expected in (
        ("spectral", 8.0),
        ("unit_rms_norm", 4.0),
        ("shape_scaling", 4.0),
        ("none", 1.0),
    ):
        how = Orthogonalization(scale=scale, extra_scale=0.5)
        assert how.factor(64, 4) == pytest.approx(0.5 * expected)
    assert Orthogonalization(scale="shape_scaling").factor(4, 64) == 1.0
    assert Orthogonalization(scale="unit_rms_norm").factor(4, 64) == 0.25


# name: the shape, the record of its matrices, the dim that tensor parallelism splits
WEIGHTS = {
    "qkv.weight": ((4, 4, 6, 24), MatrixSpec(part_dim=1, parts=(2, 1, 1)), 0),
    "wide_qkv.weight": ((1, 4, 8, 24), MatrixSpec(part_dim=1, parts=(2, 1, 1)), 2),
    "out.weight": ((24, 8, 6), MatrixSpec(in_dims=2), 1),
    "up.weight": ((2, 40, 24), MatrixSpec(part_dim=0, parts=(1, 1)), 1),
    "down.weight": ((24, 40), MatrixSpec(), 1),
    "whole.weight": ((12, 20), MatrixSpec(), None),
    "embedding.weight": ((32, 24), None, 0),
    "norm.weight": ((24,), None, None),
}


def parameters(state):
    """This rank's shard of each weight, with its records."""
    made = {}
    for name, (shape, matrix, dim) in WEIGHTS.items():
        generator = torch.Generator().manual_seed(len(name))
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        param = nn.Parameter(shard(whole, dim, state))
        spec = PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, "tp")
        made[name] = mark_matrix(shard_param(param, spec), matrix)
    return made


def shard(whole, dim, state):
    if dim is None or state.size("tp") == 1:
        return whole
    return whole.chunk(state.size("tp"), dim)[state.index("tp")].contiguous()


def run(name, tp, mode, dtype):
    how = Orthogonalization(tp=mode, dtype=dtype, extra_scale=0.2)
    with ParallelState(ParallelLayout(tp=tp)) as state:
        params = parameters(state)
        config = OptimizerConfig(name=name, lr=0.02, weight_decay=0.1, orthogonalization=how)
        optimizer = build_optimizer(params.items(), config, state)
        for step in range(STEPS):
            for key, param in params.items():
                shape, _, dim = WEIGHTS[key]
                generator = torch.Generator().manual_seed(1000 * step + len(key))
                grad = torch.randn(shape, generator=generator, dtype=torch.float64)
                param.grad = shard(grad, dim, state)
            optimizer.step()
        return {
            key: [
                param.detach().clone(),
                *(optimizer.moment(key, m) for m in optimizer.moments(key)),
            ]
            for key, param in params.items()
        }


def joined(results):
    """The whole tensors from the ranks' shards."""
    whole = {}
    for key, (_, _, dim) in WEIGHTS.items():
        kinds = zip(*(result[key] for result in results), strict=True)
        whole[key] = [ts[0] if dim is None else torch.cat(ts, dim) for ts in kinds]
    return whole


@pytest.mark.parametrize(
    ("name", "mode", "tp"),
    [
        ("muon", "duplicated", 2),
        ("muon", "distributed", 2),
        ("muon", "distributed", 4),
        ("adaptive_muon", "duplicated", 4),
        ("adaptive_muon", "distributed", 2),
    ],
)
def test_split_matrices_are_stepped_as_whole_ones(ranks, name, mode, tp):
    expected = run(name, 1, mode, torch.float64)
    found = joined(ranks(tp, run, name, tp, mode, torch.float64))
    for key, tensors in expected.items():
        for own, other in zip(found[key], tensors, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12, msg=key)


def test_gathered_matrices_get_the_bits_of_one_rank(ranks):
    expected = run("muon", 1, "duplicated", torch.bfloat16)
    found = joined(ranks(2, run, "muon", 2, "duplicated", torch.bfloat16))
    for key, tensors in expected.items():
        assert all(torch.equal(*pair) for pair in zip(found[key], tensors, strict=True)), key


def test_blocks_are_other_numbers(ranks):
    expected = run("muon", 1, "blockwise", torch.float64)
    found = joined(ranks(2, run, "muon", 2, "blockwise", torch.float64))
    assert torch.equal(found["whole.weight"][0], expected["whole.weight"][0])
    assert not torch.allclose(found["down.weight"][0], expected["down.weight"][0], rtol=1e-3)


def test_fused_matrices_are_orthogonalised_one_by_one():
    with ParallelState(ParallelLayout()) as state:
        weight = parameters(state)["qkv.weight"]
        before = weight.detach().clone()
        optimizer = Muon(
            [("qkv.weight", weight)], lr=1.0, weight_decay=0, orthogonalization=EXACT, state=state
        )
        weight.grad = torch.randn(weight.shape, dtype=weight.dtype)
        momentum = weight.grad * 0.05
        update = weight.grad.lerp(momentum, 0.95)
        optimizer.step()
        step = before - weight.detach()
        for part in (slice(0, 2), slice(2, 3), slice(3, 4)):
            rows = update[:, part].reshape(-1, 24)
            expected = EXACT.apply(rows) * EXACT.factor(*rows.shape)
            torch.testing.assert_close(step[:, part].reshape(-1, 24), expected)


def test_adaptive_muon_is_the_algorithm_of_the_paper():
    ours, theirs = make_model(torch.float64), make_model(torch.float64)
    rule = AdaptiveMuonRule(orthogonalization=Orthogonalization(dtype=torch.float64))
    named = [(n, p) for n, p in ours.named_parameters() if p.ndim == 2]
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    how = Orthogonalization(dtype=torch.float64)
    states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in matrices]

    class Reference:
        def step(self):
            with torch.no_grad():
                for param, (momentum, square) in zip(matrices, states, strict=True):
                    momentum.copy_(0.95 * momentum + 0.05 * param.grad)
                    look = 0.05 * param.grad + 0.95 * momentum
                    direction = how.apply(look.sign())
                    square.copy_(0.95 * square + 0.05 * direction**2)
                    step = direction / (square.sqrt() + 1e-8)
                    step = step * 0.2 * param.numel() ** 0.5 / step.norm()
                    param.copy_(param - 0.01 * (step + 0.1 * param))

    train(ours, NamedOptimizer(named, rule, lr=0.01, weight_decay=0.1))
    train(theirs, Reference())
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


def test_embeddings_heads_and_vectors_go_to_adamw():
    names = {
        "model.embed_tokens.weight": (8, 4),
        "lm_head.weight": (8, 4),
        "layers.0.mlp.up.weight": (8, 4),
        "layers.0.mlp.up.bias": (2, 4),
        "layers.0.norm.weight": (4,),
    }
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in names.items()}
    assert [n for n, p in params.items() if is_hidden_matrix(n, p)] == ["layers.0.mlp.up.weight"]
    optimizer = Muon(params.items())
    rules = {name: g["rule"] for g in optimizer.param_groups for name in g["param_names"]}
    assert [name for name, rule in rules.items() if rule == "muon"] == ["layers.0.mlp.up.weight"]


def test_what_is_no_matrix_is_refused_in_a_group_of_muon():
    vector = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"parameter 'v': it is no matrix, with shape"):
        Muon([{"params": [("v", vector)], "rule": "muon"}])
    with pytest.raises(ValueError, match="rule must be one of muon, adamw; got 'sgd'"):
        Muon([{"params": [("v", vector)], "rule": "sgd"}])


def test_a_split_matrix_needs_the_groups():
    weight = shard_param(nn.Parameter(torch.zeros(4, 4)), PartitionSpec("tp"))
    with pytest.raises(ValueError, match="it is split over tp; give state"):
        Muon([("w", weight)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": "rms"}, "scale must be one of spectral, unit_rms_norm"),
        ({"tp": "shared"}, "tp must be one of duplicated, distributed, blockwise"),
        ({"coefficients": "cubic"}, "coefficients must be simple or quintic"),
        ({"coefficients": [(1.0, 2.0)]}, "coefficients must be triples"),
        ({"steps": 0}, "steps must be 1 to 99, got 0"),
        ({"extra_scale": -1.0}, "extra_scale must be 0 or more"),
    ],
)
def test_an_orthogonalisation_that_can_not_work_says_why(fields, message):
    with pytest.raises(ValueError, match=message):
        Orthogonalization(**fields)


def test_a_state_dict_of_two_rules_continues_bit_equal():
    straight, resumed = make_model(), make_model()
    optimizer = Muon(straight.named_parameters(), lr=0.02)
    train(straight, optimizer)
    restored = Muon(resumed.named_parameters(), lr=0.5)
    restored.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(straight.state_dict())
    train(straight, optimizer)
    train(resumed, restored)
    for own, other in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(own, other)
