import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer, reduce_partial_grads
from mt_parallel_state import ParallelLayout, ParallelState, PartitionSpec, shard_param
from torch import nn


def make(shape, *, partial=(), spec=None, dtype=torch.float32, grad=None):
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    shard_param(param, spec or PartitionSpec(), partial_grad=partial)
    if grad is not None:
        param.grad = torch.full_like(param, grad)
    return param


@pytest.mark.parametrize("buffered", [False, True])
def test_only_marked_gradients_are_summed_over_their_axes(ranks, buffered):
    def body():
        with ParallelState(ParallelLayout(tp=2, dp=2)) as state:
            value = float(10**state.rank)
            params = {
                "norm.weight": make(3, partial=("tp",)),
                "out.bias": make((2, 2), partial=("tp",), dtype=torch.float64),
                "out.weight": make(4, spec=PartitionSpec("tp")),
                "last.weight": make(2, partial=("tp",)),
            }
            if buffered:
                buffer = GradBuffer(params.items(), group=None)
                buffer.start(1)
                for param in params.values():
                    (param * value).sum().backward()
                buffer.finish()
            else:
                for param in params.values():
                    param.grad = torch.full_like(param, value)
            reduce_partial_grads(params.items(), state)
            return {name: param.grad.unique().tolist() for name, param in params.items()}

    for rank, grads in enumerate(ranks(4, body)):
        pair = [11.0] if rank < 2 else [1100.0]
        assert grads == {
            "norm.weight": pair,
            "out.bias": pair,
            "out.weight": [float(10**rank)],
            "last.weight": pair,
        }


def test_a_tied_embedding_is_summed_over_first_and_last_stage_only(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=1, pp=4)) as state:
            params = {f"layers.{state.rank}.weight": make(2, grad=1.0)}
            if state.group("embedding") is not None:
                tied = make((3, 2), partial=("embedding",), grad=float(state.rank + 1))
                params["embedding.weight"] = tied
            reduce_partial_grads(params.items(), state)
            return {name: param.grad.unique().tolist() for name, param in params.items()}

    results = ranks(4, body)
    assert results[0] == {"layers.0.weight": [1.0], "embedding.weight": [5.0]}
    assert results[1] == {"layers.1.weight": [1.0]}
    assert results[3] == {"layers.3.weight": [1.0], "embedding.weight": [5.0]}


def test_what_every_stage_has_is_summed_over_all_of_them(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=1, pp=4)) as state:
            params = {f"layers.{state.rank}.weight": make(2, grad=1.0)}
            params["table.weight"] = make(2, partial=("pp",), grad=float(10**state.rank))
            reduce_partial_grads(params.items(), state)
            return {name: param.grad.unique().tolist() for name, param in params.items()}

    for rank, grads in enumerate(ranks(4, body)):
        assert grads == {f"layers.{rank}.weight": [1.0], "table.weight": [1111.0]}


def test_several_axes_are_one_sum_and_embedding_comes_after_them(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=2, pp=2)) as state:
            both = make(2, partial=("embedding", "tp"), grad=float(10**state.rank))
            calls = []
            original = dist.all_reduce

            def spy(tensor, **kwargs):
                calls.append(dist.get_process_group_ranks(kwargs["group"]))
                return original(tensor, **kwargs)

            dist.all_reduce = spy
            try:
                reduce_partial_grads([("both", both)], state)
            finally:
                dist.all_reduce = original
            return both.grad.unique().tolist(), calls

    for rank, (grad, calls) in enumerate(ranks(4, body)):
        assert grad == [1111.0]
        assert calls == [[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]]


def test_order_of_parameters_may_differ_between_ranks(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=2)) as state:
            params = [
                ("a", make(2, partial=("tp",), grad=1.0)),
                ("b", make(2, partial=("tp",), grad=2.0)),
                ("c", make(1, partial=("tp",), dtype=torch.float64, grad=3.0)),
            ]
            if state.rank:
                params.reverse()
            reduce_partial_grads(params, state)
            return {name: param.grad.unique().tolist() for name, param in params}

    assert ranks(2, body) == [{"a": [2.0], "b": [4.0], "c": [6.0]}] * 2


def test_a_missing_gradient_is_zero_to_the_other_ranks(ranks):
    def body():
        with ParallelState(ParallelLayout(tp=2)) as state:
            param = make(2, partial=("tp",), grad=None if state.rank else 4.0)
            reduce_partial_grads([("w", param)], state)
            return param.grad.tolist()

    assert ranks(2, body) == [[4.0, 4.0], [4.0, 4.0]]


def test_one_rank_leaves_everything_alone():
    state = ParallelState(ParallelLayout())
    params = [("w", make(2, partial=("tp", "embedding"), grad=3.0)), ("v", make(2))]
    reduce_partial_grads(params, state)
    assert params[0][1].grad.tolist() == [3.0, 3.0]
    assert params[1][1].grad is None


def test_frozen_parameters_are_left_alone(ranks):
    def body():
        param = nn.Parameter(torch.ones(2), requires_grad=False)
        shard_param(param, PartitionSpec(), partial_grad=("tp",))
        with ParallelState(ParallelLayout(tp=2)) as state:
            reduce_partial_grads([("norm", param)], state)
        return param.grad

    assert ranks(2, body) == [None, None]
