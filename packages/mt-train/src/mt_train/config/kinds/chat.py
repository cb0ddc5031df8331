"""Conversations, with labels on the assistant's turns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from mt_files import Checks, RowField

from mt_train.config.kinds.section import DataSection, Sources
from mt_train.config.limits import path_field

if TYPE_CHECKING:
    from mt_data import GPTDataset, RenderedRows, RowDataset


@dataclass(frozen=True, kw_only=True)
class ChatData(DataSection):
    """Conversations of files: the assistant's turns are learnt, with the tokens that end them.

    A line of JSON lines, or a row of a parquet or Arrow file, has `messages` (with `tools`),
    `prompt` and `completion`, or ShareGPT's `conversations`; a message may have `train: false` or a
    `weight`.

    Attributes:
        template: File of the chat template; by default the one in the tokenizer's folder, which
            with `model.from` is that folder.
        packing: With `best-fit` a row has several conversations, which fill it by best fit, and
            attention stays within each; with `none` it has one.
        too_long: Treatment of a conversation longer than a row: `refuse` ends the run with the
            conversation's line, `drop` leaves the conversation out, `cut` cuts it.
    """

    type_name: ClassVar[str] = "chat"
    endings: ClassVar[tuple[str, ...]] = ("",)
    has_few_labels: ClassVar[bool] = True

    template: str | None = path_field("")
    packing: Literal["best-fit", "none"] = "best-fit"
    too_long: Literal["refuse", "drop", "cut"] = "refuse"

    def check(self, checks: Checks) -> None:
        """Check that there are files of conversations."""
        if self.corpus is not None:
            checks.add("corpus", "is for text; name files of conversations in data.train")

    def fields(self) -> tuple[RowField, ...]:
        """Return the arrays of a row, which may have weights of labels too."""
        from mt_data import chat_fields

        return chat_fields(packed=self.packing == "best-fit")

    def files(self) -> Mapping[str, bytes]:
        """Return the chat template and its special tokens, for inference."""
        source, tokens = self._template()
        if source is None:
            return {}
        told = json.dumps(tokens, indent=2) + "\n"
        return {"chat_template.jinja": source.encode(), "tokenizer_config.json": told.encode()}

    def datasets(self, sources: Sources) -> list[GPTDataset | RowDataset]:
        """Open all paths of `train`; all have weights of labels if one has."""
        found = [self.dataset(path, sources) for path in sources.train]
        for each in found:
            each.is_weighted = any(other.is_weighted for other in found)
        return [*found]

    def dataset(self, path: Path, sources: Sources) -> RenderedRows:
        """Read a file of conversations.

        Raises:
            DataError: A line is no conversation, or the template refuses it.
        """
        from mt_data import ChatDataset
        from mt_tokenizer import ChatTemplate

        tokenizer = sources.tokenizer
        assert tokenizer is not None, "this kind needs one"  # noqa: S101
        how = {
            "sequence_length": sources.sequence_length,
            "packing": self.packing,
            "too_long": self.too_long,
            "seed": sources.seed,
        }
        source, tokens = self._template()
        if source is None:
            return ChatDataset(path, tokenizer, **how)
        with ChatTemplate(source, tokenizer, tokens=tokens) as template:
            return ChatDataset(path, tokenizer, template, **how)

    def _template(self) -> tuple[str | None, Mapping[str, str]]:
        """Return the template, and the special tokens that it names."""
        from mt_files import read_text
        from mt_tokenizer import read_template

        assert self.tokenizer is not None, "this kind needs one"  # noqa: S101
        source, tokens = read_template(Path(self.tokenizer).parent)
        if self.template is not None:
            source = read_text(self.template, limit=1 << 22)
        return source, tokens
