"""A request: its tokens, and what the scheduler gave it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf


@dataclass(eq=False, kw_only=True)
class Request:
    """One continuation of a prompt.

    Attributes:
        number: Order of arrival; the lower, the earlier served.
        tokens: The prompt's tokens, then the chosen ones.
        limit: Largest number of tokens, including the prompt's.
        salt: Key of what else the cached blocks depend on.
        priority: Requests of a higher priority are served first.
        deadline: Time at which it ends whatever it has, on the engine's clock.
        reads_cache: Whether it may start from cached blocks; one that wants the scores of its
            prompt may not.
        adapter: Number of its adapter; 0 for none.
        held: Number of tokens whose keys and values are in its blocks.
        table: Its blocks, in the order of its tokens.
        state: Its row of the recurrent layers' states; None while it waits.
        keys: Keys of its full blocks, as far as they were needed.
        end: Reason for its end; None while it goes on.
    """

    number: int
    tokens: list[int]
    limit: int
    salt: bytes = b""
    priority: int = 0
    deadline: float = inf
    reads_cache: bool = True
    adapter: int = 0
    held: int = 0
    table: list[int] = field(default_factory=list)
    state: int | None = None
    keys: list[bytes] = field(default_factory=list)
    end: str | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Place in the order of service: by priority, then by arrival."""
        return -self.priority, self.number

    @property
    def pending(self) -> int:
        """Number of tokens that a pass has not seen; one is a step of decoding."""
        return len(self.tokens) - self.held


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens of a request in the next pass.

    Attributes:
        request: The request.
        count: Number of its tokens from `request.held` on.
        drafts: Guesses of the next tokens, which the pass verifies.
    """

    request: Request
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether the pass reaches the request's last token, whose scores choose the next one."""
        return self.count == self.request.pending

    @property
    def fed(self) -> list[int]:
        """The tokens of the pass, with drafts."""
        held = self.request.held
        return [*self.request.tokens[held : held + self.count], *self.drafts]
