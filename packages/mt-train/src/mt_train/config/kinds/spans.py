"""Span corruption (T5): an encoder reads a text without some spans, and a decoder writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from mt_files import Checks, FieldError, RowField

from mt_train.config.kinds.section import MAX_TOKENIZER, DataSection, Sources, packing_misfits
from mt_train.config.limits import MAX_LENGTH

if TYPE_CHECKING:
    from mt_data import SpanDataset
    from mt_model import ModelConfig

    from mt_train.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class SpanSection:
    """Span corruption for a model with an encoder, as in T5: the decoder writes the removed spans.

    Attributes:
        density: Share of a text's tokens to remove.
        mean_length: Mean length of a span, in tokens.
        decoder_length: Length of the decoder's sequences, in tokens; by default the smallest
            multiple of 8 that holds all spans of one text. With `data.packing: documents` short
            documents have more spans, and spans that do not fit are left out.
        sentinels: Number of sentinel tokens to add after the tokenizer's own; the last one marks
            the first span. With 0 the tokenizer's last tokens are the sentinels, as in T5.
    """

    density: float = 0.15
    mean_length: float = 3.0
    decoder_length: int | None = None
    sentinels: int = 100

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "density")
        checks.at_most(0.5, "density")
        checks.at_least(1, "mean_length", "decoder_length")
        checks.at_most(MAX_LENGTH, "mean_length", "decoder_length")
        checks.at_least(0, "sentinels")
        checks.at_most(MAX_TOKENIZER, "sentinels")
        checks.done()

    def decoder(self, sequence_length: int) -> int:
        """Return the decoder's length for a length of the encoder.

        Raises:
            FieldError: There are too few sentinels, or a length is impossible.
        """
        from mt_data import DataError, SpanCorruption

        corruption = SpanCorruption(density=self.density, mean_length=self.mean_length)
        try:
            noise, spans = corruption.counts(corruption.text_length(sequence_length))
        except DataError as error:
            raise FieldError({"training.sequence_length": str(error)}) from error
        least, given = noise + spans + 1, self.decoder_length
        if 0 < self.sentinels < spans:
            text = f"{self.sentinels} is too small for {spans} spans in a sequence; use {spans}"
            raise FieldError({"data.spans.sentinels": f"{text} or more"})
        if given is not None and given < least:
            text = f"{given} is too small for {spans} spans of {noise} tokens; use {least} or more"
            raise FieldError({"data.spans.decoder_length": text})
        return given or corruption.decoder_length(sequence_length)


@dataclass(frozen=True, kw_only=True)
class SpanData(DataSection):
    """Texts with spans cut out for an encoder, and the spans for a decoder.

    It takes a model with `model.encoder_layers`; `training.sequence_length` is the encoder's.

    Attributes:
        spans: Span corruption, by default with T5's values.
        packing: With `documents` a row is several pairs of one document each, and attention stays
            within a pair.
    """

    type_name: ClassVar[str] = "spans"
    reads_shards: ClassVar[bool] = True
    feeds_encoder: ClassVar[bool] = True

    spans: SpanSection = field(default_factory=SpanSection)
    packing: Literal["none", "documents"] = "none"

    def fields(self) -> tuple[RowField, ...]:
        """Return the arrays of a row."""
        from mt_data import span_fields

        return span_fields(packed=self.packing == "documents")

    def sizes(self, sequence_length: int) -> Mapping[str, int]:
        """Return the lengths of the encoder's and the decoder's sequence."""
        return {"encoder": sequence_length, "tokens": self.spans.decoder(sequence_length)}

    def lengths(self, sequence_length: int) -> Mapping[str, int]:
        """Return the lengths of the encoder's and the decoder's sequence, by their keys."""
        decoder = self.spans.decoder(sequence_length)
        return {"training.sequence_length": sequence_length, "data.spans.decoder_length": decoder}

    @property
    def extra_tokens(self) -> Mapping[str, int]:
        """The sentinels."""
        return {"data.spans.sentinels": self.spans.sentinels}

    def misfits(self, config: RunConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go with an encoder and its spans."""
        yield from super().misfits(config, model)
        try:
            length = self.spans.decoder(config.training.sequence_length)
        except FieldError as error:
            yield from error.errors.items()
            return
        if length > model.max_sequence_length:
            most = model.max_sequence_length
            text = f"{length} is longer than the model's {most}; use {most} or less"
            yield "data.spans.decoder_length", text

    def corpus_misfits(self, train: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
        """Yield the problem if there are no documents to keep apart."""
        yield from packing_misfits(self.packing, train)

    def dataset(self, path: Path, sources: Sources) -> SpanDataset:
        """Open a data set of documents."""
        from mt_data import IndexedDataset, SpanCorruption, SpanDataset, SpanVocabulary

        assert sources.tokenizer is not None, "this kind needs one"  # noqa: S101
        spans, tokenizer = self.spans, sources.tokenizer
        return SpanDataset(
            IndexedDataset(path),
            sequence_length=sources.sequence_length,
            vocabulary=SpanVocabulary(
                sentinel=tokenizer.vocab_size - 1 + spans.sentinels,
                eod=tokenizer.eod_id,
                start=sources.model.decoder_start,
            ),
            corruption=SpanCorruption(density=spans.density, mean_length=spans.mean_length),
            decoder_length=spans.decoder_length,
            packing=self.packing,
            seed=sources.seed,
        )
