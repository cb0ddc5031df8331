"""The routes; each file has a router, and `routers` lists them."""

from __future__ import annotations

from fastapi import APIRouter

from mt_infer.server.routes import admin, chat, completions, page, responses, status, texts


def routers() -> list[APIRouter]:
    """Return the routers of all routes."""
    return [each.router for each in (status, page, completions, chat, responses, texts, admin)]
