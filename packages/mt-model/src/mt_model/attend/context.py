"""The context that the layers of one forward pass share, and the attention in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

from mt_context_parallel import Algorithm, AttentionDropout
from mt_kernels import Selector
from torch import Tensor

from mt_model.attend.cache import KVCache
from mt_model.attend.chunks import chunk_documents
from mt_model.recompute.saved_activations import SavedActivations
from mt_model.rope.config import Rotary
from mt_model.rope.rotary import RotaryTable
from mt_model.rope.temperature import TemperatureConfig

Held: TypeAlias = Mapping[str, Any]
"""Tensors that a recurrent layer keeps of each text, by the names of `cache_shapes`."""
Recurrence: TypeAlias = Callable[..., tuple[Tensor, Held]]


class Recalled(NamedTuple):
    """Queries, and the keys and values of the memories that they attend to.

    Attributes:
        query: Queries of some requests.
        key: Keys of their memories.
        value: Values of their memories.
        seen: True where a memory has a token.
        put: Function that puts outputs for the queries in the row of the pass, which may be None.

    Shape:
        query: [R, S, N, D]; key, value: [R, M, G, D]; seen: [R, M].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor
    put: Callable[[Tensor, Tensor | None], Tensor]


class AttendingLayer(Protocol):
    """A layer that calls attention.

    Attributes:
        index: Layer index in the whole model.
        window: Number of tokens that a query sees, or None.
        chunk: Number of tokens of the chunks that don't see each other, or None.
        scale: Scale of the scores, or None.
        softcap: Soft cap of the scores, or None.
        causal: Whether a query sees only the tokens up to its own.
        algorithm: Algorithm that reaches the keys of the other ranks of a context group.
        attending: Its choice of a kernel of attention, by the word for it (`attention_selectors`).
    """

    index: int
    window: int | None
    chunk: int | None
    scale: float | None
    softcap: float | None
    causal: bool
    algorithm: Algorithm
    attending: Mapping[str, Selector[Any]]

    def sink_logits(self, query: Tensor) -> Tensor | None:
        """Return the sink logit of each query head of this rank, or None."""
        ...

    def weight_dropout(self, shared: ForwardContext) -> AttentionDropout | None:
        """Return the dropout of attention weights in a pass, or None."""
        ...

    def bias_by_distance(self, shared: ForwardContext, length: int) -> Tensor | None:
        """Return the bias of the scores by distance, for distances below a length, or None.

        Shape:
            Returns [heads of this rank, 2 * length - 1].
        """
        ...


class Attend(Protocol):
    """Attention of one pass, as every layer calls it."""

    @property
    def is_whole(self) -> bool:
        """Whether queries and keys are the same tokens, in whole sequences on this rank."""
        ...

    @property
    def is_cached(self) -> bool:
        """Whether keys and values are kept for later passes, as generation does."""
        ...

    def __call__(
        self,
        layer: AttendingLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shared: ForwardContext,
    ) -> Tensor:
        """Attend, with the layer's window, scale, cap, sinks and dropout.

        Shape:
            query: [B, S, N, D]; key, value: [B, S, G, D]; rotated. Returns [B, S, N, D].
        """
        ...

    def latents(
        self,
        layer: AttendingLayer,
        query: Tensor,
        latent: Tensor,
        turned: Tensor,
        shared: ForwardContext,
    ) -> Tensor:
        """Attend to latents: one head of keys, which ends with its turned part, and of values.

        Shape:
            query: [B, S, N, D + W]; latent: [B, S, 1, D]; turned: [B, S, 1, W]. Returns
            [B, S, N, D].
        """
        ...

    def recur(
        self, layer: int, run: Recurrence, inputs: Sequence[Tensor], shared: ForwardContext
    ) -> Tensor:
        """Run a recurrent layer; see `ForwardContext.recur`."""
        ...

    def recall(self, layer: int, query: Tensor) -> Sequence[Recalled]:
        """Return the memories in pages with the queries that attend to them; none without pages.

        Shape:
            query: [B, S, N, D].
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """The context that the layers of one forward pass share.

    Attributes:
        attend: Attention of the pass: whole sequences, context-parallel, cached or paged.
        tables: Rotary tables of this rank's tokens, by the mixers' `rotary`.
        score_tables: Weights of the tables of biases that layers share, by name.
        temperatures: Factors of the queries of this rank's tokens, by the mixers'
            `query_temperature`.
        documents: Ids of the packed documents of whole sequences, which do not see each other.
        sample_ids: Counters for the dropout of attention weights; None without dropout.
        hidden_index: Global index of each element of the hidden states; None without dropout.
        token_index: Global number of each token, for adapters' dropout: of all tokens of this rank,
            and of its part of the sequence; None without.
        cache: Cache of this stage in generation.
        memory: Output of an encoder, for cross-attention.
        memory_mask: True where the memory counts, for all tokens of a row or for each of this
            rank's tokens; None for all.
        neighbour_lengths: Number of tokens of each neighbour of each chunk (Retro); None for none.
        saved: Counter and offloader of the activations for backward; None leaves them to autograd.
        plain: Layers run without the wrapping of `Stack.wrap_layers`.

    Shape:
        documents: [B, S]; sample_ids: [B]; memory: [B, M, size]; memory_mask: [B, M], or
        [B, S, M] of this rank's tokens; temperatures: [S] or [B, S].
    """

    attend: Attend
    tables: Mapping[Rotary, RotaryTable] = field(default_factory=dict)
    score_tables: Mapping[str, Tensor] = field(default_factory=dict)
    temperatures: Mapping[TemperatureConfig, Tensor] = field(default_factory=dict)
    documents: Tensor | None = None
    sample_ids: Tensor | None = None
    hidden_index: Tensor | None = None
    token_index: tuple[Tensor, Tensor] | None = None
    cache: KVCache | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    neighbour_lengths: Tensor | None = None
    saved: SavedActivations | None = None
    plain: bool = False

    def tensors(self) -> list[Tensor]:
        """Return the tensors that may need a gradient: tables, and the memory if there is one."""
        return [*self.score_tables.values(), *([] if self.memory is None else [self.memory])]

    def constants(self) -> list[Tensor]:
        """Return the tensors that layers read and none of them makes."""
        tables = (table.values for table in self.tables.values())
        once = (self.documents, self.hidden_index, self.memory, self.memory_mask)
        found = [*self.score_tables.values(), *tables, *self.temperatures.values()]
        return found + [x for x in once if x is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> ForwardContext:
        """Return a copy with other tensors in place of `tensors`."""
        tables = dict(zip(self.score_tables, tensors, strict=False))
        memory = None if self.memory is None else tensors[-1]
        return replace(self, score_tables=tables, memory=memory)

    def documents_of(self, chunk: int | None, *, like: Tensor, length: int) -> Tensor | None:
        """Return the ids of documents, split into chunks where the layer has them.

        Args:
            chunk: Number of tokens of a chunk; None leaves the documents whole.
            like: Tensor with the rows and the device of the result.
            length: Length of the whole sequences.

        Shape:
            Returns [B, S].
        """
        if chunk is None or chunk >= length:
            return self.documents
        return chunk_documents(self.documents, chunk, like=like, length=length)

    def recur(self, layer: int, run: Recurrence, *inputs: Tensor) -> Tensor:
        """Run a recurrent layer over each text of the pass, and keep its state in generation.

        Args:
            layer: Layer index in the whole model.
            run: Function of the inputs, the tensors kept of the tokens before (None where nothing
                is kept) and the ids of packed documents (or None). It returns the output and the
                tensors to keep, by the names of `cache_shapes`.
            inputs: Features of the pass's tokens.

        Shape:
            inputs: [B, S, ...]. Returns [B, S, ...]; `run` may be called with other B and S.
        """
        return self.attend.recur(layer, run, inputs, self)

    @property
    def is_cached(self) -> bool:
        """Whether this is a pass of generation."""
        return self.attend.is_cached
