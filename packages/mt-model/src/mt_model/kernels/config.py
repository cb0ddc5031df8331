"""Which kernel computes each operation of a model, by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from mt_files import Checks, did_you_mean

from mt_model.kernels.words import KernelSet

if TYPE_CHECKING:
    from mt_kernels import Registry

# The names of candidates whose registry is in a room above this one.
_WORDS = {"attention": ("matmul", "sdpa", "flash", "te", "flex", "tiles", "reference", "invariant")}
_OF_WORD = {  # where an operation has no candidate of that name
    "fused": {"attention": "auto", "gemm": "auto"},
    "reference": {"gemm": "torch"},
}


def _registries(operation: str) -> tuple[Registry[Any], ...]:
    """Return the registries behind a field of `Kernels`.

    The import of mt-fusions, and with it of torch, waits until a kernel is named: a configuration
    without names is read without torch.
    """
    import mt_fusions as fused
    from mt_kernels import Registry

    from mt_model.kernels.gemm import GEMM

    return {
        "attention": (Registry("attention", ()),),
        "norm": (fused.RMS_NORM, fused.LAYER_NORM),
        "activation": (fused.GATED, fused.SQUARED_RELU, fused.BIAS_GELU, fused.SILU_PRODUCT),
        "residual": (fused.RESIDUAL,),
        "rope": (fused.ROPE,),
        "loss": (fused.LOSS,),
        "gemm": (GEMM,),
    }[operation]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernel of each operation: `auto` or a candidate's name.

    `auto` takes the first candidate that serves and was measured to be the fastest for the device;
    inside `torch.compile` it is the plain form, which the compiler fuses. A name is used wherever
    the operation is, or refused with the reason. `fused` is mt-fusions' kernel: blocks in cache on
    a CPU, Triton on CUDA.

    Attributes:
        attention: `matmul` (short sequences on a CPU), `sdpa` (torch's), `flash` (flash-attn), `te`
            (Transformer Engine), `flex` (torch's), `tiles`, the plain `reference`, or `invariant`:
            the bits of a token depend on the tokens before it alone, in linear layers and
            activations too.
        norm: RMSNorm and LayerNorm: `fused`, `torch` (`F.rms_norm`, `F.layer_norm`), `reference`
            or, of RMSNorm alone, `cpu` (few passes of torch's vector code).
        activation: Gated activations, squared ReLU and GELU after a bias: `fused`, `torch` (its
            kernels, with one buffer for the gradient), `reference` or `invariant` (the same bits
            for a number wherever it is in a tensor). Others are one kernel of torch's, or
            `invariant`.
        residual: The addition of a branch to the residual stream: `fused`, with the norm that reads
            the sum or with dropout, or `reference`, alone.
        rope: The rotary embedding: `fused`, `torch` or `reference`.
        loss: Softmax and cross entropy of a block of logits: `fused`, `torch` or `reference`.
        gemm: The products of linear layers, of the head, and of `matmul` attention with them:
            `torch`, `cpu` (its, with the bf16 weight gradient in blocks), `onednn` (fp32 on a CPU),
            `invariant` (the same bits for any number of rows on a CPU), `packed` (of copies in
            oneDNN's layout, for a model that serves; see `pack_weights`) or `wide` (many bf16 rows
            in fp32, where a CPU has no bf16 products; see `serving_products`). `auto` takes
            `onednn` on one rank where a measurement of some tens of milliseconds finds errors as of
            fp32 and 1.25 times torch's speed.

    Example:
        >>> Kernels.of("fused").norm, Kernels(rope="fused").norm
        ('fused', 'auto')
    """

    attention: str = "auto"
    norm: str = "auto"
    activation: str = "auto"
    residual: str = "auto"
    rope: str = "auto"
    loss: str = "auto"
    gemm: str = "auto"

    sets: ClassVar[tuple[str, ...]] = get_args(KernelSet)

    def __post_init__(self) -> None:
        checks = Checks(self)
        for field in (item.name for item in fields(self)):
            name, own = getattr(self, field), _WORDS.get(field, ())
            if name == "auto":
                continue
            registries = _registries(field)
            if name in own or any(name == x.name for each in registries for x in each.candidates):
                continue
            # Only a name that no registry here has is looked for in other packages.
            words = ["auto", *own, *(x for each in registries for x in each.names)]
            if name not in words:
                known = ", ".join(dict.fromkeys(words))
                near = did_you_mean(name, words)
                hint = f". {near}" if near.startswith("Did") else ""
                checks.add(field, f"{name!r} is not one of {known}{hint}")
        checks.done()

    @property
    def is_invariant(self) -> bool:
        """Whether the bits of a token depend on the tokens before it alone."""
        return self.attention == "invariant"

    @property
    def products(self) -> str:
        """The word for `gemm`, which invariant attention chooses where it is left open."""
        return "invariant" if self.is_invariant and self.gemm == "auto" else self.gemm

    @property
    def activations(self) -> str:
        """The word for `activation`, likewise."""
        is_open = self.is_invariant and self.activation == "auto"
        return "invariant" if is_open else self.activation

    @classmethod
    def of(cls, value: KernelSet | Kernels) -> Kernels:
        """Return the choice for a word, which is for every operation, or the choice itself.

        `fused` is for all operations of mt-fusions; attention chooses for itself.

        Raises:
            ValueError: No such word.
        """
        if isinstance(value, Kernels):
            return value
        if value not in cls.sets:
            raise ValueError(
                f"kernels must be a Kernels or one of {', '.join(cls.sets)}, got {value!r}. "
                f"{did_you_mean(str(value), cls.sets)}"
            )
        words = {item.name: value for item in fields(cls)}
        return cls(**words | _OF_WORD.get(value, {}))  # pyright: ignore[reportArgumentType]
