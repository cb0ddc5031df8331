"""A language model of an encoder and a decoder that attends to its output, or a stage of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from mt_context_parallel import unshard
from mt_parallel_state import gather_from_group
from torch import Tensor

from mt_model.attend.cache import KVCache, Pages
from mt_model.attend.context import ForwardContext
from mt_model.attend.padding import padding_as_document, positions_of
from mt_model.attention.cross_attention import CrossAttention
from mt_model.block.dropout import DropoutSite
from mt_model.block.entry import MixerConfig
from mt_model.block.losses import Losses
from mt_model.block.norm import stream_norm
from mt_model.language.decoder import GPT
from mt_model.stack.batch import Batch, check_encoder_batch, whole_of
from mt_model.stack.layer import Step, TransformerLayer

if TYPE_CHECKING:
    from mt_model.language.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class DecoderPass(ForwardContext):
    """The context of the decoder's layers in one forward pass, with the encoder's.

    Attributes:
        encoder: Context of the encoder's layers; None in generation once the cache has the memory.
        encoder_length: Tokens of the encoder on this rank, between the parallel regions.
    """

    encoder: ForwardContext | None = None
    encoder_length: int = 0


class Streams(NamedTuple):
    """The activations between two layers of a stage.

    Attributes:
        encoder: The encoder's stream; after its last layer, the encoder's output.
        decoder: The decoder's stream; before its first layer, the embeddings.
        memory: The encoder's output, gathered, for the decoder's layers of the stage.
    """

    encoder: Tensor
    decoder: Tensor
    memory: Tensor | None = None


class EncoderDecoder(GPT):
    """One pipeline stage of an encoder and a decoder; with `layers=None` the whole model.

    The first `config.encoder_layers` layers are the encoder. It has the parameters of `GPT`, and
    `encoder_norm.*` on the stage with the encoder's last layer. The first stage embeds the tokens
    of both, so that stages exchange one tensor: the encoder's activations, then the decoder's. A
    cut may be between any two layers.

    The decoder attends to whole encoder outputs: every stage with layers of it all-gathers them
    once over the ranks that share sequences (backward reduce-scatter), and over the
    tensor-parallel group under sequence parallelism (backward keeps the rank's own part).

    Dropout counts the two sequences of a sample i as the samples 2 i and 2 i + 1.
    """

    def forward(
        self,
        x: Tensor | None,
        batch: Batch | Tensor | None = None,
        *,
        labels: Tensor | None = None,
        sample_ids: Tensor | None = None,
    ) -> Tensor | Losses | tuple[Tensor, Losses]:
        """Run the model, or one stage of it.

        `model(encoder_tokens, tokens)` returns logits of the decoder's tokens, and
        `model(encoder_tokens, tokens, labels=labels)` the losses. Without `tokens` they are the
        labels, shifted right behind `config.decoder_start`. A stage of an `mt_pipeline` is called
        with `(x, batch)`, like a stage of a `GPT`.

        Args:
            x: Tokens of the encoder, int64; with a mapping the activation of the stage before, None
                on the first.
            batch: Tokens of the decoder, int64; or a mapping as for `GPT`, whose `tokens` are the
                decoder's, with `encoder_tokens`, and `encoder_mask`, True where a token is and
                False at padding. Packed pairs have ids in `documents` and `encoder_documents`: a
                token of the decoder sees the encoder's output for its own pair, and
                `encoder_positions` are the encoder's `positions`. There is no `memory`. In
                generation only the first pass of a cache has `encoder_tokens`.
            labels: Next token after each token of the decoder, int64; -100 does not count.
            sample_ids: Unique number of each training sample; needed with dropout in training.

        Returns:
            The same as `GPT`.

        Shape:
            encoder_tokens, encoder_positions: [B, E / cp], this rank's as
            `mt_context_parallel.shard` cuts them; encoder_mask, encoder_documents: [B, E], whole;
            x: [B, (E + S) / cp, hidden] ((E + S) / cp / tp tokens under sequence parallelism).
            Other shapes are as in `GPT`.

        Raises:
            TypeError: Tokens, labels or sample ids are no integers, or a mask is no bool.
            ValueError: A shape does not fit, or an entry that this stage needs is missing.
        """
        if not isinstance(batch, Mapping):
            given = {"encoder_tokens": x, "tokens": batch}
            given |= {"labels": labels, "sample_ids": sample_ids}
            batch = {name: tensor for name, tensor in given.items() if tensor is not None}
            x = labels = sample_ids = None
        return super().forward(x, self._with_tokens(batch), labels=labels, sample_ids=sample_ids)

    def parts(self, batch: Batch) -> list[Callable[[Any], Any]]:
        """Return the pass in parts, for overlapped pairs; see `Stack.parts`."""
        return super().parts(self._with_tokens(batch))

    def begin(self, x: Tensor | None, batch: Batch) -> tuple[Tensor, ForwardContext]:
        """Return both streams as one activation, and the layers' context."""
        check_encoder_batch(batch)
        tokens = batch["tokens"]
        device, cache = tokens.device if x is None else x.device, batch.get("cache")
        length = tokens.shape[1] * self.shard.context.size
        own = _as_sample(batch, 1)
        positions = self._positions(own, length, device)
        shared = self._share(own, positions, length, device)
        encoder, count, place = None, 0, None
        if cache is None or (isinstance(cache, KVCache) and not cache.length):
            place, encoder = self._encoder_pass(batch, shared, device)
            count = self.shard.between(batch["encoder_tokens"], dim=1).shape[1]
        given = {name: value for name, value in vars(shared).items() if name != "memory_mask"}
        whole = DecoderPass(
            **given,
            memory_mask=self._memory_mask(batch, device),
            encoder=encoder,
            encoder_length=count,
        )
        if self.has_embedding:
            x = self.embedding.embed(own, positions, shared.hidden_index)
            if encoder is not None and place is not None:
                first = {"tokens": batch["encoder_tokens"]}
                before = self.embedding.embed(first, place, encoder.hidden_index)
                x = torch.cat((before, x), 1)
        elif x is None:
            raise ValueError("x is None, and only the first stage starts from tokens")
        return self.give_tables_gradients(x, whole), whole

    def scores(self, x: Tensor) -> Tensor:
        """Score the next token over the whole vocabulary, from the normed last output."""
        return self.head(x, tied=self._tied)

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> Losses:
        """Sum the cross entropies with labels, from the normed last output."""
        return self.head(x, labels, weights, tied=self._tied)

    def logits(
        self,
        tokens: Tensor,
        *,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        encoder_tokens: Tensor | None = None,
        encoder_mask: Tensor | None = None,
    ) -> Tensor:
        """Return scores of the next token after every token, without dropout or gradients.

        Args:
            tokens: Tokens of the decoder, as in `GPT.logits`.
            cache: Cache as in `GPT.logits`; it has the memory too.
            mask: Mask of the decoder's tokens.
            pixel_values: None; such a model takes no images.
            encoder_tokens: Tokens of the encoder; not with a cache that holds tokens.
            encoder_mask: True where a token of the encoder is, False at padding.

        Shape:
            tokens, mask: [B, S]; encoder_tokens, encoder_mask: [B, E]. Returns
            [B, S, vocab_size].

        Raises:
            ValueError: As in `GPT.logits`, or there are no tokens to attend to.
        """
        batch = {"tokens": tokens, "cache": cache, "mask": mask, "pixel_values": pixel_values}
        batch |= {"encoder_tokens": encoder_tokens, "encoder_mask": encoder_mask}
        return self._score(batch)

    @torch.no_grad()
    def encode(
        self, tokens: Tensor, pages: Pages, places: Tensor, x: Tensor | None = None
    ) -> Tensor:
        """Run the encoder on a text, and put what the decoder attends to in pages.

        Stages are called in turn, each with the activation that the one before returned.

        Args:
            tokens: Tokens of the text.
            pages: Pages of this stage.
            places: Place of each token: block * block_size + offset.
            x: Activation of the stage before; None on the first.

        Returns:
            The activation for the next stage.

        Shape:
            tokens: [1, E]; places: [E]; x: [1, E + 1, hidden]. Returns the same.

        Raises:
            ValueError: Ranks share the text's tokens.
        """
        batch = {"encoder_tokens": tokens, "tokens": tokens[:, :1]}
        x, shared = self._begin_without_dropout(x, batch, "encode()")
        stream: Any = x
        for step in self._steps(lambda layer: [layer]):
            stream, _ = step(stream, shared)
            if isinstance(stream, Streams) and stream.memory is not None:
                break
        if not isinstance(stream, Streams):  # of a stage without a decoder's layer
            return cast("Tensor", stream)
        for layer in self.stage_layers():
            if isinstance(layer.mixer, CrossAttention):
                key, value = layer.mixer.project_memory(cast("Tensor", stream.memory))
                pages.write(layer.index, "key", key, places)
                pages.write(layer.index, "value", value, places)
        return torch.cat((stream.encoder, stream.decoder), 1)

    def _builds(self, config: ModelConfig) -> bool:
        return config.encoder_layers > 0

    def _build_input(self) -> None:
        super()._build_input()
        config, shard = self.config, self.shard

        def dropout(name: str) -> DropoutSite:
            return DropoutSite(config.dropout, seed=shard.seed, layer=-1, name=name)

        self.memory_dropout, self.output_dropout = dropout("memory"), dropout("output")
        self.encoder_norm = None
        if config.final_norm and config.encoder_layers - 1 in self.layer_range:
            self.encoder_norm = stream_norm(config, shard)

    def generating(self) -> dict[int, MixerConfig]:
        """Return the decoder's mixers."""
        first = self.config.encoder_layers
        return {index: mixer for index, mixer in self._mixers().items() if index >= first}

    def _encoder_pass(
        self, batch: Batch, after: ForwardContext, device: torch.device
    ) -> tuple[Tensor, ForwardContext]:
        """Return the positions of this rank's encoder tokens, and the encoder layers' context."""
        context = self.shard.context
        length = batch["encoder_tokens"].shape[1] * context.size
        self._check_length(length)
        self.shard.check_length(length)
        mask = whole_of(batch, "encoder_mask", length)
        positions = context.positions(length, device)
        sample_ids = index = None
        if batch.get("cache") is None:
            sample_ids, index = self._dropout(_as_sample(batch, 0), length, device)
        documents = whole_of(batch, "encoder_documents", length)
        if batch.get("encoder_positions") is not None:
            positions = batch["encoder_positions"]
        elif mask is not None:
            positions = positions_of(mask).clamp(min=0).index_select(1, positions)
        if mask is not None:
            documents = padding_as_document(mask, documents)
        return positions, ForwardContext(
            attend=context,
            score_tables=after.score_tables,
            tables=self._tables(positions, length),
            temperatures=self._temperatures(positions),
            documents=documents,
            sample_ids=sample_ids,
            hidden_index=index,
            saved=after.saved,
            plain=after.plain,
        )

    def _memory_mask(self, batch: Batch, device: torch.device) -> Tensor | None:
        """Return the memory's mask for the decoder's tokens; packed ones see their own pair."""
        mask, inputs = batch.get("encoder_mask"), batch.get("encoder_documents")
        if inputs is None:
            return mask
        context, documents = self.shard.context, batch["documents"]
        places = context.positions(documents.shape[1], device)
        own = documents.index_select(1, places)[:, :, None] == inputs[:, None]
        return own if mask is None else own & mask[:, None]

    def _with_tokens(self, batch: Batch) -> Batch:
        """Make the decoder's tokens from the labels, where only labels are given."""
        labels = batch.get("labels")
        if batch.get("tokens") is not None or not isinstance(labels, Tensor):
            return batch
        if self.shard.context.group is not None:
            raise ValueError(
                f"labels are shifted to tokens in whole sequences, and the "
                f"cp={self.shard.context.size} ranks share them; give batch['tokens'] too"
            )
        start, documents = self.config.decoder_start, batch.get("documents")
        tokens = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=start)
        begins = tokens < 0
        if isinstance(documents, Tensor) and documents.shape == labels.shape:
            begins[:, 1:] |= documents.diff(dim=1) != 0
        return {**batch, "tokens": tokens.masked_fill(begins, start)}

    def _steps(self, steps_of: Callable[[TransformerLayer], list[Step]]) -> list[Step]:
        end = self.config.encoder_layers
        steps: list[Callable[..., Any]] = [self._open]
        for layer in self.stage_layers():
            is_encoder = layer.index < end
            if layer.index == max(end, self.layer_range.start):
                steps.append(self._remember)
            run = self._encode if is_encoder else self._decode
            steps += [partial(run, step) for step in steps_of(layer)]
            if layer.index == end - 1:
                steps.append(self._end_encoder)
        return cast("list[Step]", [*steps, self._close])

    def _next_of(self, layer: TransformerLayer) -> TransformerLayer | None:
        following = super()._next_of(layer)
        # Behind the encoder's last layer is another stream.
        return None if layer.index == self.config.encoder_layers - 1 else following

    def _open(self, x: Tensor, shared: DecoderPass) -> tuple[Streams, Losses]:
        """Separate the streams."""
        count = shared.encoder_length
        return Streams(*x.split((count, x.shape[1] - count), 1)), {}

    def _encode(self, step: Step, x: Streams, shared: DecoderPass) -> tuple[Streams, Losses]:
        """Apply a part of one of the encoder's layers."""
        if shared.encoder is None:
            return x, {}
        own = replace(shared.encoder, score_tables=shared.score_tables, plain=shared.plain)
        encoder, losses = step(x.encoder, own)
        return x._replace(encoder=encoder), losses

    def _end_encoder(self, x: Streams, shared: DecoderPass) -> tuple[Streams, Losses]:
        """Norm the encoder's output, and apply dropout."""
        if shared.encoder is None:
            return x, {}
        y = x.encoder if self.encoder_norm is None else self.encoder_norm(x.encoder)
        return x._replace(encoder=self.memory_dropout(y, shared.encoder.hidden_index)), {}

    def _remember(self, x: Streams, shared: DecoderPass) -> tuple[Streams, Losses]:
        """Gather the memory once, for all of the stage's layers."""
        if shared.encoder is None:
            return x, {}
        memory = x.encoder
        if self.shard.sequence_parallel:
            memory = gather_from_group(memory, self.shard.group, dim=1)
        return x._replace(memory=unshard(memory, self.shard.context.group)), {}

    def _decode(self, step: Step, x: Streams, shared: DecoderPass) -> tuple[Streams, Losses]:
        """Apply a part of one of the decoder's layers."""
        decoder, losses = step(x.decoder, replace(shared, memory=x.memory))
        return x._replace(decoder=decoder), losses

    def _close(self, x: Streams, shared: DecoderPass) -> tuple[Tensor, Losses]:
        """Join the streams for the next stage; the last stage norms the decoder's output."""
        if not self.has_head:
            return torch.cat((x.encoder, x.decoder), 1), {}
        return self.output_dropout(self._normed(x.decoder), shared.hidden_index), {}


def _as_sample(batch: Batch, side: int) -> Batch:
    """The batch with sample ids of one of the two sequences."""
    ids = cast("Tensor | None", batch.get("sample_ids"))
    return batch if ids is None else {**batch, "sample_ids": 2 * ids + side}
