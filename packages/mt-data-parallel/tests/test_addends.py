"""What a rank added to sums, which it knows after they are sums."""

import math

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer, Reduction, reduce_partial_grads, shard
from mt_parallel_state import ParallelLayout, ParallelState, PartitionSpec, shard_param
from torch import nn

STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")


def groups(levels):
    if levels == 1:
        return {"replicas": dist.group.WORLD}
    made = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    own = [group for ranks, group in made.items() if dist.get_rank() in ranks]
    return {"shards": own[0], "replicas": own[1]}


def added(strategy, levels, gradients, options=None, finish=1.0, dtype=torch.float32, more=None):
    """Train two steps with given gradients of each rank and backward; return the last addends."""
    model = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in ("a", "b", "c")})
    model.to(dtype)
    rank = dist.get_rank()
    with shard(
        model,
        strategy,
        group=Reduction(**groups(levels), **(options or {})),
        units=list(model.values()),
        bucket_size=1,
        **(more or {}),
    ) as buffer:
        for own in ([{"a": math.nan, "b": 9.0, "c": 9.0}], gradients[rank]):
            buffer.start(len(own))
            for values in own:
                rows = {name: torch.zeros(1, 3, dtype=dtype) for name in model}
                for name, value in values.items():
                    rows[name][0, 1] = value
                sum(model[name](row).sum() for name, row in rows.items()).backward()
            buffer.finish(scale=finish)
            found = buffer.addends()
            buffer.gather_params()
        return {name.removesuffix(".weight"): size for name, size in found.items()}


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_knows_its_own_gradients_and_no_others(ranks, strategy, levels):
    if strategy == "none" and levels == 2:
        levels = 1
    gradients = [
        [{"a": 1.0, "b": -2.0}, {"a": 0.0, "b": math.inf}],
        [{"a": -3.0, "b": -math.inf, "c": 0.5}, {"a": 0.0, "c": 0.25}],
        [{"a": 1.0}, {"a": math.nan, "b": 1.0}],
        [{"c": -1e38}, {"c": 0.0}],
    ]
    seen = ranks(4, added, strategy, levels, gradients)
    assert seen[0] == {"a": 1.0, "b": math.inf, "c": 0.0}
    # Where each backward is reduced alone, so is what was largest.
    assert seen[1] == {
        "a": 3.0,
        "b": math.inf,
        "c": 0.5 if strategy in ("optimizer_gradients", "full") else 0.75,
    }
    assert math.isnan(seen[2].pop("a"))
    assert seen[2] == {"b": 1.0, "c": 0.0}
    assert seen[3] == {"a": 0.0, "b": 0.0, "c": pytest.approx(1e38)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_addends_are_in_the_scale_of_the_sums(ranks, strategy):
    gradients = [[{"a": 1.0, "b": 2.0, "c": -8.0}]] * 2
    for options, factor in (({"scale": 0.25}, 0.25), ({"average": True}, 0.5)):
        seen = ranks(2, added, strategy, 1, gradients, options, 0.5)
        assert seen == [{"a": factor / 2, "b": factor, "c": 4 * factor}] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("offload", [False, True])
def test_addends_are_known_in_any_dtype_and_beside_shards_on_the_host(ranks, dtype, offload):
    gradients = [[{"a": math.nan, "b": 2.0}], [{"a": 1.0, "b": 4.0, "c": math.inf}]]
    options = {"reduce_dtype": torch.bfloat16, "local_sum": True}
    more = {"grad_dtype": dtype, "offload": offload}
    first, second = ranks(2, added, "optimizer", 1, gradients, options, 1.0, dtype, more)
    assert math.isnan(first.pop("a"))
    assert first == {"b": 2.0, "c": 0.0}
    assert second == {"a": 1.0, "b": 4.0, "c": math.inf}


def test_gradients_that_nobody_sums_are_not_noted_and_partial_ones_are(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=2)) as state:
            params = {name: nn.Parameter(torch.zeros(3)) for name in ("norm", "weight")}
            shard_param(params["norm"], PartitionSpec(), partial_grad=("tp",))
            with GradBuffer(params.items(), group=None) as buffer:
                buffer.start(1)
                sum((p * (state.rank + 1)).sum() for p in params.values()).backward()
                with pytest.raises(RuntimeError, match=r"finish\(\) was not called"):
                    buffer.addends()
                buffer.finish()
                reduce_partial_grads(params.items(), state)
                return buffer.addends(), params["norm"].grad.tolist()

    assert ranks(2, body) == [({"norm": 1.0}, [3.0] * 3), ({"norm": 2.0}, [3.0] * 3)]


def test_a_rank_that_steps_nothing_has_a_piece_that_knows_its_addends(ranks):
    def body():
        weight = nn.Parameter(torch.zeros(2))
        whole = {"whole": lambda *_: True}
        with GradBuffer(
            [("w", weight)], group=Reduction(shards=dist.group.WORLD), **whole
        ) as buffer:
            buffer.start(1)
            (weight * (dist.get_rank() + 1)).sum().backward()
            buffer.finish()
            buffer.gather_params()
            empty = buffer.empty_shard()
            return len(buffer.shards()), empty.grad, empty.phase.addends.magnitudes()

    assert ranks(2, body) == [(1, None, {"w": 1.0}), (0, None, {"w": 2.0})]
