"""Requests to forms, and forms to what the engine is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.requests import Request

from mt_infer.forms.bodies import Form, FormError, read_form
from mt_infer.forms.choosing import Choosing
from mt_infer.server.prompts import Prompt
from mt_infer.server.refusal import RefusedError
from mt_infer.server.serving import Ask, Serving

T = TypeVar("T", bound=Form)
_SMALL = 1 << 16  # bytes that are read without a thread


async def form_of(request: Request, cls: type[T]) -> T:
    """Return the fields of a request's body.

    Pages of other origins, which can send requests to this machine unasked, are refused.

    Raises:
        RefusedError: The body comes from such a page, or is encoded otherwise than in UTF-8.
        FormError: `read_form` refuses it.
    """
    headers, serving = request.headers, Serving.of(request)
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        raise RefusedError(403, "pages of other origins may send no requests", code="cross_origin")
    charset = headers.get("content-type", "").lower().partition("charset=")[2].strip('" ')
    if charset not in ("", "utf-8", "utf8"):
        raise RefusedError(400, f"charset={charset[:40]}: send JSON in UTF-8")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise RefusedError(400, "compressed bodies are not read; leave content-encoding out")
    content = await request.body()
    if len(content) <= _SMALL:
        return read_form(cls, content, serving.limits.max_depth)
    return await asyncio.to_thread(read_form, cls, content, serving.limits.max_depth)


def ask_of(
    serving: Serving,
    form: Choosing,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int | None,
    **sampling: Any,
) -> Ask:
    """Return what the engine is asked.

    Args:
        serving: The server's.
        form: The fields.
        prompts: The prompts.
        max_tokens: Largest number of tokens; None for the rest of the context.
        sampling: Further parameters of the choice.

    Raises:
        RefusedError: There is no such model.
        FormError: A receipt can't be made.
    """
    facts, adapter = serving.facts, serving.adapter_of(form.model)
    has_images = any(each.images for each in prompts)
    if form.receipt and (has_images or adapter is not None):
        raise FormError("receipt", "is not made for images or adapters; leave it out")
    shortest = 1 if facts.has_encoder else min(len(each.tokens) for each in prompts)
    room = facts.max_sequence_length - shortest
    return Ask(
        prompts=[each.tokens for each in prompts],
        sampling=form.sampling(
            max_tokens=room if max_tokens is None else min(room, max_tokens), **sampling
        ),
        images=[each.images for each in prompts] if has_images else None,
        adapter=adapter,
        cache_salt=form.cache_salt,
        deadline_s=form.deadline_s,
    )
