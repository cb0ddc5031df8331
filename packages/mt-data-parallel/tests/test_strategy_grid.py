"""Every strategy on every layout against one process, whole parameters and an optimizer of torch.

Each layer reads inputs of its own, so that a stage or a shard can compute its part of the loss
without the others, and one process all of it. What is compared is everything else: buckets,
reductions, partial sums, what is fetched when, and what is stepped where. CI runs a sample in which
every pair of settings meets; the campaign runs every place, where the ways take turns.
"""

import functools
import itertools
import re
import zlib
from pathlib import Path

import pytest
import torch
from mt_data_parallel import Reduction, reduce_partial_grads, shard
from mt_parallel_state import ParallelLayout, ParallelState, PartitionSpec, shard_param
from mt_testing import pairwise
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS, SAMPLES, LAYERS, WIDTH, LR = 6, 8, 4, 6, 0.02
# name: shape, and the dim that tensor parallelism splits (or "partial")
LAYER = {"norm": ((WIDTH,), "partial"), "weight": ((8, WIDTH), 0), "bias": ((8,), 0)}
TABLE = ((10, WIDTH), 0)
WHERE = {
    "strategy": ("none", "optimizer", "optimizer_gradients", "full"),
    "replicas": (1, 2),
    "dp": (1, 2, 4),
    "tp": (1, 2),
    "pp": (1, 2),
}
HOW = {
    "accumulation": (1, 2),
    "tied": (False, True),
    "frozen": (False, True),
    "overlap": (True, False),
    "bucket_size": (1, 100, None),
}
# What changes no number either: among the ways these take turns.
MORE = {
    "optimizer": ("adamw", "sgd"),
    "prefetch": (1, 0, 2),
    "offload": (False, True),
    "local_sum": (False, True),
    "recompute": (False, True),
}


def can_be(row):
    """Copies of what is shared out need both."""
    return row["replicas"] == 1 or (row["strategy"] != "none" and row["dp"] % row["replicas"] == 0)


def world(row):
    return row["dp"] * row["tp"] * row["pp"]


def crossed(factors):
    """All rows of some factors."""
    return [dict(zip(factors, row, strict=True)) for row in itertools.product(*factors.values())]


def some_quick(rows, every):
    """One row of several for CI, and all for the campaign."""
    return [
        pytest.param(row, marks=() if number % every == 0 else pytest.mark.campaign)
        for number, row in enumerate(rows)
    ]


PLACES = [where for where in crossed(WHERE) if can_be(where)]
WAYS = [
    how
    | {
        key: values[number // turn % len(values)]
        for turn, (key, values) in enumerate(MORE.items(), 2)
    }
    for number, how in enumerate(crossed(HOW))
]
SAMPLE = pairwise(WHERE | HOW | MORE, allowed=lambda row: can_be(row) and world(row) <= 4, seed=12)


def label(row):
    return "-".join(f"{key}={value}" for key, value in row.items())


def drawn(*key, shape):
    seed = zlib.crc32(repr(key).encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(TABLE[0][0], (SAMPLES, 3), generator=generator)


def logical(tied):
    """Shape and split dim of each logical parameter."""
    layers = {f"layers.{i}.{key}": what for i in range(LAYERS) for key, what in LAYER.items()}
    return {"embedding": TABLE, **layers} | ({} if tied else {"head": TABLE})


def is_frozen(name, frozen):
    return frozen and (name.startswith("layers.1.") or name in ("layers.2.weight", "embedding"))


class Place:
    """Which part of everything a rank has."""

    def __init__(self, *, stage=0, stages=1, part=0, parts=1):
        self.stage, self.stages, self.part, self.parts = stage, stages, part, parts

    def own(self, whole, dim):
        return whole.chunk(self.parts, dim)[self.part]


def make(name, place, tied, frozen, dtype, **record):
    """Make this place's shard of a parameter, with its record."""
    shape, dim = logical(tied)[name]
    is_split = isinstance(dim, int)
    whole = drawn(name, shape=shape).to(dtype)
    param = nn.Parameter((place.own(whole, dim) if is_split else whole).clone())
    param.requires_grad_(not is_frozen(name, frozen))
    partial = ("tp",) if dim == "partial" else record.pop("partial_grad", ())
    spec = PartitionSpec("tp") if is_split else PartitionSpec()
    return shard_param(param, spec, partial_grad=partial, **record)


class Layer(nn.Module):
    """A scaled, column-parallel layer that adds what its outputs are pulled with to the loss."""

    def __init__(self, number, place, tied, frozen, dtype):
        super().__init__()
        self.name, self.place, self.dtype = f"layers.{number}", place, dtype
        for key in LAYER:
            param = make(f"{self.name}.{key}", place, tied, frozen, dtype)
            self.register_parameter(key, param)

    def forward(self, loss, step, samples):
        x = drawn(self.name, "x", step, shape=(SAMPLES, WIDTH)).to(self.dtype)[samples]
        pull = drawn(self.name, "pull", step, shape=(SAMPLES, LAYER["bias"][0][0])).to(self.dtype)
        y = torch.tanh((x * self.norm) @ self.weight.T + self.bias)
        return loss + (y * self.place.own(pull[samples], 1)).sum()


class Net(nn.Module):
    """A stage: its layers, the table of lookups on the first and of scores on the last."""

    def __init__(self, place, tied, frozen, dtype, *, recompute=False):
        super().__init__()
        self.place, self.dtype, self.recompute = place, dtype, recompute
        self.first, self.last = place.stage == 0, place.stage == place.stages - 1
        args, count = (place, tied, frozen, dtype), LAYERS // place.stages
        numbers = range(place.stage * count, (place.stage + 1) * count)
        self.layers = nn.ModuleDict({str(n): Layer(n, *args) for n in numbers})
        shared = {"partial_grad": ("embedding",)} if tied and place.stages > 1 else {}
        if self.first or (self.last and tied):
            copy = {"is_copy": self.last} if shared else {}
            self.embedding = make("embedding", *args, **shared, **copy)
        if self.last and not tied:
            self.head = make("head", *args)
        self.scores = "embedding" if tied else "head"

    def looked_up(self, step, samples):
        table, tokens = self.embedding, tokens_of(step)[samples]
        rows = tokens - self.place.part * len(table)
        here = ((rows >= 0) & (rows < len(table))).to(self.dtype)
        pull = drawn("lookup", step, shape=(SAMPLES, 3, WIDTH)).to(self.dtype)[samples]
        found = table[rows.clamp(0, len(table) - 1)]
        return (torch.tanh(found) * pull * here.unsqueeze(-1)).sum()

    def scored(self, step, samples):
        table = getattr(self, self.scores)
        x = drawn("scores", "x", step, shape=(SAMPLES, WIDTH)).to(self.dtype)[samples]
        pull = drawn("scores", "pull", step, shape=(SAMPLES, TABLE[0][0])).to(self.dtype)[samples]
        return (torch.tanh(x @ table.T) * self.place.own(pull, 1)).sum()

    def forward(self, step, first, end):
        """Return this place's part of the loss of some samples."""
        samples = slice(first, end)
        loss = torch.zeros((), dtype=self.dtype)
        if self.first:
            loss = loss + self.looked_up(step, samples)
        for layer in self.layers.values():
            args = (loss, step, samples)
            loss = checkpoint(layer, *args, use_reentrant=False) if self.recompute else layer(*args)
        return loss + self.scored(step, samples) if self.last else loss


def optimizer_of(name, params):
    if name == "sgd":
        return torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.1, foreach=True)
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.1, fused=True)


def group_of(row, state):
    if row["strategy"] == "none":
        return Reduction(replicas=state.group("dp"), local_sum=row["local_sum"])
    if row["replicas"] == 1:
        return Reduction(shards=state.group("dp"), local_sum=row["local_sum"])
    sizes = (row["dp"] // row["replicas"], row["replicas"])
    inner, outer = state.level_groups("dp", sizes)
    return Reduction(shards=inner, replicas=outer, local_sum=row["local_sum"])


def train(row, state, dtype):
    """Train one row; return this rank's whole parameters by name."""
    place = Place(
        stage=state.index("pp"),
        stages=state.size("pp"),
        part=state.index("tp"),
        parts=state.size("tp"),
    )
    net = Net(place, row["tied"], row["frozen"], dtype, recompute=row["recompute"])
    kept = ("overlap", "bucket_size", "prefetch")
    kept += () if row["strategy"] == "none" else ("offload",)
    how = {key: row[key] for key in kept}
    with shard(net, row["strategy"], group=group_of(row, state), **how) as buffer:
        pieces = buffer.shards()
        params = [piece.param for piece in pieces] or [torch.zeros(0)]
        optimizer = optimizer_of(row["optimizer"], params)
        for step in range(STEPS):
            buffer.start(row["accumulation"])
            for samples in shares_of(row)[state.index("dp")]:
                net(step, *samples).backward()
            buffer.finish()
            reduce_partial_grads(pieces, state)
            optimizer.step()
            buffer.gather_params()
        with buffer.gathered():
            params = {name: param.detach().clone() for name, param in net.named_parameters()}
    return (state.index("tp"), params)


def train_all(where, ways, dtype):
    """Train a place with several ways."""
    layout = ParallelLayout(tp=where["tp"], dp=where["dp"], pp=where["pp"])
    with ParallelState(layout) as state:
        return [train(where | how, state, dtype) for how in ways]


def shares_of(row):
    """First and end of the samples of each backward of each replica."""
    size = SAMPLES // row["dp"] // row["accumulation"]
    starts = range(0, SAMPLES, size)
    parts, each = [(start, start + size) for start in starts], row["accumulation"]
    return [tuple(parts[i : i + each]) for i in range(0, len(parts), each)]


WHOLE = (((0, SAMPLES),),)


@functools.cache
def reference(optimizer, tied, frozen, dtype, terms=WHOLE):
    """One process; `terms` are the samples of each backward, by the sums that are added up."""
    net = Net(Place(), tied, frozen, dtype)
    params = {name: p for name, p in net.named_parameters() if p.requires_grad}
    steps = optimizer_of(optimizer, list(params.values()))
    for step in range(STEPS):
        totals = {}
        for term in terms:
            grads = {}
            for samples in term:
                net.zero_grad()
                net(step, *samples).backward()
                for name, param in params.items():
                    grads[name] = grads[name] + param.grad if name in grads else param.grad.clone()
            for name, grad in grads.items():
                totals[name] = totals[name] + grad if name in totals else grad
        for name, param in params.items():
            param.grad = totals[name]
        steps.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def joined(results, tied):
    """Put the shards together; ranks that hold the same have the same bits."""
    parts = {}
    for part, params in results:
        for name, param in params.items():
            first = parts.setdefault((name, part), param)
            assert torch.equal(first, param), (name, part)
    count = 1 + max(part for _, part in parts)
    return {
        name: torch.cat([parts[name, i] for i in range(count)], dim)
        if isinstance(dim, int)
        else parts[name, 0]
        for name, (_, dim) in logical(tied).items()
    }


def assert_equal(results, row, expected, **bounds):
    found = joined(results, row["tied"])
    assert found.keys() == expected.keys()
    for name, param in found.items():
        torch.testing.assert_close(
            param, expected[name], **bounds, msg=lambda text, name=name: f"{row} {name}: {text}"
        )


def assert_like_one_process(results, row):
    expected = reference(row["optimizer"], row["tied"], row["frozen"], torch.float64)
    assert_equal(results, row, expected, rtol=1e-12, atol=1e-12)


def run_all(ranks, where, ways, dtype):
    """Run a place with several ways; yield each row with what its ranks found."""
    found = ranks(world(where), train_all, where, ways, dtype, timeout=400)
    for how, *results in zip(ways, *found, strict=True):
        yield where | how, results


@pytest.mark.parametrize("row", SAMPLE, ids=label)
def test_every_pair_of_settings_steps_like_one_process_to_1e_minus_12(ranks, row):
    for one, results in run_all(ranks, row, [{}], torch.float64):
        assert_like_one_process(results, one)


@pytest.mark.campaign
@pytest.mark.parametrize("where", PLACES, ids=label)
def test_every_place_steps_like_one_process_to_1e_minus_12(ranks, where):
    ways = WAYS[PLACES.index(where) % 5 :: 5]
    for row, results in run_all(ranks, where, ways, torch.float64):
        assert_like_one_process(results, row)


# In fp32 a sum of two has one order; a tied table has its two uses in another order on two stages.


def has_one_order(row):
    return row["dp"] <= 2 and row["tp"] == 1 and not (row["tied"] and row["pp"] > 1)


def assert_same_bits(results, row):
    # What overlaps is reduced after each backward; what does not, after the last one.
    each_backward = row["strategy"] in ("optimizer_gradients", "full") and row["overlap"]
    shares = shares_of(row)
    terms = tuple(zip(*shares, strict=True)) if each_backward else tuple(shares)
    expected = reference(row["optimizer"], row["tied"], row["frozen"], torch.float32, terms)
    assert_equal(results, row, expected, rtol=0, atol=0)


ORDERED = pairwise(WHERE | HOW | MORE, allowed=lambda r: can_be(r) and has_one_order(r), seed=32)


@pytest.mark.parametrize("row", some_quick(ORDERED, 2), ids=label)
def test_fp32_is_bit_equal_where_the_order_of_additions_is_the_same(ranks, row):
    for one, results in run_all(ranks, row, [{}], torch.float32):
        assert_same_bits(results, one)


def published():
    """The table of the page: by how much weights may differ in fp32."""
    page = (Path(__file__).parents[3] / "docs" / "mt-data-parallel.md").read_text()
    rows = page.split("| optimizer | fp32:")[1].split("\n\n")[0]
    return {name: float(bound) for name, bound in re.findall(r"\| (\w+) \| ([\d.e-]+) \|", rows)}


def assert_as_published(results, row):
    expected = reference(row["optimizer"], row["tied"], row["frozen"], torch.float32)
    assert_equal(results, row, expected, rtol=0, atol=published()[row["optimizer"]])


OTHERS = pairwise(
    WHERE | HOW | MORE,
    allowed=lambda row: can_be(row) and world(row) <= 8 and not has_one_order(row),
    seed=23,
)


@pytest.mark.parametrize("row", some_quick(OTHERS, 4), ids=label)
def test_fp32_is_as_published_in_any_other_order(ranks, row):
    for one, results in run_all(ranks, row, [{}], torch.float32):
        assert_as_published(results, one)


@pytest.mark.campaign
@pytest.mark.parametrize("where", PLACES, ids=label)
def test_every_place_in_fp32_has_the_same_bits_or_is_as_published(ranks, where):
    ways = WAYS[PLACES.index(where) % 11 :: 11]
    for row, results in run_all(ranks, where, ways, torch.float32):
        (assert_same_bits if has_one_order(row) else assert_as_published)(results, row)
