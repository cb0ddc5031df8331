"""Ids of special tokens by their part in a row."""

from __future__ import annotations

from collections.abc import Mapping

from mt_files import shorten
from mt_tokenizer import Tokenizer

from mt_data.error import DataError


def special_ids(tokenizer: Tokenizer, names: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of special tokens.

    Args:
        tokenizer: The tokenizer.
        names: Name of the special token for each part, such as `{"sep": "[SEP]"}`.

    Raises:
        DataError: The tokenizer lacks a special token, or two parts have the same.
    """
    ids = {}
    for part, name in names.items():
        if name not in tokenizer.special_tokens:
            known = ", ".join(sorted(tokenizer.special_tokens))
            raise DataError(
                f"the tokenizer has no special token {shorten(name)} for {part}; it has {known}. "
                "Name another, or train one with train_tokenizer(special=[...])"
            )
        ids[part] = tokenizer.special_tokens[name]
    if len(set(ids.values())) < len(ids):
        raise DataError(f"{', '.join(ids)} must be {len(ids)} tokens, not {ids}")
    return ids
