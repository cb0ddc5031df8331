"""The pool: worlds, results, reuse, state, timing."""

import os
import random
import threading
import time
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist

OFFSET = 100.0


@dataclass(frozen=True)
class Answer:
    rank: int
    total: torch.Tensor


def _total() -> float:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return value.item()


def _answer(start: float) -> Answer:
    return Answer(dist.get_rank(), torch.tensor([start + OFFSET + _total()]))


def test_every_rank_has_its_own_number(ranks):
    assert ranks(4, lambda: (dist.get_rank(), dist.get_world_size())) == [(r, 4) for r in range(4)]


def test_collective_sees_all_ranks(ranks):
    for world_size in (1, 2, 4):
        expected = world_size * (world_size - 1) / 2
        assert ranks(world_size, _total) == [expected] * world_size


def test_closures_lambdas_and_partials_run(ranks):
    base = torch.arange(3.0)

    def body(factor):
        return base * factor + dist.get_rank()

    assert torch.equal(ranks(2, body, 2.0)[1], base * 2 + 1)
    assert torch.equal(ranks(2, partial(body, factor=3.0))[0], base * 3)


def test_classes_and_globals_of_the_test_module_travel_by_value(ranks):
    answers = ranks(2, _answer, 1.0)
    assert all(isinstance(answer, Answer) for answer in answers)
    assert [answer.total.item() for answer in answers] == [102.0, 102.0]


def test_send_and_recv_work_between_all_pairs(ranks):
    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        received = torch.empty(size)
        requests = [dist.isend(torch.tensor([float(rank)]), peer) for peer in range(size)
                    if peer != rank]  # fmt: skip
        for peer in range(size):
            if peer != rank:
                dist.recv(received[peer : peer + 1], peer)
        for request in requests:
            request.wait()
        received[rank] = rank
        return received

    for result in ranks(4, body):
        assert torch.equal(result, torch.arange(4.0))


def test_subgroups_are_new_in_every_call(ranks):
    def body():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        value = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(value, group=groups[dist.get_rank() // 2])
        return value.item()

    for _ in range(3):
        assert ranks(4, body) == [1.0, 1.0, 5.0, 5.0]


def test_processes_are_kept_between_calls(ranks):
    first = ranks(2, os.getpid)
    assert ranks(2, os.getpid) == first
    assert len(set(first)) == 2
    assert os.getpid() not in first


def test_state_is_reset_between_calls(ranks, tmp_path, monkeypatch):
    def dirty():
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(3)
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(mode=True)
        os.environ["MT_TESTING_LEFT_OVER"] = "1"
        os.chdir(tmp_path)
        torch.rand(7)
        random.random()

    def state():
        return (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.rand(()).device.type,
            torch.are_deterministic_algorithms_enabled(),
            os.environ.get("MT_TESTING_LEFT_OVER"),
            os.environ.get("MT_TESTING_FROM_TEST"),
            os.getcwd(),
            torch.rand(2).tolist(),
            random.random(),
        )

    monkeypatch.setenv("MT_TESTING_FROM_TEST", "yes")
    before = ranks(2, state)
    ranks(2, dirty)
    after = ranks(2, state)
    assert before == after
    assert before[0] == before[1]
    assert before[0][:8] == (
        torch.float32, 1, True, "cpu", False, None, "yes", os.getcwd(),
    )  # fmt: skip


def test_optimizer_in_a_rank_imports_no_dynamo(ranks):
    def body():
        import sys

        before = set(sys.modules)
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([parameter])
        parameter.sum().backward()
        optimizer.step()
        return sorted(name for name in set(sys.modules) - before if name.startswith("torch."))

    assert ranks(2, body) == [[], []]


def test_a_rank_may_have_children(ranks):
    def body():
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(abs, (-dist.get_rank(),))

    assert ranks(2, body) == [0, 1]


def test_32_ranks_all_reduce(ranks):
    assert ranks(32, _total) == [496.0] * 32


def test_time_of_a_call_is_printed(ranks, capsys):
    lines = []
    for world_size in (2, 4, 8):
        ranks(world_size, _total)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            ranks(world_size, _total)
            times.append(time.perf_counter() - start)
        lines.append(f"{world_size} ranks {sorted(times)[2] * 1000:.0f} ms")
    with capsys.disabled():
        print(f"\none call with an all-reduce: {', '.join(lines)}")


@pytest.mark.parametrize(
    ("world_size", "error", "match"),
    [
        (0, ValueError, "world_size is 0; a pool runs 1 to 32 ranks"),
        (33, ValueError, r"use fake_world\(size\)"),
        (_total, TypeError, "world_size must be an int, not function"),
        (True, TypeError, "not bool"),
    ],
)
def test_impossible_world_is_refused(ranks, world_size, error, match):
    with pytest.raises(error, match=match):
        ranks(world_size, _total)


def test_bad_timeout_and_backend_are_refused(ranks):
    with pytest.raises(ValueError, match="timeout is 0 s; it must be positive"):
        ranks(2, _total, timeout=0)
    with pytest.raises(ValueError, match="backend is 'mpi'; use 'gloo' or 'nccl'"):
        ranks(2, _total, backend="mpi")


def test_unpicklable_argument_is_refused_here(ranks):
    with pytest.raises(TypeError, match="cannot send _total to the ranks"):
        ranks(2, _total, threading.Lock())
