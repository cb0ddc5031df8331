"""SOAP against its algorithm written out, and split against whole."""

import copy

import pytest
import torch
from mt_data_parallel import GradBuffer, Reduction
from mt_optim import (
    SOAP,
    DistributedOptimizer,
    NamedOptimizer,
    OptimizerConfig,
    build_optimizer,
    is_hidden_matrix,
)
from mt_optim.rules.soap import SOAPRule
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
# A last bit of a gradient grows by the condition of a mean, at most 1000 times its size; steps are
# 0.01 and 0.02 long.
ROUNDED = 1e-9


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 8)).to(dtype)


def train(model, *optimizers, first=0, steps=STEPS):
    for step in range(first, first + steps):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
        for param in model.parameters():
            param.grad = None
        model(x.to(model[0].weight.dtype)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


class Reference:
    """The paper's algorithms 3 and 4, one matrix at a time, with explicit eigenbases."""

    def __init__(self, params, *, lr, decay, betas, frequency, max_dim):
        self.params, self.lr, self.decay, self.betas = list(params), lr, decay, betas
        self.frequency, self.max_dim, self.steps = frequency, max_dim, 0
        self.states = []
        for param in self.params:
            zero = torch.zeros_like(param)
            sides = [n if n <= max_dim else 0 for n in param.shape]
            means = [torch.zeros(n, n, dtype=param.dtype) for n in sides]
            bases = [torch.eye(n, dtype=param.dtype) for n in sides]
            self.states.append([zero.clone(), zero.clone(), means, bases])

    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        for param, state in zip(self.params, self.states, strict=True):
            moment, square, means, bases = state
            grad = param.grad
            for side, outer in enumerate((grad @ grad.T, grad.T @ grad)):
                if param.shape[side] > self.max_dim:
                    continue
                means[side] = b2 * means[side] + (1 - b2) * outer
                if self.steps % self.frequency == 0:
                    n = len(outer)
                    damped = means[side] + 1e-3 * means[side].trace() / n * torch.eye(n).double()
                    bases[side] = gram_schmidt(damped @ bases[side])
            left = bases[0] if len(bases[0]) else torch.eye(param.shape[0]).double()
            right = bases[1] if len(bases[1]) else torch.eye(param.shape[1]).double()
            moment.copy_(b1 * moment + (1 - b1) * grad)
            square.copy_(b2 * square + (1 - b2) * (left.T @ grad @ right) ** 2)
            first = left.T @ moment @ right / (1 - b1 ** (self.steps + 1))
            second = square / (1 - b2 ** (self.steps + 1))
            update = left @ (first / (second.sqrt() + 1e-8)) @ right.T
            param.copy_(param - self.lr * (update + self.decay * param))
        self.steps += 1


def gram_schmidt(x):
    """Orthogonalise twice, which is enough; signs differ from a Householder QR's."""
    columns = []
    for column in x.T:
        for _ in range(2):
            for other in columns:
                column = column - (other @ column) * other
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


@pytest.mark.parametrize(("frequency", "max_dim"), [(1, 100), (3, 100), (4, 16), (2, 4)])
def test_soap_is_the_algorithm_of_the_paper(frequency, max_dim):
    ours, theirs = make_model(), make_model()
    named = [(name, p) for name, p in ours.named_parameters() if p.ndim == 2]
    options = {"betas": (0.9, 0.95), "frequency": frequency, "max_dim": max_dim}
    train(ours, NamedOptimizer(named, SOAPRule(**options), lr=0.01, weight_decay=0.1))
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    reference = Reference(matrices, lr=0.01, decay=0.1, **options)
    train(theirs, reference)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=ROUNDED)


def test_without_bases_it_is_adamw():
    ours, theirs = make_model(), make_model()
    named = [(name, p) for name, p in ours.named_parameters() if p.ndim == 2]
    rule = SOAPRule(betas=(0.9, 0.95), max_dim=1)
    train(ours, NamedOptimizer(named, rule, lr=0.01, weight_decay=0.1))
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    train(theirs, torch.optim.AdamW(matrices, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1))
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


def test_bases_become_the_eigenvectors_of_the_means():
    param = nn.Parameter(torch.zeros(6, 9, dtype=torch.float64))
    generator = torch.Generator().manual_seed(3)
    left, _ = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(9, 9, generator=generator, dtype=torch.float64))
    values = torch.tensor([32.0, 16.0, 8.0, 4.0, 2.0, 1.0], dtype=torch.float64)
    optimizer = SOAP([("w", param)], lr=0.0, frequency=1)
    for _ in range(60):
        param.grad = left @ torch.diag(values) @ right[:, :6].T
        optimizer.step()
    basis = optimizer.factors("w")["basis_rows.0"]
    torch.testing.assert_close((basis.T @ left).abs(), torch.eye(6).double(), rtol=0, atol=1e-8)
    identity = torch.eye(9, dtype=torch.float64)
    columns = optimizer.factors("w")["basis_columns.0"]
    torch.testing.assert_close(columns.T @ columns, identity, rtol=0, atol=1e-12)


def test_signs_of_a_basis_change_nothing():
    ours, theirs = make_model(), make_model()
    first, second = (SOAP(m.named_parameters(), lr=0.01, frequency=4) for m in (ours, theirs))
    train(ours, first, steps=5)
    train(theirs, second, steps=5)
    for key, basis in second.factors("0.weight").items():
        if key.startswith("basis"):
            basis.mul_(torch.tensor([1.0, -1.0]).double().repeat(len(basis) // 2))
    train(ours, first, first=5, steps=5)
    train(theirs, second, first=5, steps=5)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-14)


# name: the shape, the record of its matrices, the dim that tensor parallelism splits
WEIGHTS = {
    "qkv.weight": ((4, 4, 3, 12), MatrixSpec(part_dim=1, parts=(2, 1, 1)), 0),
    "wide_qkv.weight": ((1, 4, 8, 12), MatrixSpec(part_dim=1, parts=(2, 1, 1)), 2),
    "out.weight": ((12, 4, 3), MatrixSpec(in_dims=2), 1),
    "up.weight": ((2, 16, 12), MatrixSpec(part_dim=0, parts=(1, 1)), 1),
    "whole.weight": ((12, 10), MatrixSpec(), None),
    "embedding.weight": ((16, 12), None, 0),
    "norm.weight": ((12,), None, None),
}


def shard(whole, dim, state):
    if dim is None or state.size("tp") == 1:
        return whole
    return whole.chunk(state.size("tp"), dim)[state.index("tp")].contiguous()


def run(tp):
    with ParallelState(ParallelLayout(tp=tp)) as state:
        params = {}
        for name, (shape, matrix, dim) in WEIGHTS.items():
            generator = torch.Generator().manual_seed(len(name))
            whole = torch.randn(shape, generator=generator, dtype=torch.float64)
            spec = PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, "tp")
            param = shard_param(nn.Parameter(shard(whole, dim, state)), spec)
            params[name] = mark_matrix(param, matrix)
        config = OptimizerConfig(name="soap", lr=0.02, weight_decay=0.1, soap_frequency=3)
        optimizer = build_optimizer(params.items(), config, state)
        for step in range(STEPS):
            for key, param in params.items():
                generator = torch.Generator().manual_seed(1000 * step + len(key))
                grad = torch.randn(WEIGHTS[key][0], generator=generator, dtype=torch.float64)
                param.grad = shard(grad, WEIGHTS[key][2], state)
            optimizer.step()
        return {
            key: (
                [param.detach().clone()]
                + [optimizer.moment(key, m) for m in optimizer.moments(key)],
                optimizer.factors(key),
            )
            for key, param in params.items()
        }


@pytest.mark.parametrize("tp", [2, 4])
def test_split_matrices_are_stepped_as_whole_ones(ranks, tp):
    expected = run(1)
    results = ranks(tp, run, tp)
    assert len(expected["qkv.weight"][1]) == 3 * 4
    for key, (tensors, factors) in expected.items():
        dim = WEIGHTS[key][2]
        for index, tensor in enumerate(tensors):
            shards = [result[key][0][index] for result in results]
            found = shards[0] if dim is None else torch.cat(shards, dim)
            torch.testing.assert_close(found, tensor, rtol=1e-12, atol=1e-12, msg=key)
        for result in results:
            assert result[key][1].keys() == factors.keys()
            for name, factor in factors.items():
                torch.testing.assert_close(result[key][1][name], factor, rtol=1e-12, atol=1e-12)


def sharded(world):
    with ParallelState(ParallelLayout(dp=world)) as state:
        model, group = make_model(), Reduction(shards=state.group("dp"))
        with GradBuffer(
            model.named_parameters(), group=group, bucket_size=100, whole=is_hidden_matrix
        ) as buffer:
            optimizer = DistributedOptimizer(
                buffer, lambda shards: SOAP(shards, lr=0.02, frequency=3)
            )
            for step in range(STEPS):
                x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
                buffer.start(1)
                model(x.double().chunk(world)[state.rank]).square().sum().backward()
                buffer.finish()
                optimizer.step()
            held = sum(len(optimizer.inner.factors(shard.name)) for shard in optimizer.shards)
        return [param.detach().clone() for param in model.parameters()], held


def test_whole_matrices_are_shared_out_over_data_parallel_ranks(ranks):
    model = make_model()
    train(model, SOAP(model.named_parameters(), lr=0.02, frequency=3))
    results = ranks(2, sharded, 2)
    assert sum(held for _, held in results) == 2 * 4
    for params, _ in results:
        for own, other in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(own, other.detach(), rtol=0, atol=ROUNDED)


@pytest.mark.parametrize("moments", ["full", "fp16"])
def test_a_state_dict_continues_bit_equal(moments):
    straight, resumed = make_model(torch.float32), make_model(torch.float32)
    config = OptimizerConfig(name="soap", lr=0.02, soap_frequency=3, moments_dtype=moments)
    state = ParallelState(ParallelLayout())
    optimizer = build_optimizer(straight, config, state)
    train(straight, optimizer, steps=5)
    restored = build_optimizer(resumed, config, state)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(straight.state_dict())
    for model, own in ((straight, optimizer), (resumed, restored)):
        train(model, own, first=5, steps=5)
    for own, other in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(own, other)


def test_factors_that_are_not_finite_are_named():
    model = make_model()
    optimizer = SOAP(model.named_parameters())
    assert optimizer.non_finite() == []
    optimizer.factors("0.weight")["mean_columns.0"][0, 0] = float("nan")
    assert optimizer.non_finite() == ["0.weight"]
    assert optimizer.factors("0.bias") == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequency": 0}, "frequency must be 1 or more, got 0"),
        ({"max_dim": -1}, "max_dim must be 1 or more, got -1"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NamedOptimizer(
            [nn.Parameter(torch.zeros(2, 2))],
            SOAPRule(**options),
            lr=0.1,
            weight_decay=0.0,
        )
