"""An embedding whose vocabulary is split over a group."""

from __future__ import annotations

from functools import partial
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from mt_files import check_type
from mt_parallel_state import (
    Group,
    PartitionSpec,
    group_rank,
    group_size,
    reduce_from_group,
    reduce_scatter,
    shard_param,
    shard_size,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mt_tensor_parallel.arguments import check_labels, positive_int
from mt_tensor_parallel.shards import draw_part, take_part


class _Lookup(torch.autograd.Function):
    """`F.embedding` whose backward accumulates low precision in fp32 on a CPU too.

    torch does so on CUDA. On a CPU it adds bf16 to bf16, where a frequent token's gradient stops
    growing after a few hundred additions.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,) = ctx.saved_tensors
        wide = torch.ops.aten.embedding_dense_backward(
            grads[0].float(), ids, ctx.rows, padding_idx=-1, scale_grad_by_freq=False
        )
        return None, wide.to(grads[0].dtype)


def _lookup(ids: Tensor, weight: Tensor, *, deterministic: bool) -> Tensor:
    if deterministic and weight.is_cuda:
        return weight[
            ids
        ]  # its backward sorts the ids; the backward of F.embedding adds atomically
    if weight.dtype in (torch.bfloat16, torch.float16) and not weight.is_cuda:
        return cast(Tensor, _Lookup.apply(ids, weight))
    return F.embedding(ids, weight)


class VocabParallelEmbedding(nn.Module):
    """An embedding table whose rows are split over a group.

    Rank t of n holds rows [t V / n, (t + 1) V / n). Ids of other ranks give zero rows, and the sum
    over the group is the lookup: forward all-reduces (reduce-scatters along the sequence under
    sequence parallelism), backward sends nothing (all-gathers). The initial values are standard
    normal, like `nn.Embedding`.

    Args:
        vocab_size: Whole number of rows.
        hidden_size: Length of a row.
        group: Ranks that split the rows; `None` means not split.
        axis: Axis name for the parameter's sharding record.
        sequence_parallel: Whether the output is a sequence shard.
        deterministic: Whether the table's gradient has the same bits in every run on CUDA too,
            which is slower. On a CPU it always does.
        num_tokens: Number of real tokens; further rows are padding, and their ids are refused.
            `None` means all.
        dtype: Dtype of the table; `None` is torch's default.
        device: Device of the table; `"meta"` draws no values.

    Shape:
        Input [B, S] int64 (any dims without sequence parallelism), output [B, S, hidden_size]
        (S / ranks under sequence parallelism), weight [vocab_size / ranks, hidden_size].

    Raises:
        ValueError: The group does not divide the vocabulary or the sequence, ids have no sequence
            dim to split, or an id is outside the vocabulary.
    """

    def __init__(  # noqa: PLR0913 - a layer's own settings, all but two by keyword
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        group: Group = None,
        axis: str = "tp",
        sequence_parallel: bool = False,
        deterministic: bool = False,
        num_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        positive_int(hidden_size, "hidden_size")
        rows = shard_size(positive_int(vocab_size, "vocab_size"), group, what="vocab_size")
        self.vocab_size = vocab_size
        self.num_tokens = vocab_size if num_tokens is None else num_tokens
        if not 1 <= self.num_tokens <= vocab_size:
            raise ValueError(f"num_tokens={num_tokens} is not from 1 to vocab_size={vocab_size}")
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.deterministic = deterministic
        self.first = group_rank(group) * rows
        make = {"group": group, "dtype": dtype, "device": device}
        part = draw_part((vocab_size, hidden_size), 0, Tensor.normal_, **make)
        self.weight = shard_param(part, PartitionSpec() if group is None else PartitionSpec(axis))

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        group: Group = None,
        axis: str = "tp",
        sequence_parallel: bool = False,
        deterministic: bool = False,
    ) -> Self:
        """Return an embedding with this rank's rows of a `torch.nn.Embedding`.

        The rows are a copy with its values, dtype, device and `requires_grad`. Nothing is sent:
        every rank of the group has the same whole embedding.

        Args:
            embedding: The whole embedding.
            group: As for the constructor; `None` copies the whole table.
            axis: As for the constructor.
            sequence_parallel: As for the constructor.
            deterministic: As for the constructor.

        Raises:
            TypeError: `embedding` is no `torch.nn.Embedding`.
            ValueError: As for the constructor, or it has options that a split table lacks.
        """
        check_type("embedding", embedding, nn.Embedding)
        for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(embedding, name)
            if value is not None and value is not False:
                raise ValueError(
                    f"{embedding!r} has {name}={value!r}, which a split table does not do; make "
                    "one without it"
                )
        weight = embedding.weight
        layer = cls(
            *weight.shape,
            group=group,
            axis=axis,
            sequence_parallel=sequence_parallel,
            deterministic=deterministic,
            dtype=weight.dtype,
            device="meta",
        )
        layer.weight = take_part(layer.weight, weight, group)
        return layer.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up `ids`; see the class for shapes."""
        check_labels(ids, "ids")
        check_range(ids, self.num_tokens, what="token id")
        if self.group is None or self.group.size() == 1:
            return _lookup(ids, self.weight, deterministic=self.deterministic)
        local = ids - self.first
        foreign = (local < 0) | (local >= self.weight.shape[0])
        local = local.masked_fill_(foreign, 0)
        rows = _lookup(local, self.weight, deterministic=self.deterministic)
        rows = rows.masked_fill(foreign.unsqueeze(-1), 0)
        if self.sequence_parallel:
            if ids.dim() < 2:
                raise ValueError(
                    f"sequence parallelism splits dim 1 of [B, S], got ids of shape "
                    f"{tuple(ids.shape)}; add a batch dim with ids.unsqueeze(0)"
                )
            shard_size(ids.shape[1], self.group, what="the sequence length")
            return reduce_scatter(rows, self.group, dim=1)
        return reduce_from_group(rows, self.group)

    def extra_repr(self) -> str:
        """Return the shapes and settings that torch prints."""
        return (
            f"vocab_size={self.vocab_size}, weight={list(self.weight.shape)}, "
            f"ranks={group_size(self.group)}, sequence_parallel={self.sequence_parallel}"
        )


def check_range(ids: Tensor, size: int, *, what: str) -> None:
    """Raise if an id is outside [0, size).

    On an accelerator and in a compiled graph the check is a device-side assertion, for which the
    host does not wait.
    """
    if ids.numel() == 0 or ids.device.type == "meta":
        return
    low, high = torch.aminmax(ids)
    allowed = f"ids go from 0 to {size - 1}"
    check = partial(
        torch._assert_async,
        (low >= 0) & (high < size),
        f"a {what} is outside the vocabulary: {allowed}",
    )
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        check()
        return
    try:
        check()  # without a read by the host, which a captured graph could not have
    except RuntimeError:
        worst = int(low) if low < 0 else int(high)
        raise ValueError(f"{what} {worst} is outside the vocabulary: {allowed}") from None
