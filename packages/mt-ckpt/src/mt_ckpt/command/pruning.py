"""`mt-ckpt prune`: remove old steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mt_files import FolderLock, LockedError, say

from mt_ckpt.command.inspection import size_text
from mt_ckpt.command.place import checkpoints_of
from mt_ckpt.error import CheckpointError
from mt_ckpt.path import disk_of
from mt_ckpt.root import committed_steps, latest_checkpoint, lock_root, remove_steps

_MAY_BE_READ = "may be read until a newer step is ten minutes old"


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Remove old steps from a folder of checkpoints.

    The step that `latest` names is always kept, and so is a step with a reader. A folder in
    which a run trains or saves is refused: its own `checkpoint.keep` does the same.

    Attributes:
        path: A run folder, or a folder of checkpoints.
        keep: Number of newest steps to keep.
        every: Also keep every step divisible by this number.
        steps: Also keep these steps.
        yes: Remove without a question.
        dry_run: Only print what would be removed.
    """

    path: Path
    keep: int | None = None
    every: int | None = None
    steps: tuple[int, ...] = ()
    yes: bool = False
    dry_run: bool = False

    def run(self) -> int:
        """Run the command."""
        root = checkpoints_of(self.path)
        steps = self._checked(root)
        with contextlib.nullcontext() if self.dry_run else _owned(root):
            going = self._going(root, steps)
            for path in going.values():
                say(f"{path}  {size_text(sum(disk_of(path).files(path)[0].values()))}")
            if not going:
                say(f"{root}: nothing to remove, {len(steps)} steps are kept")
            if not going or self.dry_run:
                return 0
            if not self.yes and not _confirmed(f"remove {_counted(len(going))} of {len(steps)}?"):
                say("nothing was removed")
                return 1
            held = remove_steps(disk_of(root), root, steps, going)
        say(f"removed {_counted(len(going) - len(held))}")
        if held:
            names = ", ".join(going[step].name for step in held)
            reason = "are being read" if disk_of(root).has_folders else _MAY_BE_READ
            say(f"kept, as they {reason}: {names}", stream=sys.stderr)
        return 1 if held else 0

    def _checked(self, root: Path) -> dict[int, Path]:
        if self.keep is None and self.every is None and not self.steps:
            raise CheckpointError("say what to keep: --keep N, --every N or --steps N ...")
        for name, value in (("keep", self.keep), ("every", self.every)):
            if value is not None and value < 1:
                raise CheckpointError(f"--{name} is {value}; it must be at least 1")
        steps = committed_steps(root)
        if not steps:
            raise CheckpointError(
                f"{root} holds no checkpoint; name a run folder or a folder of checkpoints",
                file=str(root),
            )
        if unknown := sorted(set(self.steps) - set(steps)):
            have = ", ".join(map(str, list(steps)[-20:]))
            raise CheckpointError(f"{root} has no step {unknown[0]} (there: {have})")
        return steps

    def _going(self, root: Path, steps: dict[int, Path]) -> dict[int, Path]:
        newest = sorted(steps)[-self.keep :] if self.keep else []
        kept = {*newest, *self.steps}
        kept |= {step for step in steps if self.every and step % self.every == 0}
        latest = latest_checkpoint(root)
        return {step: path for step, path in steps.items() if step not in kept and path != latest}


@contextlib.contextmanager
def _owned(root: Path) -> Iterator[None]:
    """Keep runs and saves out of the folder during the block.

    Raises:
        CheckpointError: A run or a save is active; the message names its process.
    """
    with contextlib.ExitStack() as stack:
        try:
            # In a store, the lock on its folder of checkpoints is all there is.
            if disk_of(root).has_folders and root.resolve().name == "checkpoints":
                stack.enter_context(FolderLock(root.resolve().parent, purpose="pruning"))
        except LockedError as error:
            raise CheckpointError(str(error), file=str(root)) from error
        stack.enter_context(lock_root(root, purpose="pruning"))
        yield


def _confirmed(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise CheckpointError(f"{question} There is nobody to ask: pass --yes to remove them")
    sys.stdout.write(f"{question} [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _counted(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"
