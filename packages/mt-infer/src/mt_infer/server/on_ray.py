"""The server's app as a deployment of Ray Serve: each replica has its own engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_files import require

from mt_infer.server.keys import Keys
from mt_infer.server.limits import Limits

if TYPE_CHECKING:
    from fastapi import FastAPI


def ray_deployment(
    folder: Path | str, *, keys: Keys | None = None, limits: Limits | None = None, **options: Any
) -> Any:
    """Return a deployment for `ray.serve.run(ray_deployment(folder).bind())`.

    Its `options` set the number of replicas and the resources of each:
    `ray_deployment(folder).options(num_replicas=4, ray_actor_options={"num_gpus": 1})`. Ray's proxy
    listens on loopback unless `ray.serve.start` says otherwise; give keys for another address.
    Ray's own processes listen on all addresses of a machine without a key, for each other: keep
    other people out of their network.

    Args:
        folder: A run of mt-train or a folder of Hugging Face, which all machines can read.
        keys: See `create_app`.
        limits: See `create_app`, for each replica.
        options: Arguments of `Engine.from_folder`.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    serve = require("ray.serve", "serving on Ray")

    def build() -> FastAPI:
        from mt_infer import Engine
        from mt_infer.server.app import create_app

        return create_app(Engine.from_folder(folder, **options), keys=keys, limits=limits)

    return serve.deployment(serve.ingress(build)())
