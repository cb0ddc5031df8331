"""Every optimizer under every strategy and layout against plain steps of whole parameters.

The gradient of an element depends on the element, its place and the sample only, so that a shard or
a pipeline stage can compute its own, and one process all of them. What is compared is everything
from there on: buckets, reductions, partial sums, norm, clipping, steps and what fetches parameters.
"""

import functools
import itertools
import math
import zlib
from pathlib import Path

import pytest
import torch
from mt_data_parallel import Reduction, reduce_partial_grads, shard
from mt_optim import (
    DistributedOptimizer,
    OptimizerConfig,
    Orthogonalization,
    build_optimizer,
    is_hidden_matrix,
)
from mt_parallel_state import (
    MatrixSpec,
    ParallelLayout,
    ParallelState,
    PartitionSpec,
    mark_matrix,
    shard_param,
)
from mt_testing import pairwise
from torch import nn

STEPS, SAMPLES, LAYERS, LR, DECAY, REFRESH = 6, 8, 4, 0.02, 0.1, 4
MATRIX_RULES = ("muon", "adaptive_muon", "soap")
QKV = MatrixSpec(part_dim=1, parts=(2, 1, 1))
# name: shape, the dim that tensor parallelism splits (or "partial"), what it is fused of
LAYER = {
    "qkv": ((2, 4, 3, 10), 0, QKV),
    "proj": ((10, 6), 1, None),
    "norm": ((10,), "partial", None),
    "bias": ((10,), None, None),
}
TABLE = ((14, 10), 0, None)
FACTORS = {
    "optimizer": ("adamw", "adam", "sgd", "lion", *MATRIX_RULES, "torch.optim.RAdam"),
    "strategy": ("none", "optimizer", "optimizer_gradients", "full"),
    "replicas": (1, 2),
    "dp": (1, 2, 4),
    "tp": (1, 2),
    "pp": (1, 2),
    "accumulation": (1, 2),
    "tied": (False, True),
    "frozen": (False, True),
    "overlap": (False, True),
    "bucket_size": (1, 200, None),
    "clip": (None, 0.5),
}
WHERE = ("optimizer", "strategy", "replicas", "dp", "tp", "pp")
HOW = [name for name in FACTORS if name not in WHERE]


def can_be(row):
    """Copies of what is shared out need both, and a pool has 16 ranks at most."""
    return row["replicas"] == 1 or (row["strategy"] != "none" and row["dp"] % row["replicas"] == 0)


def world(row):
    return row["dp"] * row["tp"] * row["pp"]


def quick(row):
    return can_be(row) and world(row) <= 8


def crossed(names):
    """All rows of some factors."""
    values = itertools.product(*(FACTORS[name] for name in names))
    return [dict(zip(names, row, strict=True)) for row in values]


# Eight ranks on few cores take seconds: here are at most four, and eight in the rows of fp32.
SAMPLE = pairwise(FACTORS, allowed=lambda row: can_be(row) and world(row) <= 4, seed=12)
# Every place with one of the 96 ways of how, which take turns; and four places with all of them.
WAYS = crossed(HOW)
PLACES = [where for where in crossed(WHERE) if can_be(where)]
GRID = [where | WAYS[37 * number % len(WAYS)] for number, where in enumerate(PLACES)]
CROSSES = [
    dict(zip(WHERE, place, strict=True))
    for place in (
        ("adamw", "full", 1, 2, 1, 1),
        ("lion", "optimizer_gradients", 2, 4, 1, 1),
        ("muon", "optimizer", 1, 2, 2, 1),
        ("sgd", "none", 1, 2, 1, 2),
    )
]


def some_quick(rows, every):
    """One row of several for CI, and all for the campaign."""
    return [
        pytest.param(row, marks=() if number % every == 0 else pytest.mark.campaign)
        for number, row in enumerate(rows)
    ]


def label(row):
    return "-".join(f"{key}={value}" for key, value in row.items())


def seeded(*key):
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def initial(name, shape, dtype):
    return torch.randn(shape, generator=seeded(name), dtype=torch.float64).to(dtype)


def pull(name, shape, dtype, step, samples):
    """What some samples of a step pull each element of a parameter with, together."""
    draw = torch.randn((SAMPLES, *shape), generator=seeded(name, step), dtype=torch.float64)
    return draw[samples].to(dtype).sum(0)


def logical(tied):
    """Name, shape, split dim and matrix of each logical parameter."""
    layers = {f"layers.{i}.{key}": what for i in range(LAYERS) for key, what in LAYER.items()}
    return {"embedding": TABLE, **layers} | ({} if tied else {"head": TABLE})


def is_frozen(name, frozen):
    return frozen and (name.startswith("layers.1.") or name in ("layers.2.proj", "embedding"))


class Held(nn.Module):
    """Parameters of one rank under their names, and the loss that their pulls make."""

    def __init__(self, names, state, tied, frozen, dtype):
        super().__init__()
        self.names, self.state, self.dtype = names, state, dtype
        for name in names:
            shape, dim, matrix = logical(tied)[name]
            spec = PartitionSpec(*(None,) * dim, "tp") if isinstance(dim, int) else PartitionSpec()
            param = nn.Parameter(self.own(initial(name, shape, dtype), dim).clone())
            param.requires_grad_(not is_frozen(name, frozen))
            partial = ("tp",) if dim == "partial" else ()
            mark_matrix(shard_param(param, spec, partial_grad=partial), matrix)
            self.register_parameter(name.split(".")[-1], param)

    def own(self, whole, dim):
        if not isinstance(dim, int):
            return whole
        return whole.chunk(self.state.size("tp"), dim)[self.state.index("tp")]

    def pulled(self, param, name, key, when):
        """Add up what a parameter contributes; of a partial gradient each rank has its share."""
        shape, dim, _ = logical(False)[name]
        pulls = self.own(pull(key, shape, self.dtype, *when), dim)
        if dim == "partial":
            place, size = self.state.index("tp"), self.state.size("tp")
            pulls = pulls * (2 * (place + 1) / (size * (size + 1)))
        return (param.tanh() * pulls).sum()

    def forward(self, x, when):
        for name in self.names:
            param = getattr(self, name.split(".")[-1])
            x = x + self.pulled(param, name, name, when)
        return x


class Net(nn.Module):
    """A pipeline stage: its layers, and the tables of the first and the last."""

    def __init__(self, state, tied, frozen, dtype):
        super().__init__()
        stage, per_stage = state.index("pp"), LAYERS // state.size("pp")
        self.first, self.last = stage == 0, stage == state.size("pp") - 1
        self.tied = tied
        args = (state, tied, frozen, dtype)
        numbers = range(stage * per_stage, (stage + 1) * per_stage)
        self.layers = nn.ModuleDict(
            {str(i): Held([f"layers.{i}.{key}" for key in LAYER], *args) for i in numbers}
        )
        tables = ["embedding"] if self.first or (self.last and tied) else []
        self.tables = Held(tables + (["head"] if self.last and not tied else []), *args)
        if tied and self.first != self.last:
            shared = self.tables.embedding
            spec = PartitionSpec("tp")
            shard_param(shared, spec, partial_grad=("embedding",), is_copy=self.last)

    def named(self):
        for layer in (*self.layers.values(), self.tables):
            for name in layer.names:
                yield name, getattr(layer, name.split(".")[-1])

    def forward(self, when):
        tables, x = self.tables, 0.0
        if self.first:
            x = x + tables.pulled(tables.embedding, "embedding", "embedding", when)
        for layer in self.layers.values():
            x = layer(x, when)
        if self.last:
            table = tables.embedding if self.tied else tables.head
            x = x + tables.pulled(table, "embedding" if self.tied else "head", "head", when)
        return x


def eps_of(name, dtype):
    """Where no gradient was yet, a base of soap turns its rounding in, and eps divides that."""
    return 1e-4 if name == "soap" and dtype == torch.float64 else 1e-8


def config_of(row, dtype, eps=None):
    name, tp = row["optimizer"], row.get("split_matrices", "duplicated")
    return OptimizerConfig(
        name=name,
        eps=eps_of(name, dtype) if eps is None else eps,
        lr=LR,
        weight_decay=DECAY,
        nesterov=row.get("nesterov"),
        max_norm=row["clip"],
        orthogonalization=Orthogonalization(extra_scale=0.2, dtype=dtype, tp=tp),
        soap_frequency=REFRESH,
        offload=row.get("offload", 0.0),
    )


def reduction(state, replicas):
    if replicas == 1:
        return Reduction(shards=state.group("dp"))
    inner, outer = state.level_groups("dp", (state.size("dp") // replicas, replicas))
    return Reduction(shards=inner, replicas=outer)


def train(row, dtype, eps=None):
    """Train one row of the grid; return this rank's parameters by name, with place and norms."""
    layout = ParallelLayout(tp=row["tp"], dp=row["dp"], pp=row["pp"])
    with ParallelState(layout) as state:
        net = Net(state, row["tied"], row["frozen"], dtype)
        strategy = row["strategy"]
        group = state.group("dp") if strategy == "none" else reduction(state, row["replicas"])
        with shard(
            net,
            strategy,
            group=group,
            named_params=net.named(),
            bucket_size=row["bucket_size"],
            overlap=row["overlap"],
            whole=is_hidden_matrix if row["optimizer"] in MATRIX_RULES else None,
        ) as buffer:
            config = config_of(row, dtype, eps)
            optimizer = DistributedOptimizer(
                buffer, lambda shards: build_optimizer(shards, config, state)
            )
            norms = [step(net, buffer, optimizer, state, row, n) for n in range(STEPS)]
            assert optimizer.step_count == STEPS
            with buffer.gathered():
                params = {name: param.detach().clone() for name, param in net.named()}
        return {axis: state.index(axis) for axis in ("tp", "pp")}, params, norms


def step(net, buffer, optimizer, state, row, number):
    own = SAMPLES // state.size("dp")
    per_backward = own // row["accumulation"]
    buffer.start(row["accumulation"])
    for part in range(row["accumulation"]):
        first = state.index("dp") * own + part * per_backward
        net((number, slice(first, first + per_backward))).backward()
    buffer.finish()
    reduce_partial_grads(optimizer.shards, state)
    return optimizer.step().grad_norm


# The references: whole parameters, one process, and no class of ours.


class Lion:
    """Chen et al., as its algorithm stands in the paper."""

    def __init__(self, params, decay):
        self.params, self.decay = params, decay
        self.moments = [torch.zeros_like(p) for p in params]

    def step(self):
        for param, moment in zip(self.params, self.moments, strict=True):
            direction = torch.sign(0.9 * moment + (1 - 0.9) * param.grad)
            param.data = param.data - LR * (direction + self.decay * param.data)
            moment.copy_(0.99 * moment + (1 - 0.99) * param.grad)


def orthogonal(x):
    """Five steps of Newton and Schulz, as a polynomial of the matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Matrices:
    """Muon and AdaMuon, matrix by matrix."""

    def __init__(self, named, adaptive, nesterov):
        self.named, self.adaptive, self.nesterov = named, adaptive, nesterov
        self.momenta = {name: torch.zeros_like(p) for name, p in named.items()}
        self.squares = {name: torch.zeros_like(p) for name, p in named.items()}

    def step(self):
        for name, param in self.named.items():
            momentum = self.momenta[name]
            momentum.copy_(0.95 * momentum + 0.05 * param.grad)
            update = 0.05 * param.grad + 0.95 * momentum if self.nesterov else momentum
            with torch.no_grad():
                param.mul_(1 - LR * DECAY)
                for own, u, square in parts_of(name, param, update, self.squares[name]):
                    own.sub_(LR * self.direction(u, square))

    def direction(self, update, square):
        matrix = update.reshape(-1, update.shape[-1])
        if not self.adaptive:
            found = orthogonal(matrix) * 0.2 * math.sqrt(max(matrix.shape))
            return found.reshape(update.shape)
        found = orthogonal(matrix.sign()).reshape(update.shape)
        square.copy_(0.95 * square + 0.05 * found**2)
        found = found / (square.sqrt() + 1e-8)
        return found * (0.2 * 0.2 * math.sqrt(found.numel()) / found.norm())


def parts_of(name, *tensors):
    """Cut tensors of a parameter into the tensors of each fused matrix."""
    fused = (2, 1, 1) if "qkv" in name else (tensors[0].shape[1],)
    return zip(*(tensor.split(fused, 1) for tensor in tensors), strict=True)


class Soap:
    """Adam in slowly turning eigenbases, matrix by matrix."""

    def __init__(self, named, eps):
        self.named, self.eps, self.steps, self.states = named, eps, 0, {}

    def step(self):
        self.steps += 1
        with torch.no_grad():
            for name, param in self.named.items():
                param.mul_(1 - LR * DECAY)
                for index, (own, grad) in enumerate(parts_of(name, param, param.grad)):
                    matrix = grad.reshape(-1, grad.shape[-1])
                    own.sub_(LR * self.direction((name, index), matrix).reshape(own.shape))

    def direction(self, key, grad):
        zero, sides = torch.zeros_like(grad), grad.shape
        start = (zero, zero, *(zero.new_zeros(n, n) for n in sides))
        bases = [torch.eye(n, dtype=grad.dtype) for n in sides]
        moment, square, *means, left, right = self.states.get(key, (*start, *bases))
        means = [
            0.95 * m + 0.05 * g for m, g in zip(means, (grad @ grad.T, grad.T @ grad), strict=True)
        ]
        if self.steps % REFRESH == 1:
            left, right = (
                torch.linalg.qr(m @ q + 1e-3 * m.trace() / len(m) * q).Q
                for m, q in zip(means, (left, right), strict=True)
            )
        moment = 0.95 * moment + 0.05 * grad
        square = 0.95 * square + 0.05 * (left.T @ grad @ right) ** 2
        self.states[key] = (moment, square, *means, left, right)
        unbiased = 1 - 0.95**self.steps
        turned = left.T @ moment @ right / unbiased
        return left @ (turned / ((square / unbiased).sqrt() + self.eps)) @ right.T


def plain_optimizers(name, params, eps, nesterov):
    """Return the optimizers of matrices, and of parameters without weight decay."""
    matrices = [p for p in params.values() if p.dim() > 1]
    vectors = [p for p in params.values() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    if name == "lion":
        return [Lion(matrices, DECAY), Lion(vectors, 0.0)]
    if name == "sgd":
        ahead = bool(nesterov)
        return [torch.optim.SGD(groups, lr=LR, momentum=0.9, nesterov=ahead, foreach=True)]
    if name in MATRIX_RULES:
        hidden = {n: p for n, p in params.items() if p.dim() > 1 and n not in ("embedding", "head")}
        tables = [params[n] for n in ("embedding", "head") if n in params]
        groups[0]["params"] = tables
        rest = [group for group in groups if group["params"]]
        betas = (0.95, 0.95) if name == "soap" else (0.9, 0.95)
        adamw = torch.optim.AdamW(rest, lr=LR, betas=betas, eps=eps, fused=True)
        if name == "soap":
            return [Soap(hidden, eps), adamw]
        return [Matrices(hidden, name == "adaptive_muon", nesterov is not False), adamw]
    if name.startswith("torch.optim."):
        return [getattr(torch.optim, name.removeprefix("torch.optim."))(groups, lr=LR)]
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name]
    return [kind(groups, lr=LR, fused=True)]


@functools.cache
def reference(name, tied, frozen, clip, dtype, shares=((SAMPLES,),), eps=None, nesterov=None):
    """Whole parameters and norms; `shares` are the samples of each backward of each replica."""
    params = {
        key: nn.Parameter(initial(key, shape, dtype).clone())
        for key, (shape, _, _) in logical(tied).items()
        if not is_frozen(key, frozen)
    }
    eps = eps_of(name, dtype) if eps is None else eps
    optimizers = plain_optimizers(name, params, eps, nesterov)
    norms = []
    for number in range(STEPS):
        set_gradients(params, number, tied, dtype, shares)
        norm = torch.cat([p.grad.double().flatten() for p in params.values()]).norm().item()
        norms.append(norm)
        if clip is not None and clip / (norm + 1e-6) < 1:
            for param in params.values():
                param.grad.mul_(clip / (norm + 1e-6))
        for optimizer in optimizers:
            optimizer.step()
    whole = {key: initial(key, shape, dtype) for key, (shape, _, _) in logical(tied).items()}
    return whole | {key: param.detach() for key, param in params.items()}, norms


def set_gradients(params, number, tied, dtype, shares):
    sums = {key: [] for key in params}
    sample = 0
    for replica in shares:
        totals = {}
        for count in replica:
            for param in params.values():
                param.grad = None
            samples = slice(sample, sample + count)
            losses = [
                (param.tanh() * pull(use, param.shape, dtype, number, samples)).sum()
                for key, param in params.items()
                for use in ((key, "head") if tied and key == "embedding" else (key,))
            ]
            sum(losses).backward()
            sample += count
            for key, param in params.items():
                totals[key] = totals[key] + param.grad if key in totals else param.grad
        for key, total in totals.items():
            sums[key].append(total)
    for key, param in params.items():
        param.grad = sum(sums[key][1:], sums[key][0])


def joined(results, tied):
    """Put the ranks' shards together, and see that ranks which hold the same hold the same bits."""
    parts = {}
    for place, params, _ in results:
        for name, param in params.items():
            first = parts.setdefault((name, place["tp"]), param)
            assert torch.equal(first, param), (name, place)
    shapes = logical(tied)
    ranks = 1 + max(place for _, place in parts)
    return {
        name: torch.cat([parts[name, i] for i in range(ranks)], dim)
        if isinstance(dim, int)
        else parts[name, 0]
        for name, (_, dim, _) in shapes.items()
    }


def assert_equal_run(results, row, expected, norms, rel, **bounds):
    for _, _, seen in results:
        assert seen == results[0][2]
    assert results[0][2] == pytest.approx(norms, rel=rel)
    found = joined(results, row["tied"])
    assert found.keys() == expected.keys()
    for name, param in found.items():
        torch.testing.assert_close(
            param, expected[name], **bounds, msg=lambda text, name=name: f"{row} {name}: {text}"
        )


def assert_like_one_process(results, row):
    settings = (row["optimizer"], row["tied"], row["frozen"], row["clip"])
    expected, norms = reference(*settings, torch.float64, nesterov=row.get("nesterov"))
    assert_equal_run(results, row, expected, norms, 1e-12, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", SAMPLE, ids=label)
def test_every_pair_of_settings_steps_like_one_process_to_1e_minus_12(ranks, row):
    assert_like_one_process(ranks(world(row), train, row, torch.float64), row)


@pytest.mark.parametrize(("eps", "error"), [(1e-8, 1e-9), (1e-4, 1e-12)])
def test_what_soap_loses_of_fp64_is_rounding_over_eps(ranks, eps, error):
    row = SAMPLE[0] | {"optimizer": "soap", "strategy": "optimizer", "dp": 4, "tp": 1, "pp": 1}
    row |= {"tied": False, "frozen": False, "clip": None}
    expected, norms = reference("soap", False, False, None, torch.float64, eps=eps)
    results = ranks(4, train, row, torch.float64, eps)
    assert_equal_run(results, row, expected, norms, error, rtol=error, atol=error)


def train_all(rows, dtype):
    return [train(row, dtype) for row in rows]


@pytest.mark.campaign
@pytest.mark.parametrize("row", GRID, ids=label)
def test_every_place_of_the_grid_steps_like_one_process_to_1e_minus_12(ranks, row):
    assert_like_one_process(ranks(world(row), train, row, torch.float64), row)


@pytest.mark.campaign
@pytest.mark.parametrize("where", CROSSES, ids=label)
def test_every_way_of_how_steps_like_one_process_to_1e_minus_12(ranks, where):
    rows = [where | how for how in WAYS]
    found = ranks(world(where), train_all, rows, torch.float64, timeout=600)
    for row, *results in zip(rows, *found, strict=True):
        assert_like_one_process(results, row)


# What else an optimizer may be told: where states are, how a split matrix is stepped, and what
# Nesterov's momentum is for those that have it.
TOLD = FACTORS | {
    "optimizer": tuple(name for name in FACTORS["optimizer"] if "torch" not in name),
    "offload": (0.0, 0.5, 1.0),
    "split_matrices": ("duplicated", "distributed"),
    "nesterov": (None, False, True),
}


def can_be_told(row):
    has_nesterov = row["optimizer"] in ("sgd", "muon", "adaptive_muon")
    return quick(row) and (has_nesterov or row["nesterov"] is None)


VARIANTS = [row for seed in range(3) for row in pairwise(TOLD, allowed=can_be_told, seed=seed)]


@pytest.mark.parametrize("row", some_quick(VARIANTS, 24), ids=label)
def test_every_pair_of_variants_steps_like_one_process_to_1e_minus_12(ranks, row):
    assert_like_one_process(ranks(world(row), train, row, torch.float64), row)


# In fp32 a sum of two has one order. So has a run whose replicas each sum their backwards first, if
# it has at most two; a tied table has its two uses in another order on two stages, and clipping
# depends on a norm whose last bit does too.
BIT_EQUAL = ("adamw", "adam", "sgd", "torch.optim.RAdam")


def has_one_order(row):
    each_backward = row["strategy"] in ("optimizer_gradients", "full") and row["accumulation"] > 1
    return (
        row["dp"] <= 2
        and row["tp"] == 1
        and not (each_backward and row["dp"] > 1)
        and not (row["tied"] and row["pp"] > 1)
    )


ONE_ORDER = FACTORS | {"optimizer": BIT_EQUAL, "clip": (None,)}
ORDERED = pairwise(ONE_ORDER, allowed=lambda row: quick(row) and has_one_order(row), seed=32)


def assert_same_bits(results, row):
    share = SAMPLES // row["dp"] // row["accumulation"]
    shares = ((share,) * row["accumulation"],) * row["dp"]
    settings = (row["optimizer"], row["tied"], row["frozen"], None)
    expected, norms = reference(*settings, torch.float32, shares)
    assert_equal_run(results, row, expected, norms, 1e-6, rtol=0, atol=0)


@pytest.mark.parametrize("row", some_quick(ORDERED, 2), ids=label)
def test_fp32_is_bit_equal_where_the_order_of_additions_is_the_same(ranks, row):
    assert_same_bits(ranks(world(row), train, row, torch.float32), row)


def published():
    """The table of the page: by how much weights may differ in fp32."""
    page = Path(__file__).parents[3] / "docs" / "mt-optim.md"
    table = page.read_text().split("| optimizer | fp32:")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:]]
    return {name: float(bound) for _, names, bound, _ in rows for name in names.split(", ")}


PUBLISHED = published()
OTHER_ORDERS = pairwise(FACTORS, allowed=lambda row: quick(row) and not has_one_order(row), seed=23)


def test_the_page_has_a_bound_for_every_optimizer():
    assert PUBLISHED.keys() == set(FACTORS["optimizer"])


def assert_as_published(results, row):
    settings = (row["optimizer"], row["tied"], row["frozen"], row["clip"])
    expected, norms = reference(*settings, torch.float32)
    bound = PUBLISHED[row["optimizer"]]
    error = max(1e-6, bound / 100)  # a norm is one of many weights
    assert_equal_run(results, row, expected, norms, error, rtol=0, atol=bound)


@pytest.mark.parametrize("row", some_quick(OTHER_ORDERS, 4), ids=label)
def test_fp32_is_as_published_in_any_other_order(ranks, row):
    assert_as_published(ranks(world(row), train, row, torch.float32), row)


@pytest.mark.campaign
@pytest.mark.parametrize("row", GRID, ids=label)
def test_every_place_of_the_grid_in_fp32_has_the_same_bits_or_is_as_published(ranks, row):
    if row["optimizer"] in BIT_EQUAL and has_one_order(row):
        row = row | {"clip": None}
        assert_same_bits(ranks(world(row), train, row, torch.float32), row)
    else:
        assert_as_published(ranks(world(row), train, row, torch.float32), row)
