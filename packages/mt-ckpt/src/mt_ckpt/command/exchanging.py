"""`mt-ckpt export` and `mt-ckpt import`: exchange with other formats."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mt_files import Progress, new_folder, say

from mt_ckpt.command.place import opened
from mt_ckpt.error import CheckpointError
from mt_ckpt.exchange.dcp import export_dcp, open_dcp
from mt_ckpt.exchange.foreign import ForeignCheckpoint
from mt_ckpt.exchange.megatron import open_megatron
from mt_ckpt.exchange.pages import Pages
from mt_ckpt.exchange.safetensors import FILE_BYTES, export_safetensors, open_foreign
from mt_ckpt.load import ArrayReader
from mt_ckpt.save import save_checkpoint

_READERS: dict[str, Callable[[Path], ForeignCheckpoint]] = {
    "safetensors": open_foreign,
    "dcp": open_dcp,
    "megatron-torch_dist": open_megatron,
}
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint in another format, one array in memory at a time.

    Attributes:
        path: A run folder, a folder of checkpoints (meaning the latest), or a step directory.
        out: A new folder.
        to: The format: safetensors, in files of --file-bytes with an index, or dcp, which
            torch.distributed.checkpoint loads.
        prefix: Write only the arrays of this group, without its name, such as model.
        step: The step in the folder; by default the latest.
        file_bytes: Largest size of a safetensors file.
    """

    path: Path
    out: Path
    to: Literal["safetensors", "dcp"] = "safetensors"
    prefix: str = ""
    step: int | None = None
    file_bytes: int = FILE_BYTES

    def run(self) -> int:
        """Run the command."""
        if self.file_bytes < 1:
            raise CheckpointError(f"--file-bytes is {self.file_bytes}; it must be at least 1")
        progress = Progress()
        with opened(self.path, self.step) as arrays, new_folder(self.out) as folder:
            try:
                self._write(arrays, folder, progress)
            finally:
                progress.clear()
            step = arrays.manifest.step
        say(f"{self.out}: step {step} as {self.to}")
        return 0

    def _write(self, arrays: ArrayReader, folder: Path, progress: Progress) -> None:
        def report(done: int, total: int) -> None:
            progress.update("writing", done, total)

        if self.to == "dcp":
            export_dcp(arrays, folder, prefix=self.prefix, report=report)
            return
        limit = self.file_bytes
        export_safetensors(arrays, folder, prefix=self.prefix, file_bytes=limit, report=report)


@dataclass(frozen=True, kw_only=True)
class Import:
    """Read a checkpoint of another format into a new folder of checkpoints.

    Pickles in it are read as data: none of their code runs, and a pickle that names more than
    tensors need is refused.

    Attributes:
        path: A folder of this format, or a .safetensors file.
        out: A new folder of checkpoints.
        source: The format: safetensors, dcp (torch.distributed.checkpoint), or megatron-torch_dist
            (Megatron-core's dist_checkpointing). Its flag is --from.
        prefix: Group to put all arrays in, such as model.
        step: Step of the checkpoint; by default its own if it is known, or 0.
    """

    path: Path
    out: Path
    source: Literal["safetensors", "dcp", "megatron-torch_dist"] = "safetensors"
    prefix: str = ""
    step: int | None = None

    def run(self) -> int:
        """Run the command."""
        progress = Progress()
        with new_folder(self.out) as folder, Pages.within(folder) as pages:
            found = _READERS[self.source](self.path)
            step = self.step if self.step is not None else found.step or 0
            metadata = {self.source: dict(found.description)} if found.description else {}
            try:
                shards = list(
                    found.shards(
                        pages,
                        self.prefix,
                        lambda done, total: progress.update("reading", done, total),
                    )
                )
            finally:
                progress.clear()
            count = len(shards)
            save_checkpoint(folder, step, shards, metadata)
        if found.skipped:
            names = ", ".join(sorted(found.skipped)[:_SHOWN])
            more = len(found.skipped) - _SHOWN
            rest = f" and {more} more" if more > 0 else ""
            say(f"left out, as they are no tensors: {names}{rest}", stream=sys.stderr)
        say(f"{self.out}: step {step}, {count} arrays")
        return 0
