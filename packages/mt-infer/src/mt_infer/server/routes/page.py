"""`GET /`: a page to talk with the model."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter()


@router.get("/")
async def page() -> Response:
    """Return the page, which loads nothing from elsewhere and may run only its own script."""
    content, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(content, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """Return the page, and what it may load."""
    content = (files("mt_infer.server") / "chat.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _digest(content, "script"),
        "style-src": _digest(content, "style"),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return content, "; ".join(f"{name} {value}" for name, value in policy.items())


def _digest(content: str, element: str) -> str:
    """Return the digest of an element's text, as a policy names it."""
    (inner,) = re.findall(f"<{element}>(.*?)</{element}>", content, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
    return f"'sha256-{digest}'"
