"""Routes for an admin's key: weights, memory and adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from mt_files import Checks
from starlette.requests import Request

from mt_infer.forms.bodies import Form
from mt_infer.server.routes.reading import form_of
from mt_infer.server.serving import Serving, refusals

router = APIRouter(prefix="/admin")


@dataclass(frozen=True, kw_only=True)
class Load(Form):
    """The body of `/admin/load`.

    Attributes:
        step: Step of the checkpoint; None for the latest.
    """

    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sleep(Form):
    """The body of `/admin/sleep`.

    Attributes:
        level: 1 frees keys and values, 2 moves the weights to host memory too.
    """

    level: int = 1


@dataclass(frozen=True, kw_only=True)
class NewAdapter(Form):
    """The body of `/admin/adapters`.

    Attributes:
        name: Name of the adapter, which requests give as their model.
        folder: Folder of Hugging Face PEFT.
    """

    name: str
    folder: str

    def __post_init__(self) -> None:
        checks = Checks(self)
        if not self.name or "/" in self.name:
            checks.add("name", "give a name without a slash")
        checks.done()


@router.post("/load")
async def load(request: Request) -> dict[str, Any]:
    """Read a checkpoint of the run into the model."""
    form, serving = await form_of(request, Load), Serving.of(request)
    with refusals():
        return {"step": await serving.backend.load_step(form.step)}


@router.post("/sleep")
async def sleep(request: Request) -> dict[str, Any]:
    """Free memory until `/admin/wake`."""
    form, serving = await form_of(request, Sleep), Serving.of(request)
    with refusals():
        await serving.backend.sleep(form.level)
    return {"is_asleep": True}


@router.post("/wake")
async def wake(request: Request) -> dict[str, Any]:
    """Serve again."""
    with refusals():
        await Serving.of(request).backend.wake()
    return {"is_asleep": False}


@router.post("/adapters")
async def load_adapter(request: Request) -> dict[str, Any]:
    """Load a LoRA adapter, or replace the one of the same name."""
    form, serving = await form_of(request, NewAdapter), Serving.of(request)
    with refusals():
        await serving.backend.load_adapter(form.name, form.folder)
    return {"adapters": list(serving.facts.adapters)}


@router.delete("/adapters/{name}")
async def remove_adapter(request: Request, name: str) -> dict[str, Any]:
    """Forget an adapter."""
    serving = Serving.of(request)
    with refusals():
        await serving.backend.remove_adapter(name)
    return {"adapters": list(serving.facts.adapters)}
