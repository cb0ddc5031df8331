"""The routes; each file has a router, and `routers` lists them."""

from __future__ import annotations

from fastapi import APIRouter

from mt_infer.server.routes import admin, generation, page, status, texts


def routers() -> list[APIRouter]:
    """Return the routers of all routes."""
    return [each.router for each in (status, page, generation, texts, admin)]
