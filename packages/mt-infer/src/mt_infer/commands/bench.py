"""The command `mt-infer bench`."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mt_infer.console import print_text


@dataclass(kw_only=True)
class Bench:
    """Measure a server under load: requests of drawn lengths at drawn times; print JSON."""

    server: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL|DIR")]
    """The address of a server with OpenAI's interface, whose key is in the environment as
    MT_INFER_API_KEY; or a folder, which `mt-infer serve` then serves meanwhile."""
    requests: int = 100
    """Number of requests."""
    rate: float = 0.0
    """Mean number of requests a second, which arrive as in a Poisson process; 0 for all at once."""
    concurrency: int | None = None
    """Largest number of requests at once; by default no limit."""
    shortest_prompt: int = 16
    """Smallest number of words of a prompt."""
    longest_prompt: int = 256
    """Largest number of words of a prompt."""
    shortest_answer: int = 16
    """Smallest limit of an answer's tokens."""
    longest_answer: int = 128
    """Largest limit of an answer's tokens."""
    full_answers: bool = False
    """Let each answer have as many tokens as its limit, by the field min_tokens, which our servers
    and vLLM's know."""
    temperature: float | None = None
    """Temperature of the answers; by default the server's own."""
    seed: int = 0
    """The same seed draws the same requests."""
    route: Literal["completions", "chat"] = "completions"
    """The route to measure."""
    name: str | None = None
    """Name of the model; by default the first that the server lists."""
    warmup: int = 1
    """Number of requests before the measured ones."""
    timeout: float = 600.0
    """Seconds to wait for more of an answer."""
    out: Path | None = None
    """A file for the JSON, instead of standard output."""

    def run_command(self) -> int:
        """Measure, write the report and return the exit status: 1 if no request was answered."""
        from mt_files import write_file

        from mt_infer.bench.serving import served
        from mt_infer.client import is_url

        self._check()
        with ExitStack() as stack:
            url = self.server if is_url(self.server) else stack.enter_context(served(self.server))
            found = self._measure(url)
        text = json.dumps(found, indent=2)
        if self.out is None:
            print_text(text)
        else:
            write_file(self.out, f"{text}\n".encode())
        return 0 if found["answered"] else 1

    def _check(self) -> None:
        for name, least in (("warmup", 0), ("concurrency", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} {value}: use {least} or more")
        if not self.timeout > 0:
            raise ValueError(f"--timeout {self.timeout}: use more than 0")
        self._workload()

    def _workload(self, **changed: Any) -> Any:
        from mt_infer.bench.workload import Workload

        names = Workload.__dataclass_fields__
        return Workload(**{name: getattr(self, name) for name in names} | changed)

    def _measure(self, url: str) -> dict[str, Any]:
        from mt_infer.bench.measuring import Target, report, run
        from mt_infer.client import KEY_VARIABLE, Client, ServerError

        key = os.environ.get(KEY_VARIABLE)
        client = Client(url=url, key=key, timeout_s=self.timeout)
        model = self.name or next(iter(client.models()), None)
        if model is None:
            raise ServerError(f"{url} lists no models; give one with --name")
        how = {"full": self.full_answers, "temperature": self.temperature}
        target = Target(client=client, model=model, route=self.route, **how)
        if self.warmup:
            run(
                target, self._workload(requests=self.warmup, rate=0.0, seed=self.seed + 1).draw(), 1
            )
        workload = self._workload()
        found = report(run(target, workload.draw(), self.concurrency))
        asked = {"concurrency": self.concurrency, "route": self.route, **how}
        return {"model": model, "workload": {**vars(workload), **asked}, **found}
