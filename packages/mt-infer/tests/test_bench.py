"""`mt-infer bench`: drawn requests to a real server, and the report of their times."""

import json
from itertools import pairwise

import pytest
from mt_hf import save_pretrained
from mt_infer import Engine
from mt_infer.bench.measuring import Timing, percentiles, report
from mt_infer.bench.workload import Workload
from mt_infer.cli import main
from mt_infer.server import create_app
from mt_model import GPT, gpt
from mt_tokenizer import train_tokenizer
from serving import served

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Address of a server of a small model."""
    path = tmp_path_factory.mktemp("benched") / "model"
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 4, "max_sequence_length": 256}
    save_pretrained(GPT(gpt(vocab_size=264, **sizes, init_std=0.1), seed=3), path)
    train_tokenizer(["the of and to in is"], 262).save(path / "tokenizer.json")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with served(create_app(Engine.from_folder(path, max_batch=8))) as site:
        yield f"http://127.0.0.1:{site.port}"


@pytest.fixture
def bench(capsys):
    """Exit code and report of a measurement."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["bench", *map(str, arguments)])
        out, err = capsys.readouterr()
        return stop.value.code, json.loads(out) if out else None, err

    return call


SHORT = ("--longest-prompt", 20, "--shortest-prompt", 5, "--shortest-answer", 2)


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_a_server_is_measured(url, bench, route):
    options = ("--requests", 12, "--rate", 200, "--longest-answer", 8, "--full-answers")
    code, found, _ = bench(url, *SHORT, *options, "--route", route)
    assert code == 0
    assert found["requests"] == found["answered"] == 12
    assert found["errors"] == {}
    planned = Workload(**{k: v for k, v in found["workload"].items() if k in vars(Workload())})
    assert found["tokens_out"] == sum(each.max_tokens for each in planned.draw())
    assert found["tokens_in"] > 12 * 5
    times = found["time_to_first_token_ms"]
    assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
    assert times["max"] <= found["whole_answer_ms"]["max"] <= 1000 * found["seconds"] + 1
    assert found["requests_per_s"] == pytest.approx(12 / found["seconds"], rel=0.01)


def test_errors_are_counted_and_the_exit_code_tells(url, bench, tmp_path):
    code, found, _ = bench(url, "--requests", 2, "--longest-prompt", 900, "--shortest-prompt", 800)
    assert code == 1
    assert found["errors"] == {"400": 2}
    assert found["time_to_first_token_ms"] is None
    out = tmp_path / "report.json"
    code, found, _ = bench(url, *SHORT, "--requests", 1, "--longest-answer", 2, "--out", out)
    assert (code, found) == (0, None)
    assert json.loads(out.read_text())["answered"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("http://127.0.0.1:1",), "no answer from"),
        (("http://127.0.0.1:1", "--requests", 0), "requests"),
        (("http://127.0.0.1:1", "--longest-answer", 3), "longest_answer"),
        (("http://127.0.0.1:1", "--warmup", -1), "use 0 or more"),
        (("http://127.0.0.1:1", "--rate", -1), "rate"),
    ],
)
def test_a_mistake_is_one_message(bench, arguments, message):
    code, found, err = bench(*arguments)
    assert code in (1, 2)
    assert found is None
    assert message in err


def test_requests_arrive_as_in_a_poisson_process():
    planned = Workload(requests=4000, rate=50.0, seed=7).draw()
    gaps = [b.at - a.at for a, b in pairwise(planned)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert variance == pytest.approx(mean**2, rel=0.1)
    lengths = [len(each.prompt.split()) for each in planned]
    assert (min(lengths), max(lengths)) == (16, 256)
    assert sum(length < 64 for length in lengths) == pytest.approx(2000, rel=0.1)
    assert planned == Workload(requests=4000, rate=50.0, seed=7).draw()
    assert planned != Workload(requests=4000, rate=50.0, seed=8).draw()


def test_a_report_has_rates_and_percentiles():
    first = Timing(sent=0.0, parts=[0.1, 0.2, 0.4], ended=0.5, tokens_in=5, tokens_out=4)
    second = Timing(sent=0.5, parts=[1.5], ended=2.0, tokens_in=7, tokens_out=1)
    found = report([first, second, Timing(sent=1.0, ended=1.1, error="429")])
    assert (found["answered"], found["errors"]) == (2, {"429": 1})
    assert (found["requests_per_s"], found["tokens_in_per_s"]) == (1.0, 6.0)
    assert found["time_to_first_token_ms"]["p50"] == 100
    assert found["time_to_first_token_ms"]["max"] == 1000
    assert found["between_parts_ms"]["mean"] == 150
    assert found["time_per_token_ms"]["p99"] == 100
    assert percentiles([n / 1000 for n in range(1, 101)]) == {
        "mean": 50.5,
        "p50": 50,
        "p90": 90,
        "p99": 99,
        "max": 100,
    }


def test_a_folder_that_can_not_be_served_is_one_message(bench, tmp_path):
    code, found, err = bench(tmp_path / "none")  # test_benchmarks serves one that can
    assert (code, found) == (1, None)
    assert "none is not a folder" in err
