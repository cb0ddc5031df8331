"""Data sets of a run, one for each objective."""

from __future__ import annotations

from dataclasses import asdict, fields
from math import ceil
from pathlib import Path
from typing import TypeAlias

from mt_data import (
    DataError,
    GPTDataset,
    IndexedDataset,
    MaskedDataset,
    MaskedVocabulary,
    Masking,
    SpanCorruption,
    SpanDataset,
    SpanVocabulary,
    TokenRanges,
    split_ranges,
)
from mt_model import ModelConfig
from mt_tokenizer import Tokenizer

from mt_train.config.data_section import MaskingSection
from mt_train.config.run_config import RunConfig
from mt_train.data.corpus import Corpus

Made: TypeAlias = SpanDataset | MaskedDataset
"""A data set that makes inputs and labels itself."""


def masked_rows(config: RunConfig, indexed: IndexedDataset, tokenizer: Tokenizer) -> MaskedDataset:
    """Make rows of tokens for `data.objective: mlm`.

    Args:
        config: Configuration of the run.
        indexed: Tokens of the data set.
        tokenizer: Tokenizer of the tokens.

    Raises:
        DataError: The tokenizer lacks a special token, or the tokens make no rows.
    """
    hidden = config.data.hidden or MaskingSection()
    given = asdict(hidden)
    names = {name: given[name] for name in ("cls", "sep", "mask", "pad")}
    return MaskedDataset(
        indexed,
        sequence_length=config.training.sequence_length,
        vocabulary=MaskedVocabulary.of(tokenizer, names),
        masking=Masking(**{item.name: given[item.name] for item in fields(Masking)}),
        pairs=hidden.pairs,
        seed=config.training.seed,
    )


def training_sets(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer | None, model: ModelConfig
) -> list[GPTDataset | Made]:
    """Open the training sets of a run, with the rows of its objective."""
    if tokenizer is not None and (config.data.hidden or config.data.spans):
        return [dataset_of(config, prefix, tokenizer, model) for prefix in corpus.train]
    indexed = [IndexedDataset(prefix) for prefix in corpus.train]
    shares = corpus.weights or [int(each.num_tokens) for each in indexed]
    samples = config.training.steps * config.training.global_batch_size
    return [
        GPTDataset(
            each,
            sequence_length=config.training.sequence_length,
            seed=config.training.seed,
            order=config.data.order,
            num_samples=None
            if config.data.order == "stable"
            else _num_samples(samples, share / sum(shares)),
            sequences=_training_part(config, each),
        )
        for each, share in zip(indexed, shares, strict=True)
    ]


def _num_samples(samples: int, share: float) -> int:
    """Return the samples that Megatron-LM plans for a data set: half a percent more in a blend."""
    return samples if share == 1 else ceil(ceil(samples * share) * 1.005)


def _training_part(config: RunConfig, indexed: IndexedDataset) -> range | None:
    """Return the sequences that `data.split` gives to training; None for all of them."""
    if config.data.split is None:
        return None
    found = split_ranges(config.data.split, len(indexed))[0]
    if not found:
        text = f"data.split {config.data.split} gives none of its {len(indexed)} documents to"
        raise DataError(f"{indexed.prefix}: {text} training; raise its first number")
    return found


def held_out_tokens(config: RunConfig, corpus: Corpus) -> IndexedDataset | TokenRanges | None:
    """Open the held-out tokens, from `data.validation` or from the second part of `data.split`."""
    if corpus.validation is not None:
        return IndexedDataset(corpus.validation)
    if config.data.split is None:
        return None
    indexed = [IndexedDataset(prefix) for prefix in corpus.train]
    parts = [(each, split_ranges(config.data.split, len(each))[1]) for each in indexed]
    found = [(each, part) for each, part in parts if part]
    return TokenRanges(found) if found else None


def dataset_of(config: RunConfig, prefix: Path, tokenizer: Tokenizer, model: ModelConfig) -> Made:
    """Open a data set whose rows have masks or spans."""
    training, spans = config.training, config.data.spans
    indexed, length = IndexedDataset(prefix), training.sequence_length
    if spans is None:
        return masked_rows(config, indexed, tokenizer)
    return SpanDataset(
        indexed,
        sequence_length=length,
        vocabulary=SpanVocabulary(
            sentinel=tokenizer.vocab_size - 1 + spans.sentinels,
            eod=tokenizer.eod_id,
            start=model.decoder_start,
        ),
        corruption=SpanCorruption(density=spans.density, mean_length=spans.mean_length),
        decoder_length=spans.decoder_length,
        packing=config.data.packing,
        seed=training.seed,
    )
