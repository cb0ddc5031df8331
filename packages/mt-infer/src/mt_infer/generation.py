"""The generation loop: prefill once, then one token at a time from the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from mt_data import DataError, Tokenizer
from mt_model import GPT, ModelConfig

from mt_infer.sampling import Sampling, choose


class PromptError(ValueError):
    """A prompt the model can't continue."""


def encode_prompt(prompt: str, tokenizer: Tokenizer, limit: int) -> list[int]:
    """Tokens of a prompt; an empty one is the end of the document before.

    Raises:
        PromptError: It is not valid text, or fills the model's context of `limit` tokens.
    """
    try:
        tokens = tokenizer.encode(prompt) or [tokenizer.eod_id]
    except DataError as error:
        raise PromptError(f"the prompt is not valid text: {error}") from error
    _check_length(tokens, limit)
    return tokens


def _check_length(prompt: list[int], limit: int) -> None:
    if len(prompt) >= limit:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens, the model's context {limit}; "
            f"shorten it to at most {limit - 1} tokens"
        )


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A loaded model with its tokenizer.

    Attributes:
        model: One stage holding all layers; under tensor parallelism, this rank's shards.
        config: The model's layer list.
        tokenizer: The one the model was trained with.
    """

    model: GPT
    config: ModelConfig
    tokenizer: Tokenizer

    def generate(self, prompt: str, *, max_tokens: int, sampling: Sampling) -> str:
        """Continue a text.

        Args:
            prompt: The text to continue; an empty one starts a new document.
            max_tokens: Stop after this many tokens, at the end of a document, or when the context
                is full.
            sampling: How to choose tokens.

        Returns:
            The continuation alone.

        Raises:
            PromptError: The prompt is not valid text, or fills the model's context.
        """
        tokens = encode_prompt(prompt, self.tokenizer, self.config.max_sequence_length)
        return self.tokenizer.decode(list(self.tokens(tokens, max_tokens, sampling)))

    @torch.inference_mode()
    def tokens(self, prompt: list[int], max_tokens: int, sampling: Sampling) -> Iterator[int]:
        """Yield the continuation of a prompt token by token."""
        limit = self.config.max_sequence_length
        _check_length(prompt, limit)
        length = min(limit, len(prompt) + max_tokens)
        cache = self.model.new_cache(batch_size=1, max_length=length)
        device = next(self.model.parameters()).device
        fed, start = torch.tensor([prompt], device=device), 0
        for position in range(len(prompt), length):
            logits = self.model.logits(fed, cache=cache, start=start, last_only=True)
            # Padding rows of the embedding are no tokens.
            allowed = logits[:, -1, : self.tokenizer.vocab_size]
            token = choose(allowed, sampling, position)
            if int(token) == self.tokenizer.eod_id:
                return
            yield int(token)
            start += fed.shape[1]
            fed = token[:, None]
