"""The app on Ray Serve: `uv run --with 'ray[serve]' pytest -m campaign -k ray`."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from mt_infer import Engine, Sampling
from mt_infer.server import Key, Keys, ray_deployment
from mt_model import gpt
from serving import Site

KEY = "a-client's-key-of-this-test"


def listening(port: int) -> set[str]:
    """Return the addresses, in hexadecimal, on which somebody listens to a port."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    return {row[1][:-5] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.campaign
@pytest.mark.filterwarnings("default")  # of Ray's own
def test_replicas_on_ray_give_the_engines_tokens(write_run, tmp_path, monkeypatch) -> None:
    for switch in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_UV_RUN_RUNTIME_ENV"):
        monkeypatch.setenv(switch, "0")
    serve = pytest.importorskip("ray.serve")
    import ray

    sizes = {"vocab_size": 264, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
    run = write_run(tmp_path / "run", gpt(**sizes, max_sequence_length=32, init_std=0.4))
    expected = Engine.from_folder(run).generate("to be", Sampling(seed=3, max_tokens=8))
    port = free_port()
    deployment = ray_deployment(run, keys=Keys(clients=(Key(secret=KEY),)))
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        options = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}}
        serve.run(deployment.options(**options).bind(), route_prefix="/")
        asked = {"prompt": "to be", "seed": 3, "max_tokens": 8}
        found = [Site(port=port, key=KEY).post("/v1/completions", asked) for _ in range(6)]
        assert {each.body["choices"][0]["text"] for each in found} == {expected[0].text}
        assert Site(port=port).post("/v1/completions", asked).status == 401
        assert listening(port) == {"0100007F"}
    finally:
        serve.shutdown()
        ray.shutdown()
