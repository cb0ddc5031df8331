"""A file of answers that a killed command continues."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mt_files import FileError, parse_json

from mt_infer.commands.asking import MAX_PROMPT_BYTES, Question
from mt_infer.completion import Completion
from mt_infer.engine.engine import Engine
from mt_infer.sampling import Sampling

_WINDOW = 1024  # prompts in the engine at a time
_KEY_LETTERS = 16


class AnswerFile:
    """Answers as JSON lines, in the order of their questions.

    An existing file has the answers of a killed command to the first questions; an incomplete last
    line is removed. One process at a time writes the file.

    Args:
        path: The file; a link is not followed.
        questions: All questions.
        settings: Everything besides the question that decides an answer: the model and the options.

    Attributes:
        rest: Questions without an answer.

    Raises:
        FileError: The file can't be written, or has other lines than answers.
        ValueError: The file has answers to other questions, or from another model or setting.
    """

    def __init__(self, path: Path, questions: Sequence[Question], settings: object) -> None:
        self._path, self._told = path, json.dumps(settings, default=str).encode()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.fdopen(os.open(path, flags, 0o666), "r+b")
        try:
            self._lock()
            self.rest = questions[self._kept(questions) :]
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise FileError(self._path, "is no regular file; name a new one for --out")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = "is written by another process; wait for it, or name another --out"
            raise FileError(self._path, text) from None
        except OSError:  # no locks on this file system
            return

    def _kept(self, questions: Sequence[Question]) -> int:
        """Return the number of existing answers, and cut the file after them."""
        number, end = 0, 0
        while (line := self._file.readline(2 * MAX_PROMPT_BYTES)).endswith(b"\n"):
            self._check(line, number, questions)
            number, end = number + 1, self._file.tell()
        self._file.seek(end)
        self._file.truncate()
        return number

    def _check(self, line: bytes, number: int, questions: Sequence[Question]) -> None:
        where = f"{self._path}:{number + 1}"
        record = parse_json(line, name=where)
        if not isinstance(record, dict) or not {"line", "key", "text"} <= record.keys():
            raise FileError(where, "is no answer of this command; name another file for --out")
        if number >= len(questions) or record["key"] != self._key(questions[number]):
            raise ValueError(
                f"{where}: is an answer to another prompt, or of another model or setting; name "
                "another file for --out, or remove this one"
            )

    def _key(self, question: Question) -> str:
        """Return the digest of everything that decides an answer."""
        return hashlib.sha256(self._told + question.tokens.tobytes()).hexdigest()[:_KEY_LETTERS]

    def answer(self, engine: Engine, sampling: Sampling, *, adapter: str | None = None) -> None:
        """Write the engine's answers to the unanswered questions, in the order of the questions.

        Args:
            engine: The engine.
            sampling: How to choose tokens.
            adapter: Name of the adapter.
        """
        for first in range(0, len(self.rest), _WINDOW):
            window = self.rest[first : first + _WINDOW]
            ready, following = dict[int, Completion](), 0
            tokens = [list(each.tokens) for each in window]
            for delta in engine.stream(tokens, sampling, adapter=adapter):
                if delta.completion is not None:
                    ready[delta.index] = delta.completion
                while following in ready:
                    self._write(window[following], ready.pop(following))
                    following += 1

    def complete(self, complete: Callable[[list[int]], Completion]) -> None:
        """Write the missing answers, one after the other.

        Args:
            complete: Function that continues the tokens of a prompt.
        """
        for question in self.rest:
            self._write(question, complete(list(question.tokens)))

    def _write(self, question: Question, completion: Completion) -> None:
        """Append the answer to the next question."""
        record: Mapping[str, Any] = {
            "line": question.line,
            "text": completion.text or "",
            "end": completion.end,
            "tokens": len(completion.tokens),
            "key": self._key(question),
        }
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Close the file, for another process to write."""
        self._file.close()
