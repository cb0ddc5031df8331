"""The generation loop: prefill once, then one token at a time from the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch.distributed as dist
from mt_model import GPT, GraphedDecoding, KVCache, ModelConfig
from mt_parallel_state import random_uniform
from mt_quant import KVFormat
from mt_tokenizer import Tokenizer
from torch import Tensor

from mt_infer.choosing.draws import NO_TOKEN, draw, draw_key, no_token_error
from mt_infer.completion import Completion, End
from mt_infer.retrieval import Retrieve, retrieved
from mt_infer.sampling import Sampling
from mt_infer.text import PromptError, StopTexts, check_prompt, encode_prompt

_SERVED = {"seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "stop", "max_tokens"}


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A loaded model with its tokenizer, for one prompt at a time.

    It serves what `Engine` does not: CUDA graphs, with stages too, and models that read neighbours
    (Retro).

    Attributes:
        model: This rank's stage: all layers without pipeline stages; under tensor parallelism its
            shards of them.
        config: The model's layer list.
        tokenizer: Tokenizer of the model's training.
        ends: Ids of the tokens that end a text; none means the tokenizer's end-of-document token.
        stages: The ranks that hold the stages, in order; None: this rank holds all layers.
        cuda_graphs: Replay a CUDA graph for each token after the prompt; the tokens are the same.
            On a CPU nothing is captured, and computations that a replay would get wrong raise
            `mt_fusions.GraphError`.
        kv_cache_dtype: Format of cached keys and values: `full`, the model's dtype, `fp8`, `int8`
            or another format of mt-quant; `auto` is the format of the model's calibrated scales,
            and `full` without any.
        on_eager: Function to call once for each text with the reason why its passes can't be
            replayed; None raises `mt_fusions.GraphError`.
        retrieve: Function from chunks to their neighbours, for a model with `retro`, such as
            `mt_retro.Retriever(database)` or `Passages(...)`: it is called for each finished chunk
            of prompt and answer. Without it no chunk has neighbours.
    """

    model: GPT
    config: ModelConfig
    tokenizer: Tokenizer
    ends: frozenset[int] = frozenset()
    stages: dist.ProcessGroup | None = None
    cuda_graphs: bool = False
    kv_cache_dtype: KVFormat | str = "auto"
    on_eager: Callable[[str], object] | None = None
    retrieve: Retrieve | None = None

    def complete(self, prompt: str | list[int], sampling: Sampling) -> Completion:
        """Continue a text.

        Args:
            prompt: The text to continue, or its tokens; an empty text starts a new document.
            sampling: How to choose tokens: seed, temperature, top-k, top-p, min-p, typical-p,
                `stop` and `max_tokens`.

        Raises:
            ValueError: A parameter is given that only `Engine` supports.
            PromptError: The prompt is not valid text, fills the model's context, or has an image
                token.
            LogitsError: The model's scores have NaN, or no finite maximum.
        """
        for name in (each.name for each in fields(sampling)):
            if name not in _SERVED and getattr(sampling, name) != getattr(Sampling(), name):
                raise ValueError(f"Sampling.{name} needs an Engine; leave it out for a Generator")
        limit = self.config.max_sequence_length
        is_text = isinstance(prompt, str)
        given = encode_prompt(prompt, self.tokenizer, self.config) if is_text else prompt
        tokens: list[int] = []
        stops, seed = StopTexts(sampling.stop, self.tokenizer), sampling.seed or 0
        for token in self.tokens(given, sampling.max_tokens, sampling):
            tokens.append(token)
            text = stops.cut(tokens)
            if text is not None:
                return Completion(tokens=tokens, text=text, end="stop", seed=seed)
        room = limit - len(given)
        end: End = "stop"
        if len(tokens) == min(sampling.max_tokens, room):
            end = "length" if sampling.max_tokens <= room else "context"
        return Completion(tokens=tokens, text=self.tokenizer.decode(tokens), end=end, seed=seed)

    @torch.inference_mode()
    def tokens(self, prompt: list[int], max_tokens: int, sampling: Sampling) -> Iterator[int]:
        """Yield the continuation of a prompt token by token."""
        limit = self.config.max_sequence_length
        check_prompt(prompt, self.config)
        if self.config.encoder_layers:
            raise ValueError("an encoder's model is served by an Engine; make one")
        if self.config.images is not None and self.config.images.token_id in prompt:
            raise PromptError("the prompt has an image token; give it with images to an Engine")
        self._check_retrieval()
        fed = torch.tensor([prompt], device=next(self.model.parameters()).device)
        first = fed.shape[1]
        length = min(limit, first + max_tokens)
        kept = {"max_length": length, "kv_cache_dtype": self.kv_cache_dtype}
        cache = self.model.new_cache(batch_size=1, **kept)
        whole = [fed]
        waiting: Tensor | None = None
        decoding: GraphedDecoding | None = None
        for position in range(first, length):
            beside = self._beside(whole, cache)
            found = self._scores({"tokens": fed, "cache": cache, **beside}, decoding)
            # Reading a token waits for the device, so the next pass is queued first.
            if waiting is not None:
                token = self._read(waiting, position - 1)
                if token is None:
                    return
                yield token
            if decoding is not None and self.stages is None:
                waiting = found.clone()  # the next replay overwrites the graph's output
            else:
                key = draw_key(sampling.seed or 0, position)
                waiting = self._choose(key, found, sampling)
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

    def _check_retrieval(self) -> None:
        """Refuse a database for a model without retrieval, and graphs for a model with it."""
        retro = self.config.retro
        if retro is None and self.retrieve is not None:
            raise ValueError("the model reads no neighbours (model.retro); leave retrieve out")
        if retro is not None and self.cuda_graphs:
            raise ValueError(
                "a model with retro reads neighbours whenever a chunk is finished, which no graph "
                "replays; use cuda_graphs=False"
            )

    def _beside(self, whole: list[Tensor], cache: KVCache) -> dict[str, Tensor]:
        """Return the neighbours of the chunks that the next pass finishes."""
        retro, length = self.config.retro, sum(each.shape[1] for each in whole)
        if retro is None or self.retrieve is None:
            return {}
        if cache.length // retro.chunk == length // retro.chunk:
            return {}
        text = torch.cat(whole, dim=1)
        return retrieved(self.retrieve, text, cache.length, retro, self.config.vocab_size)

    def _read(self, chosen: Tensor, position: int) -> int | None:
        """Return the token chosen for a position, or None if it ends the text."""
        token = int(chosen)
        if token == NO_TOKEN:
            raise no_token_error(position)
        return None if token in (self.ends or (self.tokenizer.eod_id,)) else token

    def _choose(self, key: int | Tensor, scores: Tensor, sampling: Sampling) -> Tensor:
        """Choose a token by the last one's scores, without the padding rows of the embedding."""
        allowed = scores[:, -1, : self.tokenizer.vocab_size]
        rows = torch.arange(allowed.shape[0], device=allowed.device)
        draws = random_uniform(key, rows, dtype=torch.float64)
        return draw(allowed, sampling, draws, quick=False)

    def _decoding(self, cache: KVCache, sampling: Sampling) -> GraphedDecoding:
        """Return the graph that replays each pass; without stages it also chooses the token."""
        if self.stages is not None:
            return GraphedDecoding(self.model, cache, on_eager=self.on_eager)
        seed = sampling.seed or 0
        keys = torch.tensor([draw_key(seed, place) for place in range(cache.max_length + 1)])
        keys = keys.to(next(self.model.parameters()).device)

        def then(scores: Tensor, place: Tensor) -> Tensor:
            key = keys.index_select(0, place.view(1)).squeeze(0)
            return self._choose(key, scores, sampling)

        state = {"keys": keys}
        return GraphedDecoding(self.model, cache, then=then, state=state, on_eager=self.on_eager)

    def _scores(self, batch: Mapping[str, Any], decoding: GraphedDecoding | None) -> Tensor:
        """Return the scores after the last token on every rank, or the result of `decoding`.

        Stages pass the activation on by send and recv, and the last stage broadcasts the scores.
        """
        tokens = batch["tokens"]
        run = decoding or self.model
        if self.stages is None:
            return cast("Tensor", run(None, batch))
        stage, last = dist.get_rank(self.stages), dist.get_world_size(self.stages) - 1
        where = {"dtype": self.model.shard.dtype, "device": tokens.device}
        x = None
        if stage > 0:
            length = self.config.handed_tokens(batch)
            x = torch.empty(tokens.shape[0], length, self.config.hidden_size, **where)
            dist.recv(x, group=self.stages, group_src=stage - 1)
        y = cast("Tensor", run(x, batch)).contiguous()
        if stage < last:
            dist.send(y, group=self.stages, group_dst=stage + 1)
            # Only the last stage has scores; the broadcast fills this tensor.
            y = torch.empty(tokens.shape[0], 1, self.config.vocab_size, **where)
        dist.broadcast(y, group=self.stages, group_src=last)
        return y
