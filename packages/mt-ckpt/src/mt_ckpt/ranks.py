"""Steps that ranks take together, which fail on all ranks or on none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mt_files import check_type

from mt_ckpt.error import CheckpointError


class Ranks:
    """The ranks of a group; without a group, a single rank without communication.

    Reports are sent as JSON text in uint8 CPU tensors, because the `*_object` collectives pickle.
    The group therefore needs a CPU backend such as gloo.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            check_type("group", group, dist.ProcessGroup)
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this rank is not in `group`; only members save and load")

    def phase(self, local: Callable[[], Any], combine: Callable[[list[Any]], Any]) -> Any:
        """Run `local` on every rank, then `combine` with all their values on rank 0.

        Collectives: an all-gather, a gather and two broadcasts.

        Returns:
            The value of `combine`, a JSON value, on every rank.

        Raises:
            CheckpointError: `local` failed on some rank, or `combine` did; the same error on every
                rank.
        """
        # An exception is a report too: every rank reaches the collectives, so none waits forever.
        report, cause = _attempt(local)
        reports = self._gather(report)
        verdict: dict[str, Any] = {}
        if self.rank == 0:
            verdict = self._first_failure(reports)
            if not verdict:
                verdict, cause = _attempt(lambda: combine([item["value"] for item in reports]))
        verdict = self._broadcast(verdict)
        if "error" in verdict:
            raise CheckpointError(
                verdict["error"], file=verdict["file"], tensor=verdict["tensor"]
            ) from cause
        return verdict["value"]

    def exchange(
        self, outgoing: dict[int, np.ndarray], sizes: dict[int, int]
    ) -> dict[int, np.ndarray]:
        """Send bytes to other ranks, and receive as many as `sizes` says from each.

        Collectives: a send and a receive for each pair of ranks, all under way together. What one
        rank sends has to be what the other expects.
        """
        received = {rank: torch.empty(size, dtype=torch.uint8) for rank, size in sizes.items()}
        works = [
            dist.irecv(data, group=self.group, group_src=rank) for rank, data in received.items()
        ]
        sent = {rank: torch.from_numpy(data) for rank, data in outgoing.items()}
        works += [dist.isend(data, group=self.group, group_dst=rank) for rank, data in sent.items()]
        for work in works:
            if work is not None:
                work.wait()
        return {rank: data.numpy() for rank, data in received.items()}

    def _first_failure(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        failures = [(rank, item) for rank, item in enumerate(reports) if "error" in item]
        if not failures:
            return {}
        rank, first = failures[0]
        if self.size > 1:
            also = [other for other, _ in failures[1:]]
            more = f"\n(ranks {also} failed too)" if also else ""
            first = {**first, "error": f"rank {rank}: {first['error']}{more}"}
        return first

    def _gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return all values on rank 0, and an empty list elsewhere."""
        if self.size == 1:
            return [value]
        data = _encode(value)
        # `gather` needs equal sizes, so the lengths are exchanged and reports padded first.
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.group)
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        boxes = [torch.empty_like(padded) for _ in lengths] if self.rank == 0 else None
        dist.gather(padded, boxes, group=self.group, group_dst=0)
        return [_decode(box[:n]) for box, n in zip(boxes or [], lengths, strict=False)]

    def _broadcast(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        data = _encode(value)
        size = torch.tensor([len(data)])
        dist.broadcast(size, group=self.group, group_src=0)
        if self.rank != 0:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, group=self.group, group_src=0)
        return _decode(data)


def _attempt(action: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    try:
        return {"value": action()}, None
    except CheckpointError as error:
        return {"error": str(error), "file": error.file, "tensor": error.tensor}, error
    except Exception as error:  # noqa: BLE001 - the other ranks wait for a report
        text = str(error)
        if not isinstance(error, ValueError | TypeError):  # their messages are complete
            text = f"{type(error).__name__}: {text}"
        return {"error": text, "file": None, "tensor": None}, error


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
