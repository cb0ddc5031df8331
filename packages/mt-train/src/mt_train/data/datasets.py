"""Data sets of a run, one for each objective."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

from mt_data import (
    GPTDataset,
    IndexedDataset,
    MaskedDataset,
    MaskedVocabulary,
    Masking,
    SpanCorruption,
    SpanDataset,
    SpanVocabulary,
    Tokenizer,
)
from mt_model import ModelConfig

from mt_train.config.data_section import MaskingSection
from mt_train.config.run_config import RunConfig
from mt_train.data.mixture import Dataset


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


def dataset_of(
    config: RunConfig, prefix: Path, tokenizer: Tokenizer, model: ModelConfig
) -> Dataset:
    """Open one of a run's data sets, with the rows of its objective."""
    training, spans = config.training, config.data.spans
    indexed, length = IndexedDataset(prefix), training.sequence_length
    if config.data.hidden is not None:
        return masked_rows(config, indexed, tokenizer)
    if spans is None:
        return GPTDataset(indexed, sequence_length=length, seed=training.seed)
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
