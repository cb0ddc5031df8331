"""The notation of pipeline layouts, such as `Et*3|(tt|)*4tL`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MOST_CHARACTERS = 4096
_MOST_SYMBOLS = 65_536
_DEEPEST = 16
_SYMBOLS = "EtmL|"
_TOKEN = re.compile(r"\*[\s,]*([0-9]*)|[^\s,]")


class LayoutError(ValueError):
    """A layout string has a mistake; the message points at it.

    Attributes:
        position: Index of the wrong character.
    """

    def __init__(self, text: str, position: int, reason: str) -> None:
        super().__init__(text, position, reason)  # pickle passes these to the constructor again
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
    """The content of one stage.

    Attributes:
        layers: Its transformer layers.
        embedding: Whether it has the embedding.
        mtp: Number of its multi-token prediction layers.
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
    loss, and `|` ends a stage. `*3` repeats the symbol or the group in parentheses before it three
    times. Commas and spaces are ignored. This is Megatron-LM's notation; nothing in the string is
    evaluated.

    Args:
        text: The layout, of at most 4,096 characters.
        num_layers: Required number of layers; None allows any number.
        stages: Required number of stages; None allows any number. With several stages on each rank
            and round-robin placement, stage `c * p + r` is chunk c of rank r.

    Returns:
        The content of each stage.

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
    symbols = _symbols(text)
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
        reason = f"it has {len(result)} stages, but needs {stages}: write {stages - 1} '|'"
        raise LayoutError(text, len(text), reason)
    return tuple(result)


def _symbols(text: str) -> list[tuple[str, int]]:
    """Return every symbol with its position in the text, with repetitions written out."""
    found: list[tuple[str, int]] = []
    groups: list[tuple[int, int]] = []  # starts of the open groups: in the text, and in `found`
    item: int | None = None  # start, in `found`, of the symbols that a '*' would repeat
    for token in _TOKEN.finditer(text):
        symbol, at = token[0][0], token.start()
        if symbol == "*":
            if item is None:
                raise LayoutError(text, at, "there is nothing before '*' to repeat")
            at, times = token.start(1), int(token[1] or 0)
            if times < 1:
                reason = "'*' needs a whole number of at least 1 after it"
                raise LayoutError(text, at, reason)
            length = len(found) - item
            if times > _MOST_SYMBOLS or len(found) + (times - 1) * length > _MOST_SYMBOLS:
                raise LayoutError(text, at, f"written out it has more than {_MOST_SYMBOLS} symbols")
            found += found[item:] * (times - 1)
            item = None
        elif symbol == "(":
            if len(groups) == _DEEPEST:
                raise LayoutError(text, at, f"groups are nested more than {_DEEPEST} deep")
            groups.append((at, len(found)))
            item = None
        elif symbol == ")":
            if not groups:
                raise LayoutError(text, at, "')' closes no '('")
            _, item = groups.pop()
        elif symbol in _SYMBOLS:
            item = len(found)
            found.append((symbol, at))
        else:
            raise LayoutError(text, at, f"{symbol!r} is unknown: use E, t, m, L, |, (, ) and *")
    if groups:
        raise LayoutError(text, groups[-1][0], "'(' is never closed")
    return found


def _check_order(text: str, symbols: list[tuple[str, int]]) -> None:
    """Require E first, then layers, then prediction layers, then L, with one E and one L."""
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
            raise LayoutError(text, position, f"{symbol} may occur only once: it {where} stage")
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
