"""`mt-data check`: the content of files of conversations, and their wrong lines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from mt_files import Checks, read_text, say
from mt_tokenizer import ChatTemplate, Rendered, Tokenizer, load_tokenizer, read_template

from mt_data.commands.inspect import quantiles
from mt_data.documents.chat import ChatReader, TooLong
from mt_data.documents.conversations import read_lines
from mt_data.error import DataError, DataFileError

SHOWN = 20
_MOST_TEMPLATE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Check:
    """Run a chat template over files of conversations, and print the learnt text.

    The exit status is 2 if a line is wrong; the first wrong lines are named.

    Attributes:
        files: Files of JSON lines, JSON, parquet or Arrow, or folders of them, with messages,
            prompt and completion, or conversations in each record.
        tokenizer: The model's tokenizer; required.
        template: File of the chat template; by default the one in the tokenizer's folder.
        eod: The special token that ends a document, if the tokenizer has none of the usual ones.
        sequence_length: Number of tokens of a row; without it no conversation is too long.
        too_long: Treatment of longer conversations: refuse, drop or cut.
        show: Number of conversations to print, with the learnt text between [[ and ]].
    """

    files: tuple[str, ...]
    tokenizer: Path | None = None
    template: Path | None = None
    eod: str | None = None
    sequence_length: int | None = None
    too_long: TooLong = "refuse"
    show: int = 1

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "sequence_length")
        checks.at_least(0, "show")
        checks.done()

    def run(self) -> None:
        """Run the command."""
        if self.tokenizer is None or not self.files:
            raise DataError("files and --tokenizer are required: mt-data check FILE --tokenizer T")
        tokenizer = load_tokenizer(self.tokenizer, eod=self.eod)
        template = chat_template(tokenizer, self.template, self.tokenizer.parent)
        reader = ChatReader(tokenizer, template, size=self.sequence_length, too_long=self.too_long)
        wrong: list[DataFileError] = []
        turns = ended = shown = 0
        try:
            for path in self.files:
                for found in reader.read(read_lines(path), wrong.append):
                    parts = _parts(found)
                    learnt = [ids for is_learnt, ids in parts if is_learnt]
                    special = tokenizer.special_tokens.values()
                    turns += len(learnt)
                    ended += sum(ids[-1] in special for ids in learnt)
                    if shown < self.show:
                        say(f"--- {len(found.ids)} tokens; learnt is what stands in [[ ]]")
                        say(_text(parts, tokenizer))
                        shown += 1
        finally:
            if template is not None:
                template.close()
        _say_report(reader, turns, ended)
        for error in wrong[:SHOWN]:
            say(f"wrong: {error}", stream=sys.stderr)
        if wrong:
            raise DataError(f"{len(wrong)} lines are wrong; mend them, or leave them out")


def chat_template(tokenizer: Tokenizer, file: Path | None, folder: Path) -> ChatTemplate | None:
    """Return the chat template in a file, else the one in a folder; None without either.

    Raises:
        FileError: A file can't be read.
    """
    source, tokens = read_template(folder)
    if file is not None:
        source = read_text(file, limit=_MOST_TEMPLATE)
    return None if source is None else ChatTemplate(source, tokenizer, tokens=tokens)


def _parts(found: Rendered) -> list[tuple[bool, list[int]]]:
    """Return runs of tokens, each with whether it is learnt."""
    pairs = zip((weight > 0 for weight in found.trained), found.ids, strict=True)
    runs = groupby(pairs, key=lambda pair: pair[0])
    return [(is_learnt, [number for _, number in run]) for is_learnt, run in runs]


def _text(parts: list[tuple[bool, list[int]]], tokenizer: Tokenizer) -> str:
    texts = (tokenizer.decode(ids) for _, ids in parts)
    marked = zip(parts, texts, strict=True)
    return "".join(f"[[{text}]]" if is_learnt else text for (is_learnt, _), text in marked)


def _say_report(reader: ChatReader, turns: int, ended: int) -> None:
    report = reader.report
    say(f"conversations  {report.conversations}")
    if report.conversations:
        share = report.labels / report.tokens
        say(f"tokens         {report.tokens}, of which {report.labels} are learnt ({share:.1%})")
        say(f"turns          {turns} learnt, of which {ended} end with a special token")
        say(f"lengths        {quantiles(np.array(report.lengths))} (tokens, by quantile)")
    say(f"left out       {report.too_long} too long, {report.unlabelled} with nothing to learn")
    say(f"cut            {report.cut}")
