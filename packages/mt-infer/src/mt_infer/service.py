"""Service of a call's requests: their priority, deadline and caller."""

from __future__ import annotations

from dataclasses import dataclass

from mt_files import Checks


@dataclass(frozen=True, kw_only=True)
class Service:
    """Service of a call's requests.

    Attributes:
        priority: Requests of a higher priority are served first, and take blocks from lower ones.
        deadline_s: Seconds after the call at which a request ends with `deadline`, complete or
            not; None for no deadline.
        caller: The owner of the cached blocks of the prompts and answers: the prefix cache finds
            them for this caller alone. A server derives it from a client's key, and from a salt if
            the client gives one.
    """

    priority: int = 0
    deadline_s: float | None = None
    caller: str = ""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "deadline_s")
        checks.done()
