"""Each way in which a request ends without an answer is the official client's own error."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from mt_infer import Engine
from mt_infer.server import Key, Keys, Limits, create_app
from openai import OpenAI
from serving import Site, served, wait_for

KEY, ADMIN = "a-client's-key-of-this-test", "an-admin's-key-of-this-test"
KEYS = Keys(clients=(Key(secret=KEY),), admins=(Key(secret=ADMIN),))
LIMITS = Limits(max_queue=0, max_body_bytes=4096)
FOREIGN = {"default_headers": {"Origin": "https://elsewhere.example"}}
both = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def engine(saved_run: Path) -> Engine:
    return Engine.from_folder(saved_run, blocks=64, max_batch=1)


@pytest.fixture(scope="module")
def site(engine: Engine) -> Iterator[Site]:
    with served(create_app(engine, keys=KEYS, limits=LIMITS), KEY) as found:
        yield found


def asked(site: Site, *, stream: bool, body: Any = None, **how: Any) -> list[Any]:
    """What the client gets for a request: the answer, or its events."""
    base, key = f"http://127.0.0.1:{site.port}/v1", how.pop("api_key", KEY)
    given: Any = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 4, "seed": 5}
    with OpenAI(base_url=base, api_key=key, **{"max_retries": 0} | how) as client:
        found = client.completions.create(stream=stream, **given | (body or {}))
        return list(found) if stream else [found]


def text(answers: list[Any]) -> str:
    found = "".join(each.choices[0].text for each in answers if each.choices)
    assert found
    return found


@pytest.mark.parametrize(
    ("how", "error", "status", "code"),
    [
        ({"body": {"temperature": -1}}, openai.BadRequestError, 400, "invalid_value"),
        ({"api_key": KEY[::-1]}, openai.AuthenticationError, 401, "invalid_api_key"),
        (FOREIGN, openai.PermissionDeniedError, 403, "cross_origin"),
        ({"body": {"model": "modle"}}, openai.NotFoundError, 404, "model_not_found"),
        ({"body": {"prompt": [1] * 3000}}, openai.APIStatusError, 413, "body_too_large"),
    ],
)
@both
def test_a_refused_request_is_the_clients_error_of_its_status(
    site: Site, how: Any, error: type[openai.APIStatusError], status: int, code: str, stream: bool
) -> None:
    with pytest.raises(error) as caught:
        asked(site, stream=stream, **how)
    assert (caught.value.status_code, caught.value.code) == (status, code)


def test_a_route_that_is_not_served_is_not_found(site: Site) -> None:
    base = f"http://127.0.0.1:{site.port}/v1"
    with OpenAI(base_url=base, api_key=KEY) as client, pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="a cat")


@both
def test_a_full_queue_is_a_rate_limit_and_a_retry_is_served(
    engine: Engine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(create_app(engine, keys=KEYS, limits=LIMITS), KEY) as site:
        expected = text(asked(site, stream=stream))
        engine.pause()
        held = threading.Thread(target=asked, args=(site,), kwargs={"stream": False})
        held.start()
        wait_for(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            asked(site, stream=stream)
        assert caught.value.response.headers["retry-after"] == "1"
        monkeypatch.setattr(OpenAI, "_sleep_for_retry", lambda *_, **__: resume())

        def resume() -> None:
            engine.resume()
            held.join()

        assert text(asked(site, stream=stream, max_retries=2)) == expected


@both
def test_an_engine_that_sleeps_is_an_internal_error_until_it_wakes(
    site: Site, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, expected = Site(port=site.port, key=ADMIN), text(asked(site, stream=stream))
    assert admin.post("/admin/sleep", {}).status == 200
    with pytest.raises(openai.InternalServerError) as caught:
        asked(site, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (503, "not_ready")
    wake: Any = lambda *_, **__: admin.post("/admin/wake", {})  # noqa: E731
    monkeypatch.setattr(OpenAI, "_sleep_for_retry", wake)
    assert text(asked(site, stream=stream, max_retries=2)) == expected


@both
def test_a_pass_that_raises_is_an_internal_error_without_its_text(
    site: Site, engine: Engine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, passes = engine._loop.runner.scores, iter([not stream, True, True])

    def failing(*given: Any) -> Any:
        if next(passes, stream):
            raise RuntimeError("a secret of the server")
        return scores(*given)

    with monkeypatch.context() as patch:
        patch.setattr(engine._loop.runner, "scores", failing)
        with pytest.raises(openai.APIError) as caught:
            asked(site, stream=stream, body={"extra_body": {"min_tokens": 4}})
    assert (caught.value.code, isinstance(caught.value, openai.InternalServerError)) == (
        "internal_error",
        not stream,
    )
    assert "secret" not in str(caught.value)
    assert text(asked(site, stream=stream))


@both
def test_no_connection_and_no_time_are_errors_of_the_connection(
    site: Site, engine: Engine, stream: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(openai.APIConnectionError):
        asked(Site(port=port), stream=stream)
    engine.pause()
    try:
        with pytest.raises(openai.APITimeoutError):
            asked(site, stream=stream, timeout=0.2)
    finally:
        engine.resume()
    wait_for(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 0)
