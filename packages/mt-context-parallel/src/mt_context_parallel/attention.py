"""Context-parallel attention: the entry and its checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

import torch
import torch.distributed as dist
from mt_parallel_state import all_to_all, group_rank, group_size
from torch import Tensor

from mt_context_parallel.flex import FlexKernel
from mt_context_parallel.function import SplitAttention
from mt_context_parallel.kernels import (
    CudnnKernel,
    FlashKernel,
    ReferenceKernel,
    SdpaCpuKernel,
    TileKernel,
    TileKernels,
)
from mt_context_parallel.local import LocalAttention
from mt_context_parallel.splits import (
    Segment,
    Split,
    all_segments,
    document_bounds,
    order_of,
    sorted_runs,
)
from mt_context_parallel.tiles import AttentionDropout, AttentionMask, Tile

Algorithm = Literal["ring", "all_gather", "ulysses", "hierarchical"]


@dataclass(frozen=True, kw_only=True)
class HierarchicalGroups:
    """The two levels of a context group: rank = outer rank * inner size + inner rank.

    Where there is a `ParallelState`, its `level_groups("cp", (inner_size, outer_size))` are
    these two, with its checks and backend options.

    Attributes:
        inner: Neighbours on one node, which swap tokens for heads; None for one rank.
        outer: Ranks with the same place in their inner groups, which form rings; None for one.

    Raises:
        TypeError: A level is no process group that this rank is in.
        ValueError: The levels have more than this rank in common.
    """

    inner: dist.ProcessGroup | None
    outer: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        levels = {"inner": self.inner, "outer": self.outer}
        for name, group in levels.items():
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise TypeError(
                    f"{name} must be a process group that this rank is in, or None, got {group!r}"
                )
        inner, outer = (
            [] if group is None else dist.get_process_group_ranks(group)
            for group in levels.values()
        )
        common = sorted({*inner} & {*outer})
        if inner and outer and common != [dist.get_rank()]:
            raise ValueError(
                f"inner has the ranks {inner} and outer {outer}, with {common} in common, but must "
                f"meet in this rank alone, which is {dist.get_rank()}; make them with "
                "HierarchicalGroups.create() or ParallelState.level_groups()"
            )

    @staticmethod
    def create(group: dist.ProcessGroup, *, inner_size: int) -> HierarchicalGroups:
        """Make both levels of `group`. Collective over `group` alone.

        These are plain groups with torch's default options, also where `group` has others or
        is a checked one of a `ParallelState`: use that state's `level_groups` then.

        Raises:
            ValueError: `inner_size` does not divide the group's size.
        """
        ranks = group_size(group)
        if inner_size < 1 or ranks % inner_size:
            valid = [n for n in range(1, ranks + 1) if ranks % n == 0]
            raise ValueError(
                f"inner_size is {inner_size}, which does not divide the {ranks} ranks of the "
                f"group; sizes that do are {valid}"
            )
        members, rank = dist.get_process_group_ranks(group), group_rank(group)
        first = rank // inner_size * inner_size
        made = []
        for part in (members[first : first + inner_size], members[rank % inner_size :: inner_size]):
            made.append(dist.new_group(part, use_local_synchronization=True))
        return HierarchicalGroups(inner=made[0], outer=made[1])


def default_kernels(device: torch.device) -> tuple[TileKernel, ...]:
    """Return fused kernels and, at their end, the plain one, which computes all tiles.

    On GPUs for which torch's own attention prefers cuDNN (compute capability 9.0 and 10.0, cuDNN
    after 9.15) cuDNN comes before flash.
    """
    flash, cudnn = FlashKernel(), CudnnKernel()
    fused: tuple[TileKernel, TileKernel] = flash, cudnn
    if device.type == "cuda":
        newest = torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
        if newest and (torch.backends.cudnn.version() or 0) > 91500:
            fused = cudnn, flash
    return *fused, FlexKernel(), SdpaCpuKernel(), ReferenceKernel()


@cache
def _kernels_of(device: torch.device) -> TileKernels:
    return TileKernels(default_kernels(device))


def context_parallel_attention(  # noqa: PLR0913 - the options of one operation, by keyword
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | HierarchicalGroups | None,
    algorithm: Algorithm = "ring",
    mask: AttentionMask | None = None,
    split: Split = "zigzag",
    cu_seqlens: Sequence[int] | Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    kernels: tuple[TileKernel, ...] | None = None,
) -> Tensor:
    """Compute attention of this rank's tokens to the tokens of the whole group, exactly.

    Collective over the group of N ranks, in forward and in backward:

    - ring: N - 1 sends and receives of keys and values; backward the same again, and N of their
      gradients.
    - all_gather: an all-gather of the keys and one of the values; backward the same again, and a
      reduce-scatter of the gradient of each.
    - ulysses: an all-to-all each of q, k, v and the output; backward of the four gradients.
    - hierarchical: ulysses in the inner group, ring in the outer group.

    Tiles are merged, and gradients summed over tiles and ranks, in fp32 (fp64 for fp64). The
    gradients of keys and values are also sent in that dtype; everything else is sent in its own
    dtype. A fused kernel rounds each tile to the dtype of q.

    Args:
        q: Queries of this rank's tokens, in the order of `shard`.
        k: Keys of the same tokens. Fewer heads than queries: neighbouring query heads share one.
        v: Values of the same tokens.
        group: The ranks that share the sequence; None for one that is not split. The algorithm
            "hierarchical" takes `HierarchicalGroups`, the others a process group.
        algorithm: "ring" sends keys round the group while computing; "all_gather" has all keys on
            every rank; "ulysses" swaps the split sequence for split heads; "hierarchical" does
            that in the inner groups, and rings over the outer.
        mask: Which keys a query sees; None is causal.
        split: How the sequence was split.
        cu_seqlens: Starts of the packed documents and the end of the last, in the whole sequence.
            Documents do not see each other. A list or a CPU tensor: a CUDA tensor is read back,
            which waits for the device once a call.
        sinks: A logit per query head that takes part in the softmax and has no value. Its gradient
            is this rank's part of a sum over the group.
        bias: Added to the scores by the distance of query and key, after a cap: the score of the
            pair (i, j) of the whole sequence of L tokens gets `bias[:, i - j + L - 1]`. Equal on
            every rank; its gradient is this rank's part of a sum over the group.
        dropout: Dropout of the attention weights.
        scale: Factor of the scores; None is 1 / sqrt(D).
        softcap: Scores become `softcap * tanh(score / softcap)`, before the mask; None leaves them.
        kernels: Kernels in order of preference; a tile gets the first that can compute it. None
            takes fused kernels, and the plain one where these cannot.

    Shape:
        q: [B, S, H, D]; k: [B, S, G, D]; v: [B, S, G, V]; sinks: [H]; bias: [H, 2 * L - 1]. Returns
        [B, S, H, V]. Heads come after tokens, unlike in torch's `scaled_dot_product_attention`.

    Raises:
        TypeError: A dtype is wrong or differs, `cu_seqlens` are no integers, or `group` is of
            the wrong kind for the algorithm.
        ValueError: Shapes, sizes, devices or options do not fit, or no kernel can compute a tile;
            the message has the nearest ones that fit.
    """
    mask = AttentionMask() if mask is None else mask
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, or None for no cap, got {softcap}")
    inner, outer = _levels(group, algorithm)
    ranks, own = (
        group_size(inner) * group_size(outer),
        group_rank(outer) * group_size(inner) + group_rank(inner),
    )
    _check_qkv(q, k, v)
    if scale is not None and not -math.inf < scale < math.inf:
        raise ValueError(f"scale={scale} must be finite, or None for 1 / sqrt(head_dim)")
    length = q.shape[1] * ranks
    _check(q, mask=mask, length=length, sinks=sinks, dropout=dropout)
    _check_bias(q, bias, length)
    # torch's kernels for the CPU read other strides of queries wrongly, without an error.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    bounds = document_bounds(length, cu_seqlens)  # once: a CUDA tensor is read back for it
    runs = all_segments(length, ranks, split, bounds)
    documents = mask.documents
    whole = Tile(
        q=runs[own][0],
        kv=runs[own][0],
        causal=mask.causal,
        window=mask.window,
        documents=documents[None] if documents is not None and documents.dim() == 1 else documents,
        length=length,
        dropout=dropout,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        bias=None if bias is None else bias.detach(),
        trains_bias=bias is not None and bias.requires_grad,
    )
    chosen = _kernels_of(q.device) if kernels is None else TileKernels(kernels)
    if inner is not None:
        return _over_heads((q, k, v), (sinks, bias), (inner, outer), (whole, runs, chosen))
    gather = outer is not None and algorithm == "all_gather"
    shards = [sorted_runs(runs)] if gather else runs
    return SplitAttention(
        local=LocalAttention(whole=whole, q_runs=runs[own], shards=shards, kernels=chosen),
        group=outer,
        order=order_of(runs, q.device) if gather else None,
    )(q, k, v, sinks, bias)


def _over_heads(
    qkv: tuple[Tensor, Tensor, Tensor],
    of_heads: tuple[Tensor | None, Tensor | None],
    levels: tuple[dist.ProcessGroup, dist.ProcessGroup | None],
    work: tuple[Tile, list[list[Segment]], TileKernels],
) -> Tensor:
    """Swap tokens for heads in the inner group, and ring over the outer one if there is one."""
    (q, k, v), (inner, outer) = qkv, levels
    whole, runs, kernels = work
    size, heads = inner.size(), q.shape[2]
    if heads % size or (k.shape[2] % size and size % k.shape[2]):
        raise ValueError(
            f"{heads} query heads and {k.shape[2]} key heads cannot be split over the {size} ranks "
            f"that swap tokens for heads; query heads must be a multiple of {size}, the nearest "
            f"being {max(1, round(heads / size)) * size}, and key heads a multiple or a divisor of "
            f"{size}; or use algorithm='ring' or 'all_gather'"
        )
    if k.shape[2] < size:  # each rank then has a copy of the one key head its queries share
        k, v = (x.repeat_interleave(size // k.shape[2], dim=2) for x in (k, v))
    count = heads // size
    first = inner.rank() * count
    sinks, bias = (None if x is None else x[first : first + count] for x in of_heads)
    whole = replace(whole, bias=None if bias is None else bias.detach())
    if whole.dropout is not None:
        whole = replace(whole, dropout=whole.dropout.of_heads(first, heads))
    blocks = [runs[start : start + size] for start in range(0, len(runs), size)]
    own = blocks[group_rank(outer)]
    shards = [sorted_runs(block) for block in blocks]
    order = order_of(own, q.device)
    q, k, v = (
        all_to_all(x, inner, split_dim=2, concat_dim=1).index_select(1, order) for x in (q, k, v)
    )
    out = SplitAttention(
        local=LocalAttention(
            whole=whole, q_runs=shards[group_rank(outer)], shards=shards, kernels=kernels
        ),
        group=outer,
    )(q, k, v, sinks, bias)
    return all_to_all(out.index_select(1, order.argsort()), inner, split_dim=1, concat_dim=2)


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _levels(
    group: dist.ProcessGroup | HierarchicalGroups | None, algorithm: Algorithm
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the group that swaps tokens for heads and the group that shares keys."""
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"algorithm must be one of {get_args(Algorithm)}, got {algorithm!r}")
    if isinstance(group, HierarchicalGroups):
        if algorithm != "hierarchical":
            raise TypeError(
                f"algorithm={algorithm!r} takes one process group, got HierarchicalGroups; pass "
                "the whole context group or choose 'hierarchical'"
            )
        inner, outer = group.inner, group.outer
    elif group is None or group_size(group) == 1:
        return None, None
    elif algorithm == "hierarchical":
        raise TypeError(
            "algorithm='hierarchical' takes HierarchicalGroups, got one process group of "
            f"{group.size()} ranks; make them with HierarchicalGroups.create(group, inner_size=...)"
        )
    else:
        inner, outer = (group, None) if algorithm == "ulysses" else (None, group)
    return inner if group_size(inner) > 1 else None, outer if group_size(outer) > 1 else None


def _check(
    q: Tensor,
    *,
    mask: AttentionMask,
    length: int,
    sinks: Tensor | None,
    dropout: AttentionDropout | None,
) -> None:
    kinds = {"mask": (mask, AttentionMask), "sinks": (sinks, Tensor)}
    for name, (value, kind) in (kinds | {"dropout": (dropout, AttentionDropout)}).items():
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be of type {kind.__name__}, or None, got {value!r}")
    heads, tensors = q.shape[2], {"sinks": sinks, "mask.documents": mask.documents}
    for name, x in tensors.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q on {q.device}; use one device")
    if mask.window is not None and length and mask.window > length:
        raise ValueError(
            f"window is {mask.window}, but the sequence has {length} tokens; use at most {length}, "
            "or None for no window"
        )
    documents = None if mask.documents is None else tuple(mask.documents.shape)
    if documents not in (None, (length,), (q.shape[0], length)):
        raise ValueError(
            f"mask.documents is {documents}, but must be ({length},) or {(q.shape[0], length)}: it "
            "is of the whole sequence, unlike q"
        )
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks must be [{heads}], one per query head, got {tuple(sinks.shape)}")
    if dropout is not None and tuple(dropout.sample_ids.shape) != (q.shape[0],):
        raise ValueError(
            f"dropout.sample_ids must be [{q.shape[0]}], one per sample, got "
            f"{tuple(dropout.sample_ids.shape)}"
        )
    total = heads if dropout is None or dropout.num_heads is None else dropout.num_heads
    if dropout is not None and not 0 <= dropout.first_head <= total - heads:
        raise ValueError(
            f"dropout.first_head={dropout.first_head} and the {heads} query heads here do not fit "
            f"{total} heads in all; give the global index of the first one, and dropout.num_heads"
        )


def _check_bias(q: Tensor, bias: Tensor | None, length: int) -> None:
    if bias is None:
        return
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise TypeError(f"bias must be a tensor of floating point, or None, got {bias!r:.80}")
    expected = (q.shape[2], 2 * length - 1)
    if tuple(bias.shape) != expected:
        raise ValueError(
            f"bias is {tuple(bias.shape)}, but must be {expected}: a number for each query head "
            f"and each distance from {1 - length} to {length - 1}"
        )
    if bias.device != q.device:
        raise ValueError(f"bias is on {bias.device}, but q on {q.device}; use one device")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k and v must be [B, S, heads, head_dim], got {shapes}")
    if not (q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape[2] == v.shape[2]):
        message = f"q, k and v must have the same B and S, and k and v the same heads: {shapes}"
        if q.shape[::2] == k.shape[::2] == v.shape[::2] and k.shape[1] == v.shape[1]:
            message += (
                "; these look like [B, heads, S, head_dim], the layout of torch's "
                "scaled_dot_product_attention: give each as x.transpose(1, 2)"
            )
        raise ValueError(message)
    if not min(*q.shape[2:], *k.shape[2:], *v.shape[2:]):
        raise ValueError(f"heads and head_dim must be at least 1, got {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head_dim, got {shapes}")
    heads, groups = q.shape[2], k.shape[2]
    if heads % groups:
        nearest = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"{heads} query heads cannot share {groups} key heads evenly; {heads} heads can share "
            f"{min(nearest, key=lambda n: abs(n - groups))}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in _DTYPES:
        raise TypeError(f"q, k and v must be one of {_DTYPES}, got {q.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}"
        )
