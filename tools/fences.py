"""The fenced code blocks of a Markdown page, and whether they are to be run."""

import re
from dataclasses import dataclass
from pathlib import Path

RUN = ("bash", "python")
ALIASES = {"sh": "bash", "shell": "bash", "zsh": "bash", "py": "python", "python3": "python"}

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<mark>`{3,}|~{3,})\s*(?P<language>[\w+-]*)")
_NOT_RUN = re.compile(r"^\s*<!--\s*not-run:\s*(?P<reason>.*?)\s*-->\s*$")
_INSTALLS = re.compile(r"\bpip install\b|\buv (?:sync|add|remove|lock)\b")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block to run."""

    page: Path
    line: int
    language: str
    code: str
    reason: str | None = None  # why it is not run

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.language}"


class FenceError(ValueError):
    """A fence that can neither be run nor be skipped as it stands."""


def blocks_of(page: Path, text: str) -> list[Block]:
    """The bash and python blocks of `text`.

    Raises:
        FenceError: a fence is not closed, is a shell under another name, changes the environment,
            or is marked not-run without a reason.
    """
    found: list[Block] = []
    lines = text.splitlines()
    opened: re.Match[str] | None = None
    start = 0
    for number, line in enumerate(lines, start=1):
        match = _FENCE.match(line)
        if opened is None:
            opened, start = match, number
        elif match and match["mark"].startswith(opened["mark"]) and not match["language"]:
            body = [each.removeprefix(opened["indent"]) for each in lines[start : number - 1]]
            language = opened["language"]
            reason = _reason_above(page, lines, start)
            found += _block(page, start, language, "\n".join(body) + "\n", reason)
            opened = None
    if opened is not None:
        raise FenceError(f"{page}:{start}: the fence is never closed. Add its closing line.")
    return found


def _block(page: Path, line: int, language: str, code: str, reason: str | None) -> list[Block]:
    if language in ALIASES:
        raise FenceError(
            f"{page}:{line}: fence language {language!r} would not be run. Write"
            f" {ALIASES[language]!r}, or 'console' for what is not a script."
        )
    if language not in RUN:
        return []
    if language == "bash" and reason is None and (match := _INSTALLS.search(code)):
        raise FenceError(
            f"{page}:{line}: `{match.group()}` would change the environment that runs it. Write it"
            " as 'console', or put `<!-- not-run: reason -->` above."
        )
    return [Block(page=page, line=line, language=language, code=code, reason=reason)]


def _reason_above(page: Path, lines: list[str], fence: int) -> str | None:
    above = [line for line in lines[: fence - 1] if line.strip()]
    match = _NOT_RUN.match(above[-1]) if above else None
    if match and not match["reason"]:
        raise FenceError(f"{page}:{fence}: not-run gives no reason. Write <!-- not-run: WHY -->.")
    return match["reason"] if match else None
