"""Values that every rank gets from every rank."""

import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import ParallelLayout, ParallelState, agreement_device, share_json


def shared(values):
    with ParallelState(ParallelLayout(dp=len(values))) as state:
        calls = []
        real = dist.all_gather
        dist.all_gather = lambda *args, **options: calls.append(1) or real(*args, **options)
        try:
            found = share_json(values[state.rank], state.group("dp"), device=state.device)
        finally:
            dist.all_gather = real
        return found, len(calls)


@pytest.mark.parametrize(
    ("values", "gathers"),
    [
        ([["a", 1.5], None, {"wörter": [None, True]}], 1),
        ([[], "x" * 5000, 0], 1),
        ([None, None], 0),
    ],
)
def test_every_rank_gets_all_values_by_rank(ranks, values, gathers):
    assert ranks(len(values), shared, values) == [(values, gathers)] * len(values)


def test_one_rank_shares_with_itself():
    assert share_json((1, 2), None) == [[1, 2]]
    assert share_json(None, None) == [None]


def test_what_json_cannot_hold_is_a_type_error():
    with pytest.raises(TypeError, match="not JSON serializable"):
        share_json(object(), None)


def test_a_group_without_a_backend_for_cpus_agrees_on_its_device():
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert agreement_device(group, "cuda:3") == torch.device("cuda:3")
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, _gloo())
    assert agreement_device(group, "cuda:3") == torch.device("cpu")


def _gloo():
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


def test_hosts_of_a_gloo_group_agree_on_cpus(ranks):
    def body():
        with ParallelState(ParallelLayout(dp=2)) as state:
            return str(agreement_device(state.group("dp"), "cuda"))

    assert ranks(2, body) == ["cpu", "cpu"]
    assert agreement_device(None, "cuda") == torch.device("cpu")
