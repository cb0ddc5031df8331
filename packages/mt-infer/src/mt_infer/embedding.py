"""Vectors of chunks by a model: the mean of its last features over a chunk's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from mt_model import GPT
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import Tokenizer
from numpy.typing import NDArray

from mt_infer.digests import run_digest
from mt_infer.loading import Run, RunError, built_model, open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

_BATCH = 32  # chunks of a pass
_DIGITS = 32


class Embedder:
    """A function from chunks to vectors, for databases of mt-retro.

    A vector is the mean, in fp32, of the normed output of the model's last layer. Chunks come in
    passes of 32, so equal calls have equal bits. Torch uses one thread, since the bits of products
    may depend on the number of threads.

    Args:
        model: A language model, or a bidirectional one such as BERT.
        digest: Digest of the model's weights, a part of the name.
        tokenizer: Tokenizer of the model, for chunks of another tokenizer.
        source: Tokenizer of the chunks, whose text the model's tokenizer encodes anew; None if both
            are the same.

    Attributes:
        name: Name of the embedding, with everything that decides its vectors.
        dim: Number of values in a vector.

    Raises:
        RunError: The model has an encoder and a decoder, or the tokenizer is missing.

    Shape:
        `embedder(chunks)`: [n, m] tokens, with negative numbers after the last of a chunk;
        [n, dim] float32.
    """

    def __init__(
        self,
        model: GPT,
        *,
        digest: str,
        tokenizer: Tokenizer | None = None,
        source: Tokenizer | None = None,
    ) -> None:
        if model.config.encoder_layers:
            raise RunError(
                "a model with an encoder and a decoder has no features of a text; use another"
            )
        if source is not None and tokenizer is None:
            raise RunError("the model has no tokenizer for text; leave --tokenizer out")
        same = source is None or tokenizer is None or source.sha256 == tokenizer.sha256
        self._model, self._tokenizer = model.eval(), tokenizer
        self._source = None if same else source
        kind = str(model.shard.dtype).removeprefix("torch.")
        self.name = f"mt-infer embed: version 1, mean of {digest[:_DIGITS]} in {kind}"
        if self._source is not None:
            self.name += f", text of {self._source.sha256[:_DIGITS]}"
        self.dim = model.config.hidden_size

    def __call__(self, chunks: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the vectors of chunks.

        Raises:
            ValueError: A chunk has a token that the model doesn't know, or too many.
        """
        torch.set_num_threads(1)
        found = np.empty((len(chunks), self.dim), np.float32)
        for start in range(0, len(chunks), _BATCH):
            rows = chunks[start : start + _BATCH]
            texts = [row[row >= 0].tolist() for row in rows]
            found[start : start + _BATCH] = self._embed([self._tokens(text) for text in texts])
        return found

    def _tokens(self, text: list[int]) -> list[int]:
        """Return the tokens of a chunk as the model reads them."""
        limit = self._model.config.max_sequence_length
        if self._source is not None and self._tokenizer is not None:
            return self._tokenizer.encode_prompt(self._source.decode(text))[:limit]
        if len(text) > limit or max(text, default=0) >= self._model.config.vocab_size:
            raise ValueError(
                f"a chunk has {len(text)} tokens up to {max(text, default=0)}, and the model reads "
                f"{limit} below {self._model.config.vocab_size}; name the data's tokenizer with "
                "--tokenizer FILE, or use smaller chunks"
            )
        return text

    @torch.no_grad()
    def _embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        device = next(self._model.parameters()).device
        width = max(1, *map(len, texts))
        tokens = torch.zeros(len(texts), width, dtype=torch.int64)
        mask = torch.zeros(len(texts), width, dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text, dtype=torch.int64)
            mask[row, : len(text)] = True
        batch = {"tokens": tokens.to(device), "mask": mask.to(device)}
        features = self._model.final_features(batch).float()
        weights = mask.to(device)[..., None].float()
        means = (features * weights).sum(1) / weights.sum(1).clamp(min=1)
        return means.cpu().numpy()


def embedder_of(
    run: Run,
    state: ParallelState,
    *,
    source: Tokenizer | None = None,
    dtype: str | None = None,
    ema: bool = False,
) -> Embedder:
    """Load the model of an opened folder as an embedding.

    Args:
        run: The folder, opened with `writes=False`.
        state: This rank's place; no layout splits the model.
        source: Tokenizer of the chunks, if it is another than the model's.
        dtype: Dtype of the model; by default fp32.
        ema: Whether to use the moving average of the weights.
    """
    model = built_model(run, state, dtype=dtype or "fp32", ema=ema)
    digest = run_digest(run) + ("-ema" if ema else "")
    return Embedder(model, digest=digest, tokenizer=run.own_tokenizer, source=source)


def load_embedder(
    folder: Path, *, source: Tokenizer | None = None, device: torch.device | str = "cpu"
) -> Embedder:
    """Load a run, or a folder of Hugging Face, as an embedding in this process alone.

    Args:
        folder: A run of mt-train or a folder of Hugging Face, such as a BERT.
        source: Tokenizer of the chunks, if it is another than the model's.
        device: Device of the model.
    """
    state = ParallelState(ParallelLayout(), rank=0, device=torch.device(device))
    with open_run(folder, writes=False) as run, state:
        return embedder_of(run, state, source=source)
