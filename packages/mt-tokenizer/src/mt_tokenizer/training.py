"""Training of byte-level BPE tokenizers by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mt_files import require, shorten

from mt_tokenizer.error import TokenizerError
from mt_tokenizer.pieces import NUM_BYTES
from mt_tokenizer.tokenizer import Tokenizer, check_text

DEFAULT_SPECIAL = ("<|eod|>",)
MAX_WORD = 1024
MAX_TRAINED_VOCABULARY = 1 << 20
PATTERNS: dict[str, str] = {
    # Words with the space before them, numbers, punctuation, white space (GPT-2's rule).
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # A line end is joined with the punctuation before and the indentation after it, and a word with
    # one sign before it, such as a dot or an underscore: fewer tokens for source code.
    "code": r" ?[^\s\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]*[\r\n]+[ \t]*"
    r"| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str] = DEFAULT_SPECIAL,
    *,
    pattern: str = "gpt2",
) -> Tokenizer:
    """Train a byte-level BPE tokenizer.

    All 256 bytes are in its alphabet, so every text can be encoded. A small corpus may yield fewer
    tokens than `vocab_size`; the model pads its vocabulary.

    Args:
        texts: The corpus, read once. Words longer than `MAX_WORD` characters are split, because the
            time for a word grows with the square of its length.
        vocab_size: Largest number of tokens; at least 256 plus the number of special tokens.
        special: Special tokens, numbered from 0; the first one ends documents.
        pattern: Rule for splitting text before merging: "gpt2", "code" (3 to 5% fewer tokens on
            Python sources), or a regular expression.
    """
    library = require("tokenizers", "training a tokenizer")
    _check_special(special)
    smallest = NUM_BYTES + len(special)
    if not smallest <= vocab_size <= MAX_TRAINED_VOCABULARY:
        raise TokenizerError(
            f"vocab_size is {vocab_size}; it must be at least {smallest}: 256 bytes and "
            f"{len(special)} special tokens, and at most {MAX_TRAINED_VOCABULARY}"
        )
    engine = library.Tokenizer(library.models.BPE())
    steps = _pre_tokenizers(library, pattern)
    bound = library.pre_tokenizers.Split(
        library.Regex(rf"[\s\S]{{1,{MAX_WORD}}}"), behavior="isolated"
    )
    engine.pre_tokenizer = library.pre_tokenizers.Sequence([*steps[:-1], bound, steps[-1]])
    engine.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(_without(texts, special), trainer=trainer)
    if pattern == "gpt2":  # the same rule under the name that other libraries know
        engine.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        engine.pre_tokenizer = library.pre_tokenizers.Sequence(steps)
    return Tokenizer(engine, eod=special[0])


def _pre_tokenizers(library: Any, pattern: str) -> list[Any]:
    try:
        regex = library.Regex(PATTERNS.get(pattern, pattern))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise TokenizerError(
            f"pattern {shorten(pattern)} is neither one of {sorted(PATTERNS)} nor a regular "
            f"expression: {error}"
        ) from None
    return [
        library.pre_tokenizers.Split(regex, behavior="isolated"),
        library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _check_special(special: Sequence[str]) -> None:
    if not special or len(set(special)) != len(special):
        raise TokenizerError(f"special is {list(special)}; give one or more distinct names")
    for name in special:
        if len(name) < 2 or not name.isascii() or not name.isprintable():
            raise TokenizerError(
                f"special token {shorten(name)} must have two or more printable ASCII characters, "
                "so that it cannot be mistaken for a byte"
            )


def _without(texts: Iterable[str], special: Sequence[str]) -> Iterator[str]:
    """Split texts at literal special tokens, which could otherwise be learnt as merges."""
    for number, text in enumerate(texts):
        check_text(text, number)
        parts = [text]
        for name in special:
            parts = [piece for part in parts for piece in part.split(name)]
        yield from parts
