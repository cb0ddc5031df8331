"""Pairs of texts: an encoder reads the prompt, and a decoder learns the completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from mt_files import Checks, RowField

from mt_train.config.kinds.section import DataSection, Sources
from mt_train.config.limits import MAX_LENGTH

if TYPE_CHECKING:
    from mt_data import PairDataset
    from mt_model import ModelConfig

    from mt_train.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class PairData(DataSection):
    """Pairs in JSON lines: an encoder reads the `prompt`, a decoder learns the `completion`.

    It takes a model with `model.encoder_layers`; `training.sequence_length` is the encoder's.

    Attributes:
        decoder_length: Number of tokens of the decoder; by default `training.sequence_length`.
        packing: With `best-fit` a row has several pairs, and attention stays within each; with
            `none` it has one.
        too_long: Treatment of a pair with a text longer than a row: `refuse` ends the run with the
            pair's line, `drop` leaves the pair out, `cut` cuts both texts.
    """

    type_name: ClassVar[str] = "pairs"
    endings: ClassVar[tuple[str, ...]] = ("",)
    feeds_encoder: ClassVar[bool] = True
    has_few_labels: ClassVar[bool] = True

    decoder_length: int | None = None
    packing: Literal["best-fit", "none"] = "best-fit"
    too_long: Literal["refuse", "drop", "cut"] = "refuse"

    def check(self, checks: Checks) -> None:
        """Check that there are files of pairs, and the decoder's length."""
        checks.at_least(2, "decoder_length")
        checks.at_most(MAX_LENGTH, "decoder_length")
        if self.corpus is not None:
            checks.add("corpus", "is for text; name files of pairs in data.train")

    def fields(self) -> tuple[RowField, ...]:
        """Return the arrays of a row."""
        from mt_data import span_fields

        return span_fields(packed=True)

    def sizes(self, sequence_length: int) -> Mapping[str, int]:
        """Return the lengths of the encoder's and the decoder's sequence."""
        return {"encoder": sequence_length, "tokens": self._decoder(sequence_length)}

    def lengths(self, sequence_length: int) -> Mapping[str, int]:
        """Return the lengths of the encoder's and the decoder's sequence, by their keys."""
        decoder = self._decoder(sequence_length)
        return {"training.sequence_length": sequence_length, "data.decoder_length": decoder}

    def misfits(self, config: RunConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go with an encoder and its pairs."""
        yield from super().misfits(config, model)
        length, most = self._decoder(config.training.sequence_length), model.max_sequence_length
        if length > most:
            text = f"{length} is longer than the model's {most}; use {most} or less"
            yield "data.decoder_length", text

    def dataset(self, path: Path, sources: Sources) -> PairDataset:
        """Read a file of pairs.

        Raises:
            DataError: A line is no pair.
        """
        from mt_data import PairDataset

        assert sources.tokenizer is not None, "this kind needs one"  # noqa: S101
        return PairDataset(
            path,
            sources.tokenizer,
            lengths=(sources.sequence_length, self._decoder(sources.sequence_length)),
            start=sources.model.decoder_start,
            packing=self.packing,
            too_long=self.too_long,
            seed=sources.seed,
        )

    def _decoder(self, sequence_length: int) -> int:
        return sequence_length if self.decoder_length is None else self.decoder_length
