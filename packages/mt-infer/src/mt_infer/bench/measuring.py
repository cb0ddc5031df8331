"""Requests to a server, with the times of the parts of the answers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from mt_infer.bench.workload import Planned
from mt_infer.client import Client, ServerError

_PERCENTILES = (50, 90, 99)
_LONGEST = 200  # characters of a message
_PATHS = {"completions": "/completions", "chat": "/chat/completions"}
Route = Literal["completions", "chat"]


@dataclass(kw_only=True)
class Timing:
    """The times of a request, in seconds from the beginning.

    Attributes:
        sent: Time of sending.
        parts: Arrival times of texts.
        ended: Time of the end.
        tokens_in: Number of tokens of the prompt, as the server counts.
        tokens_out: Number of tokens of the answer, as the server counts.
        error: Status or message of an error; None for an answer.
    """

    sent: float
    parts: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens_in: int = 0
    tokens_out: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server, and the common fields of all requests.

    Attributes:
        client: The server.
        model: Name of the model.
        route: The measured route.
        full: Whether each answer has as many tokens as its limit.
        temperature: Temperature of the answers; None for the server's default.
    """

    client: Client
    model: str
    route: Route = "completions"
    full: bool = False
    temperature: float | None = None

    def send(self, planned: Planned, begun: float) -> Timing:
        """Send a request, and return its times."""
        timing = Timing(sent=time.perf_counter() - begun)
        try:
            for event in self.client.stream(_PATHS[self.route], self._body(planned)):
                now = time.perf_counter() - begun
                if any(map(_has_text, event.get("choices") or [])):
                    timing.parts.append(now)
                usage = event.get("usage") or {}
                timing.tokens_in = usage.get("prompt_tokens", timing.tokens_in)
                timing.tokens_out = usage.get("completion_tokens", timing.tokens_out)
        except ServerError as error:
            timing.error = str(error)[:_LONGEST] if error.status is None else str(error.status)
        timing.ended = time.perf_counter() - begun
        timing.tokens_out = timing.tokens_out or len(timing.parts)
        return timing

    def _body(self, planned: Planned) -> dict[str, Any]:
        said = {"messages": [{"role": "user", "content": planned.prompt}]}
        given = said if self.route == "chat" else {"prompt": planned.prompt}
        usage = {"stream_options": {"include_usage": True}}
        how: dict[str, Any] = {"max_tokens": planned.max_tokens}
        if self.full:
            how["min_tokens"] = planned.max_tokens
        if self.temperature is not None:
            how["temperature"] = self.temperature
        return {"model": self.model, **given, **how, **usage}


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


def run(target: Target, planned: Sequence[Planned], concurrency: int | None = None) -> list[Timing]:
    """Send requests at their planned times, each in its own thread, and return their timings.

    Args:
        target: The server.
        planned: The requests.
        concurrency: Largest number of requests at once; later ones wait. None for no limit.
    """
    places = threading.Semaphore(concurrency or len(planned))
    timings: list[Timing | None] = [None] * len(planned)

    def send(number: int, each: Planned) -> None:
        try:
            timings[number] = target.send(each, begun)
        finally:
            places.release()

    threads, begun = [], time.perf_counter()
    for number, each in enumerate(planned):
        time.sleep(max(0.0, begun + each.at - time.perf_counter()))
        places.acquire()
        threads.append(threading.Thread(target=send, args=(number, each), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return [each for each in timings if each is not None]


def report(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return rates, percentiles in milliseconds, and the number of errors by kind."""
    done = [each for each in timings if each.error is None]
    seconds = max((each.ended for each in timings), default=0.0)
    seconds -= min((each.sent for each in timings), default=0.0)
    streamed = [each for each in done if each.parts]
    gaps = [b - a for each in done for a, b in pairwise(each.parts)]
    per_token = [
        (each.parts[-1] - each.parts[0]) / (each.tokens_out - 1)
        for each in streamed
        if each.tokens_out > 1
    ]
    return {
        "requests": len(timings),
        "answered": len(done),
        "errors": dict(Counter(each.error for each in timings if each.error is not None)),
        "seconds": round(seconds, 3),
        "requests_per_s": _rate(len(done), seconds),
        "tokens_in_per_s": _rate(sum(each.tokens_in for each in done), seconds),
        "tokens_out_per_s": _rate(sum(each.tokens_out for each in done), seconds),
        "tokens_in": sum(each.tokens_in for each in done),
        "tokens_out": sum(each.tokens_out for each in done),
        "time_to_first_token_ms": percentiles([e.parts[0] - e.sent for e in streamed]),
        "between_parts_ms": percentiles(gaps),
        "time_per_token_ms": percentiles(per_token),
        "whole_answer_ms": percentiles([each.ended - each.sent for each in done]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return the mean, percentiles and the maximum of times, in milliseconds; None without any."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    ranks = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in _PERCENTILES}
    found = {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}
    return {name: round(1000 * value, 3) for name, value in found.items()}


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds else 0.0
