"""Attention masks as data, and the tiles of the score matrix that they leave to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from mt_parallel_state import random_uniform
from torch import Tensor

from mt_context_parallel.splits import Segment


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """Which keys a query sees, by their positions in the whole sequence.

    Attributes:
        causal: A query at i sees only keys at j <= i.
        window: A query sees only keys less than this many positions away; None for no limit.
        documents: Document ids of all tokens of the whole (not split) sequence, equal on every
            rank; a query sees only keys of its own document. Prefer `cu_seqlens` where the host
            knows the bounds: tiles between documents are then not computed at all.

    Shape:
        documents: [S] or [B, S] of integers.
    """

    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not isinstance(self.window, int):
            raise TypeError(f"window must be an int or None, got {self.window!r}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}")
        if self.documents is not None and self.documents.dim() not in (1, 2):
            raise ValueError(
                f"documents must be [S] or [B, S], got shape {tuple(self.documents.shape)}"
            )
        if self.documents is not None:
            _check_integers("documents", self.documents)


_INDICES = 1 << 22  # of random values at once: 32 MiB


def _check_integers(name: str, x: Tensor) -> None:
    if x.is_floating_point() or x.is_complex():
        raise TypeError(f"{name} must be integers, such as int64, got {x.dtype}")


@dataclass(frozen=True, kw_only=True)
class AttentionDropout:
    """Dropout of attention weights as a function of (sample, head, query, key) alone.

    The weight with the index `((sample * num_heads + head) * S + query) * S + key` in a sequence
    of S tokens is dropped where `random_uniform(key, index) < probability`: the same for every
    split of samples, heads or sequence over ranks.

    Attributes:
        probability: Probability that a weight is dropped, in [0, 1).
        key: Key of the random values from `mt_parallel_state.hash_key`, or an int64 tensor of it.
        sample_ids: Global id of each sample of the batch.
        first_head: Global index of this rank's first query head.
        num_heads: Number of query heads of all ranks; None where this rank has all of them.

    Shape:
        sample_ids: [B] of int64.
    """

    probability: float
    key: int | Tensor
    sample_ids: Tensor
    first_head: int = 0
    num_heads: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise ValueError(f"probability must be in [0, 1), got {self.probability}")
        _check_integers("sample_ids", self.sample_ids)

    def of_heads(self, start: int, total: int) -> AttentionDropout:
        """Return the dropout of the heads from `start` on, out of `total` heads of this rank."""
        total = total if self.num_heads is None else self.num_heads
        return replace(self, first_head=self.first_head + start, num_heads=total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A run of queries against a run of keys.

    Attributes:
        q: The run of queries.
        kv: The run of keys.
        causal: Whether causality rules out some pair.
        window: The window, if it rules out some pair, else None.
        documents: Ids to compare, or None where all pairs are in one document. [1 or B, S]
        length: Number of tokens in the whole sequence.
        dropout: Dropout of the weights.
        scale: Factor of the scores.
        softcap: Scores become `softcap * tanh(score / softcap)`; None leaves them.
        bias: Added to the scores of a head, at index `query - key + length - 1`; None for none.
        trains_bias: Whether the bias has a gradient.

    Shape:
        bias: [H, 2 * length - 1].
    """

    q: Segment
    kv: Segment
    causal: bool
    window: int | None
    documents: Tensor | None
    length: int
    dropout: AttentionDropout | None
    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    trains_bias: bool = False

    @property
    def is_square(self) -> bool:
        """Whether queries and keys are the same tokens."""
        return self.q.start == self.kv.start and self.q.length == self.kv.length

    @property
    def kind(self) -> tuple[bool, ...]:
        """The features that decide which kernels can compute the tile."""
        given = (self.window, self.documents, self.softcap, self.bias)
        drops = self.dropout is not None and self.dropout.probability > 0
        return self.causal, self.is_square, drops, *(x is not None for x in given)

    @property
    def q_rows(self) -> slice:
        """The rows of the queries in their shard."""
        return slice(self.q.local, self.q.local + self.q.length)

    @property
    def kv_rows(self) -> slice:
        """The rows of the keys in their shard."""
        return slice(self.kv.local, self.kv.local + self.kv.length)

    def allowed(self, device: torch.device) -> Tensor | None:
        """Return whether each query sees each key; None where all do. [1 or B, 1, q, kv]."""
        result: Tensor | None = None
        if self.causal or self.window is not None:
            q = torch.arange(self.q.length, device=device) + (self.q.start - self.kv.start)
            distance = q[:, None] - torch.arange(self.kv.length, device=device)
            if self.causal:
                result = distance >= 0
            if self.window is not None:
                near = distance.abs() < self.window
                result = near if result is None else result & near
            result = None if result is None else result[None, None]
        if self.documents is not None:
            q = self.documents[:, self.q.start : self.q.start + self.q.length]
            kv = self.documents[:, self.kv.start : self.kv.start + self.kv.length]
            same = (q[:, :, None] == kv[:, None, :])[:, None]
            result = same if result is None else result & same
        return result

    def distances(self, device: torch.device) -> Tensor:
        """Return the index of each pair's bias, `query - key + length - 1`. [q, kv]."""
        q = torch.arange(self.q.length, device=device) + self.q.start + self.length - 1
        return q[:, None] - (torch.arange(self.kv.length, device=device) + self.kv.start)

    def kept(self, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return 0 for dropped weights, else 1 / (1 - probability). [B, H, q, kv]."""
        if self.dropout is None or not self.dropout.probability:
            return None
        site = self.dropout
        own = torch.arange(heads, device=site.sample_ids.device) + site.first_head
        planes = (site.sample_ids[:, None] * (site.num_heads or heads) + own).to(device)
        q = torch.arange(self.q.length, device=device) + self.q.start
        kv = torch.arange(self.kv.length, device=device) + self.kv.start
        pair = q[:, None] * self.length + kv
        result = torch.empty((*planes.shape, *pair.shape), dtype=dtype, device=device)
        # Few planes at a time: the indices of all planes take more memory than the weights.
        count = max(1, _INDICES // pair.numel())
        for plane, part in zip(
            planes.flatten().split(count), result.flatten(0, 1).split(count), strict=True
        ):
            index = plane[:, None, None] * (self.length * self.length) + pair
            torch.ge(random_uniform(site.key, index), site.probability, out=part)
        return result.div_(1 - site.probability)


def _cut(run: Segment, block: int | None) -> list[Segment]:
    if block is None or run.length <= block:
        return [run]
    return [
        Segment(run.start + n, min(block, run.length - n), run.local + n, run.document)
        for n in range(0, run.length, block)
    ]


def _cut_at(run: Segment, q: Segment) -> list[Segment]:
    """Cut keys into those before, among and after the queries: full, causal and masked tiles."""
    ends = [run.start, q.start, q.start + q.length, run.start + run.length]
    bounds = sorted({min(max(end, ends[0]), ends[-1]) for end in ends})
    return [
        Segment(start, end - start, run.local + start - run.start, run.document)
        for start, end in pairwise(bounds)
    ]


def _joined(runs: Sequence[Segment]) -> list[Segment]:
    """Join runs that follow each other both in the sequence and in the shard."""
    joined: list[Segment] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.document == run.document
            and last.start + last.length == run.start
            and last.local + last.length == run.local
        ):
            joined[-1] = last._replace(length=last.length + run.length)
        else:
            joined.append(run)
    return joined


def tiles_of(whole: Tile, q_runs: Sequence[Segment], kv_runs: Sequence[Segment]) -> list[Tile]:
    """Return the tiles with a visible pair (by positions), each with only the masks it needs.

    Runs of different documents are never paired: the work grows with the documents, not with
    their square.

    Args:
        whole: A tile with the mask, dropout and scale; its own runs do not matter.
        q_runs: The queries of a shard.
        kv_runs: The keys of a shard.
    """
    keys: dict[int, list[Segment]] = {}
    for run in _joined(kv_runs):
        keys.setdefault(run.document, []).append(run)
    return [
        tile
        for q in _joined(q_runs)
        for run in keys.get(q.document, ())
        for kv in (_cut_at(run, q) if whole.causal else [run])
        if (tile := _tile(whole, q, kv)) is not None
    ]


def blocks_of(tile: Tile, block: int | None) -> list[Tile]:
    """Cut a tile into blocks of at most `block` queries and keys, without masked blocks."""
    return [
        part
        for q in _cut(tile.q, block)
        for kv in _cut(tile.kv, block)
        if (part := _tile(tile, q, kv)) is not None
    ]


def _tile(whole: Tile, q: Segment, kv: Segment) -> Tile | None:
    """Return the tile of two runs of one document, or None if no pair is visible."""
    least = q.start - (kv.start + kv.length - 1)  # the least distance query - key
    most = q.start + q.length - 1 - kv.start
    if whole.causal and most < 0:
        return None
    if whole.window is not None and (least >= whole.window or most <= -whole.window):
        return None
    inside = whole.window is None or (most < whole.window and least > -whole.window)
    return replace(
        whole,
        q=q,
        kv=kv,
        causal=whole.causal and least < 0,
        window=None if inside else whole.window,
    )
