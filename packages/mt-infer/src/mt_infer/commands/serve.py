"""The command `mt-infer serve`."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from mt_files import MissingExtraError, require

from mt_infer.console import print_text

if TYPE_CHECKING:
    from mt_infer.backends.backend import Setup
    from mt_infer.server.keys import Keys
    from mt_infer.server.limits import Limits


@dataclass(kw_only=True)
class Serve:
    """Serve a run or a folder of Hugging Face to clients of OpenAI's interface.

    Without a key it serves this machine alone. It needs mt-infer[server].
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """The --out folder of an mt-train run, a folder of Hugging Face, or a model of the hub in the
    local cache."""
    host: str = "127.0.0.1"
    """Address to listen on; another than this machine's own needs a key."""
    port: int = 8000
    """Port to listen on; 0 takes a free one, which the line on stdout names."""
    api_key_file: Path | None = None
    """File with the keys of clients, one a line, which only you may read; by default the key in
    MT_INFER_API_KEY, if it is set."""
    admin_key_file: Path | None = None
    """File with the keys of /admin, which does not exist without one."""
    name: str | None = None
    """Name of the model for clients; by default the folder's."""
    step: int | None = None
    """The checkpoint of this step; by default the latest."""
    follow: bool = False
    """Load each newer step of the run soon after it is saved."""
    adapter: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=FOLDER of a LoRA adapter, which clients have as a model; may be given several times."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    """Dtype of the computation; by default fp32 on a CPU and bf16 on a GPU."""
    kv_cache_dtype: Literal["auto", "full", "fp8", "int8"] = "auto"
    """Format of cached keys and values."""
    speculate: str | None = None
    """Who guesses tokens, of which a pass verifies several: ngram, mtp, or the folder of a smaller
    model."""
    max_batch: int = 64
    """Largest number of requests in a pass."""
    max_batch_tokens: int = 512
    """Largest number of tokens in a pass; a longer prompt takes several."""
    nproc: int | None = None
    """Number of processes that share the model; by default --pp."""
    pp: int = 1
    """Number of pipeline stages, each with a part of the layers; processes may share a stage."""
    replicas: int = 1
    """Number of engines, each with the model in a process of its own, and on a GPU of its own if
    there are several; a request goes to the one that has seen the beginning of its prompt, or to
    the one with the least work."""
    prefill: int = 0
    """Number of further engines that only compute prompts, and hand their blocks to the others."""
    max_queue: int = 256
    """Largest number of requests that wait; more are refused until some have ended."""
    max_body_bytes: int = 8 << 20
    """Largest body of a request."""
    drain_seconds: float = 30.0
    """Seconds for the accepted requests after SIGTERM."""

    def run_command(self) -> int:
        """Serve until SIGTERM or SIGINT."""
        for module in ("fastapi", "uvicorn", "prometheus_client"):
            try:
                require(module, "mt-infer serve")
            except MissingExtraError as error:
                raise MissingExtraError(
                    "mt-infer serve needs: pip install 'mt-infer[server]'"
                ) from error
        from mt_infer.logs import log_to
        from mt_infer.server.http import check_address
        from mt_infer.server.keys import Keys, keys_of_environment, read_keys
        from mt_infer.server.limits import Limits

        files = self.api_key_file, self.admin_key_file
        clients, admins = (() if each is None else read_keys(each) for each in files)
        keys = Keys(clients=clients or keys_of_environment(os.environ), admins=admins)
        check_address(self.host, keys)
        limits = Limits(
            max_queue=self.max_queue,
            max_body_bytes=self.max_body_bytes,
            drain_s=self.drain_seconds,
        )
        log_to(sys.stderr)
        return asyncio.run(self._serve(keys, limits, self._setup()))

    def _setup(self) -> Setup:
        from mt_infer.backends.backend import Setup

        if self.replicas < 1:
            raise ValueError(f"--replicas {self.replicas}: use 1 or more")
        if self.prefill < 0:
            raise ValueError(f"--prefill {self.prefill}: use 0 or more")
        if self.pp < 1:
            raise ValueError(f"--pp {self.pp}: use 1 or more")
        nproc = self.pp if self.nproc is None else self.nproc
        if nproc < 1 or nproc % self.pp:
            raise ValueError(f"--nproc {nproc}: use a multiple of --pp {self.pp}")
        named = [each.partition("=") for each in self.adapter]
        wrong = next((name for name, _, folder in named if not (name and folder)), None)
        if wrong is not None:
            raise ValueError(f"--adapter {wrong}: write NAME=FOLDER")
        options: dict[str, Any] = {
            "max_batch": self.max_batch,
            "max_batch_tokens": self.max_batch_tokens,
            "kv_cache_dtype": self.kv_cache_dtype,
            "speculate": self.speculate,
        }
        return Setup(
            folder=self.model,
            name=self.name or Path(self.model).resolve().name,
            step=self.step,
            dtype=self.dtype,
            follow=self.follow,
            nproc=nproc,
            pp=self.pp,
            adapters={name: folder for name, _, folder in named},
            options=options,
        )

    async def _serve(self, keys: Keys, limits: Limits, setup: Setup) -> int:
        from mt_infer.backends.process import EngineProcess
        from mt_infer.backends.replicas import Replicas
        from mt_infer.server.app import create_app
        from mt_infer.server.http import Server, bound

        how = {"max_stream_bytes": limits.max_stream_bytes}
        numbers = range(self.replicas + self.prefill)
        engines = [EngineProcess(replace(setup, device=each), **how) for each in numbers]
        answering, prefill = engines[: self.replicas], engines[self.replicas :]
        backend = engines[0] if len(engines) == 1 else Replicas(answering, prefill=prefill)
        with bound(self.host, self.port) as listener:
            port = listener.getsockname()[1]
            shown = f"[{self.host}]" if ":" in self.host else self.host
            try:
                for each in engines:  # one after the other, as a failure would be that of all
                    await each.start()
                app = create_app(backend, keys=keys, limits=limits)
                line = f"listening on http://{shown}:{port}"
                await Server(app, limits, lambda: print_text(line)).serve([listener])
            finally:
                await backend.close()
        return 0
