"""A request: its tokens, and its blocks from the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mt_infer.images import Image  # imports torch


@dataclass(eq=False, kw_only=True)
class Request:
    """One continuation of a prompt.

    Attributes:
        number: Order of arrival; lower numbers are served earlier.
        tokens: The prompt's tokens, then the chosen ones. With an encoder they begin with the
            decoder's start, and the prompt's tokens are `source`.
        limit: Largest number of tokens, including the prompt's.
        source: Tokens for the encoder.
        images: Images among its tokens, in order.
        caller: Owner of its cached blocks; nobody else finds them.
        salt: Key of everything else that the cached blocks depend on.
        priority: Requests of a higher priority are served first.
        deadline: Time at which it ends, complete or not, on the engine's clock.
        reads_cache: Whether it may start from cached blocks; not if it wants the scores of its
            prompt.
        adapter: Number of its adapter; 0 for none.
        held: Number of tokens whose keys and values are in its blocks.
        table: Its blocks, in the order of its tokens.
        memory: Blocks of the encoded source, to which the decoder attends.
        is_encoded: Whether the blocks of the source are filled.
        state: Number of its rows of the recurrent layers' states; None while it waits.
        unseen: Number of its last held tokens that a model for drafts has not seen, so that no
            request may find their blocks.
        turn: Number of drafted tokens so far, which decides the row with the current states.
        keys: Keys of its full blocks, as far as they were needed.
        host: Its blocks of host memory, while it waits.
        saved: Number of tokens whose keys and values host memory has, and number of unseen ones.
        kept: Its recurrent states in host memory, by layer.
        end: Reason for its end; None while it goes on.
    """

    number: int
    tokens: list[int]
    limit: int
    source: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()
    caller: str = ""
    salt: bytes = b""
    priority: int = 0
    deadline: float = inf
    reads_cache: bool = True
    adapter: int = 0
    held: int = 0
    table: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    is_encoded: bool = False
    state: int | None = None
    unseen: int = 0
    turn: int = 0
    keys: list[bytes] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    saved: tuple[int, int] = 0, 0
    kept: Sequence[Any] = ()
    end: str | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Place in the order of service: by priority, then by arrival."""
        return -self.priority, self.number

    @property
    def pending(self) -> int:
        """Number of tokens that no pass has seen; 1 means a step of decoding."""
        return len(self.tokens) - self.held

    @property
    def unread(self) -> int:
        """Number of tokens that the encoder has not read."""
        return 0 if self.is_encoded else len(self.source)

    @property
    def piece(self) -> int:
        """Number of next tokens that must stay in one chunk: one, or the rest of an image."""
        held = self.held
        return next((each.end - held for each in self.images if each.start <= held < each.end), 1)

    def uncut(self, count: int) -> int:
        """Return the largest number of next tokens, up to a count, that cuts no image."""
        end = self.held + count
        cut = (each.start for each in self.images if each.start < end < each.end)
        return next(cut, end) - self.held


class StateCopy(NamedTuple):
    """A copy of the recurrent layers' states.

    Attributes:
        state: Number of a request's rows.
        turn: Place of the states among these rows; see `Request.turn`.
        kept: Row of the prefix cache.
        is_back: Whether the copy goes to the request, which starts from these states.
    """

    state: int
    turn: int
    kept: int
    is_back: bool


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens of a request for a model to read.

    Attributes:
        request: The request.
        start: Place of the first token in the text.
        fed: The tokens.
    """

    request: Request
    start: int
    fed: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens of a request in the next pass.

    Attributes:
        request: The request.
        start: Number of tokens that the request holds before.
        count: Number of its tokens from `start` on.
        drafts: Guesses of the next tokens, which the pass verifies.
    """

    request: Request
    start: int
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether the pass reaches the request's last token, whose scores choose the next one."""
        return self.start + self.count == len(self.request.tokens)

    @property
    def fed(self) -> list[int]:
        """The tokens of the pass, with drafts."""
        return [*self.request.tokens[self.start : self.start + self.count], *self.drafts]
