"""ParallelState over gloo: groups by name, made by members only, shared when equal."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import (
    CheckMode,
    GroupOptions,
    ParallelLayout,
    ParallelState,
    twin_group,
)


def _sum_of_ranks(group: dist.ProcessGroup | None) -> float:
    value = torch.tensor(float(dist.get_rank()))
    if group is not None:
        dist.all_reduce(value, group=group)
    return value.item()


def test_one_rank_needs_no_torch_distributed() -> None:
    with ParallelState(ParallelLayout()) as state:
        assert state.group("tp") is None
        assert state.group("dp-cp-tp-pp") is None
        assert (state.rank, state.size("dp"), state.index("tp")) == (0, 1, 0)
        with pytest.raises(RuntimeError, match=r"needs torch\.distributed"):
            state.device_mesh("tp")


def test_several_ranks_without_a_world_say_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"has 2 ranks.*init_process_group\(detect_env\(\)\)"):
        ParallelState(ParallelLayout(tp=2))


def test_groups_reduce_over_the_ranks_of_the_layout(ranks) -> None:
    def body() -> None:
        layout = ParallelLayout(tp=2, pp=2)
        with ParallelState(layout) as state:
            for axes in ("tp", "pp", "tp-pp", "dp", "embedding"):
                assert _sum_of_ranks(state.group(axes)) == sum(state.ranks(axes))
                assert state.ranks(axes)[state.index(axes)] == dist.get_rank()
                assert state.size(axes) == len(state.ranks(axes))

    ranks(4, body)


def test_equal_rank_lists_share_one_group(ranks) -> None:
    def body() -> None:
        with ParallelState(ParallelLayout(tp=2, dp=2)) as state:
            assert state.group("tp") is state.group("tp-cp") is state.group("tp")
            assert state.group("dp-tp") is state.group("etp-edp-ep")
            assert state.group("cp") is None

    ranks(4, body)


def test_ranks_with_different_numbers_of_groups_still_agree_on_names(ranks) -> None:
    """The trap of ``new_group(use_local_synchronization=True)``: inner stages made fewer groups."""

    def body() -> None:
        with ParallelState(ParallelLayout(pp=4)) as state:
            ends = state.group("embedding")
            assert (ends is None) == (dist.get_rank() in (1, 2))
            _sum_of_ranks(ends)
            assert _sum_of_ranks(state.group("pp")) == 6

    ranks(4, body)


def test_two_states_with_two_layouts_live_in_one_process(ranks) -> None:
    def body() -> None:
        wide, deep = ParallelState(ParallelLayout(tp=4)), ParallelState(ParallelLayout(tp=2, dp=2))
        twin = ParallelState(ParallelLayout(tp=4))
        rank = dist.get_rank()
        assert _sum_of_ranks(deep.group("tp")) == (1 if rank < 2 else 5)
        assert _sum_of_ranks(wide.group("tp")) == 6
        assert _sum_of_ranks(twin.group("tp")) == 6
        assert twin.group("tp") is not wide.group("tp")
        wide.close()
        assert _sum_of_ranks(twin.group("tp")) == 6
        deep.close()
        twin.close()
        again = ParallelState(ParallelLayout(tp=4))
        assert _sum_of_ranks(again.group("tp")) == 6
        dist.destroy_process_group()
        again.close()  # its world is gone already

    ranks(4, body)


def test_layouts_of_two_sizes_make_a_group_of_the_same_ranks(ranks) -> None:
    def body() -> list[float]:
        sums = []
        whole = ParallelState(ParallelLayout(tp=2, dp=2))
        sums.append(_sum_of_ranks(whole.group("tp")))
        if dist.get_rank() < 2:
            with ParallelState(ParallelLayout(tp=2)) as half:
                assert half.group("tp") is not whole.group("tp")
                sums.append(_sum_of_ranks(half.group("tp")))
        whole.close()
        if dist.get_rank() < 2:  # also when the larger one is gone
            with ParallelState(ParallelLayout(tp=2)) as half:
                sums.append(_sum_of_ranks(half.group("tp")))
        return sums

    assert ranks(4, body) == [[1.0] * 3, [1.0] * 3, [5.0], [5.0]]


def test_a_closed_state_says_so_instead_of_waiting(ranks) -> None:
    def body() -> None:
        state = ParallelState(ParallelLayout(tp=2, dp=2))
        state.group("tp")
        state.close()
        state.close()
        for call in (
            lambda: state.group("tp"),
            lambda: state.group("dp"),
            lambda: state.level_groups("tp-dp", (2, 2)),
            lambda: state.device_mesh("tp"),
        ):
            with pytest.raises(RuntimeError, match="this ParallelState is closed"):
                call()
        assert state.group("cp") is None

    ranks(4, body)


def test_a_layout_that_does_not_fill_the_world_names_the_sizes(ranks) -> None:
    def body() -> None:
        with pytest.raises(
            ValueError, match=r"needs 4 ranks \(tp=4 x cp=1 x dp=1 x pp=1\).* has 2"
        ):
            ParallelState(ParallelLayout(tp=4))
        other = 1 - dist.get_rank()
        with pytest.raises(ValueError, match=f"rank={other} was given"):
            ParallelState(ParallelLayout(tp=2), rank=other)
        alone = ParallelState(ParallelLayout())  # one rank of a larger world, on its own
        assert alone.group("tp") is None

    ranks(2, body)


def test_a_device_mesh_carries_dtensors_over_our_groups(ranks) -> None:
    def body() -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        with ParallelState(ParallelLayout(tp=2, dp=2), device="cpu") as state:
            mesh = state.device_mesh("dp-tp")
            assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
            assert mesh.get_group("tp") is state.group("tp")
            whole = torch.arange(16.0).view(4, 4)
            sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
            dp, tp = state.index("dp"), state.index("tp")
            assert torch.equal(sharded.to_local(), whole.view(2, 2, 2, 2)[dp, :, tp])
            assert torch.equal(sharded.full_tensor(), whole)
            line = state.device_mesh("tp")
            assert line.mesh.tolist() == state.ranks("tp")
            assert torch.equal(distribute_tensor(whole, line, [Replicate()]).to_local(), whole)
            assert state.device_mesh("tp-cp").mesh.tolist() == [[r] for r in state.ranks("tp")]

    ranks(4, body)


def test_two_models_share_a_world_side_by_side(ranks) -> None:
    def body() -> tuple[int, float, float]:
        mine = dist.get_rank()
        encoder = mine < 2
        with ParallelState(
            ParallelLayout(tp=2) if encoder else ParallelLayout(dp=2), offset=0 if encoder else 2
        ) as state:
            group = state.group("tp" if encoder else "dp")
            with ParallelState(ParallelLayout(pp=4)) as whole:
                return state.rank, _sum_of_ranks(group), _sum_of_ranks(whole.group("pp"))

    assert ranks(4, body) == [(0, 1.0, 6.0), (1, 1.0, 6.0), (0, 5.0, 6.0), (1, 5.0, 6.0)]


def test_a_layout_beyond_the_world_or_elsewhere_is_refused(ranks) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=r"offset=1 puts .* use an offset"):
            ParallelState(ParallelLayout(tp=2), offset=1)

    ranks(2, body)

    def outside() -> None:
        if dist.get_rank() == 2:
            with pytest.raises(ValueError, match="this process is rank 2, and the layout is on"):
                ParallelState(ParallelLayout(tp=2))

    ranks(3, outside)


def test_level_groups_reduce_over_their_ranks(ranks) -> None:
    def body() -> list[float]:
        with ParallelState(ParallelLayout(dp=4)) as state:
            inner, outer = state.level_groups("dp", (2, 2))
            return [_sum_of_ranks(group) for group in (inner, outer)]

    assert ranks(4, body) == [[1.0, 2.0], [1.0, 4.0], [5.0, 2.0], [5.0, 4.0]]


def test_a_twin_has_the_ranks_the_timeout_and_the_life_of_its_group(ranks) -> None:
    def body() -> None:
        layout = ParallelLayout(tp=2, dp=2)
        timeout = timedelta(seconds=77)
        with ParallelState(layout, device="cpu", timeout=timeout) as state:
            group = state.group("tp")
            twin = twin_group(group)
            assert twin is twin_group(group) is not group
            assert dist.get_process_group_ranks(twin) == dist.get_process_group_ranks(group)
            assert twin._get_backend(torch.device("cpu")).options._timeout == timeout
            assert _sum_of_ranks(twin) == sum(state.ranks("tp"))
            other = twin_group(group, "log", timeout=2 * timeout)
            assert twin_group(group, "log") is other is not twin
            assert other._get_backend(torch.device("cpu")).options._timeout == 2 * timeout
        for closed in (group, twin, other):
            with pytest.raises((KeyError, ValueError)):
                dist.get_process_group_ranks(closed)
        with ParallelState(layout, device="cpu", check=CheckMode()) as state:
            checked = state.group("tp")
            assert twin_group(checked) is checked

    ranks(4, body)


def test_group_options_reach_the_group_and_are_checked(ranks) -> None:
    def body() -> float:
        options = {"tp": GroupOptions(timeout=timedelta(seconds=7), max_ctas=8)}
        with ParallelState(ParallelLayout(tp=2), options=options) as state:
            group = state.group("tp")
            assert group is not None
            return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    assert ranks(2, body) == [7.0, 7.0]
    with pytest.raises(ValueError, match="max_ctas: 64 is too large; use 32 or less"):
        GroupOptions(max_ctas=64)
    with pytest.raises(ValueError, match="min_ctas=8 is above max_ctas=4"):
        GroupOptions(min_ctas=8, max_ctas=4)
    with pytest.raises(ValueError, match="unknown axis 'tpp'"):
        ParallelState(ParallelLayout(), options={"tpp": GroupOptions()})


def _timeout(group: dist.ProcessGroup | None) -> float:
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_options_belong_to_the_ranks_whatever_name_they_are_asked_for_by(ranks) -> None:
    def seconds(key: str, ask, **sizes: int) -> float:
        options = {key: GroupOptions(timeout=timedelta(seconds=7))}
        with ParallelState(ParallelLayout(**sizes), options=options) as state:
            return _timeout(ask(state))

    def body() -> list[float]:
        return [
            seconds("cp-dp", lambda s: s.group("dp-cp"), cp=2, dp=2),
            seconds("dp-cp", lambda s: s.group("dp"), dp=4),
            *(
                seconds("dp", lambda s, i=i: s.level_groups("dp", (2, 2))[i], dp=4)
                for i in range(2)
            ),
        ]

    assert ranks(4, body) == [[7.0] * 4] * 4


def test_options_that_contradict_each_other_are_refused(ranks) -> None:
    short, long = (GroupOptions(timeout=timedelta(seconds=s)) for s in (7, 9))
    with pytest.raises(
        ValueError, match=r"options\['embedding'\] and options\['mirror'\] differ, .*"
    ):
        ParallelState(ParallelLayout(pp=4), options={"embedding": short, "mirror": long})

    def body() -> None:
        layout = ParallelLayout(cp=2, dp=2)
        with ParallelState(layout, options={"dp-cp": short}) as state:
            assert _timeout(state.group("cp")) != 7.0
            with pytest.raises(ValueError, match=r"'dp-cp.level0' .* was made as 'cp'"):
                state.level_groups("dp-cp", (2, 2))
        with ParallelState(layout, options={"dp-cp": short, "cp": long}) as state:
            assert _timeout(state.level_groups("dp-cp", (2, 2))[0]) == 9.0  # cp's own ranks

    ranks(4, body)


def test_a_mesh_has_the_dims_and_ranks_of_its_axes(ranks) -> None:
    def body() -> None:
        layout = ParallelLayout(tp=2, dp=2, order="tp-dp-cp-ep-pp")
        with ParallelState(layout) as state:
            mesh = state.device_mesh("dp-tp")
            assert mesh.mesh_dim_names == ("dp", "tp")
            assert mesh.mesh.tolist() == layout.groups("tp")

    ranks(4, body)
