"""PartitionSpec and the records on parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_parallel_state import (
    ParallelLayout,
    ParamSharding,
    PartitionSpec,
    global_shape_of,
    offsets_of,
    shard_param,
    sharding_of,
)
from torch import nn

LAYOUTS = [
    ParallelLayout(tp=2, cp=2, dp=2, pp=2),
    ParallelLayout(tp=2, dp=4, ep=4, etp=2),
    ParallelLayout(tp=4, dp=2, order="dp-tp"),
]


@settings(max_examples=40, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), data=st.data())
def test_the_shards_of_a_spec_tile_the_global_array(
    layout: ParallelLayout, data: st.DataObject
) -> None:
    pool = data.draw(st.sampled_from([("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")]))
    names = data.draw(st.permutations(pool))
    cuts = sorted(data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=2)))
    spec = PartitionSpec(None, tuple(names[: cuts[0]]), tuple(names[cuts[0] : cuts[1]]))
    shape = (3, 16, 32)
    local = spec.local_shape(shape, layout)
    assert spec.global_shape(local, layout) == shape
    count = torch.zeros(shape, dtype=torch.int64)
    for rank in range(layout.world_size):
        start = spec.offsets(shape, layout, layout.coordinates(rank))
        box = tuple(slice(s, s + n) for s, n in zip(start, local, strict=True))
        count[box] += 1
    copies = layout.world_size
    for axis in spec.axes:
        copies //= layout.size(axis)
    assert count.eq(copies).all()


def test_the_first_axis_of_a_dim_is_the_major_one() -> None:
    layout = ParallelLayout(tp=2, dp=2)
    spec = PartitionSpec(("dp", "tp"))
    assert spec.offsets((8,), layout, {"dp": 1, "tp": 0}) == (4,)
    assert spec.offsets((8,), layout, {"dp": 0, "tp": 1}) == (2,)


def test_specs_are_values() -> None:
    assert PartitionSpec("tp", None) == PartitionSpec(("tp",)) != PartitionSpec(None, "tp")
    assert len({PartitionSpec("tp"), PartitionSpec("tp", None), PartitionSpec()}) == 2
    assert repr(PartitionSpec(None, ("dp", "tp"))) == "PartitionSpec(None, ('dp', 'tp'))"
    assert PartitionSpec("tp").axes == frozenset({"tp"})


def test_a_spec_that_does_not_fit_names_the_sizes() -> None:
    layout = ParallelLayout(tp=4)
    with pytest.raises(
        ValueError, match=r"dim 1 of shape \(2, 10\) has size 10, which tp = 4.*8 or 12"
    ):
        PartitionSpec(None, "tp").local_shape((2, 10), layout)
    with pytest.raises(ValueError, match="unknown axis 'xp'"):
        PartitionSpec("xp")
    with pytest.raises(ValueError, match="appears twice"):
        PartitionSpec("tp", "tp")
    with pytest.raises(ValueError, match="mixes axes of the dense view"):
        PartitionSpec("tp", "ep")
    with pytest.raises(ValueError, match="has 1 dims"):
        PartitionSpec(None, "tp").local_shape((4,), layout)


def test_an_unmarked_parameter_is_replicated() -> None:
    param = nn.Parameter(torch.zeros(3))
    assert sharding_of(param) == ParamSharding(PartitionSpec())
    assert global_shape_of(param, ParallelLayout(tp=4)) == (3,)


def test_a_marked_parameter_knows_its_box() -> None:
    layout = ParallelLayout(tp=2, dp=2)
    param = shard_param(nn.Parameter(torch.zeros(3, 4)), PartitionSpec(None, "tp"))
    assert global_shape_of(param, layout) == (3, 8)
    assert offsets_of(param, layout, 3) == (0, 4)


def test_the_record_survives_module_to() -> None:
    linear = nn.Linear(2, 2)
    shard_param(linear.weight, PartitionSpec("tp"))
    linear.to(torch.bfloat16)
    assert sharding_of(linear.weight).spec == PartitionSpec("tp")


def test_partial_gradients_are_checked() -> None:
    param = nn.Parameter(torch.zeros(4, 4))
    record = sharding_of(shard_param(param, PartitionSpec(), partial_grad=("tp", "embedding")))
    assert record.partial_grad == ("tp", "embedding")
    with pytest.raises(ValueError, match="cannot be a partial sum over 'tp'"):
        shard_param(param, PartitionSpec("tp"), partial_grad=("tp",))
    with pytest.raises(TypeError, match=r"write \('tp',\)"):
        shard_param(param, PartitionSpec(), partial_grad="tp")
    with pytest.raises(ValueError, match="unknown axis 'xp'"):
        shard_param(param, PartitionSpec(), partial_grad=("xp",))
    with pytest.raises(ValueError, match=r"\('tp', 'tp'\) names an axis twice, and each entry is"):
        shard_param(param, PartitionSpec(), partial_grad=("tp", "tp"))
    with pytest.raises(ValueError, match="more dims than the parameter"):
        shard_param(nn.Parameter(torch.zeros(4)), PartitionSpec(None, "tp"))
