"""Reading of request bodies into forms."""

from __future__ import annotations

import asyncio
from typing import TypeVar
from urllib.parse import urlsplit

from starlette.requests import Request

from mt_infer.forms.bodies import Form, read_form
from mt_infer.forms.refusal import RefusedError
from mt_infer.server.serving import Serving

T = TypeVar("T", bound=Form)
_SMALL = 1 << 16  # bytes that are read without a thread


async def form_of(request: Request, cls: type[T]) -> T:
    """Return the fields of a request's body.

    Pages of other origins, which can send requests to this machine unasked, are refused.

    Raises:
        RefusedError: The body comes from such a page, or is not encoded in UTF-8.
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
