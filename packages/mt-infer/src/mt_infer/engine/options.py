"""Sizes and switches of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mt_files import Checks
from mt_model import GPT, ModelConfig
from mt_quant import KVFormat

_USUAL_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes and switches of an engine.

    Attributes:
        blocks: Number of blocks of keys and values; None has room for 2,048 tokens of each of
            `max_batch` requests, or for one that fills the model's context; an encoder has twice
            as many.
        block_size: Number of tokens of a block.
        host_blocks: Number of blocks of host memory, in which evicted requests keep their keys and
            values; without room there they compute them again.
        max_batch: Largest number of requests in a pass.
        max_batch_tokens: Largest number of tokens in a pass; a longer prompt takes several, beside
            which other requests go on.
        kv_cache_dtype: Format of cached keys and values; see `mt_model.GPT.new_pages`.
        prefix_cache: Whether requests start from the blocks of earlier ones that begin with the
            same tokens; recurrent layers keep states for it, up to `max_batch` of them.
        speculate: Source of guesses of the next tokens, several of which a pass verifies; the
            tokens stay the same. `ngram`: the tokens that followed the same text before. `mtp`: the
            model's modules that predict further tokens (`ModelConfig.mtp`). A model with the same
            vocabulary, or its folder, for `Engine.from_folder`.
        num_drafts: Largest number of guesses in a pass.
        batch_invariant: Whether a token has the same bits with any other tokens in its pass: the
            bits of a trainer with `mt_model.Kernels(attention="invariant")`. With None a probe of
            the loaded model decides. False is quicker. A model from the caller keeps its kernels.
        pack_weights: Whether `Engine.from_folder` keeps weights on a CPU in oneDNN's layout too,
            which makes products of few tokens up to twice as fast and doubles the weights' memory.
    """

    blocks: int | None = None
    block_size: int = 16
    host_blocks: int = 0
    max_batch: int = 64
    max_batch_tokens: int = 512
    kv_cache_dtype: str | KVFormat = "auto"
    prefix_cache: bool = True
    speculate: str | Path | GPT | None = None
    num_drafts: int = 4
    batch_invariant: bool | None = None
    pack_weights: bool = True

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "blocks", "block_size", "max_batch", "max_batch_tokens", "num_drafts")
        checks.at_least(0, "host_blocks")
        checks.done()

    def num_blocks(self, config: ModelConfig) -> int:
        """Return the number of blocks for a model."""
        if self.blocks is not None:
            return self.blocks
        longest = config.max_sequence_length
        tokens = max(longest, self.max_batch * min(longest, _USUAL_TOKENS))
        return -(-tokens // self.block_size) * (2 if config.encoder_layers else 1)
