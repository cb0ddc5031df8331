"""GPT: a language model, or one pipeline stage of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from mt_parallel_state import shard_param, sharding_of
from torch import Tensor, nn

from mt_model.attend.cache import KVCache
from mt_model.attend.context import ForwardContext
from mt_model.attend.padding import last_tokens
from mt_model.attend.sequence import SequenceAttend
from mt_model.block.losses import Losses, add_losses
from mt_model.language.divergence import Teaching
from mt_model.language.embedding import TokenEmbedding
from mt_model.language.generating import GeneratingStack
from mt_model.language.head import LanguageHead
from mt_model.language.mtp import Ahead, MTPModule
from mt_model.language.pooled_head import PooledHead
from mt_model.retro.cross_attention import ChunkedCrossAttention
from mt_model.retro.neighbours import Neighbours
from mt_model.stack.batch import Batch, batch_of, check_batch, new_tokens
from mt_model.stack.config import StackConfig
from mt_model.stack.layer import Step, TransformerLayer
from mt_model.vision.image_input import ImageInput

if TYPE_CHECKING:
    from mt_model.generation.adapters import AdapterBank
    from mt_model.language.config import ModelConfig


class GPT(GeneratingStack):
    """One pipeline stage of a language model; with `layers=None` the whole model.

    Besides the parameters of `Stack`, the stage that starts at layer 0 has `embedding.*`
    (`TokenEmbedding`) and `images.*` (`ImageInput`), and the stage that ends at the last layer has
    `head.*` (`LanguageHead`), `pooled_head.*` (`PooledHead`) and `mtp.K.*` (`MTPModule`). A tied
    head, or modules of `mtp`, on another stage than the embedding have a second `embedding.weight`
    (`is_copy`); both then have partial gradients over "embedding".

    It takes the arguments of `Stack`: `GPT(config)`, or `GPT(config, state, layers=range(4))`.

    Attributes:
        adapters: Adapters that requests of a pass may have; None for none.
    """

    adapters: AdapterBank | None = None

    def _check_config(self, config: object) -> None:
        if not isinstance(config, StackConfig) or config.inputs != "tokens":
            raise TypeError(
                f"config must be a ModelConfig, as gpt(...) or preset(...) make it, got "
                f"{type(config).__name__}"
            )
        config = cast("ModelConfig", config)
        if not self._builds(config):
            raise ValueError(
                f"encoder_layers={config.encoder_layers} is no model of {type(self).__name__}; "
                "build it by config.build(state, ...)"
            )

    def _builds(self, config: ModelConfig) -> bool:
        """Whether this class builds the model."""
        return not config.encoder_layers

    def _build_input(self) -> None:
        if self.has_embedding or (self.has_head and self.config.shares_embedding):
            alone = not self.has_embedding
            self.embedding = TokenEmbedding(self.config, shard=self.shard, only_tokens=alone)
            self._mark_tied(self.embedding.weight)
        images = self.config.images if self.has_embedding else None
        self.images = None
        if images is not None:
            size, placed = (self.config.hidden_size, {"state": self.state, "shard": self.shard})
            self.images = ImageInput(images, size, **placed, plan=self.plan)

        self.neighbours = None
        if self.config.retro is not None:
            place = self.config.retro.places(self.config.num_layers)[0]
            placed = {"layers": self.layer_range, "shard": self._placement_of(place)}
            placed["alone"] = self._sequences_alone()
            self.neighbours = Neighbours(self.config.retro, self.config, **placed)

    def _sequences_alone(self) -> SequenceAttend:
        """Return attention within sequences that no ranks share, such as neighbours."""
        if self.shard.context.group is None:
            return self.shard.context
        layers = self.config.num_layers
        return SequenceAttend(self.state, "ring", None, layers=layers, shared=False)

    def _cross_of(self, layer: int) -> nn.Module | None:
        config, retro = self.config, self.config.retro
        if retro is None or layer not in retro.places(config.num_layers):
            return None
        cross, size = retro.cross(config.layers[layer]), config.hidden_size
        placed = {"layer": layer, "shard": self._placement_of(layer)}
        return ChunkedCrossAttention(cross, size, chunk=retro.chunk, **placed)

    def _build_output(self) -> None:
        config = self.config
        self.head = LanguageHead(config, shard=self.shard)
        pooled, self.pooled_head = config.pooled_head, None
        if pooled is not None:
            self.pooled_head = PooledHead(pooled, config, shard=self.shard)
        self.mtp = nn.ModuleList(
            MTPModule(config, layer=layer, shard=self._placement_of(layer))
            for layer in range(config.num_layers, len(config.all_layers))
        )

    def _mark_tied(self, weight: nn.Parameter) -> None:
        if self.config.shares_embedding and not (self.has_embedding and self.has_head):
            spec = sharding_of(weight).spec
            shard_param(weight, spec, partial_grad=("embedding",), is_copy=not self.has_embedding)

    def forward(
        self,
        x: Tensor | None,
        batch: Batch | None = None,
        *,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
    ) -> Tensor | Losses | tuple[Tensor, Losses]:
        """Run the model, or one stage of it.

        `model(tokens)` returns logits and `model(tokens, labels=labels)` the losses. A stage of an
        `mt_pipeline` is called with `(x, batch)` instead: the activation of the stage before, and
        a mapping with the rest. The last stage returns losses where there are labels, else logits.

        Losses are sums over this rank's tokens, which the trainer divides once by the global count
        of labels: `lm`, the cross entropies; the losses of this stage's layers by their names
        (`ModelConfig.loss_weights`); and `tokens`, the number of labels. With `mtp` there are also
        `mtp_1`, the sum for the labels one token further on in the same document, `tokens_1`, their
        number, and so on; with a pooled head `nsp` and `sequences` (`ModelConfig.loss_counts`).
        Losses are fp32 (fp64 for an fp64 model), and equal on all ranks of a tensor-parallel group.

        Args:
            x: Tokens, int64; with a batch the activation of the stage before, None on the first.
            batch: `tokens`, int64, and `labels` and `sample_ids` as below; `embeddings` in place
                of tokens; `pixel_values`, images in the order of the tokens that stand for them,
                whole on every rank that shares a sequence; `token_types`, 0 where missing;
                `documents`, ids of packed documents that do not see each other; `positions` other
                than 0, 1, 2 and on, or three for each token (MRoPE); `mask`, True where a token is
                and False at padding, which no token sees and which has no positions;
                `label_weights`, by which the loss of each label is multiplied;
                `neighbours` of each whole chunk of a model with `retro`, token ids padded with 0,
                and `neighbour_lengths`, their numbers of tokens, 0 where there is none (with a
                cache, of each chunk that the pass finishes);
                `sequence_labels`, the class of each row for a pooled head, where -100 does not
                count; `memory` and `memory_mask` for cross-attention, whole on every rank; and for
                generation this stage's own `cache`, with which the last stage returns only the
                logits after the last token of each row. With `slots` the tokens are one row of many
                requests, the cache is `new_pages`, and there are logits of the scored tokens;
                `peers` are ranks of which each has some of the row's tokens.
            labels: Next token after each token, int64; -100 does not count.
            sample_ids: Unique number of each training sample; needed with dropout in training.

        Returns:
            The activation for the next stage, as `(x, losses)` where its layers have losses and the
            pass is none of generation. The last stage returns losses or logits: logits cover all
            tokens of this rank and the whole vocabulary, gathered over the tensor-parallel group,
            with gradients.

        Shape:
            tokens, labels, label_weights, positions, token_types: [B, S / cp], this rank's as
            `mt_context_parallel.shard` cuts them, or positions [3, B, S / cp]; documents, mask:
            [B, S], whole; sample_ids, sequence_labels: [B]; embeddings: [B, S / cp, hidden];
            neighbours: [B, S // chunk, k, 2 * chunk]; neighbour_lengths: [B, S // chunk, k];
            pixel_values: [N, C, H, W]; memory: [B, M, size]; memory_mask: [B, M];
            x: [B, S / cp, hidden] (S / cp / tp tokens under sequence parallelism);
            logits: [B, S / cp, vocab_size].

        Raises:
            TypeError: Tokens, labels or sample ids are no integers, or the batch is no mapping.
            ValueError: A shape does not fit, or an entry that this stage needs is missing.
        """
        if batch is None:
            batch, x = batch_of(x, labels, sample_ids), None
        elif labels is not None or sample_ids is not None:
            raise ValueError("give labels and sample_ids in the batch, or tokens without a batch")
        check_batch(batch)
        x, shared = self.begin(x, batch)
        x, losses = self.run_layers(x, shared)
        losses = add_losses(losses, self.mtp_losses(x, shared, batch))
        return self.finish(x, losses, batch)

    def parts(self, batch: Batch) -> list[Callable[[Any], Any]]:
        """Return the pass in parts, for overlapped pairs; see `Stack.parts`."""
        check_batch(batch)
        return super().parts(batch)

    def begin(self, x: Tensor | None, batch: Batch) -> tuple[Tensor, ForwardContext]:
        """Return the activation that enters this stage's layers, and the layers' context."""
        if self.adapters is not None:
            self.adapters.begin(batch.get("slots"))
        given = new_tokens(batch)
        length = given.shape[1] * self.shard.context.size
        device = given.device if x is None else x.device
        positions = self._positions(batch, length, device)
        shared = self._share(batch, positions, length, device)
        if self.has_embedding:
            self._check_images(batch)
            x = self.embedding.embed(batch, positions, shared.hidden_index, self.images)
        elif x is None:
            raise ValueError("x is None, and only the first stage starts from tokens")
        if self.neighbours is not None:
            lengths = self.neighbours.lengths(batch, training=self.training)
            shared = replace(shared, neighbour_lengths=lengths)
            if lengths is not None and lengths.shape[1] and self.has_embedding:
                x = torch.cat((x, self.embedding(batch["neighbours"].flatten(1))), 1)
        return self.give_tables_gradients(x, shared), shared

    def _steps(self, steps_of: Callable[[TransformerLayer], list[Step]]) -> list[Step]:
        if self.neighbours is None:
            return super()._steps(steps_of)
        layers = [(layer.index, steps_of(layer)) for layer in self.stage_layers()]
        return self.neighbours.steps(layers, is_last=self.has_head)

    def _check_images(self, batch: Batch) -> None:
        if batch.get("pixel_values") is None:
            return
        if self.images is None:
            raise ValueError(
                "the batch has pixel_values, but the model takes no images; leave them out, or "
                "build it with images=ImageInputConfig(...)"
            )
        if batch.get("embeddings") is not None:
            raise ValueError("pixel_values do not go with embeddings; give tokens in their place")

    def finish(
        self, x: Tensor, losses: Losses, batch: Batch
    ) -> Tensor | Losses | tuple[Tensor, Losses]:
        """Return the stage's result, from the output and the losses of its layers."""
        cache, slots = batch.get("cache"), batch.get("slots")
        if isinstance(cache, KVCache):
            cache.length += new_tokens(batch).shape[1]
        if not self.has_head:
            return (x, losses) if losses and cache is None else x
        if slots is not None:
            return self.scores(x.index_select(1, slots.scored))
        if batch.get("labels") is not None:
            own = self.loss(x, batch["labels"], batch.get("label_weights"))
            return {**own, **self._pooled_loss(x, batch), **losses}
        return self.scores(x if cache is None else last_tokens(x, batch.get("mask")))

    def _pooled_loss(self, x: Tensor, batch: Batch) -> Losses:
        if self.pooled_head is not None:
            return self.pooled_head.loss(self._normed(x), batch)
        if batch.get("sequence_labels") is not None:
            raise ValueError(
                "the batch has sequence_labels, but the model was built without a pooled_head; "
                "leave them out, or build it with pooled_head=PooledHeadConfig()"
            )
        return {}

    def mtp_losses(self, x: Tensor, shared: ForwardContext, batch: Batch) -> Losses:
        """Compare with a teacher and run the MTP modules, where there are labels.

        Returns:
            `distillation` with `batch["teaching"]`; `mtp_k` and `tokens_k` of module k, and the
            losses of the modules' layers by their names.
        """
        losses: Losses = {}
        if not self.has_head or batch.get("labels") is None:
            return losses
        teaching = batch.get("teaching")
        if teaching is not None:
            if batch.get("label_weights") is not None:
                raise ValueError("a student learns all labels alike; leave label_weights out")
            found = self.head(self._normed(x), batch["labels"], tied=self._tied, teaching=teaching)
            losses = add_losses(losses, found)
        if not self.mtp:
            return losses
        ahead = Ahead(batch, shared.documents, self.shard.context.group)
        x = self._normed(x)
        for depth, module in enumerate(self.mtp, start=1):
            tokens, labels, weights = ahead.at(depth)
            x, more = module(x, self.embedding(tokens), shared)
            found = self.head(x, labels, weights, tied=self._tied, with_z=False)
            losses = add_losses(losses, self._whole(more))
            losses |= {f"mtp_{depth}": found["lm"], f"tokens_{depth}": found["tokens"]}
        if shared.saved is not None:
            shared.saved.finish()
        return losses

    @torch.no_grad()
    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run a pass over pages, and return scores and what `ahead` reads.

        Args:
            batch: `tokens`, `cache` and `slots`, as of `forward`.

        Shape:
            Returns the scores [1, L, vocab_size] of the scored tokens, and the output
            [1, T, hidden] of the final norm.
        """
        check_batch(batch)
        x, _ = self.run_layers(*self.begin(None, batch))
        return cast("Tensor", self.finish(x, {}, batch)), self._normed(x)

    @torch.no_grad()
    def ahead(self, depth: int, features: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run an MTP module over pages, and return its scores and what the next module reads.

        Args:
            depth: Number of the module; the first is 1.
            features: Features of tokens, from `features` or the module before.
            batch: `tokens`, those `depth` places after these in their texts; `cache` of
                `new_pages(mtp=True)`, and `slots` of the tokens of the features.

        Shape:
            features: [1, T, hidden]. Returns [1, L, vocab_size] and [1, T, hidden].
        """
        check_batch(batch)
        tokens, slots = batch["tokens"], batch["slots"]
        count, device = tokens.shape[1], tokens.device
        shared = self._share(batch, self._positions(batch, count, device), count, device)
        x, _ = self.mtp[depth - 1](features, self.embedding(tokens), shared)
        return self.head(x.index_select(1, slots.scored), tied=self._tied), x

    def built_layers(self) -> Iterator[TransformerLayer]:
        """Return this stage's layers, with the MTP modules' layers on the last stage."""
        modules = cast("Iterable[MTPModule]", self.mtp if self.has_head else ())
        return chain(self.stage_layers(), (module.layer for module in modules))

    def layer_name(self, index: int) -> str:
        """Return the name of a layer; indices past the last layer belong to MTP modules."""
        behind = index - self.config.num_layers
        return super().layer_name(index) if behind < 0 else f"mtp.{behind}.layer"

    def scores(self, x: Tensor) -> Tensor:
        """Norm the last layer's output and score the next token, over the whole vocabulary."""
        return self.head(self._normed(x), tied=self._tied)

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> Losses:
        """Norm the last layer's output, and sum its cross entropies with this rank's labels."""
        return self.head(self._normed(x), labels, weights, tied=self._tied)

    def teach(self, x: Tensor, temperature: float) -> Teaching:
        """Norm the last layer's output, for a student to learn the scores of the head.

        Args:
            x: Output of the last layer.
            temperature: Divisor of the scores.
        """
        with torch.no_grad():
            return self.head.teach(self._normed(x), temperature, tied=self._tied)

    @property
    def _tied(self) -> Tensor | None:
        return self.embedding.weight if self.config.tied else None

    def logits(
        self,
        tokens: Tensor,
        *,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
    ) -> Tensor:
        """Return scores of the next token after every token, without dropout or gradients.

        Args:
            tokens: Sequences of equal length; with a cache, the tokens after the cached ones.
            cache: Keys and values of the tokens before; the new ones are added.
            mask: True where a token is, False at padding; None where all are tokens.
            pixel_values: Images among these tokens; None for none.

        Shape:
            tokens, mask: [B, S]; pixel_values: [N, C, H, W]. Returns [B, S, vocab_size].

        Raises:
            ValueError: The model is one of several stages, or sequence or context parallel, or
                the tokens do not fit the cache or the model.
        """
        batch = {"tokens": tokens, "cache": cache, "mask": mask, "pixel_values": pixel_values}
        return self._score(batch)

    @torch.no_grad()
    def final_features(self, batch: Batch, x: Tensor | None = None) -> Tensor:
        """Return the normed output of the last layer, without dropout or gradients.

        Args:
            batch: A batch of the model without labels or a cache; see `forward`.
            x: Activation of the stage before, for a stage but the first.

        Returns:
            The features, or the activation for the next stage.

        Shape:
            x: [B, S, hidden]. Returns [B, S, hidden].

        Raises:
            ValueError: The model is sequence or context parallel, or the tokens don't fit it.
        """
        x, _ = self.run_layers(*self._begin_without_dropout(x, batch, "final_features()"))
        return self._normed(x) if self.has_head else x

    @torch.no_grad()
    def _score(self, batch: Batch) -> Tensor:
        """Return the scores of a batch's tokens; see `logits`."""
        x = self._without_dropout(batch, "logits()")
        if batch.get("cache") is not None:
            batch["cache"].length += batch["tokens"].shape[1]
        return self.scores(x)

    def _without_dropout(self, batch: Batch, what: str) -> Tensor:
        """Return the last layer's output of the whole model, for the calling method."""
        if not (self.has_embedding and self.has_head):
            raise ValueError(
                f"{what} needs the whole model, and this stage holds layers "
                f"{self.layer_range.start} to {self.layer_range.stop - 1} of "
                f"{self.config.num_layers}. Build it with pp=1, or call the stages in turn with "
                "a batch of tokens and each its own cache"
            )
        return self.run_layers(*self._begin_without_dropout(None, batch, what))[0]

    def _begin_without_dropout(
        self, x: Tensor | None, batch: Batch, what: str
    ) -> tuple[Tensor, ForwardContext]:
        """Return what enters the stage's layers, for the calling method."""
        check_batch(batch)
        self._check_whole_sequences(what)
        was_training = self.training
        self.training = False  # of this module alone: it says whether a pass drops anything
        try:
            x, shared = self.begin(x, batch)
        finally:
            self.training = was_training
        return x, replace(shared, plain=True)

    @torch.no_grad()
    def pooled_logits(self, batch: Batch) -> Tensor:
        """Score the classes of each sequence by the pooled head, without dropout or gradients.

        Args:
            batch: A batch of the model without labels: `tokens`, with `token_types` and `mask`
                where needed.

        Shape:
            Returns [B, num_classes].

        Raises:
            ValueError: The model has no pooled head, is one of several stages, or is sequence or
                context parallel.
        """
        if self.config.pooled_head is None:
            raise ValueError(
                "the model has no pooled_head; build it with pooled_head=PooledHeadConfig()"
            )
        x = self._without_dropout(batch, "pooled_logits()")
        return cast("PooledHead", self.pooled_head)(self._normed(x), batch)
