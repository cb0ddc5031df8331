"""TensorBoard scalars, behind the `tensorboard` extra."""

from __future__ import annotations

from pathlib import Path

from mt_train.reporting.metrics import Record


class Board:
    """A writer of every number of a record as a scalar.

    Args:
        folder: TensorBoard's log folder.
        resume_step: Scalars of later steps, from a lost part of the run, are hidden.
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        # `load_config` has checked that it is installed.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, record: Record) -> None:
        """Write a training or evaluation record."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """Hand the scalars to the system."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
