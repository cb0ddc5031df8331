"""Experts on several ranks against all on one rank: outputs, gradients and communication."""

import itertools

import pytest
import torch
from mt_moe import (
    Capacity,
    ExpertGroups,
    ExpertOptions,
    MoELayer,
    MoEOptions,
    RouterOptions,
    make_dispatcher,
)
from mt_moe.dispatch.all_gather import AllGatherDispatcher
from mt_moe.dispatch.all_to_all import AllToAllDispatcher
from mt_moe.dispatch.choice import DISPATCHERS
from mt_moe.dispatch.local import LocalDispatcher
from mt_parallel_state import ParallelLayout, ParallelState, offsets_of, sharding_of
from mt_testing import HostSyncs, pairwise
from plain import F64, assert_same, drawn
from torch import distributed as dist

HIDDEN, FFN, EXPERTS = 6, 8, 8
LOSSES = {"aux": 0.3, "sequence_aux": 0.2, "z": 0.1}
CAPACITIES = {
    "none": None,
    "probability": Capacity(factor=0.75),
    "position": Capacity(factor=0.75, policy="position"),
    "probability_padded": Capacity(factor=1.25, pad=True),
    "position_padded": Capacity(factor=0.5, policy="position", pad=True),
}
PLACES = {  # who is where
    "dispatcher": ("all_to_all", "all_gather"),
    "ep": (1, 2, 4),
    "etp": (1, 2),
    "tokens": ("whole", "sequence_parallel", "repeated"),
}
CHOICES = {  # what tokens choose
    "capacity": tuple(CAPACITIES),
    "top_k": (1, 2, 4),
    "load": ("drawn", "half_empty", "one_expert"),
}
MORE = {
    "multiple": (1, 4),
    "shared": (False, True),
    "latent": (None, 4),
    "valid": (False, True),
    "gated": (True, False),
    "scaled": (False, True),
}


def options_of(row):
    router = RouterOptions(
        **{"top_k": row["top_k"], "score": "sigmoid", "normalize": row["top_k"] > 1},
        **{"dtype": F64, "losses": LOSSES, "linear_bias": True, "jitter": 0.05},
    )
    gated = row.get("gated", True)
    experts = ExpertOptions(
        **{"activation": "silu" if gated else "relu2", "gated": gated, "bias": True},
        multiple=row.get("multiple", 1),
    )
    shared = row.get("shared", True)
    return {
        **{"router": router, "experts": experts, "capacity": CAPACITIES[row["capacity"]]},
        **{"shared_size": 4 * shared, "shared_gate": shared, "latent_size": row.get("latent")},
        "scale_input": row.get("scaled", False),
    }


def made(row, **extra):
    """The same logical layer, whatever the layout."""
    torch.manual_seed(0)
    dispatcher = extra.pop("dispatcher", "auto")
    options = MoEOptions(**options_of(row), dispatcher=dispatcher)
    layer = MoELayer(HIDDEN, FFN, EXPERTS, options=options, dtype=F64, **extra)
    with torch.no_grad():
        if row["load"] == "half_empty":
            layer.router.bias[EXPERTS // 2 :] = -9
        if row["load"] == "one_expert":
            layer.router.bias[5] = 4
    return layer


def step(layer, x, grad, **inputs):
    """Output and input's gradient; parameters keep theirs."""
    x = x.clone().requires_grad_()
    out = layer(x, **inputs)
    losses = sum(loss.sum for loss in out.losses.values())
    ((out.hidden * grad).sum() + losses).backward()
    return {"y": out.hidden.detach(), "x": x.grad}, out.dropped, out.load


def whole_gradients(layer, state):
    """Each parameter's gradient as the trainer sums it: over partial axes and replicas."""
    found = {}
    for name, param in layer.named_parameters():
        grad, record = param.grad.clone(), sharding_of(param)
        is_expert = name.startswith("experts.")
        for axis in (*record.partial_grad, "edp" if is_expert else "dp"):
            group = state.group(axis)
            if group is not None:
                dist.all_reduce(grad, group=group)
        found[name] = grad
    return found


def check(row):
    """One row of the grid, on a rank."""
    world, tp = dist.get_world_size(), 1 if row["tokens"] == "whole" else 2
    layout = ParallelLayout(tp=tp, dp=world // tp, ep=row["ep"], etp=row["etp"])
    sequence_parallel = row["tokens"] == "sequence_parallel"
    shape = (2, 7 if row["tokens"] == "repeated" else 6)
    with ParallelState(layout) as state:
        groups = ExpertGroups.of(state)
        split = {"groups": groups, "sequence_parallel": sequence_parallel}
        whole, own = made(row), made(row, dispatcher=row["dispatcher"], **split)
        replicas, dropped = [], []
        for replica in range(layout.dp):
            x, grad = drawn(2, *shape, HIDDEN, seed=replica)
            index = torch.arange(shape[0] * shape[1]).view(shape) + 100 * replica
            valid = drawn(*shape, seed=9) > -1 if row.get("valid") else None
            inputs = {"valid": valid, "token_index": index}
            found, lost, load = step(whole, x, grad, **inputs)
            replicas.append((found, x, grad, inputs))
            dropped.append((lost, load))
        expected, x, grad, inputs = replicas[state.index("dp")]
        if sequence_parallel:

            def part(t):
                return None if t is None else t.chunk(2, 1)[state.index("tp")]

            expected = {name: part(t) for name, t in expected.items()}
            x, grad, inputs = part(x), part(grad), {n: part(t) for n, t in inputs.items()}
        found, lost, load = step(own, x, grad, **inputs)
        assert_same(found, expected)
        grads = whole_gradients(own, state)
        for name, param in own.named_parameters():
            start = offsets_of(param, layout, state.rank)
            reference = whole.get_parameter(name).grad
            box = tuple(slice(a, a + n) for a, n in zip(start, param.shape, strict=True))
            assert_same({name: grads[name]}, {name: reference[box]})
        counted = torch.cat([load, torch.zeros(1).long() if lost is None else lost.view(1)])
        if tp > 1:
            dist.all_reduce(counted, group=state.group("tp"))
        lost, load = dropped[state.index("dp")]
        assert torch.equal(counted[:-1], load)
        assert int(counted[-1]) == (0 if lost is None else int(lost))
        del own, groups


def world_of(row):
    return max(row["ep"] * row["etp"], 1 if row["tokens"] == "whole" else 2)


SAMPLE = pairwise(PLACES | CHOICES | MORE, seed=3)


@pytest.mark.parametrize("row", SAMPLE, ids=lambda r: "-".join(str(v) for v in r.values()))
def test_experts_on_many_ranks_equal_all_of_them_on_one(ranks, row):
    ranks(world_of(row), check, row)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "place", [dict(zip(PLACES, each, strict=True)) for each in itertools.product(*PLACES.values())],
    ids=lambda r: "-".join(str(v) for v in r.values()),
)  # fmt: skip
def test_every_place_and_every_choice_equals_one_rank(ranks, place):
    def body():
        for each in itertools.product(*CHOICES.values()):
            check(place | dict(zip(CHOICES, each, strict=True)))

    ranks(world_of(place), body, timeout=300)


DISTRIBUTED = [AllToAllDispatcher, AllGatherDispatcher]


def sent_of(tokens, k, seed, *, none=False):
    """Tokens, choices (some of no expert) and weights."""
    x = drawn(tokens, HIDDEN, seed=seed)
    experts = drawn(tokens, EXPERTS, seed=seed + 50).topk(k).indices
    if none:
        experts = experts.masked_fill(drawn(tokens, k, seed=seed + 60) > 0.5, EXPERTS)
    return x, experts, drawn(tokens, k, seed=seed + 70).softmax(1)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("none", [False, True])
def test_combining_what_was_sent_is_the_weighted_sum_on_one_rank(k, none):
    x, experts, weights = sent_of(17, k, 0, none=none)
    kept = (weights * (experts < EXPERTS)).sum(1, keepdim=True)
    for kind in (LocalDispatcher, AllToAllDispatcher, AllGatherDispatcher):
        made = kind(EXPERTS) if kind is LocalDispatcher else kind(EXPERTS, ExpertGroups())
        sent = made.dispatch(x, experts, weights, drops=none)
        assert_same({"y": made.combine(sent.rows, sent.handle)}, {"y": kept * x})
        assert int(sent.counts.sum()) == int((experts < EXPERTS).sum())
        assert sent.exact == (len(sent.rows) == int(sent.counts.sum()))


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_combining_what_was_sent_is_the_identity_whatever_each_rank_has(ranks, kind, etp):
    """Ranks with different numbers of tokens, one with none; one expert gets all of some rank."""

    def body():
        rank = dist.get_rank()
        groups = ExpertGroups(experts=dist.group.WORLD, etp=etp)
        made = kind(EXPERTS, groups)
        for k, none in ((1, False), (3, False), (3, True)):
            x, experts, weights = sent_of((5, 0, 13, 1)[rank], k, rank, none=none)
            if rank == 2:
                experts[:, 0] = 6
            x.requires_grad_()
            weights.requires_grad_()
            sent = made.dispatch(x, experts, weights, drops=none)
            y = made.combine(sent.rows, sent.handle)
            kept = etp * (weights * (experts < EXPERTS)).sum(1, keepdim=True)
            assert_same({"y": y}, {"y": kept * x})
            grad = drawn(*y.shape, seed=9)
            inputs = (x, weights)
            found = torch.autograd.grad(y, inputs, grad)
            expected = torch.autograd.grad(kept * x, inputs, grad)
            assert_same(dict(enumerate(found)), dict(enumerate(expected)))
            first = groups.place[0] * made.local_experts
            rows = list(zip(x[:, 0].tolist(), experts.tolist(), strict=True))
            everyone = [None] * 4
            dist.all_gather_object(everyone, rows)
            wanted = [
                sorted(v for each in everyone for v, e in each for own in e if own == expert)
                for expert in range(first, first + made.local_experts)
            ]
            parts = sent.rows[: int(sent.counts.sum()), 0].split(sent.counts.tolist())
            assert [sorted(part.tolist()) for part in parts] == wanted

    ranks(4, body)


class Wire:
    """Counts the bytes that this rank sends to others, by collective."""

    def __enter__(self):
        self.sent, self.real = {}, {}
        for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
            self.real[name] = getattr(dist, name)
            setattr(dist, name, lambda *a, name=name, **k: self._call(name, *a, **k))
        return self

    def __exit__(self, *_):
        for name, function in self.real.items():
            setattr(dist, name, function)

    def _call(self, name, output, x, *splits, group=None, **options):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        parts = splits[1] if splits else [len(x) // size] * size
        gathers = name == "all_gather_into_tensor"
        rows = (size - 1) * len(x) if gathers else sum(parts) - parts[rank]
        row = x[:1].numel() if len(x) else 0
        kind = "counts" if name == "all_to_all_single" and x.dtype == torch.int64 else name
        self.sent[kind] = self.sent.get(kind, 0) + rows * row * x.element_size()
        return self.real[name](output, x, *splits, group=group, **options)

    def take(self):
        found, self.sent = self.sent, {}
        return found


@pytest.mark.parametrize("etp", [1, 2])
def test_all_to_all_sends_what_its_formula_says(ranks, etp):
    def body():
        rank, tokens, k = dist.get_rank(), 24, 3
        groups = ExpertGroups(experts=dist.group.WORLD, etp=etp)
        made = AllToAllDispatcher(EXPERTS, groups)
        x, experts, weights = sent_of(tokens, k, rank)
        x.requires_grad_()
        made.dispatch(x, experts, weights)  # the first compares settings
        with Wire() as wire:
            sent = made.dispatch(x, experts, weights)
            forward = wire.take()
            y = made.combine(sent.rows, sent.handle)
            back = wire.take()
            y.backward(torch.ones_like(y))
            backward = wire.take()
        row, here = HIDDEN * 8, groups.place[0]
        stay = int((experts // made.local_experts == here).sum())
        rows = tokens * k * etp - stay
        arrived = len(sent.rows)
        assert forward == {"all_to_all_single": rows * row, "counts": 8 * EXPERTS * etp * 3 // 4}
        assert back == {"all_to_all_single": (arrived - stay) * row}
        assert backward == {"all_to_all_single": (rows + arrived - stay) * row}

    ranks(4, body)


@pytest.mark.parametrize("k", [1, 4])
def test_all_gather_sends_what_its_formula_says_whatever_k(ranks, k):
    def body():
        tokens = 24
        made = AllGatherDispatcher(EXPERTS, ExpertGroups(experts=dist.group.WORLD))
        x, experts, weights = sent_of(tokens, k, dist.get_rank())
        x.requires_grad_()
        weights.requires_grad_()
        made.dispatch(x, experts, weights)
        with Wire() as wire:
            sent = made.dispatch(x, experts, weights)
            forward = wire.take()
            y = made.combine(sent.rows, sent.handle)
            back = wire.take()
            y.backward(torch.ones_like(y))
            backward = wire.take()
        rows, shares, numbers = (3 * tokens * n * 8 for n in (HIDDEN, k, k))
        assert forward == {"all_gather_into_tensor": rows + shares + numbers}
        assert back == {"reduce_scatter_tensor": rows}
        assert backward == {"all_gather_into_tensor": rows, "reduce_scatter_tensor": rows + shares}

    ranks(4, body)


@pytest.mark.parametrize(("kind", "waits"), [("local", 0), ("all_to_all", 1), ("all_gather", 2)])
def test_the_host_waits_as_often_as_the_table_says(kind, waits):
    made = make_dispatcher(kind, EXPERTS, ExpertGroups())
    x, weights = (torch.empty(12, n, device="meta", requires_grad=True) for n in (HIDDEN, 2))
    experts = torch.empty(12, 2, device="meta", dtype=torch.int64)
    for _ in range(2):  # the first puts a table on the device
        with HostSyncs("meta") as syncs:
            sent = made.dispatch(x, experts, weights)
            made.combine(sent.rows, sent.handle).sum().backward()
    assert len(syncs) == waits, str(syncs)


def test_auto_is_local_on_one_rank_and_a_name_that_cannot_serve_says_why(ranks):
    assert isinstance(make_dispatcher("auto", EXPERTS, ExpertGroups()), LocalDispatcher)
    assert DISPATCHERS.names == ("auto", "local", "all_to_all", "all_gather", "deepep")

    def body():
        groups = ExpertGroups(experts=dist.group.WORLD)
        assert isinstance(make_dispatcher("auto", EXPERTS, groups), AllToAllDispatcher)
        with pytest.raises(ValueError, match="it is for one rank, and 2 share the experts"):
            make_dispatcher("local", EXPERTS, groups)
        for kind in DISTRIBUTED:
            with pytest.raises(ValueError, match="num_experts=7 can't be divided evenly over ep=2"):
                kind(7, groups)

    ranks(2, body)
