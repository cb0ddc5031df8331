"""A save whose disk fails, or whose machine stops, at any call: the old or the new step remains."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mt_ckpt import (
    CheckpointError,
    TensorShard,
    clean,
    latest_checkpoint,
    load_checkpoint,
    verify_checkpoint,
)
from mt_ckpt.disk import Disk
from mt_ckpt.ranks import Ranks
from mt_ckpt.save import Save

WAIT_SECONDS = 60.0


class Stopped(BaseException):
    """The process is gone; no handler of errors sees it."""


@dataclass
class Node:
    """A file or a folder, as it is and as it is known to be on the disk."""

    entries: dict[str, Node] | None = None
    durable_entries: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)
    data: bytes = b""
    durable_data: bytes = b""


class Model:
    """The content of a disk after a power loss: all synced data, and any part of the rest.

    Changes of names are atomic each and survive in any combination; of a file's data, a prefix
    beyond what was synced survives.
    """

    def __init__(self, base: Path) -> None:
        self.base, self.top = base, self._read(base)

    def _read(self, path: Path) -> Node:
        if path.is_file():
            return Node(data=path.read_bytes(), durable_data=path.read_bytes())
        entries = {child.name: self._read(child) for child in path.iterdir()}
        return Node(entries=entries, durable_entries=dict(entries))

    def node(self, path: Path) -> Node:
        found = self.top
        for name in path.relative_to(self.base).parts:
            assert found.entries is not None
            found = found.entries[name]
        return found

    def name(self, folder: Path, **changes: Node | None) -> None:
        """Add, replace or (None) remove names in a folder."""
        node = self.node(folder)
        assert node.entries is not None
        for name, child in changes.items():
            if child is None:
                del node.entries[name]
            else:
                node.entries[name] = child
        node.pending.append(changes)

    def sync(self, path: Path) -> None:
        node = self.node(path)
        node.durable_data, node.pending = node.data, []
        node.durable_entries = dict(node.entries or {})

    def write_out(
        self, target: Path, survives: Callable[[], bool], node: Node | None = None
    ) -> None:
        """Write a legal state after a power loss to the folder `target`."""
        node = self.top if node is None else node
        if node.entries is None:
            extra = len(node.data) - len(node.durable_data) if survives() else 0
            target.write_bytes(node.data[: len(node.durable_data) + extra])
            return
        entries: dict[str, Node | None] = dict(node.durable_entries)
        for change in node.pending:
            if survives():
                entries |= change
        target.mkdir()
        for name, child in entries.items():
            if child is not None:
                self.write_out(target / name, survives, child)


class FaultDisk(Disk):
    """A disk that fails or stops at the nth call, for one rank."""

    threads = 1

    def __init__(self, model: Model, lock: Any, *, fault: str = "", nth: int = 0) -> None:
        self.model, self.lock, self.fault, self.nth = model, lock, fault, nth
        self.calls, self.stopped = 0, False
        self.files: dict[int, Path] = {}

    def _call(self, action: Callable[[], Any], *, takes_room: bool = False) -> Any:
        if self.stopped:
            raise Stopped
        self.calls += 1
        is_hit = self.calls == self.nth
        if self.fault == "full" and self.calls >= self.nth and takes_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if is_hit and self.fault in ("ENOSPC", "EIO"):
            code = getattr(errno, self.fault)
            raise OSError(code, os.strerror(code))
        if is_hit and self.fault == "stop before":
            self.stopped = True
            raise Stopped
        with self.lock:
            result = action()
        if is_hit and self.fault == "stop after":
            self.stopped = True
            raise Stopped
        return result

    def mkdir(self, path: Path) -> None:
        def action() -> None:
            super(FaultDisk, self).mkdir(path)
            self.model.name(path.parent, **{path.name: Node(entries={})})

        self._call(action, takes_room=True)

    def create(self, path: Path) -> int:
        def action() -> int:
            descriptor = super(FaultDisk, self).create(path)
            self.files[descriptor] = path
            self.model.name(path.parent, **{path.name: Node()})
            return descriptor

        return self._call(action, takes_room=True)

    def write(self, descriptor: int, data: memoryview) -> int:
        def action() -> int:
            is_short = self.calls == self.nth and self.fault in ("short", "short, then full")
            size = super(FaultDisk, self).write(
                descriptor, data[: len(data) // 2 or 1] if is_short else data
            )
            self.model.node(self.files[descriptor]).data += bytes(data[:size])
            if self.calls == self.nth and self.fault == "short, then full":
                self.fault, self.nth = "full", self.calls + 1
            return size

        return self._call(action, takes_room=True)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)  # a process that is gone closes its files too

    def fsync(self, path: Path) -> None:
        self._call(lambda: self.model.sync(path))

    def rename(self, path: Path, new: Path) -> None:
        def action() -> None:
            super(FaultDisk, self).rename(path, new)
            node = self.model.node(path)
            self.model.name(path.parent, **{path.name: None, new.name: node})

        self._call(action)

    def unlink(self, path: Path) -> None:
        self._remove(super().unlink, path)

    def rmdir(self, path: Path) -> None:
        self._remove(super().rmdir, path)

    def _remove(self, real: Callable[[Path], None], path: Path) -> None:
        def action() -> None:
            real(path)
            self.model.name(path.parent, **{path.name: None})

        self._call(action)


class QuickDisk(Disk):
    """A disk that loses nothing, and so need not sync."""

    threads = 1

    def fsync(self, path: Path) -> None:
        pass


class ThreadRanks(Ranks):
    """Ranks as threads; when one stops, the others get an error, as from gloo."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, table: dict) -> None:
        super().__init__(None)
        self.rank, self.size, self.barrier, self.table = rank, size, barrier, table

    def _gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        self.table[self.rank] = value
        self.barrier.wait(WAIT_SECONDS)
        found = [self.table[rank] for rank in range(self.size)]
        self.barrier.wait(WAIT_SECONDS)
        return found if self.rank == 0 else []

    def exchange(
        self, outgoing: dict[int, np.ndarray], sizes: dict[int, int]
    ) -> dict[int, np.ndarray]:
        self.table["sent", self.rank] = outgoing
        self.barrier.wait(WAIT_SECONDS)
        found = {rank: self.table["sent", rank][self.rank] for rank in sizes}
        self.barrier.wait(WAIT_SECONDS)
        return found

    def _broadcast(self, value: dict[str, Any]) -> dict[str, Any]:
        if self.rank == 0:
            self.table["all"] = value
        self.barrier.wait(WAIT_SECONDS)
        found = self.table["all"]
        self.barrier.wait(WAIT_SECONDS)
        return found


def values(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model/w": torch.randn(4, 3, generator=generator),
        "model/b": torch.randn(6, generator=generator).bfloat16(),
        "step": torch.tensor(step),
    }


def shards(step: int, rank: int, size: int) -> list[TensorShard]:
    found = []
    for name, tensor in values(step).items():
        if not tensor.dim():
            found.append(TensorShard(name, tensor, write=rank == 0))
            continue
        rows = len(tensor) // size
        offsets = (rank * rows, *[0] * (tensor.dim() - 1))
        part = tensor[rank * rows : (rank + 1) * rows]
        found.append(TensorShard(name, part, global_shape=tuple(tensor.shape), offsets=offsets))
    return found


def save_on_threads(
    root: Path, step: int, keep: int | None, disks: list[Disk], seed: int | None = None
) -> list[BaseException | None]:
    """Save on a thread for each disk, and return the error of each."""
    size, ends = len(disks), list[BaseException | None]([None] * len(disks))
    barrier, table = threading.Barrier(size), {}
    seed = step if seed is None else seed

    def work(rank: int) -> None:
        try:
            Save(
                root,
                step,
                shards(seed, rank, size),
                {"seed": seed},
                keep=keep,
                event=lambda _: None,
                locks=True,
                disk=disks[rank],
            ).run(ThreadRanks(rank, size, barrier, table))
        except (CheckpointError, Stopped, threading.BrokenBarrierError) as error:
            ends[rank] = error
            if not isinstance(error, CheckpointError):
                barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    return ends


def load(path: Path) -> int:
    """Return the seed of a checkpoint whose every bit is that seed's."""
    assert verify_checkpoint(path) == []
    found = {name: torch.zeros_like(tensor) for name, tensor in values(0).items()}
    seed = load_checkpoint(path, [TensorShard(name, tensor) for name, tensor in found.items()])[
        "seed"
    ]
    for name, tensor in values(seed).items():
        assert torch.equal(found[name], tensor), name
    return seed


@dataclass(frozen=True)
class Case:
    """A state of the folder, and the save into it.

    Attributes:
        before: Steps saved before, in this order.
        unnamed: Remove the file `latest`, as a save killed just before its end leaves the folder.
        packed: Put the arrays into packs; with two ranks, these send each other boxes.
        step: The step to save.
        keep: Retention of that save.
    """

    before: tuple[int, ...]
    step: int = 30
    keep: int | None = None
    unnamed: bool = False
    packed: bool = False


CASES = {
    "first": Case(()),
    "later": Case((10,)),
    "retention": Case((10, 20), keep=1),
    "replaced": Case((30, 10), keep=2),
    "only one replaced": Case((30,), unnamed=True),
    "packed": Case((10,), keep=1, packed=True),
}
NEW = 99  # seed of the saved values, other than those of any step before
FAULTS = ["ENOSPC", "EIO", "full", "short", "short, then full", "stop before", "stop after"]
LOSSES = ["nothing", "all", "some"]


def prepare(base: Path, case: Case) -> Path:
    root = base / "root"
    root.mkdir(parents=True)
    for step in case.before:
        assert save_on_threads(root, step, None, [QuickDisk()]) == [None]
    if case.unnamed:
        (root / "latest").unlink()
    return root


def count_calls(base: Path, case: Case, size: int) -> list[int]:
    root = prepare(base, case)
    model, lock = Model(base), threading.Lock()
    disks = [FaultDisk(model, lock) for _ in range(size)]
    assert save_on_threads(root, case.step, case.keep, disks, NEW) == [None] * size
    return [disk.calls for disk in disks]


def check_fault(
    source: Path, base: Path, case: Case, size: int, rank: int, nth: int, fault: str, loss: str
) -> None:
    """Save with one fault into a copy of `source`, and check what a restarted program finds."""
    root = Path(shutil.copytree(source, base / "disk")) / "root"
    model, lock = Model(base / "disk"), threading.Lock()
    disks = [
        FaultDisk(model, lock, fault=fault, nth=nth) if rank == each else FaultDisk(model, lock)
        for each in range(size)
    ]
    ends = save_on_threads(root, case.step, case.keep, disks, NEW)
    if fault == "short":
        assert ends == [None] * size
    if fault.startswith("stop"):
        assert any(isinstance(end, Stopped) for end in ends)
        if loss != "nothing":
            rng = random.Random(f"{rank} {nth} {fault}")
            lost = base / "after"
            model.write_out(lost, (lambda: False) if loss == "all" else lambda: rng.random() < 0.5)
            root = lost / "root"
    clean(root)
    old = case.before[-1] if case.before else None
    found = latest_checkpoint(root)
    seed = None if found is None else load(found)
    assert seed in (old, NEW)
    if ends == [None] * size:
        assert seed == NEW
    for path in root.glob("step_*"):
        load(path)  # nothing that looks like a checkpoint is half of one
    if found is None or found.name != f"step_{case.step:08d}":
        assert (
            save_on_threads(root, case.step, case.keep, [QuickDisk()] * size, NEW) == [None] * size
        )
        assert load(root) == NEW
    assert save_on_threads(root, 40, 1, [QuickDisk()] * size) == [None] * size
    assert load(root) == 40
    assert not list(root.glob(".*step*"))


def rows(counts: list[int]) -> list[tuple[int, int, str, str]]:
    """List rank, call, fault and loss of every fault of a save with these numbers of calls."""
    return [
        (rank, nth, fault, loss)
        for rank, count in enumerate(counts)
        for nth in range(1, count + 1)
        for fault in FAULTS
        for loss in (LOSSES if fault.startswith("stop") else LOSSES[:1])
    ]


@pytest.mark.parametrize(
    "share",
    [pytest.param(1.0, marks=pytest.mark.campaign, id="all"), pytest.param(0.008, id="some")],
)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_fault_at_any_call_leaves_the_old_or_the_new_step(
    tmp_path, monkeypatch, name, size, share
):
    case = CASES[name]
    monkeypatch.setattr("mt_ckpt.stored.packing.MIN_ARRAYS", 0 if case.packed else 256)
    prepare(tmp_path / "source", case)
    faults = rows(count_calls(tmp_path / "count", case, size))
    chosen = (
        faults
        if share == 1.0
        else random.Random(f"{name} {size}").sample(faults, max(5, int(share * len(faults))))
    )
    for number, fault in enumerate(chosen):
        base = tmp_path / str(number)
        try:
            check_fault(tmp_path / "source", base, case, size, *fault)
        except BaseException as error:
            error.add_note(f"{name}, {size} ranks, fault {fault}")
            raise
        shutil.rmtree(base)
    print(f"{name}, {size} ranks: {len(chosen)} faults")


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_saved_survives_a_power_loss(tmp_path, monkeypatch, name):
    case = CASES[name]
    monkeypatch.setattr("mt_ckpt.stored.packing.MIN_ARRAYS", 0 if case.packed else 256)
    root = prepare(tmp_path / "disk", case)
    disk = FaultDisk(Model(tmp_path / "disk"), threading.Lock())
    assert save_on_threads(root, case.step, case.keep, [disk], NEW) == [None]
    disk.model.write_out(tmp_path / "after", lambda: False)
    assert load(tmp_path / "after/root") == NEW


def test_a_failing_call_is_an_error_with_its_path_and_reason(tmp_path):
    for nth in itertools.count(1):
        root = prepare(tmp_path / str(nth), CASES["later"])
        disk = FaultDisk(Model(root.parent), threading.Lock(), fault="EIO", nth=nth)
        (end,) = save_on_threads(root, 30, None, [disk], NEW)
        if end is None:
            break
        assert isinstance(end, CheckpointError)
        assert str(root) in str(end)
        assert os.strerror(errno.EIO) in str(end)
        assert not list(root.glob(".*step*"))
        assert load(root / "step_00000010") == 10
    assert nth > 20


def test_a_model_loses_what_was_not_synced(tmp_path):
    (tmp_path / "disk").mkdir()
    disk = FaultDisk(Model(tmp_path / "disk"), threading.Lock())
    for name in ("a", "b"):
        descriptor = disk.create(tmp_path / "disk" / name)
        disk.write(descriptor, memoryview(b"12"))
        disk.close(descriptor)
    disk.fsync(tmp_path / "disk/a")
    disk.fsync(tmp_path / "disk")
    disk.rename(tmp_path / "disk/a", tmp_path / "disk/c")
    disk.model.write_out(tmp_path / "lost", lambda: False)
    found = {path.name: path.read_bytes() for path in (tmp_path / "lost").iterdir()}
    assert found == {"a": b"12", "b": b""}
    disk.model.write_out(tmp_path / "kept", lambda: True)
    found = {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()}
    assert found == {"c": b"12", "b": b"12"}
