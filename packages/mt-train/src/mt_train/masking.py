"""Rows of a data set of which some tokens are hidden, as a run's configuration says."""

from __future__ import annotations

from dataclasses import asdict, fields

from mt_data import IndexedDataset, MaskedDataset, MaskedVocabulary, Masking, Tokenizer

from mt_train.config import RunConfig
from mt_train.data_section import MaskingSection


def masked_rows(config: RunConfig, indexed: IndexedDataset, tokenizer: Tokenizer) -> MaskedDataset:
    """Make rows of tokens for `data.objective: mlm`.

    Args:
        config: Of the run.
        indexed: The tokens.
        tokenizer: With which they were made.

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
