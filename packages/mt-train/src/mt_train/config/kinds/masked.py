"""Masked language modelling (BERT): hidden tokens are predicted from both sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from mt_files import Checks, RowField, shorten

from mt_train.config.kinds.section import DataSection, Sources

if TYPE_CHECKING:
    from mt_data import MaskedDataset
    from mt_model import ModelConfig

    from mt_train.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class MaskingSection:
    """Choice and replacement of hidden tokens, and the special tokens of the rows.

    Attributes:
        fraction: Share of a row's tokens to predict; always at least one token.
        masked: Share of the predicted tokens that become the mask token.
        random: Share of the predicted tokens that become a random token; the rest stays unchanged.
        whole_words: Hide words with all their tokens.
        spans: Hide spans of several words, or of several tokens without `whole_words`, with one
            replacement for a span: `geometric` has SpanBERT's lengths; with `ngrams` a length n has
            a share in proportion to 1 / n.
        longest: Length of the longest span.
        pairs: Rows of two texts, in which the second text follows the first or comes from another
            document; `model.pooled_head` learns the difference (next sentence prediction).
        cls: Token at the beginning of a row.
        sep: Token after each text.
        mask: Token in place of hidden tokens.
        pad: Padding token.
    """

    fraction: float = 0.15
    masked: float = 0.8
    random: float = 0.1
    whole_words: bool = False
    spans: Literal["none", "geometric", "ngrams"] = "none"
    longest: int = 10
    pairs: bool = False
    cls: str = "[CLS]"
    sep: str = "[SEP]"
    mask: str = "[MASK]"
    pad: str = "[PAD]"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "fraction")
        checks.at_least(0, "masked", "random")
        checks.at_most(1, "fraction", "masked", "random")
        checks.at_least(1, "longest")
        if not checks.errors and self.masked + self.random > 1 + 1e-9:
            text = f"{self.random} and masked {self.masked} are more than 1 together"
            checks.add("random", f"{text}; lower one of them")
        if not checks.errors and len(set(self.special.values())) < len(self.special):
            text = f"cls, sep, mask and pad are {', '.join(map(shorten, self.special.values()))}"
            checks.add("mask", f"{text}; give each of the four a token of its own")
        checks.done()

    @property
    def special(self) -> dict[str, str]:
        """The special tokens by their part in a row."""
        return {"cls": self.cls, "sep": self.sep, "mask": self.mask, "pad": self.pad}


@dataclass(frozen=True, kw_only=True)
class MaskedData(DataSection):
    """Padded rows `[CLS] text [SEP]` from one document, with hidden tokens to predict.

    It takes a model with `causal: false`, such as BERT.

    Attributes:
        masking: Masking, by default `{fraction: 0.15, masked: 0.8, random: 0.1, whole_words: false,
            spans: none, longest: 10, pairs: false}`, and the names of the special tokens `cls`,
            `sep`, `mask` and `pad`, which `tokenizer` must have. With `pairs` a row is
            `[CLS] a [SEP] b [SEP]`, and `model.pooled_head` learns whether b follows a.
    """

    type_name: ClassVar[str] = "masked"
    is_causal: ClassVar[bool] = False
    has_few_labels: ClassVar[bool] = True
    reads_shards: ClassVar[bool] = True

    masking: MaskingSection = field(default_factory=MaskingSection)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The four special tokens of a row."""
        return tuple(self.masking.special.values())

    def fields(self) -> tuple[RowField, ...]:
        """Return the arrays of a row."""
        from mt_data import masked_fields

        return masked_fields(pairs=self.masking.pairs)

    def misfits(self, config: RunConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go with hidden tokens, or with pairs."""
        yield from super().misfits(config, model)
        pairs, length = self.masking.pairs, config.training.sequence_length
        least = 5 if pairs else 3  # with the special tokens
        if length < least:
            text = f"{length} leaves no room for text beside the special tokens of data.kind masked"
            yield "training.sequence_length", f"{text}; use {least} or more"
        if model.mtp is not None:
            text = "predicts further tokens, which data.kind masked has none of; leave it out"
            yield "model.mtp", text
        pooled = model.pooled_head
        if pairs and (pooled is None or pooled.num_classes != 2 or model.token_types < 2):
            text = "true needs model.pooled_head: {num_classes: 2} and model.token_types: 2"
            yield "data.masking.pairs", text

    def dataset(self, path: Path, sources: Sources) -> MaskedDataset:
        """Open a data set of documents.

        Raises:
            DataError: The tokenizer lacks a special token, or the tokens make no rows.
        """
        from mt_data import IndexedDataset, MaskedDataset, MaskedVocabulary, Masking

        assert sources.tokenizer is not None, "this kind needs one"  # noqa: S101
        given = asdict(self.masking)
        return MaskedDataset(
            IndexedDataset(path),
            sequence_length=sources.sequence_length,
            vocabulary=MaskedVocabulary.of(sources.tokenizer, self.masking.special),
            masking=Masking(**{item.name: given[item.name] for item in fields(Masking)}),
            pairs=self.masking.pairs,
            seed=sources.seed,
        )
