"""Running text: a token predicts the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from mt_data import FillInMiddle
from mt_files import Checks, RowField

from mt_train.config.kinds.section import DataSection, HeldOutRows, Sources, packing_misfits

if TYPE_CHECKING:
    from mt_data import (
        GPTDataset,
        IndexedDataset,
        RowDataset,
        Rows,
        ShardedDataset,
        Shards,
        TokenRanges,
    )
    from mt_model import ModelConfig

    from mt_train.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class TextData(DataSection):
    """Running text, cut into rows of equal length: each token predicts the next one.

    Attributes:
        split: Shares of the documents of `train` for training, validation and test, in their order,
            as in Megatron-LM: `969,30,1`. By default all of them are for training.
        order: Order of the rows of `train`: `stable` does not depend on the run's length; with
            `megatron` it is Megatron-LM's for the same seed, split and number of samples.
        packing: Attention between the documents of a sequence. `none` lets a token attend to
            everything before it; `documents` keeps attention within a document: positions restart,
            and the first token of a document is no label. It holds for training and evaluation.
        fim: Fill in the middle, such as `{rate: 0.5, spm_rate: 0.5}`: a share of the texts of
            `train` is cut in three, and the middle comes last. `tokenizer` must have the special
            tokens `prefix`, `suffix` and `middle`, by default `<|fim_prefix|>` and so on.
    """

    type_name: ClassVar[str] = "text"
    needs_tokenizer: ClassVar[bool] = False
    overlaps: ClassVar[bool] = True
    reads_shards: ClassVar[bool] = True

    split: str | None = None
    order: Literal["stable", "megatron"] = "stable"
    packing: Literal["none", "documents"] = "none"
    fim: FillInMiddle | None = None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens of fill-in-the-middle texts."""
        return () if self.fim is None else self.fim.special

    def check(self, checks: Checks) -> None:
        """Check split and order."""
        for name, is_set in (("split", self.split is not None), ("order", self.order != "stable")):
            if is_set and not self.train:
                checks.add(name, "is for data.train; leave it out")
        if self.phases and self.order == "megatron":
            text = (
                "are for data.order: stable, as Megatron-LM's depends on one share for the whole "
            )
            checks.add("phases", text + "run; leave one of them out")
        if self.split is None or "split" in checks.errors:
            return
        from mt_data import DataError, parse_split

        try:
            train, held_out, _ = parse_split(self.split)
        except DataError as error:
            checks.add("split", str(error))
            return
        if not train:
            checks.add("split", f"{self.split} leaves nothing for training; raise its first number")
        if held_out and self.validation is not None:
            text = f"{self.split} holds documents out, and data.validation names others"
            checks.add("split", f"{text}; leave one of them out")

    def fields(self) -> tuple[RowField, ...]:
        """Return the arrays of a row."""
        from mt_data import text_fields

        return text_fields(packed=self.packing == "documents")

    def misfits(self, config: RunConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
        """Yield settings that do not go with running text."""
        yield from super().misfits(config, model)
        if self.fim is not None and self.corpus is None and self.tokenizer is None:
            text = "makes tokens of parts of texts, and there is no data.tokenizer; name the one of"
            yield "data.fim", f"{text} data.train, or leave this out"

    def corpus_misfits(self, train: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
        """Yield the problem if there are no documents to keep apart."""
        yield from packing_misfits(self.packing, train)

    def rows(self) -> Rows:
        """Return the rule by which samples become rows."""
        from mt_data import Rows

        return Rows(packing=self.packing)

    @property
    def blend_order(self) -> Literal["split", "shortfall"]:
        """Order of the samples of several data sets: Megatron-LM's, or one found at once."""
        return "shortfall" if self.order == "megatron" else "split"

    def datasets(self, sources: Sources) -> list[GPTDataset | RowDataset]:
        """Open all paths of `train`, each with its part of `split`, or the shards of a corpus."""
        from mt_data import IndexedDataset

        if sources.shards is not None:
            return [cast("GPTDataset", self._samples_of_shards(sources, sources.shards))]
        indexed = [IndexedDataset(prefix) for prefix in sources.train]
        shares = sources.weights or [int(each.num_tokens) for each in indexed]
        return [
            self._samples(sources)(
                each,
                sequence_length=sources.sequence_length,
                seed=sources.seed,
                order=self.order,
                num_samples=None
                if self.order == "stable"
                else _num_samples(sources.num_samples, share / sum(shares)),
                sequences=self._training_part(each),
                order_folder=sources.orders,
            )
            for each, share in zip(indexed, shares, strict=True)
        ]

    def _samples_of_shards(self, sources: Sources, shards: Shards) -> ShardedDataset:
        """Open a corpus in shards, whose first shard is finished."""
        from mt_data import ShardedDataset

        return ShardedDataset(
            shards.open,
            partial(self._samples(sources), order_folder=sources.orders),
            count=shards.plan.count,
            sequence_length=sources.sequence_length,
            seed=sources.seed,
            identity=shards.identity,
            num_tokens=shards.plan.size,
        )

    def _samples(self, sources: Sources) -> Callable[..., GPTDataset]:
        """Return a function that makes the samples of a path."""
        from mt_data import FillInMiddleDataset, GPTDataset

        if self.fim is None:
            return GPTDataset
        assert sources.tokenizer is not None, "this needs one"  # noqa: S101
        return partial(FillInMiddleDataset, tokenizer=sources.tokenizer, fill=self.fim)

    def held_out(self, sources: Sources) -> HeldOutRows | None:
        """Return windows over the held-out tokens: every token is a label once."""
        from mt_data import IndexedDataset, SequentialWindows, count_text_bytes

        stream, tokenizer = self.held_out_tokens(sources), sources.tokenizer
        if stream is None:
            return None
        whole = [IndexedDataset(prefix) for prefix in sources.validation]  # they know their bytes
        windows = SequentialWindows(
            stream,
            sources.sequence_length,
            sources.stride,
            start_id=None if tokenizer is None else tokenizer.eod_id,
        )
        return HeldOutRows(
            rows=windows,
            num_bytes=None
            if tokenizer is None
            else sum(count_text_bytes(each, tokenizer) for each in whole or [stream]),
            num_labels=windows.num_labels,
        )

    def held_out_tokens(self, sources: Sources) -> IndexedDataset | TokenRanges | None:
        """Open the held-out tokens, from `validation` or from the second part of `split`."""
        from mt_data import IndexedDataset, TokenRanges, split_ranges

        if sources.validation:
            named = [IndexedDataset(prefix) for prefix in sources.validation]
            whole = [(each, range(len(each))) for each in named]
            return named[0] if len(named) == 1 else TokenRanges(whole)
        if self.split is None:
            return None
        indexed = [IndexedDataset(prefix) for prefix in sources.train]
        parts = [(each, split_ranges(self.split, len(each))[1]) for each in indexed]
        found = [(each, part) for each, part in parts if part]
        return TokenRanges(found) if found else None

    def _training_part(self, indexed: IndexedDataset) -> range | None:
        """Return the sequences that `split` gives to training; None for all of them."""
        from mt_data import DataError, split_ranges

        if self.split is None:
            return None
        found = split_ranges(self.split, len(indexed))[0]
        if not found:
            text = f"data.split {self.split} gives none of its {len(indexed)} documents to training"
            raise DataError(f"{indexed.prefix}: {text}; raise its first number")
        return found


def _num_samples(samples: int, share: float) -> int:
    """Return Megatron-LM's number of samples for a data set: half a percent more in a blend."""
    return samples if share == 1 else ceil(ceil(samples * share) * 1.005)
