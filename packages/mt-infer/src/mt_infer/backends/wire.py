"""Messages between the server and its engine's process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from mt_files import MissingExtraError, UserError

from mt_infer.backends.backend import (
    EngineDownError,
    EngineFailedError,
    Facts,
    Job,
    Picture,
    Setup,
)
from mt_infer.completion import Completion, Delta
from mt_infer.message import HEAD, size_behind, unpack
from mt_infer.sampling import Sampling
from mt_infer.service import Service

_MOST_BYTES = 1 << 28
_TOPS = ("top_logprobs", "prompt_top_logprobs")
_ERRORS = {"value": ValueError, "down": EngineDownError, "failed": EngineFailedError}


async def next_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None at the end.

    Raises:
        EngineDownError: The message is too long.
    """
    try:
        head = await reader.readexactly(HEAD)
        size = size_behind(head)
        if size > _MOST_BYTES:
            raise EngineDownError(f"a message of {size} bytes exceeds {_MOST_BYTES}")
        content = head + await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    makers = {"Facts": _facts, "Delta": _delta, "Completion": _completion}
    return unpack(content, Setup, Job, Picture, Sampling, Service, **makers)


def error_message(error: BaseException) -> dict[str, str]:
    """Return an error as JSON; an error that a user can solve counts as the caller's."""
    solved = ValueError, UserError, MissingExtraError
    kinds = {"down": EngineDownError, "value": solved}
    kind = next((name for name, types in kinds.items() if isinstance(error, types)), "failed")
    text = str(error) if kind != "failed" else f"{type(error).__name__}: {error}"
    return {"kind": kind, "text": text}


def error_of(given: Mapping[str, str]) -> Exception:
    """Return an error from its JSON."""
    return _ERRORS[given["kind"]](given["text"])


def _facts(**given: Any) -> Facts:
    digests = {None if step == "null" else int(step): x for step, x in given["digests"].items()}
    return Facts(**given | {"digests": digests, "adapters": tuple(given.get("adapters", ()))})


def _delta(**given: Any) -> Delta:
    return Delta(**_with_tokens(given))


def _completion(**given: Any) -> Completion:
    return Completion(**_with_tokens(given))


def _with_tokens(given: dict[str, Any]) -> dict[str, Any]:
    """Return fields in which the most likely tokens are numbers again instead of texts."""
    for name in _TOPS:
        if name in given:
            given[name] = [{int(token): x for token, x in each.items()} for each in given[name]]
    return given
