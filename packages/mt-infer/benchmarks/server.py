"""Requests through HTTP: mt-infer's server beside its own engine and beside other servers.

    python packages/mt-infer/benchmarks/server.py [--rounds N] [--out REPORT.json]

A Llama of 110M parameters with drawn weights answers greedily in bf16, each engine on one thread.
The servers are processes of their own: `mt-infer serve`, without and with a further engine that
only computes prompts; llama.cpp's, where `uv pip install xllamacpp gguf` was run;
`transformers serve`, where openai, fastapi and uvicorn are installed. What is missing is left out
with its reason. The first row times as many streams as there are slots, in alternating rounds; the
second has the times to the first token while requests of drawn lengths arrive at 70% of the rate
that the server can answer.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from mt_hf import save_pretrained
from mt_infer import Engine, Sampling
from mt_infer.bench.measuring import Target, Timing, report, run
from mt_infer.bench.serving import served
from mt_infer.bench.workload import Workload
from mt_infer.client import Client, ServerError
from mt_model import GPT, gpt
from mt_testing.benchmark import environment, quartiles, take_turns, write_report
from mt_tokenizer import train_tokenizer

GOALS = {"engine": 0.9, "llama.cpp": 1.5, "transformers": 2.0}
SHARE = 0.7  # of the rate that a server can answer
LLAMA_CPP = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, slots, room = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_ctx, params.n_parallel, params.verbosity = slots * room, slots, -1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.port, params.cache_ram_mib = 0, 0
server = xllamacpp.Server(params)
print("listening on", server.listening_address, flush=True)
sys.stdin.read()
"""


MIXED = Workload(requests=24, longest_prompt=256, longest_answer=64)
SMALL = Workload(requests=4, shortest_prompt=4, longest_prompt=8, shortest_answer=2)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model and the requests; prompts in words, answers in tokens."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    vocab: int = 32000
    room: int = 1024
    slots: int = 16
    prompt: int = 32
    answer: int = 32
    mixed: Workload = MIXED


QUICK = Sizes(
    hidden=32,
    layers=2,
    heads=2,
    vocab=300,
    room=256,
    slots=2,
    prompt=4,
    answer=4,
    mixed=replace(SMALL, longest_answer=4),
)


class MissingError(Exception):
    """A server that is not installed."""


def make_folder(sizes: Sizes, path: Path) -> Path:
    """Write a model with drawn weights and a tokenizer that knows the prompts' words."""
    shape: dict[str, Any] = {"hidden_size": sizes.hidden, "num_layers": sizes.layers}
    shape |= {"num_heads": sizes.heads, "vocab_size": sizes.vocab, "tied": True}
    save_pretrained(GPT(gpt(**shape, max_sequence_length=sizes.room), seed=1), path)
    sources = Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    texts = [each.read_text() for each in sources] if sizes.vocab > QUICK.vocab else ["the of and"]
    tokenizer = train_tokenizer(texts, sizes.vocab)
    tokenizer.save(path / "tokenizer.json")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eod_token}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    return path


@contextmanager
def llama_cpp(folder: Path, sizes: Sizes) -> Iterator[str]:
    """llama.cpp's own server over HTTP, of the folder as a GGUF file."""
    if not (find_spec("xllamacpp") and find_spec("gguf")):
        raise MissingError("llama.cpp: uv pip install xllamacpp gguf")
    path = folder.parent / "model.gguf"
    export = ["export", str(folder), str(path), "--format", "gguf", "--type", "bf16"]
    subprocess.run([sys.executable, "-m", "mt_infer", *export], check=True)  # noqa: S603
    room = sizes.mixed.longest_prompt + sizes.mixed.longest_answer + sizes.prompt
    arguments = [str(path), str(sizes.slots), str(min(sizes.room, 2 * room))]
    command = [sys.executable, "-c", LLAMA_CPP, *arguments]
    with running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("listening on "):
                yield line.split()[-1]
                return
    raise MissingError("llama.cpp: its server ended; see above")


@contextmanager
def transformers(folder: Path, sizes: Sizes) -> Iterator[str]:
    """`transformers serve` with its own batching of requests that come together."""
    missing = [name for name in ("openai", "fastapi", "uvicorn") if not find_spec(name)]
    if missing:
        raise MissingError(f"transformers serve: uv pip install {' '.join(missing)}")
    code = "from transformers.cli.transformers import main; main()"
    port = str(20000 + os.getpid() % 10000)
    options = ["--port", port, "--host", "127.0.0.1", "--device", "cpu", "--dtype", "bfloat16"]
    blocks = ["--cb-num-blocks", str(sizes.slots * 64), "--cb-block-size", "16"]
    command = [sys.executable, "-c", code, "serve", str(folder), "--continuous-batching"]
    with running([*command, *options, *blocks]) as process:
        while process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=1):
                break
            time.sleep(0.2)
        if process.poll() is None:
            yield f"http://127.0.0.1:{port}"
            return
    raise MissingError("transformers serve: it ended; see above")


@contextmanager
def running(command: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a process while the block runs."""
    process = subprocess.Popen(command, **how)  # noqa: S603 - a command of this file
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Bench:
    """The servers of a run, and what they answered.

    Attributes:
        targets: The servers by name.
        skipped: Why others are left out.
    """

    def __init__(self, sizes: Sizes, folder: Path, peers: Sequence[str], stack: ExitStack) -> None:
        self.sizes, self.skipped, self.targets = sizes, dict[str, str](), dict[str, Target]()
        self._seed = 0
        own = ("--dtype", "bf16", "--max-batch", str(sizes.slots))
        starts: dict[str, Callable[[], Any]] = {"mt": partial(served, str(folder), own)}
        starts["mt, prefill apart"] = partial(served, str(folder), (*own, "--prefill", "1"))
        starts |= {"llama.cpp": partial(llama_cpp, folder, sizes)}
        starts |= {"transformers": partial(transformers, folder, sizes)}
        for name, start in starts.items():
            if name in peers or name.startswith("mt"):
                try:
                    client = Client(url=stack.enter_context(start()))
                except MissingError as error:
                    self.skipped[name] = str(error)
                    continue
                model = str(folder) if name == "transformers" else client.models()[0]
                how = {"full": name.startswith("mt"), "temperature": 0.0}
                self.targets[name] = Target(client=client, model=model, **how)
        blocks = sizes.slots * -(-sizes.room // 16)
        self._engine = Engine.from_folder(
            folder, dtype="bf16", max_batch=sizes.slots, blocks=blocks, prefix_cache=False
        )

    def streams(self, rounds: int, seconds: float) -> dict[str, Any]:
        """Return the tokens a second of as many streams as there are slots, in turns."""
        tokens: dict[str, list[int]] = {name: [] for name in ("engine", *self.targets)}

        def ask(name: str) -> None:
            tokens[name].append(self._tokens_of(self.targets.get(name)))

        ways = {name: partial(ask, name) for name in tokens}
        load = os.getloadavg()[0]
        found = take_turns(ways, rounds, seconds=seconds)
        speeds = {
            name: [n / times[name][0] for n, times in zip(tokens[name][1:], found, strict=True)]
            for name in ways  # the first call warms up
        }
        ratios = {
            f"mt / {other}": {
                "ratio": quartiles(a / b for a, b in zip(speeds["mt"], speeds[other], strict=True)),
                "goal": goal,
            }
            for other, goal in GOALS.items()
            if other in speeds
        }
        shown = {name: quartiles(each) for name, each in speeds.items()}
        loads = [load, os.getloadavg()[0]]
        return {"rounds": len(found), "load": loads, "tokens_per_s": shown, "ratios": ratios}

    def _tokens_of(self, target: Target | None) -> int:
        """Return the number of tokens of an answer to each stream; None asks the engine itself."""
        prompt, answer = self.sizes.prompt, self.sizes.answer
        lengths = {"shortest_prompt": prompt, "longest_prompt": prompt}
        lengths |= {"shortest_answer": answer, "longest_answer": answer}
        self._seed += 1
        planned = Workload(requests=self.sizes.slots, seed=self._seed, **lengths).draw()
        if target is not None:
            return tokens_of(run(target, planned))
        how = Sampling(temperature=0, max_tokens=answer, min_tokens=answer)
        prompts = [each.prompt for each in planned]
        return sum(len(delta.tokens) for delta in self._engine.stream(prompts, how))

    def arrivals(self) -> dict[str, Any]:
        """Return the times under a Poisson load at a share of what each server can answer."""
        found: dict[str, Any] = {}
        for name, target in self.targets.items():
            most = report(run(target, self.sizes.mixed.draw(), self.sizes.slots))
            rate = SHARE * most["requests_per_s"]
            workload = replace(self.sizes.mixed, rate=rate, seed=1)
            load = os.getloadavg()[0]
            under = report(run(target, workload.draw()))
            loads = [load, os.getloadavg()[0]]
            found[name] = {"load": loads, "capacity": most, "rate": rate, "under_load": under}
        return found


def tokens_of(timings: Sequence[Timing]) -> int:
    """Return the number of tokens of answers."""
    wrong = [each.error for each in timings if each.error is not None]
    if wrong:
        raise ServerError(f"{len(wrong)} of {len(timings)} requests have no answer: {wrong[0]}")
    return sum(each.tokens_out for each in timings)


def tables(found: dict[str, Any]) -> Iterator[str]:
    """Yield the report's lines in Markdown."""
    yield "| streams through HTTP | ratio of tokens/s | goal |\n|---|---|---|"
    for pair, each in found["streams"]["ratios"].items():
        low, middle, high = each["ratio"]
        yield f"| {pair} | {middle:.2f} ({low:.2f} to {high:.2f}) | {each['goal']} |"
    yield "\n| at 70% of its capacity | first token p50, ms | p99, ms |\n|---|---|---|"
    for name, each in found["arrivals"].items():
        times = each["under_load"]["time_to_first_token_ms"]
        yield f"| {name}, {each['rate']:.2f} requests/s | {times['p50']:.0f} | {times['p99']:.0f} |"
    yield from (f"\nWithout {name}: {why}" for name, why in found["skipped"].items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    others = ["llama.cpp", "transformers"]
    parser.add_argument("--peers", nargs="*", default=others, choices=others)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300, help="after three rounds")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to test the script")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/server.json"))
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the servers
    torch.set_num_threads(1)
    packages = [name for name in ("torch", "transformers", "xllamacpp") if find_spec(name)]
    found: dict[str, Any] = environment(*packages)
    sizes = QUICK if given.quick else Sizes()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        bench = Bench(sizes, make_folder(sizes, Path(scratch) / "model"), given.peers, stack)
        found["streams"] = bench.streams(given.rounds, given.seconds)
        found["arrivals"] = bench.arrivals()
        found["skipped"] = bench.skipped
    print("\n".join(tables(found)))
    write_report(given.out, found)


if __name__ == "__main__":
    main()
