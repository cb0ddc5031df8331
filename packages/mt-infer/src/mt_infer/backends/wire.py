"""Messages between the server and its engine's process: JSON behind its length; no pickle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mt_files import MissingExtraError, UserError

from mt_infer.backends.backend import EngineDownError, EngineFailedError, Facts, Job, Picture
from mt_infer.completion import Completion, Delta
from mt_infer.sampling import Sampling
from mt_infer.service import Service

_SIZE = 4  # bytes of a length
_MOST_BYTES = 1 << 28
_TOPS = ("top_logprobs", "prompt_top_logprobs")
_ERRORS = {"value": ValueError, "down": EngineDownError, "failed": EngineFailedError}


def packed(message: Mapping[str, Any], raw: bytes = b"") -> bytes:
    """Return a message as bytes: two lengths, JSON, and raw bytes such as pixels."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(_SIZE), len(raw).to_bytes(_SIZE), text, raw])


async def next_message(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes] | None:
    """Return the next message and its raw bytes; None at the end.

    Raises:
        EngineDownError: It is longer than any message may be, or it is cut.
    """
    try:
        sizes = await reader.readexactly(2 * _SIZE)
        length, more = int.from_bytes(sizes[:_SIZE]), int.from_bytes(sizes[_SIZE:])
        if length + more > _MOST_BYTES:
            raise EngineDownError(f"a message of {length + more} bytes exceeds {_MOST_BYTES}")
        return json.loads(await reader.readexactly(length)), await reader.readexactly(more)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def asked(job: Job) -> tuple[dict[str, Any], bytes]:
    """Return a job as a message and the pixels of its images."""
    message: dict[str, Any] = {
        "prompts": [list(each) for each in job.prompts],
        "sampling": _given(job.sampling),
        "adapter": job.adapter,
        "service": _given(job.service),
    }
    if job.images is not None:
        message["images"] = [[[x.width, x.height] for x in each] for each in job.images]
    return message, b"".join(x.rgb for each in job.images or () for x in each)


def asked_of(message: Mapping[str, Any], raw: bytes) -> Job:
    """Return the job of a message; the inverse of `asked`."""
    images, place = message.get("images"), 0
    pictures: list[list[Picture]] = []
    for each in images or ():
        pictures.append([])
        for width, height in each:
            end = place + 3 * width * height
            pictures[-1].append(Picture(width=width, height=height, rgb=raw[place:end]))
            place = end
    return Job(
        prompts=message["prompts"],
        sampling=Sampling(**message["sampling"]),
        images=None if images is None else pictures,
        adapter=message["adapter"],
        service=Service(**message["service"]),
    )


def delta_message(delta: Delta) -> dict[str, Any]:
    """Return a delta as JSON."""
    given = _given(delta)
    if delta.completion is not None:
        given["completion"] = _given(delta.completion)
    return given


def delta_of(given: dict[str, Any]) -> Delta:
    """Return the delta of JSON."""
    completion = given.pop("completion", None)
    whole = None if completion is None else Completion(**_with_tops(completion))
    return Delta(**_with_tops(given), completion=whole)


def facts_message(facts: Facts) -> dict[str, Any]:
    """Return facts as JSON."""
    return _given(facts) | {"digests": list(facts.digests.items())}


def facts_of(given: dict[str, Any]) -> Facts:
    """Return the facts of JSON."""
    given |= {"digests": dict(given["digests"]), "adapters": tuple(given["adapters"])}
    return Facts(**given)


def error_message(error: BaseException) -> dict[str, str]:
    """Return an error as JSON; what a user can solve is the caller's."""
    solved = ValueError, UserError, MissingExtraError
    kinds = {"down": EngineDownError, "value": solved}
    kind = next((name for name, types in kinds.items() if isinstance(error, types)), "failed")
    text = str(error) if kind != "failed" else f"{type(error).__name__}: {error}"
    return {"kind": kind, "text": text}


def error_of(given: Mapping[str, str]) -> Exception:
    """Return the error of JSON."""
    return _ERRORS[given["kind"]](given["text"])


def _given(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not at their defaults of None."""
    named = ((field.name, getattr(value, field.name)) for field in fields(value))
    return {name: x for name, x in named if x is not None}


def _with_tops(given: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping with the tokens of most likely ones as numbers again."""
    for name in _TOPS:
        if name in given:
            given[name] = [{int(token): x for token, x in each.items()} for each in given[name]]
    return given
