"""Reads which layers live on which stage from a string such as `Et*3|(tt|)*4tL`."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_CHARACTERS = 4096
_MOST_SYMBOLS = 65_536
_DEEPEST = 16
_SYMBOLS = "EtmL|"


class LayoutError(ValueError):
    """A layout string has a mistake; the message points at it.

    Attributes:
        position: Index of the character that is wrong.
    """

    def __init__(self, text: str, position: int, reason: str) -> None:
        super().__init__(text, position, reason)  # what pickle makes it from again
        self.position = position

    def __str__(self) -> str:
        text, position, reason = self.args
        shown = text.replace("\n", " ")
        start = max(0, position - 60)
        piece = ("..." if start else "") + shown[start : position + 60]
        caret = " " * (position - start + (3 if start else 0)) + "^"
        return f"layout, character {position}: {reason}\n  {piece}\n  {caret}"


@dataclass(frozen=True, kw_only=True)
class StageContent:
    """What lives on one stage.

    Attributes:
        layers: Its transformer layers.
        embedding: Whether it has the embedding.
        mtp: How many multi-token prediction layers it has.
        loss: Whether it has the head and the loss.
    """

    layers: range
    embedding: bool = False
    mtp: int = 0
    loss: bool = False


def parse_layout(
    text: str, *, num_layers: int | None = None, stages: int | None = None
) -> tuple[StageContent, ...]:
    """Read a layout string.

    `E` is the embedding, `t` a layer, `m` a multi-token prediction layer, `L` the head and the
    loss, and `|` ends a stage. `*3` repeats what is before it three times, which may be a group in
    parentheses. Commas and spaces mean nothing. It is Megatron-LM's notation; nothing in the string
    is evaluated.

    Args:
        text: The layout, of at most 4,096 characters.
        num_layers: How many layers it must have; None for any number.
        stages: How many stages it must have; None for any number. With several stages on each
            rank, stage `c * p + r` is chunk c of rank r for round robin.

    Returns:
        What lives on each stage.

    Raises:
        LayoutError: The string is not a layout, its parts are in an impossible order, or it has
            another number of layers or stages.

    Example:
        >>> [len(stage.layers) for stage in parse_layout("Et|(tt|)*2tL", num_layers=6)]
        [1, 2, 2, 1]
    """
    if not isinstance(text, str):
        raise TypeError(f"a layout is a string such as 'Et|tL', got {text!r:.60}")
    if len(text) > _MOST_CHARACTERS:
        reason = f"the layout has {len(text)} characters; at most {_MOST_CHARACTERS} are read"
        raise LayoutError(text, _MOST_CHARACTERS, reason)
    symbols = _Parser(text).symbols()
    _check_order(text, symbols)
    result: list[StageContent] = []
    layers = 0
    for part in _stages(text, symbols):
        count = part.count("t")
        result.append(
            StageContent(
                layers=range(layers, layers + count),
                embedding="E" in part,
                mtp=part.count("m"),
                loss="L" in part,
            )
        )
        layers += count
    if num_layers is not None and layers != num_layers:
        raise LayoutError(text, len(text), f"it has {layers} layers (t), the model {num_layers}")
    if stages is not None and len(result) != stages:
        reason = f"it has {len(result)} stages, but {stages} are needed: it takes {stages - 1} '|'"
        raise LayoutError(text, len(text), reason)
    return tuple(result)


class _Parser:
    """Recursive descent: layout = {(symbol | "(" layout ")") ["*" number]}."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def symbols(self) -> list[tuple[str, int]]:
        """Every symbol with the position that it was read from, repetitions written out."""
        found = self._layout(depth=0)
        if self._at < len(self._text):
            raise self._error("')' closes no '('")
        return found

    def _layout(self, depth: int) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        while (symbol := self._peek()) not in ("", ")"):
            start = self._at
            if symbol == "(":
                item = self._group(start, depth)
            elif symbol in _SYMBOLS:
                self._at += 1
                item = [(symbol, start)]
            elif symbol == "*":
                raise self._error("'*' repeats what is before it, and there is nothing")
            else:
                raise self._error(f"{symbol!r} is unknown: use E, t, m, L, |, (, ) and *")
            times_at = self._at
            found += item * self._times(len(item))
            if len(found) > _MOST_SYMBOLS:
                self._at = times_at
                raise self._error(f"written out it has more than {_MOST_SYMBOLS} symbols")
        return found

    def _group(self, start: int, depth: int) -> list[tuple[str, int]]:
        if depth == _DEEPEST:
            raise self._error(f"groups are nested more than {_DEEPEST} deep")
        self._at += 1
        item = self._layout(depth + 1)
        if self._peek() != ")":
            self._at = start
            raise self._error("'(' is never closed")
        self._at += 1
        return item

    def _times(self, length: int) -> int:
        if self._peek() != "*":
            return 1
        self._at += 1
        self._peek()
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in "0123456789":
            self._at += 1
        digits = self._text[start : self._at]
        if not digits or int(digits[:9]) == 0:
            self._at = start
            raise self._error("after '*' comes how often: a whole number of at least 1")
        if len(digits) > 9 or int(digits) * length > _MOST_SYMBOLS:
            self._at = start
            raise self._error(f"written out it has more than {_MOST_SYMBOLS} symbols")
        return int(digits)

    def _peek(self) -> str:
        """The next character that means something, empty at the end."""
        while self._at < len(self._text) and (
            self._text[self._at] == "," or self._text[self._at].isspace()
        ):
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _error(self, reason: str) -> LayoutError:
        return LayoutError(self._text, self._at, reason)


def _check_order(text: str, symbols: list[tuple[str, int]]) -> None:
    """E first, then layers, then prediction layers, then L; E and L once."""
    if not symbols:
        raise LayoutError(text, 0, "the layout is empty: write for example Et|t|tL")
    if symbols[0][0] != "E":
        raise LayoutError(text, symbols[0][1], "the first stage begins with the embedding, E")
    if symbols[-1][0] != "L":
        raise LayoutError(text, symbols[-1][1], "the last stage ends with the head and loss, L")
    seen_mtp = False
    for symbol, position in symbols[1:-1]:
        if symbol in "EL":
            where = "begins the first" if symbol == "E" else "ends the last"
            raise LayoutError(text, position, f"{symbol} is there once and {where} stage")
        if symbol == "t" and seen_mtp:
            raise LayoutError(text, position, "a layer (t) cannot come after a prediction layer, m")
        seen_mtp = seen_mtp or symbol == "m"


def _stages(text: str, symbols: list[tuple[str, int]]) -> list[str]:
    parts = [""]
    for symbol, position in symbols:
        if symbol != "|":
            parts[-1] += symbol
        elif not parts[-1]:
            raise LayoutError(text, position, f"stage {len(parts) - 1} is empty")
        else:
            parts.append("")
    return parts
