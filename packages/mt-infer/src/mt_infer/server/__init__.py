"""The HTTP server of an engine, with OpenAI's interface; needs `mt-infer[server]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_files import resolve_later

if TYPE_CHECKING:
    from mt_infer.backends.backend import Backend as Backend
    from mt_infer.backends.backend import Facts as Facts
    from mt_infer.backends.backend import Job as Job
    from mt_infer.backends.backend import Picture as Picture
    from mt_infer.backends.local import LocalEngine as LocalEngine
    from mt_infer.backends.replicas import Replicas as Replicas
    from mt_infer.server.app import create_app as create_app
    from mt_infer.server.keys import Key as Key
    from mt_infer.server.keys import Keys as Keys
    from mt_infer.server.limits import Limits as Limits
    from mt_infer.server.on_ray import ray_deployment as ray_deployment
else:
    __getattr__ = resolve_later(__name__)
