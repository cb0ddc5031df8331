"""One layer of a model, as a frozen value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from mt_files import Checks

from mt_model.block.entry import EntryConfig, FeedForwardConfig, MixerConfig
from mt_model.block.sizes import MAX_LAYERS
from mt_model.kernels.words import Norms


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: a mixer and a feed-forward, each a branch of the residual stream with its norms.

    With f a branch and n its norms, the stream x becomes `x + s f(n(x))` (`pre`, Llama and GPT-2),
    `x + s n(f(x))` (`output`, OLMo-2), `x + s n2(f(n1(x)))` (`sandwich`, Gemma 2) or
    `n(x + s f(x))` (`post`, BERT), where s is `residual_scale`.

    Attributes:
        mixer: Mixer, of type attention where plain values name no other `type`; None for none.
        feed_forward: Feed-forward, an MLP likewise; None for none. A layer has at least one of
            the two.
        repeat: How often the layer comes; 1 in a `ModelConfig`, which lists each layer.
        norms: Place of the norms: `pre`, `output`, `sandwich` or `post`.
        parallel: Both branches start from the layer's input, and are added at once (GPT-NeoX).
        shared_norm: Parallel branches have one norm in front of both (GPT-J, Phi).
        residual_scale: Factor of a branch before it is added (Granite).
    """

    mixer: MixerConfig | None
    feed_forward: FeedForwardConfig | None = None
    repeat: int = 1
    norms: Norms = "pre"
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "repeat")
        checks.at_most(MAX_LAYERS, "repeat")
        checks.above(0, "residual_scale")
        checks.done()
        if not self.entries:
            checks.add("mixer", "None, and so is feed_forward; a layer has one of them at least")
        if self.parallel and (len(self.entries) == 1 or self.norms == "post"):
            checks.add(
                "parallel",
                "True, but there is only one branch, or the norm of the one is the input of the "
                "other (norms='post'). Use parallel=False.",
            )
        if self.shared_norm and not (self.parallel and self.norms in ("pre", "sandwich")):
            checks.add(
                "shared_norm",
                "True, but only parallel branches with a norm in front can share one. Use "
                "parallel=True and norms='pre' or 'sandwich', or shared_norm=False.",
            )
        checks.done()

    @property
    def num_norms(self) -> int:
        """Number of norms of the layer itself, before and after its branches."""
        branches = len(self.entries)
        each = branches * (2 if self.norms == "sandwich" else 1)
        return each - 1 if self.shared_norm else each

    @property
    def entries(self) -> tuple[EntryConfig, ...]:
        """The mixer and the feed-forward, where the layer has them."""
        return tuple(entry for entry in (self.mixer, self.feed_forward) if entry is not None)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Weights of the layer's losses by name; both entries may add to the same loss."""
        return {name: weight for e in self.entries for name, weight in e.loss_weights.items()}


def runs(layers: Iterable[LayerConfig]) -> Iterator[tuple[LayerConfig, int]]:
    """Yield each run of equal layers as the layer and how often it comes."""
    for layer, equal in groupby(layers):
        yield layer, sum(1 for _ in equal)
