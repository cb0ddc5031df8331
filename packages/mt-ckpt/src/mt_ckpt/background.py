"""Saving in the background: the state is copied, and training goes on while a thread writes it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from mt_files import check_type

from mt_ckpt.error import CheckpointError
from mt_ckpt.path import as_path, disk_of
from mt_ckpt.ranks import Ranks
from mt_ckpt.root import Keep
from mt_ckpt.save import Save
from mt_ckpt.shard import TensorShard

_Key = tuple[str, tuple[int, ...], torch.Size, torch.dtype]


class BackgroundSaver:
    """Saves the steps of a run in a thread; each is the same as one of `save_checkpoint`.

    `save` copies the tensors into host memory and returns. The thread then writes and commits as
    `save_checkpoint` does: `latest` moves, and old steps go, once everything is on the disk. One
    save is under way at a time: the next one waits for it, and so does the end of the block. The
    memory of the copies, as much as this rank writes, is used again by the next save. With a group,
    the ranks agree who writes what before they copy.

    A failure is raised by the next `check`, `save` or `wait`, or at the end of the block, on every
    rank of `group`; if the block ends with another error, it is a note of that error.

    Args:
        root: See `save_checkpoint`.
        group: The ranks that save, as a group of its own with a CPU backend (gloo), which nothing
            else uses meanwhile: the threads of all ranks communicate on it beside training. None:
            this process saves alone.
        keep: See `save_checkpoint`.
        on_event: See `save_checkpoint`; it is called in the thread, and for `save.begin` with a
            group by `save`.

    Example:
        >>> with BackgroundSaver(root, keep=3) as saver:
        ...     for step in range(1, 1001):
        ...         train()
        ...         saver.check()
        ...         if step % 100 == 0:
        ...             saver.save(step, shards(), {"step": step})
    """

    def __init__(
        self,
        root: str | Path,
        *,
        group: dist.ProcessGroup | None = None,
        keep: int | Keep | None = None,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        self._root, self._keep = as_path(root), keep
        self._ranks, self._event = Ranks(group), on_event or (lambda _: None)
        self._buffers: dict[_Key, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved: Path | None = None

    @property
    def saved(self) -> Path | None:
        """The step directory of the newest complete save; None before the first."""
        return self._saved

    @property
    def failed(self) -> bool:
        """Whether a save has failed and its error has not been raised yet.

        Ranks learn of a failure at slightly different times. Let one rank ask, tell the others, and
        then call `wait` on all.
        """
        return self._error is not None

    def save(self, step: int, shards: Iterable[TensorShard], metadata: dict[str, Any]) -> None:
        """Copy the state, and start to save it; see `save_checkpoint` for the arguments.

        Changes of tensors and metadata after the return are not in the checkpoint.

        Raises:
            CheckpointError: The previous save failed, or the ranks' shards don't fit together; this
                one has not started.
        """
        self.wait()
        save = Save(
            self._root,
            step,
            list(shards),
            copy.deepcopy(metadata),
            keep=self._keep,
            event=self._event,
            locks=True,
            disk=disk_of(self._root),
        )
        if self._ranks.size > 1:
            save.agree(self._ranks)
        save.shards = self._copy(save.shards, only_own=save.agreed)
        # The interpreter waits at its end for a thread that is no daemon.
        self._thread = threading.Thread(target=self._run, args=(save,), name="mt-ckpt-save")
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a failed save, without waiting for one under way.

        Raises:
            CheckpointError: A save failed; earlier checkpoints are unchanged.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> Path | None:
        """Wait for the save under way, and return `saved`; every rank calls it.

        Raises:
            CheckpointError: A save failed; earlier checkpoints are unchanged.
        """
        self._join()
        self.check()
        return self._saved

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
            return
        self._join()
        if self._error is not None:
            error.add_note(f"A save in the background failed too: {self._error}")

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, save: Save) -> None:
        try:
            self._saved = save.run(self._ranks)
        except BaseException as error:
            self._error = _as_checkpoint_error(error)
            if not threading.main_thread().is_alive():
                raise  # nobody will ask for the error, so it is at least printed

    def _copy(self, shards: list[TensorShard], *, only_own: bool) -> list[TensorShard]:
        """Return the shards with copied tensors, or without memory if this rank doesn't write them.

        Args:
            shards: The shards.
            only_own: Whether the ranks have agreed that this rank writes all of them.
        """
        owned: list[TensorShard] = []
        kept: dict[_Key, torch.Tensor] = {}
        devices: set[torch.device] = set()
        with torch.no_grad():
            for shard in shards:
                check_type("every one of shards", shard, TensorShard)
                tensor = shard.tensor
                if not (shard.write or only_own):
                    nothing = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
                    owned.append(replace(shard, tensor=nothing))
                    continue
                key = (shard.name, shard.offsets, tensor.shape, tensor.dtype)
                buffer = self._buffers.pop(key, None)
                if buffer is None:
                    pinned = tensor.device.type == "cuda"
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                if tensor.device.type == "cuda":
                    devices.add(tensor.device)
                buffer.copy_(tensor, non_blocking=True)
                kept[key] = buffer
                owned.append(replace(shard, tensor=buffer))
        for device in devices:
            torch.cuda.synchronize(device)
        self._buffers = kept
        return owned


def _as_checkpoint_error(error: BaseException) -> CheckpointError:
    """Return the error itself, or a CheckpointError for a lost connection to another rank."""
    if isinstance(error, CheckpointError):
        return error
    made = CheckpointError(f"the save in the background failed: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
