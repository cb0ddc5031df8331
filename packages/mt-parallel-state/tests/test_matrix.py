import copy

import pytest
import torch
from mt_parallel_state import MatrixSpec, PartitionSpec, mark_matrix, shard_param, sharding_of
from mt_parallel_state import shardings as records
from torch import nn


def test_parts_are_views_whose_rows_come_before_the_input_dims():
    x = torch.arange(2 * 4 * 3 * 5).view(2, 4, 3, 5)
    spec = MatrixSpec(part_dim=1, parts=(2, 1, 1))
    query, key, value = spec.views(x)
    assert torch.equal(query, x[:, :2])
    assert torch.equal(value, x[:, 3:])
    assert key.data_ptr() == x[:, 2:].data_ptr()
    assert [spec.shape(tuple(part.shape)) for part in (query, key)] == [(12, 5), (6, 5)]
    assert MatrixSpec(in_dims=2).shape((4, 2, 3)) == (4, 6)
    assert MatrixSpec().views(x) == (x,)


def test_the_record_of_a_matrix_and_of_a_split_do_not_disturb_each_other():
    param = nn.Parameter(torch.zeros(4, 4))
    mark_matrix(shard_param(param, PartitionSpec("tp")), MatrixSpec())
    assert sharding_of(param).spec == PartitionSpec("tp")
    shard_param(param, PartitionSpec(None, "tp"), is_copy=True)
    assert (sharding_of(param).matrix, sharding_of(param).is_copy) == (MatrixSpec(), True)


def test_the_record_survives_a_deep_copy_of_the_module():
    module = nn.Linear(2, 2)
    mark_matrix(module.weight, MatrixSpec())
    records(module)
    assert records(copy.deepcopy(module))["weight"].matrix == MatrixSpec()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"in_dims": 0}, "in_dims must be 1 or more, got 0"),
        ({"part_dim": 0}, "come together"),
        ({"parts": (1,)}, "come together"),
        ({"part_dim": 0, "parts": (1, 0)}, "each part has 1 or more"),
    ],
)
def test_a_spec_that_says_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MatrixSpec(**fields)


def test_parts_of_another_tensor_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3, 2\) has no parts of \(1, 1\) along dim 0"):
        MatrixSpec(part_dim=0, parts=(1, 1)).views(torch.zeros(3, 2))
