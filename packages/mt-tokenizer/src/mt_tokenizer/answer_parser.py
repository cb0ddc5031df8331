"""An answer's text to what it says: content, reasoning and calls, while it comes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from mt_tokenizer.answer import AnswerEvent, ChatAnswer, Content, Reasoning
from mt_tokenizer.reader import Broken, Reader, Waiting
from mt_tokenizer.tool_calls import FORMS, CallForm, Calls

_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """A model's marks of the parts of its answers.

    Attributes:
        calls: Form of calls of functions: `hermes` (Qwen's too), `llama3`, `mistral`, `deepseek`;
            None for none.
        reasoning: Marks before and behind the reasoning; None for none.
    """

    calls: CallForm | None = None
    reasoning: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.calls is not None and self.calls not in FORMS:
            raise ValueError(f"calls={self.calls!r}: use {', '.join(FORMS)} or None")

    @classmethod
    def find(cls, template: str, vocabulary: Collection[str] = ()) -> AnswerForm:
        """Find the form by the marks in a chat template, else by those in the vocabulary.

        Args:
            template: Source of the template.
            vocabulary: Names of the tokens, such as `Tokenizer.special_tokens`.
        """
        thoughts = (pair for pair in _THOUGHTS if pair[0] in template or pair[0] in vocabulary)
        return cls(calls=_call_form(template, vocabulary), reasoning=next(thoughts, None))


def _call_form(template: str, vocabulary: Collection[str]) -> CallForm | None:
    if "<function=" in template:  # arguments as elements, which no form here has
        return None
    for where in (template, vocabulary):
        for name, form in FORMS.items():
            if form.mark in where:
                return name
    return "llama3" if '"parameters"' in template and "ipython" in template else None


class AnswerParser:
    """Reads the text of an answer while it comes.

    The joined events of an answer depend only on its text, and not on the pieces. The content has
    all text but the reasoning and the whole calls of offered functions. The parser drops the marks,
    line ends beside the reasoning, white space before a call, and white space between the last call
    and the end.

    Args:
        form: The model's marks of the parts.
        functions: Names of the offered functions; with none, nothing is a call.
        prompt: The rendered prompt, which may already have begun the reasoning.
    """

    def __init__(
        self, form: AnswerForm, *, functions: Collection[str] = (), prompt: str = ""
    ) -> None:
        self._reader, self._events = Reader(), list[AnswerEvent]()
        self._reasoning = form.reasoning
        self._calls = Calls(functions, self._events.append)
        self._form = FORMS[form.calls] if form.calls is not None and functions else None
        self._is_behind_call = False
        thinks = form.reasoning is not None and prompt.rstrip().endswith(form.reasoning[0])
        self._running = self._run(thinks=thinks)

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the text, and return the events that no later piece can change."""
        self._reader.text += text
        next(self._running, None)
        return self._taken()

    def finish(self) -> list[AnswerEvent]:
        """End the text, and return the last events."""
        self._reader.has_ended = True
        for _ in self._running:
            pass
        return self._taken()

    def _taken(self) -> list[AnswerEvent]:
        taken = self._events.copy()
        self._events.clear()
        return taken

    def _run(self, *, thinks: bool) -> Waiting[None]:
        reader = self._reader
        if self._reasoning is not None:
            begin, end = self._reasoning
            if thinks or (yield from reader.take_behind_space(begin)):
                yield from self._skip_lines()
                yield from self._think(end)
        if self._form is not None and self._form.is_bare:
            begin = reader.at
            if (yield from reader.skip_space()) == "{":
                yield from self._call(begin)
            else:
                reader.at = begin
        while (yield from self._say()):
            pass

    def _skip_lines(self) -> Waiting[None]:
        while (yield from self._reader.peek()) == "\n":
            self._reader.at += 1

    def _think(self, end: str) -> Waiting[None]:
        """Read reasoning up to its mark."""
        reader = self._reader
        while True:
            place = reader.text.find(end, reader.at)
            if place >= 0:
                until = reader.at + len(reader.text[reader.at : place].rstrip("\n"))
            elif reader.has_ended:
                until = len(reader.text)
            else:
                until = held_back(reader.text, reader.at, end, "\n")
            if said := reader.text[reader.at : until]:
                self._events.append(Reasoning(text=said))
            reader.at = until if place < 0 else place + len(end)
            reader.drop()
            if place >= 0:
                yield from self._skip_lines()
            if place >= 0 or reader.has_ended:
                return
            yield

    def _say(self) -> Waiting[bool]:
        """Read content up to a call and the call; return whether there may be more."""
        reader = self._reader
        mark = self._form.mark if self._form is not None else ""
        while True:
            place = reader.text.find(mark, reader.at) if mark else -1
            if place >= 0:
                begin = len(reader.text[:place].rstrip())
                self._content(begin)
                reader.at = place + len(mark)
                yield from self._call(begin)
                return True
            if reader.has_ended:
                if reader.text[reader.at :].strip() or not self._is_behind_call:
                    self._content(len(reader.text))
                return False
            self._content(held_back(reader.text, reader.at, mark) if mark else len(reader.text))
            reader.drop()
            yield

    def _content(self, until: int) -> None:
        """Give out the text up to a place as content, and go there."""
        text = self._reader.text[self._reader.at : until]
        if text:
            self._events.append(Content(text=text))
            self._is_behind_call = False
        self._reader.at = until

    def _call(self, begin: int) -> Waiting[None]:
        """Read the calls behind a mark, or give out the text from `begin` on as content."""
        assert self._form is not None, "it has a mark"  # noqa: S101
        reader, calls = self._reader, self._calls
        first = behind = reader.at
        num_whole = calls.num_whole

        def keep() -> None:
            nonlocal behind
            behind = reader.at

        try:
            yield from self._form.read(reader, calls, keep)
        except Broken:
            calls.end(is_whole=False)
        if calls.num_whole == num_whole:
            reader.at = begin
            self._content(first)
        else:
            reader.at, self._is_behind_call = behind, True
        reader.drop()


def held_back(text: str, at: int, mark: str, space: str | None = None) -> int:
    """Return the place from which text may belong to a mark that is not there yet.

    Args:
        text: The text.
        at: Place from which it counts.
        mark: The mark.
        space: Characters before a mark that belong to it; None for white space.
    """
    rest = text[at:]
    sizes = range(min(len(rest), len(mark) - 1), 0, -1)
    size = next((n for n in sizes if rest.endswith(mark[:n])), 0)
    return at + len(rest[: len(rest) - size].rstrip(space))


def parse_answer(
    text: str, form: AnswerForm, *, functions: Collection[str] = (), prompt: str = ""
) -> ChatAnswer:
    """Return the parsed answer in a whole text; see `AnswerParser`."""
    parser = AnswerParser(form, functions=functions, prompt=prompt)
    events: Iterable[AnswerEvent] = [*parser.feed(text), *parser.finish()]
    return ChatAnswer.of(events)
