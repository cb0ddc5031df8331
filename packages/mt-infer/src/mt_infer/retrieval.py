"""Neighbours of the chunks of a growing text (Retro)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from mt_model import RetroConfig
from numpy.typing import NDArray
from torch import Tensor


class Retrieve(Protocol):
    """A function from chunks to passages, such as `mt_retro.Retriever`.

    The result has `tokens` [n, k, 2 * chunk]: the passages of each chunk, the nearest first, with
    negative numbers after the end of each passage and for missing passages.
    """

    def __call__(self, chunks: Sequence[NDArray[np.int64]], k: int, /) -> Any: ...  # noqa: D102


class Passages:
    """The same passages for each chunk of a text, in place of a database.

    Args:
        passages: Tokens of each passage.

    Attributes:
        tokens: The tokens, as in `Retrieve`; empty except in the result of a call.
    """

    def __init__(self, passages: Sequence[Sequence[int]]) -> None:
        self._passages = [np.asarray(passage, np.int64) for passage in passages]
        self.tokens = np.empty((0, 0, 0), np.int64)

    def __call__(self, chunks: Sequence[NDArray[np.int64]], k: int, /) -> Passages:
        """Return the passages for each chunk.

        Raises:
            ValueError: There are more than k passages, or a passage is longer than two chunks.
        """
        room = 2 * len(chunks[0])
        longest = max(map(len, self._passages), default=0)
        if len(self._passages) > k or longest > room:
            raise ValueError(
                f"{len(self._passages)} passages of up to {longest} tokens, and the model reads "
                f"{k} of up to {room} tokens for each chunk; give fewer, or shorter ones"
            )
        found = Passages(())
        found.tokens = np.full((len(chunks), k, room), -1, np.int64)
        for number, passage in enumerate(self._passages):
            found.tokens[:, number, : len(passage)] = passage
        return found


def retrieved(
    retrieve: Retrieve, text: Tensor, held: int, retro: RetroConfig, vocab_size: int
) -> dict[str, Tensor]:
    """Return the neighbours of the chunks that a pass finishes, as entries of its batch.

    Args:
        retrieve: The function that finds the neighbours.
        text: All tokens so far, including the new ones.
        held: Number of tokens before the pass.
        retro: The model's settings of retrieval.
        vocab_size: Size of the model's vocabulary.

    Shape:
        text: [1, S]. Returns `neighbours` [1, L, k, 2 * chunk] and `neighbour_lengths` [1, L, k];
        empty if the pass finishes no chunk.

    Raises:
        ValueError: The passages have another shape, or tokens that the model doesn't know.
    """
    size, end = retro.chunk, text.shape[1] // retro.chunk
    begin = held // size
    if begin == end:
        return {}
    chunks = text[0, begin * size : end * size].reshape(-1, size).cpu().numpy()
    found = np.asarray(retrieve(list(chunks), retro.neighbours).tokens)
    expected = (len(chunks), retro.neighbours, retro.length)
    if found.shape != expected:
        raise ValueError(
            f"passages have the shape {found.shape}, and a model with model.retro.chunk={size} "
            f"reads {expected}; use a database with chunks of {size} tokens"
        )
    if found.max(initial=-1) >= vocab_size:
        raise ValueError(
            f"a passage has the token {found.max()}, and the model's vocabulary {vocab_size} "
            "tokens; use a database of the tokens of its tokenizer"
        )
    tokens = torch.from_numpy(np.maximum(found, 0).astype(np.int64))
    lengths = torch.from_numpy((found >= 0).sum(-1).astype(np.int64))
    made = {"neighbours": tokens[None], "neighbour_lengths": lengths[None]}
    return {name: x.to(text.device) for name, x in made.items()}
