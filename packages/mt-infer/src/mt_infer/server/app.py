"""The app: routes with an engine, keys and limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mt_infer.backends.backend import Backend
from mt_infer.forms.refusal import RefusedError
from mt_infer.server.gate import Gate
from mt_infer.server.keys import Keys
from mt_infer.server.limits import Limits
from mt_infer.server.routes import routers
from mt_infer.server.serving import Serving

if TYPE_CHECKING:
    from mt_infer.engine.engine import Engine  # imports torch


def create_app(
    engine: Engine | Backend, *, keys: Keys | None = None, limits: Limits | None = None
) -> FastAPI:
    """Return the app that serves an engine.

    Args:
        engine: The engine, of this process or another one.
        keys: Keys of clients and admins; None for a server of this machine alone, without keys.
        limits: The limits.
    """
    backend = _backend(engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await backend.close()
        app.state.serving.prompts.close()

    # Without a schema there are no pages of documentation, which would load foreign scripts.
    app = FastAPI(title="mt-infer", lifespan=lifespan, redirect_slashes=False, openapi_url=None)
    limits, keys = limits or Limits(), keys or Keys()
    app.state.serving = Serving(backend, limits)
    app.add_middleware(Gate, keys=keys, limits=limits)
    app.add_exception_handler(HTTPException, _no_route)
    for router in routers():
        app.include_router(router)
    return app


def _backend(engine: Engine | Backend) -> Backend:
    if hasattr(type(engine), "is_ready"):  # by its class, as facts may not be known yet
        return cast("Backend", engine)
    from mt_infer.backends.local import LocalEngine

    return LocalEngine(cast("Engine", engine))


async def _no_route(_: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    text = {404: "there is no such route", 405: "the route has other methods"}
    raise RefusedError(status, text.get(status, "the request is not served")) from error
