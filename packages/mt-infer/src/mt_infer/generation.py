"""The generation loop: prefill once, then one token at a time from the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from mt_data import DataError, Tokenizer
from mt_model import GPT, GraphedDecoding, KVCache, ModelConfig
from mt_quant import KVFormat
from torch import Tensor

from mt_infer.sampling import NO_TOKEN, LogitsError, Sampling, choose_by

_DROPPED = 16  # tokens without text that a stop text may have inside


class PromptError(ValueError):
    """A prompt that the model can't continue."""


def encode_prompt(prompt: str, tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """Return the tokens of a prompt, in which names of special tokens stand for these tokens.

    An empty one becomes the end-of-document token.

    Raises:
        PromptError: The prompt is not valid text, fills the model's context, or has an image token.
    """
    try:
        tokens = tokenizer.encode_prompt(prompt) or [tokenizer.eod_id]
    except DataError as error:
        raise PromptError(f"the prompt is not valid text: {error}") from error
    _check_length(tokens, config.max_sequence_length)
    if config.images is not None and config.images.token_id in tokens:
        raise PromptError(
            f"the prompt has the token {config.images.token_id}, which stands for an image, and "
            "mt-infer takes text alone; leave it out, or give images to mt_model's "
            "model.logits(tokens, pixel_values=...)"
        )
    return tokens


def _check_length(prompt: list[int], limit: int) -> None:
    if len(prompt) >= limit:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens, the model's context {limit}; "
            f"shorten it to at most {limit - 1} tokens"
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A generated text.

    Attributes:
        text: The continuation.
        num_tokens: Number of its tokens, with those of a stop string.
        end: Reason for its end: the end of the `document`, a `stop` string, the requested number
            of tokens (`limit`), or a full `context`.
    """

    text: str
    num_tokens: int
    end: Literal["document", "stop", "limit", "context"]


class StopTexts:
    """Texts that end a continuation.

    Args:
        texts: The texts; none never ends one.
        tokenizer: The tokenizer of the continuation.

    Raises:
        ValueError: A text is empty.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        if "" in texts:
            raise ValueError("stop '': every text has it; name a text of one character or more")
        self.texts, self._tokenizer = tuple(texts), tokenizer
        # A token has a byte at least, but for those that a decoder drops.
        self._window = max((len(text.encode()) for text in texts), default=0) + _DROPPED

    def cut(self, tokens: list[int]) -> str | None:
        """Return the text of tokens before the first of the stop texts; None if it has none.

        Called after each token, so only the last ones are looked at.
        """
        if not self.texts or not self._found(self._tokenizer.decode(tokens[-self._window :])):
            return None
        text = self._tokenizer.decode(tokens)
        found = self._found(text)
        return text[: min(found)] if found else None

    def _found(self, text: str) -> list[int]:
        places = (text.find(each) for each in self.texts)
        return [place for place in places if place >= 0]


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A loaded model with its tokenizer.

    Attributes:
        model: This rank's stage: all layers without pipeline stages; under tensor parallelism its
            shards of them.
        config: The model's layer list.
        tokenizer: The one the model was trained with.
        ends: Ids of the tokens that end a text; none means the tokenizer's end-of-document token.
        stages: The ranks that hold the stages, in order; None: this rank holds all layers.
        cuda_graphs: Replay a CUDA graph for each token behind the prompt; the tokens are the same.
            On a CPU nothing is captured, and what a replay would compute wrong raises
            `mt_fusions.GraphError`.
        kv_cache_dtype: What keys and values are kept in: `full`, the model's dtype, `fp8`, `int8`
            or another format of mt-quant; `auto` is what the model has calibrated scales for, and
            `full` without any.
        on_eager: Told once a text why its passes are not replayed, where they can't be; None
            raises `mt_fusions.GraphError`.
    """

    model: GPT
    config: ModelConfig
    tokenizer: Tokenizer
    ends: frozenset[int] = frozenset()
    stages: dist.ProcessGroup | None = None
    cuda_graphs: bool = False
    kv_cache_dtype: KVFormat | str = "auto"
    on_eager: Callable[[str], object] | None = None

    def generate(self, prompt: str, *, max_tokens: int, sampling: Sampling) -> str:
        """Return the continuation of a text; see `complete`."""
        return self.complete(prompt, max_tokens=max_tokens, sampling=sampling).text

    def complete(
        self, prompt: str, *, max_tokens: int, sampling: Sampling, stop: Sequence[str] = ()
    ) -> Completion:
        """Continue a text; a model with an encoder reads it there, and its decoder answers.

        Args:
            prompt: The text to continue; an empty one starts a new document.
            max_tokens: Stop after this many tokens, at the end of a document, or when the context
                is full.
            sampling: How to choose tokens.
            stop: Texts that end the continuation, which is cut before the first of them.

        Raises:
            PromptError: The prompt is not valid text, fills the model's context, or has an image
                token.
            LogitsError: The model's scores have NaN, or no finite maximum.
        """
        limit = self.config.max_sequence_length
        given = encode_prompt(prompt, self.tokenizer, self.config)
        tokens: list[int] = []
        stops = StopTexts(stop, self.tokenizer)
        for token in self.tokens(given, max_tokens, sampling):
            tokens.append(token)
            text = stops.cut(tokens)
            if text is not None:
                return Completion(text=text, num_tokens=len(tokens), end="stop")
        room = limit - (1 if self.config.encoder_layers else len(given))
        end: Literal["document", "limit", "context"] = "document"
        if len(tokens) == min(max_tokens, room):
            end = "limit" if max_tokens <= room else "context"
        return Completion(text=self.tokenizer.decode(tokens), num_tokens=len(tokens), end=end)

    @torch.inference_mode()
    def tokens(self, prompt: list[int], max_tokens: int, sampling: Sampling) -> Iterator[int]:
        """Yield the continuation of a prompt token by token.

        A model with an encoder reads the prompt there, with an end-of-document token appended, and
        its decoder starts with `decoder_start`.
        """
        limit = self.config.max_sequence_length
        _check_length(prompt, limit)
        device = next(self.model.parameters()).device
        fed, encoded = torch.tensor([prompt], device=device), None
        if self.config.encoder_layers:
            end = [] if prompt[-1] == self.tokenizer.eod_id else [self.tokenizer.eod_id]
            encoded = torch.tensor([[*prompt, *end]], device=device)
            fed = torch.tensor([[self.config.decoder_start]], device=device)
        first = fed.shape[1]
        length = min(limit, first + max_tokens)
        kept = {"max_length": length, "kv_cache_dtype": self.kv_cache_dtype}
        cache = self.model.new_cache(batch_size=1, **kept)
        whole = [fed]
        waiting: Tensor | None = None
        decoding: GraphedDecoding | None = None
        for position in range(first, length):
            found = self._scores(fed, cache, encoded, decoding)
            encoded = None  # the cache now holds the encoder's keys and values
            # Reading a token waits for the device, so the next pass is queued first.
            if waiting is not None:
                token = self._read(waiting, position - 1)
                if token is None:
                    return
                yield token
            if decoding is not None and self.stages is None:
                waiting = found.clone()  # the next replay overwrites the graph's output
            else:
                waiting = choose_by(sampling.key(position), self._allowed(found), sampling)
            fed = waiting[:, None].clamp(min=0)  # without a token the pass only must not fail
            whole.append(fed)
            # The next pass warms up eagerly; replays start at the third pass.
            if self.cuda_graphs and decoding is None and position + 1 < length:
                decoding = self._decoding(cache, sampling)
            # Rotary factors change at this length, so all keys are computed again.
            if self.config.cache_break(cache.length, position + 1) is not None:
                cache = self.model.new_cache(batch_size=1, **kept)
                fed, decoding = torch.cat(whole, dim=1), None
        if waiting is not None:
            token = self._read(waiting, length - 1)
            if token is not None:
                yield token

    def _read(self, chosen: Tensor, position: int) -> int | None:
        """Return the token chosen for a position, or None if it ends the text."""
        token = int(chosen)
        if token == NO_TOKEN:
            raise LogitsError(
                f"the model's scores for token {position} of the text (the prompt's included) have "
                "NaN or no finite maximum, so no token can be chosen; the weights are damaged, or "
                "too large for this dtype: try --dtype fp32, or another checkpoint"
            )
        return None if token in (self.ends or (self.tokenizer.eod_id,)) else token

    def _allowed(self, scores: Tensor) -> Tensor:
        """Return the last token's scores without the padding rows of the embedding."""
        return scores[:, -1, : self.tokenizer.vocab_size]

    def _decoding(self, cache: KVCache, sampling: Sampling) -> GraphedDecoding:
        """Return the graph that replays each pass; without stages it also chooses the token."""
        if self.stages is not None:
            return GraphedDecoding(self.model, cache, on_eager=self.on_eager)
        keys = torch.tensor([sampling.key(place) for place in range(cache.max_length + 1)])
        keys = keys.to(next(self.model.parameters()).device)

        def then(scores: Tensor, place: Tensor) -> Tensor:
            key = keys.index_select(0, place.view(1)).squeeze(0)
            return choose_by(key, self._allowed(scores), sampling)

        state = {"keys": keys}
        return GraphedDecoding(self.model, cache, then=then, state=state, on_eager=self.on_eager)

    def _scores(
        self,
        tokens: Tensor,
        cache: KVCache,
        encoded: Tensor | None,
        decoding: GraphedDecoding | None,
    ) -> Tensor:
        """Return the scores after the last token on every rank, or the result of `decoding`.

        Stages pass the activation on by send and recv, and the last stage broadcasts the scores.
        """
        batch = {"tokens": tokens, "cache": cache, "encoder_tokens": encoded}
        run = decoding or self.model
        if self.stages is None:
            return cast("Tensor", run(None, batch))
        stage, last = dist.get_rank(self.stages), dist.get_world_size(self.stages) - 1
        where = {"dtype": self.model.shard.dtype, "device": tokens.device}
        x = None
        if stage > 0:
            length = tokens.shape[1] + (0 if encoded is None else encoded.shape[1])
            x = torch.empty(tokens.shape[0], length, self.config.hidden_size, **where)
            dist.recv(x, group=self.stages, group_src=stage - 1)
        y = cast("Tensor", run(x, batch)).contiguous()
        if stage < last:
            dist.send(y, group=self.stages, group_dst=stage + 1)
            # Only the last stage has scores; the broadcast fills this tensor.
            y = torch.empty(tokens.shape[0], 1, self.config.vocab_size, **where)
        dist.broadcast(y, group=self.stages, group_src=last)
        return y
