"""Status of a server: `/health`, `/ready`, `/metrics` and `/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mt_infer.forms.refusal import RefusedError
from mt_infer.server.serving import Serving

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """Say that the HTTP process is alive."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Return whether the server can serve requests now."""
    serving = Serving.of(request)
    if serving.is_draining or not serving.backend.is_ready:
        raise RefusedError(503, "the server is not ready", code="not_ready", retry_after=1)
    return JSONResponse({"status": "ready", "step": serving.facts.step})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    serving = Serving.of(request)
    stats = await serving.backend.stats() if serving.backend.is_ready else {}
    return Response(serving.metrics.text(stats, serving.facts.step), media_type="text/plain")


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """Return the model and its adapters."""
    facts = Serving.of(request).facts
    owned = {"object": "model", "created": 0, "owned_by": "mt-infer"}
    first = {"id": facts.model, "max_model_len": facts.max_sequence_length, **owned}
    adapters = [{"id": name, "parent": facts.model, **owned} for name in facts.adapters]
    return {"object": "list", "data": [first, *adapters]}
