"""Wrong arguments of every public function: an error of a kind that users know, at once."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import mt_parallel_state as mt
import pytest
import torch
from mt_parallel_state.job import is_peer_loss
from torch import nn

LAYOUT = mt.ParallelLayout(tp=2, dp=2, pp=2)
STATE = mt.ParallelState(mt.ParallelLayout(), device="cpu")
SPEC = mt.PartitionSpec("tp")
PARAM = mt.shard_param(nn.Parameter(torch.zeros(4, 4)), SPEC)
SIZES = {"tp": 2, "cp": 1, "ep": 1, "pp": 1, "etp": 1, "order": "tp-cp-ep-dp-pp"}

# A function and arguments that it takes. Each is replaced by each of WRONG in turn.
CALLS: list[tuple[Callable[..., object], dict[str, Any]]] = [
    (mt.ParallelLayout, {**SIZES, "dp": 2}),
    (mt.ParallelLayout.fit, {**SIZES, "world_size": 8}),
    (LAYOUT.size, {"axes": "tp"}),
    (LAYOUT.coordinates, {"rank": 1}),
    (LAYOUT.groups, {"axes": "tp"}),
    (LAYOUT.group_of, {"axes": "tp", "rank": 1}),
    (LAYOUT.axis_names, {"axes": "tp-dp"}),
    (
        mt.ParallelState,
        {
            "layout": mt.ParallelLayout(),
            "rank": 0,
            "device": "cpu",
            "timeout": timedelta(seconds=3),
            "check": mt.CheckMode(),
            "offset": 0,
            "options": {"tp": mt.GroupOptions()},
        },
    ),
    (STATE.size, {"axes": "tp"}),
    (STATE.index, {"axes": "tp"}),
    (STATE.ranks, {"axes": "tp"}),
    (STATE.group, {"axes": "tp"}),
    (STATE.level_groups, {"axes": "tp", "sizes": (1,)}),
    (mt.twin_group, {"group": None}),
    (mt.CheckMode, {"timeout": 3.0}),
    (
        mt.GroupOptions,
        {
            "timeout": timedelta(seconds=3),
            "high_priority": True,
            "min_ctas": 1,
            "max_ctas": 2,
            "cluster_size": 1,
            "net_name": "x",
        },
    ),
    (SPEC.local_shape, {"global_shape": (4, 4), "layout": LAYOUT}),
    (SPEC.global_shape, {"local_shape": (4, 4), "layout": LAYOUT}),
    (SPEC.offsets, {"global_shape": (4, 4), "layout": LAYOUT, "coords": LAYOUT.coordinates(1)}),
    (mt.ParamSharding, {"spec": SPEC, "partial_grad": ("dp",), "is_copy": False}),
    (mt.shard_param, {"param": PARAM, "spec": SPEC, "partial_grad": (), "is_copy": False}),
    (mt.sharding_of, {"param": PARAM}),
    (mt.global_shape_of, {"param": PARAM, "layout": LAYOUT}),
    (mt.offsets_of, {"param": PARAM, "layout": LAYOUT, "rank": 1}),
    (mt.cut_into_levels, {"ranks": [0, 1, 2, 3], "sizes": (2, 2)}),
    (mt.detect_env, {"environ": {}}),
    (
        mt.DistributedEnv,
        {
            "rank": 0,
            "world_size": 1,
            "local_rank": 0,
            "local_world_size": 1,
            "master_addr": "127.0.0.1",
            "master_port": 1,
        },
    ),
    (
        mt.fill_normal_,
        {
            "tensor": torch.zeros(4, 4),
            "key": 1,
            "std": 1.0,
            "global_shape": (4, 4),
            "offsets": (0, 0),
        },
    ),
    (
        mt.initialize_,
        {"param": PARAM, "seed": 0, "name": "w", "layout": LAYOUT, "rank": 0, "std": 0.1},
    ),
    (mt.random_uniform, {"key": 1, "index": torch.arange(4)}),
    (mt.must_launch, {"nproc": 1, "env": mt.DistributedEnv()}),
    (is_peer_loss, {"error": None}),
]
NUMBERS = [-1, 0, 1.5, 10**12, 10**30, -(10**30), math.nan, math.inf, True]
OTHERS = [None, "x", "", b"x", object(), [], {}, (1, "a"), torch.zeros(2)]


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def expire(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"took more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_wrong_arguments_are_type_or_value_errors_at_once(
    function: Callable[..., object], arguments: dict[str, Any]
) -> None:
    for name in arguments:
        for wrong in (*NUMBERS, *OTHERS):
            with _time_limit(5.0):
                try:
                    function(**{**arguments, name: wrong})
                except (TypeError, ValueError):
                    continue
                except Exception as error:
                    raise AssertionError(f"{name}={wrong!r} gives {error!r}") from error


@pytest.mark.parametrize("nproc", [0, -1, 10**12, None, 1.5, True])
def test_absurd_numbers_of_processes_start_none(nproc: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="nproc must be"):
        mt.launch("no_such_module", [], nproc)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mt.ParallelState(mt.ParallelLayout(), offset=-1), "offset=-1 must be at least 0"),
        (lambda: mt.ParallelLayout(order=None), "order must be a string"),  # type: ignore[arg-type]
        (lambda: LAYOUT.groups(3), "axes must be a string such as 'dp-cp', got 3"),  # type: ignore[arg-type]
        (lambda: mt.ParallelLayout(tp=2**11, dp=2**11), "a layout has at most 1048576"),
        (lambda: SPEC.local_shape((4,), None), "layout must be a ParallelLayout, got None"),  # type: ignore[arg-type]
        (lambda: mt.shard_param(PARAM, "tp"), "spec must be a PartitionSpec, got 'tp'"),  # type: ignore[arg-type]
        (lambda: SPEC.offsets((4,), LAYOUT, {}), "lack tp"),
    ],
)
def test_errors_name_the_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
