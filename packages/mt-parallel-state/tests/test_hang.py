"""Reports of ranks that wait in a collective for long."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import report_hangs
from mt_parallel_state.hang import _python_wait


def _reports(seconds: float, meet) -> list[str]:
    """Return what this rank reports while it runs `meet`."""
    handler = logging.Handler()
    found: list[str] = []
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("mt_parallel_state")
    logger.addHandler(handler)
    try:
        with report_hangs(seconds=seconds, hint="run it with checks"):
            meet(dist.get_rank())
    finally:
        logger.removeHandler(handler)
    return found


def test_the_lowest_rank_that_waits_says_who_waits_where_and_where_the_others_are(ranks) -> None:
    def body() -> list[str]:
        def meet(rank: int) -> None:
            if rank == 1:
                time.sleep(3)
            dist.all_reduce(torch.ones(5))

        return _reports(1.2, meet)

    first, *others = ranks(3, body)
    assert others == [[], []]
    title, waiting, late, hint = first[0].splitlines()
    assert len(first) == 1
    assert "1.2 s" in title
    assert "ranks 0, 2: waiting in" in waiting
    assert "all_reduce" in waiting
    assert "test_hang.py" in waiting
    assert "rank 1: elsewhere, at test_hang.py" in late
    assert hint == "run it with checks"


def test_a_message_that_does_not_come_is_reported_too(ranks) -> None:
    def body() -> list[str]:
        def meet(rank: int) -> None:
            if rank == 0:
                time.sleep(3)
                dist.send(torch.ones(5), dst=1)
            else:
                dist.recv(torch.ones(5), src=0)

        return _reports(1.2, meet)

    nothing, (report,) = ranks(2, body)
    assert nothing == []
    assert "rank 1: waiting in recv at test_hang.py" in report


def test_ranks_that_compute_or_go_on_report_nothing(ranks) -> None:
    def body() -> list[str]:
        def meet(rank: int) -> None:
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                time.sleep(0.05)
            for _ in range(5):
                dist.barrier()
                time.sleep(0.1)

        return _reports(2.0, meet)

    assert ranks(2, body) == [[], []]


def test_a_frame_between_two_lines_has_no_number() -> None:
    code = SimpleNamespace(co_filename=__file__)
    assert _python_wait(SimpleNamespace(f_globals={}, f_code=code, f_lineno=None)) is None


def test_one_process_is_not_watched_and_seconds_are_checked() -> None:
    with report_hangs(seconds=0.1):
        pass
    with pytest.raises(ValueError, match="seconds=0"), report_hangs(seconds=0):
        pass
