"""Communication that runs while a sequence-parallel linear layer multiplies.

The layer's input is gathered, or its output scattered, in pieces of the sequence: one piece is sent
while another is multiplied. On one node torch's symmetric memory does this, with ranks that read
each other's memory; elsewhere it is a loop over chunks. Results equal the plain path up to the
rounding of matrix products with other numbers of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from mt_parallel_state import Group, group_size, start_all_gather, start_reduce_scatter
from torch import Tensor

from mt_tensor_parallel.gemm import SEQUENCE_DIM, Gemm, Operand


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The way in which a layer's products hide its communication.

    Attributes:
        kind: `"plain"` hides nothing in forward; `"chunked"` communicates in pieces; `"symmetric"`
            uses torch's products over symmetric memory (`torch.ops.symm_mem`).
        chunks: Number of pieces of each rank's share of the sequence, at most its length.
        reason: Why this overlap was picked.
    """

    kind: Literal["plain", "chunked", "symmetric"] = "plain"
    chunks: int = 1
    reason: str = "asked for"

    def __post_init__(self) -> None:
        if self.kind not in ("plain", "chunked", "symmetric"):
            raise ValueError(f"kind must be 'plain', 'chunked' or 'symmetric', got {self.kind!r}")
        fewest = 2 if self.kind == "chunked" else 1
        if not isinstance(self.chunks, int):
            raise TypeError(f"chunks must be an int, got {self.chunks!r}")
        if self.chunks < fewest:
            raise ValueError(f"chunks={self.chunks} must be {fewest} or more for {self.kind!r}")

    def pieces(self, share: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Return the pieces of a share of the sequence."""
        return share.tensor_split(min(self.chunks, max(share.shape[dim], 1)), dim)


class Product(NamedTuple):
    """A product with a layer's weight, in forward or for the input's gradient."""

    gemm: Gemm
    weight: Operand
    bias: Tensor | None = None
    is_dgrad: bool = False

    def __call__(self, x: Operand) -> Tensor:
        """Multiply through the layer's `Gemm`."""
        if self.is_dgrad:
            return self.gemm.dgrad(x, self.weight)
        return self.gemm.forward(x, self.weight, self.bias)

    @property
    def matrix(self) -> Tensor:
        """The matrix by which `x` is multiplied."""
        return self.weight if self.is_dgrad else self.weight.t()


def pick_overlap(
    group: Group,
    *,
    sequence_parallel: bool,
    device: torch.device,
    gemm: Gemm | None = None,
    chunks: int = 4,
) -> Overlap:
    """Return the best overlap for a layer, with the reason.

    Symmetric memory is preferred to pieces, and pieces to the plain path.

    Args:
        group: The layer's ranks.
        sequence_parallel: Whether the layer gathers and scatters at all.
        device: Device of its activations.
        gemm: The layer's strategy; `None` is `TorchGemm`.
        chunks: Number of pieces of a chunked overlap.
    """
    if group is None or group_size(group) == 1:
        return Overlap(reason="one rank sends nothing")
    if not sequence_parallel:
        return Overlap(reason="without sequence parallelism only the output's sum travels")
    if device.type == "cpu":
        # gloo's threads want the cores that multiply, and each message costs more than it hides.
        return Overlap(reason="on a CPU communication and products share the cores")
    if gemm is not None and not gemm.keeps_tensors:
        return Overlap(reason=f"the operands of {gemm!r} travel whole")
    obstacle = symmetric_obstacle(group, device, gemm)
    if obstacle is None:
        return Overlap(kind="symmetric", reason="the ranks read each other's memory")
    return Overlap(kind="chunked", chunks=chunks, reason=f"no symmetric memory: {obstacle}")


def symmetric_obstacle(
    group: dist.ProcessGroup, device: torch.device, gemm: Gemm | None
) -> str | None:
    """Return why a group cannot use products over symmetric memory, or None if it can.

    This assumes that ranks fill the nodes in order, one per GPU, as launchers place them.
    """
    if gemm is not None and not gemm.is_torch:
        return f"the products are {gemm!r}'s"
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if torch.compiler.is_compiling():
        return "a compiled graph has torch.compile's own passes for it"
    if type(group) is not dist.ProcessGroup:
        return f"a {type(group).__name__} must see every collective"
    try:
        _fused()
    except (ImportError, AttributeError) as error:
        return f"this torch ({torch.__version__}) lacks it: {error}"
    per_node = torch.cuda.device_count()
    ranks = dist.get_process_group_ranks(group)
    if len({rank // per_node for rank in ranks}) > 1:
        return f"ranks {ranks} are on several nodes of {per_node} GPUs"
    others = (rank % per_node for rank in ranks if rank % per_node != device.index)
    apart = [i for i in others if not torch.cuda.can_device_access_peer(device, i)]
    return f"GPU {device.index} cannot read the memory of {apart}" if apart else None


def _fused() -> tuple[Any, Any]:
    """Return the fused all-gather and product, and the fused product and reduce-scatter.

    `import torch.distributed` alone does not define torch's; this module does.

    Raises:
        ImportError: torch was built without symmetric memory.
        AttributeError: It has no such products.
    """
    import torch.distributed._symmetric_memory

    products = torch.ops.symm_mem
    return products.fused_all_gather_matmul, products.fused_matmul_reduce_scatter


def check_overlap(
    overlap: Overlap, group: dist.ProcessGroup, device: torch.device, gemm: Gemm | None
) -> None:
    """Raise ValueError if a layer cannot use an overlap."""
    obstacle = None
    if overlap.kind == "symmetric":
        obstacle = symmetric_obstacle(group, device, gemm)
    elif overlap.kind == "chunked" and gemm is not None and not gemm.keeps_tensors:
        obstacle = f"the operands of {gemm!r} travel whole"
    if obstacle is not None:
        raise ValueError(
            f"overlap kind {overlap.kind!r} cannot work here: {obstacle}; leave overlap=None to "
            "have the best way picked"
        )


def gather_and(
    product: Product, x: Operand, group: dist.ProcessGroup, overlap: Overlap, *, keep: bool
) -> tuple[Tensor, Operand | None]:
    """All-gather `x` along the sequence and apply `product` to it, piece by piece.

    Args:
        product: The product to apply.
        x: This rank's share.
        group: The ranks of the sequence.
        overlap: The overlap.
        keep: Whether to return the whole input too. If not, only the plain path ever holds it.

    Returns:
        The product of the whole, and the whole or None.

    Shape:
        x: [B, s, in]. Returns [B, ranks * s, out] and [B, ranks * s, in].
    """
    if overlap.kind == "plain":
        whole = product.gemm.gather(x, group)()
        return product(whole), whole if keep else None
    if overlap.kind == "symmetric":
        gathered, _ = _fused()
        whole, (y,) = gathered(x, [product.matrix], SEQUENCE_DIM, group.group_name, return_A=keep)
        return y if product.bias is None else y.add_(product.bias), whole
    pieces = overlap.pieces(x, SEQUENCE_DIM)
    pending = start_all_gather(pieces[0], group, SEQUENCE_DIM)
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    for following in (*pieces[1:], None):
        arrived = pending.wait()
        if following is not None:
            pending = start_all_gather(following, group, SEQUENCE_DIM)
        if keep:
            inputs.append(arrived)
        outputs.append(product(arrived))
    return _interleaved(outputs, group), _interleaved(inputs, group) if keep else None


def _interleaved(pieces: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Join pieces, each with a part of every rank's share, in the order of the ranks."""
    parts = [piece.unflatten(SEQUENCE_DIM, (group.size(), -1)) for piece in pieces]
    return torch.cat(parts, SEQUENCE_DIM + 1).flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)


def scatter_after(
    product: Product, x: Operand, group: dist.ProcessGroup, overlap: Overlap
) -> Tensor:
    """Apply `product` and reduce-scatter the result along the sequence, piece by piece.

    Shape:
        x: [B, ranks * s, in]. Returns [B, s, out].
    """
    if overlap.kind == "plain":
        return start_reduce_scatter(product(x), group, SEQUENCE_DIM).wait()
    if overlap.kind == "symmetric":
        _, scattered = _fused()
        return scattered(x, product.matrix, "sum", SEQUENCE_DIM, group.group_name)
    shares = x.unflatten(SEQUENCE_DIM, (group.size(), -1))
    pending = [
        start_reduce_scatter(
            product(piece.flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)), group, SEQUENCE_DIM
        )
        for piece in overlap.pieces(shares, SEQUENCE_DIM + 1)
    ]
    return torch.cat([each.wait() for each in pending], SEQUENCE_DIM)
