"""The routes; each file has a router, and `routers` lists them."""

from __future__ import annotations

from fastapi import APIRouter

from mt_infer.server.routes import chat, completions, responses, status, texts


def routers() -> list[APIRouter]:
    """Return the routers of all routes."""
    return [each.router for each in (status, completions, chat, responses, texts)]
