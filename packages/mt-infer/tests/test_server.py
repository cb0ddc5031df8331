"""The app of the server: keys, limits, and its engine."""

from __future__ import annotations

import http.client
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from mt_infer import Engine, EngineOptions, Sampling
from mt_infer.backends.process import EngineProcess, Setup
from mt_infer.server import Key, Keys, Limits, create_app
from mt_infer.server.routes import routers
from mt_model import GPT, gpt
from serving import Site, served, wait_for

CONFIG = gpt(
    vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, max_sequence_length=4096, init_std=0.4
)
KEY, ADMIN = "a-client's-key-of-this-test", "an-admin's-key-of-this-test"
KEYS = Keys(
    clients=(Key(secret=KEY), Key(secret=KEY[::-1], priority=1)), admins=(Key(secret=ADMIN),)
)
LIMITS = Limits(max_queue=2, max_body_bytes=4096, body_s=0.5)
SHORT = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Engine:
    options = EngineOptions(blocks=512, max_batch=2)
    return Engine(GPT(CONFIG, seed=3).eval(), options=options)


@pytest.fixture(scope="module")
def site(engine: Engine) -> Iterator[Site]:
    app = create_app(engine, keys=KEYS, limits=LIMITS)
    with served(app, KEY) as found:
        yield found


def test_a_completion_has_the_engines_tokens_and_a_fingerprint(site: Site, engine: Engine) -> None:
    found = site.post("/v1/completions", SHORT)
    assert found.status == 200, found.text
    expected = Engine(engine.model).generate([1, 2, 3], Sampling(temperature=0, max_tokens=4))
    assert found.body["usage"]["completion_tokens"] == len(expected[0].tokens) == 4
    digest = engine.digest[:16]
    assert found.body["system_fingerprint"] == f"mt-{digest}-float32-tp1-pp1"


def test_every_route_but_health_needs_a_key(site: Site) -> None:
    bare = Site(port=site.port)
    assert bare.get("/health").body == {"status": "ok"}
    listed = [route for router in routers() for route in router.routes]
    routes = [each for each in listed if isinstance(each, APIRoute)]
    assert len(routes) == len(listed)
    known = {(method, each.path) for each in routes for method in each.methods}
    assert len(known) > 12
    unknown = {("GET", "/no/such/route"), ("PUT", "/v1/completions"), ("GET", "/health/")}
    for method, path in (known | unknown) - {("GET", "/health")}:
        wrong = KEY if path.startswith("/admin") else ADMIN
        for key in ("", "Bearer", f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {wrong}"):
            found = bare.ask(method, path, b"{}", Authorization=key)
            assert (found.status, found.body["error"]["code"]) == (401, "invalid_api_key"), path


def test_admin_needs_its_own_key(site: Site) -> None:
    assert site.get("/admin/x").status == 401
    assert Site(port=site.port, key=ADMIN).get("/admin/x").status == 404


def test_status_routes_answer_with_a_key(site: Site) -> None:
    assert site.get("/ready").body == {"status": "ready", "step": None}
    assert [each["id"] for each in site.get("/v1/models").body["data"]] == ["model"]
    text = site.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"\nmt:{name} 0.0" in text
    assert "mt:time_to_first_token_seconds_bucket" in text


def test_the_dashboard_shows_metrics_that_there_are(site: Site) -> None:
    text = site.get("/metrics").text
    dashboard = Path(__file__).parent.parent / "examples/grafana.json"
    names = set(re.findall(r"mt:\w+", dashboard.read_text()))
    assert len(names) > 10
    assert not [name for name in names if f"# TYPE {name.removesuffix('_bucket')} " not in text]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (SHORT | {"model": "modle"}, 404, "modle"),
        (SHORT | {"prompt": [64]}, 400, "64 is no token"),
        (SHORT | {"prompt": [-1]}, 400, "-1 is no token"),
        (SHORT | {"temperature": -1}, 400, "temperature"),
        (b"{", 400, "not valid JSON"),
        (SHORT | {"prompt": [1] * 4096}, 413, "4096 bytes"),
    ],
)
def test_a_wrong_request_is_refused_in_openais_form(
    site: Site, body: object, status: int, said: str
) -> None:
    found = site.post("/v1/completions", body)
    assert found.status == status
    assert set(found.body["error"]) == {"message", "type", "param", "code"}
    assert said in found.body["error"]["message"]


def test_a_route_that_does_not_exist_and_a_wrong_method_are_refused(site: Site) -> None:
    assert site.get("/v1/nothing").body["error"]["type"] == "not_found_error"
    assert site.get("/v1/completions").status == 405


def test_a_body_that_does_not_come_ends_the_request(site: Site) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Authorization", f"Bearer {KEY}")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    found = connection.getresponse()
    assert (found.status, found.getheader("connection")) == (408, "close")
    connection.close()


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mt_infer.server")
    with served(create_app(EngineProcess(Setup(folder="x", name="x")))) as site:
        connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        connection.close()
        wait_for(lambda: caplog.records)
    assert [(each.getMessage(), vars(each)["status"]) for each in caplog.records] == [
        ("request", 499)
    ]


def test_a_full_queue_refuses_and_those_who_leave_give_their_blocks_back(
    site: Site, engine: Engine
) -> None:
    free = engine.stats()["free_blocks"]
    long = json.dumps(SHORT | {"max_tokens": 3000}).encode()
    held = []
    for _ in range(4):  # max_batch and max_queue
        connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
        connection.request("POST", "/v1/completions", long, {"Authorization": f"Bearer {KEY}"})
        held.append(connection)
    wait_for(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 4)
    found = site.post("/v1/completions", SHORT)
    assert (found.status, found.headers["retry-after"]) == (429, "1")
    assert 'mt:requests_rejected_total{reason="queue_full"} 1.0' in site.get("/metrics").text
    for each in held:
        each.close()
    wait_for(lambda: engine.stats()["free_blocks"] == free)
    assert engine.stats()["waiting"] == 0
    assert site.post("/v1/completions", SHORT).status == 200


def test_requests_of_several_clients_share_passes(site: Site, engine: Engine) -> None:
    before, found = engine.stats(), []
    body = SHORT | {"max_tokens": 200}
    threads = [
        threading.Thread(target=lambda: found.append(site.post("/v1/completions", body).status))
        for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    after = engine.stats()
    assert found == [200] * 4
    assert after["passes"] - before["passes"] < after["tokens"] - before["tokens"]
