"""The order of the buckets' reductions, and the reductions under way."""

from __future__ import annotations

from collections.abc import Sequence

from mt_data_parallel.bucket import Bucket


class LaunchQueue:
    """Reduces buckets in one order on all ranks, whichever of their parameters are ready first.

    Args:
        buckets: The buckets in the order of their reductions.
        overlap: Whether complete buckets are launched before `drain`.
        releases: Whether gradients are released after their reduction.
    """

    def __init__(self, buckets: Sequence[Bucket], *, overlap: bool, releases: bool) -> None:
        self._buckets, self._overlap, self._releases = buckets, overlap, releases
        self._sequence: list[Bucket] = []
        self._next = 0

    @property
    def progress(self) -> tuple[int, int]:
        """The number of reductions begun, and the number in the whole step."""
        return self._next, len(self._sequence)

    def begin(self) -> None:
        """Plan the reductions of a step: each bucket once, or once for each backward."""
        self._next = 0
        rounds = max((bucket.rounds for bucket in self._buckets), default=0)
        self._sequence = [b for turn in range(rounds) for b in self._buckets if turn < b.rounds]

    def launch_ready(self) -> None:
        """Launch complete buckets in order, up to the first incomplete one."""
        while self._overlap and self._is_left and self._sequence[self._next].is_ready:
            self._launch()

    def drain(self) -> None:
        """Launch all others, and wait until every sum is there."""
        while self._is_left:
            self._launch()
        # Each loop starts the next step of all sums before anyone waits for a single one.
        for bucket in self._buckets:
            bucket.advance()
        for bucket in self._buckets:
            bucket.settle()
            bucket.launch_replicas()
        for bucket in self._buckets:
            bucket.advance()
        for bucket in self._buckets:
            bucket.settle()

    def clear(self) -> None:
        """Let go of the buckets, which hold process groups."""
        self._sequence.clear()

    @property
    def _is_left(self) -> bool:
        return self._next < len(self._sequence)

    def _launch(self) -> None:
        if self._releases and self._next:
            # At most two buckets are whole at a time.
            self._sequence[self._next - 1].settle()
        elif self._next > 1:
            # The last sum is still under way; the one before it has arrived by now.
            self._sequence[self._next - 2].advance()
        self._sequence[self._next].launch()
        self._next += 1
