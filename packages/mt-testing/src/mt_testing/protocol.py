"""What the pool and its ranks say to each other."""

from __future__ import annotations

from dataclasses import dataclass

FINISH = b""  # every rank has answered: the process group may go
NOTES_VARIABLE = "MT_TESTING_NOTES_FD"  # file descriptor that outlives the rank: last words


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call as sent to every rank.

    Attributes:
        payload: The serialised function and arguments.
        store: Path of a `FileStore`. A `TCPStore` looks the peer's name up on every connection,
            which now and then costs the seconds of a DNS time-out where no server answers.
        timeout: Of the process group and its store, in seconds.
    """

    payload: bytes
    world_size: int
    backend: str
    store: str
    timeout: float
    environ: dict[str, str]
    directory: str
    sys_path: list[str]
