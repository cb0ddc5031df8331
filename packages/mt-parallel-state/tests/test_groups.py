"""How groups are made where torch could split the world's communicator, seen without a GPU.

A backend that looks like NCCL (its name, its options, a world bound to a device, support for
splitting) records what torch asks of it. Splitting is a collective of the whole world, and our
groups are made by their members alone: a split would hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_parallel_state import (
    DistributedEnv,
    GroupOptions,
    JoinError,
    ParallelLayout,
    ParallelState,
    init_process_group,
    job,
    twin_group,
)
from mt_parallel_state.groups import nccl_options
from mt_testing.strategies import layouts
from torch._C._distributed_c10d import FakeProcessGroup

CPU = torch.device("cpu:0")
needs_nccl = pytest.mark.skipif(
    not hasattr(dist, "ProcessGroupNCCL"), reason="this torch is built without NCCL's options"
)


class Recorder:
    """What torch asked of the backend."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []
        self.splits: list[tuple[int, ...]] = []
        self.options: list[Any] = []
        self.eager: list[torch.device] = []
        self.lazy: list[Any] = []

    def create(self, asked: Any, options: Any) -> FakeProcessGroup:
        ranks = tuple(asked.global_ranks_in_group)
        group = FakeProcessGroup._create_internal(asked.group_rank, asked.group_size)
        if ranks:  # else it is the world
            self.made.append(ranks)
            self.options.append(options)
            world = dist.group.WORLD  # torch splits it where it is bound; not all versions say so
            if getattr(asked, "split_from", None) is not None or world.bound_device_id is not None:
                self.splits.append(ranks)
            if getattr(options, "lazy_init", False):
                self.lazy.append(group)
        return group


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    found = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        splits = property(lambda group: not any(group is lazy for lazy in found.lazy))
        patch.setattr(FakeProcessGroup, "supports_splitting", splits)
        patch.setattr(
            FakeProcessGroup,
            "eager_connect_single_device",
            lambda group, device: found.eager.append(device),
        )
        dist.Backend.register_backend(
            "ncclspy", found.create, extended_api=True, devices=["cpu", "cuda"]
        )
        yield found


def _made_on(recorder: Recorder, rank: int, world: int, build: Any) -> list[tuple[int, ...]]:
    """The groups that a rank of the world makes, in order; none of them a split."""
    recorder.__init__()
    dist.init_process_group("cpu:ncclspy", store=dist.HashStore(), rank=rank, world_size=world)
    try:
        default = dist.group.WORLD
        assert default is not None
        default.bound_device_id = CPU  # as NCCL's creator does, or init_process_group(device_id=)
        recorder.eager.clear()  # the world may connect at once
        build(rank)
        assert default.bound_device_id == CPU
    finally:
        dist.destroy_process_group()
    assert recorder.splits == []
    return list(recorder.made)


def _ask(state: ParallelState) -> None:
    axes = ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "dp-cp", "tp-cp-dp-pp", "embedding")
    for name in (*axes, "mirror", "tp-ep-pp"):
        group = state.group(name)
        if group is not None:
            twin_group(group)
    cp = state.size("cp")
    if cp % 2 == 0:
        state.level_groups("cp", (2, cp // 2))


@needs_nccl
@settings(max_examples=25, deadline=None)
@given(sizes=layouts(max_world=12, axes=("tp", "cp", "ep", "etp", "dp", "pp")), extra=st.booleans())
def test_members_make_their_groups_alone_and_in_one_order(
    recorder: Recorder, sizes: dict[str, int], extra: bool
) -> None:
    layout = ParallelLayout(**sizes)
    # With an offset, some ranks of the world are outside the layout and make no group at all.
    offset = 1 if extra and layout.world_size > 1 else 0
    inside = range(offset, offset + layout.world_size)

    def build(rank: int) -> None:
        if rank in inside:
            _ask(ParallelState(layout, offset=offset, device="cpu"))

    world = layout.world_size + 2 * offset
    orders = {rank: _made_on(recorder, rank, world, build) for rank in range(world)}
    for rank, order in orders.items():
        assert all(rank in group for group in order)
        for other in range(rank):
            shared = [group for group in order if other in group]
            assert shared == [group for group in orders[other] if rank in group]


@needs_nccl
def test_the_ends_of_a_pipeline_tie_embeddings_without_the_stages_between(
    recorder: Recorder,
) -> None:
    def build(rank: int) -> None:
        with ParallelState(ParallelLayout(pp=4), device="cpu") as state:
            state.group("embedding")
            state.group("mirror")

    made = [_made_on(recorder, rank, 4, build) for rank in range(4)]
    assert made == [[(0, 3)], [(1, 2)], [(1, 2)], [(0, 3)]]


@needs_nccl
def test_a_lazy_group_knows_its_device_and_connects_later(recorder: Recorder) -> None:
    options = {"tp": GroupOptions(timeout=timedelta(seconds=7), high_priority=True)}

    def build(rank: int) -> None:
        state = ParallelState(ParallelLayout(tp=2, dp=2), device="cpu", options=options)
        lazy = hasattr(nccl_options(None, None), "lazy_init")
        for axes in ("tp", "dp"):
            group = state.group(axes)
            assert group is not None
            assert group.bound_device_id == (CPU if lazy else None)

    _made_on(recorder, 1, 4, build)
    assert recorder.eager == []
    tp, dp = recorder.options
    assert (tp._timeout, tp.is_high_priority_stream) == (timedelta(seconds=7), True)
    assert (dp._timeout, dp.is_high_priority_stream) == (timedelta(minutes=30), False)


@needs_nccl
@pytest.mark.parametrize(
    ("launcher", "local_rank", "gpus", "expected"),
    [
        ("torchrun", 3, 4, 3),
        ("slurm", 3, 4, 3),
        ("slurm", 3, 1, 0),  # --gpus-per-task=1
        ("torchrun", 0, 1, 0),
        ("torchrun", 1, 1, None),
        ("slurm", 4, 4, None),
    ],
)
def test_each_rank_binds_its_gpu_and_tells_torch_where_it_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, launcher: str, local_rank: int, gpus: int, expected: int | None
) -> None:
    bound: list[Any] = []
    joined: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", bound.append)
    monkeypatch.setattr(job, "meet", lambda *_: dist.HashStore())
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **rest: joined.update(rest, backend=backend)
    )
    env = DistributedEnv(
        rank=local_rank,
        world_size=8,
        local_rank=local_rank,
        local_world_size=8,
        launcher=launcher,
    )
    if expected is None:
        with pytest.raises(JoinError, match=f"local rank {local_rank} has no GPU: .* {gpus};"):
            init_process_group(env)
        return
    device = torch.device("cuda", expected)
    assert init_process_group(env) == device
    assert bound == [device]
    assert joined["backend"] == "cpu:gloo,cuda:nccl"
    if hasattr(nccl_options(None, None), "lazy_init"):
        assert joined["device_id"] == device
        assert joined["pg_options"].lazy_init
    else:
        assert (joined["device_id"], joined["pg_options"]) == (None, None)


def test_a_gloo_world_that_is_bound_to_a_device_stays_so(ranks) -> None:
    def body() -> float:
        default = dist.group.WORLD
        assert default is not None
        default.bound_device_id = CPU
        with ParallelState(ParallelLayout(tp=2), device="cpu") as state:
            x = torch.ones(1)
            dist.all_reduce(x, group=state.group("tp"))
        assert default.bound_device_id == CPU
        return x.item()

    assert ranks(2, body) == [2.0, 2.0]


def test_a_twin_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="group must be a ProcessGroup, got -1"):
        twin_group(-1)  # type: ignore[arg-type]
