"""What the integration tests share: a small corpus, a small run and ways to start it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mt_data import BatchSampler
from mt_testing import KillAt, Programs, RankDied, RankPool

# What our programs import when a run begins.
IMPORTED = ("mt_train.cli", "mt_train.session.run", "mt_infer.cli", "mt_hf.commands.cli")
IMPORTED += ("mt_data.cli", "mt_infer.generation", "mt_model.attention.attention")
IMPORTED += ("zarr", "tokenizers", "yaml", "tyro", "typeguard", "matplotlib.figure")

TINY = """\
model:
  hidden_size: 32
  num_layers: 4
  num_heads: 4
  num_kv_heads: 2
  ffn_size: 64
  qk_norm: head
data:
  train: [{data}/train]
  validation: {data}/validation
  tokenizer: {data}/tokenizer.json
training:
  steps: 8
  global_batch_size: 8
  micro_batch_size: 8
  sequence_length: 32
  dtype: fp32
optimizer:
  lr: 3e-3
  warmup: 3
evaluation:
  max_windows: 16
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels", help="model.kernels of every run of the tiny configuration that names none"
    )


class Recorder:
    """A sampler's record of each sample that it reads: its number in the run, and its content."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sampler(self) -> type[BatchSampler]:
        """Return a `BatchSampler` that writes a line for each step."""
        path = self.path

        class RecordingSampler(BatchSampler):
            def step(self, step):
                batches = super().step(step)
                numbers = [int(number) for ids in self.sample_ids(step) for number in ids]
                rows = {n: digests(self.dataset, n) for n in numbers}
                with path.open("a") as file:
                    file.write(json.dumps({"step": step, "rows": rows}) + "\n")
                return batches

        return RecordingSampler


def digests(dataset: Any, number: int) -> dict[str, str]:
    """Return the digest of each array of a sample: of its tokens, or of the arrays of its row."""
    row = dataset.row(number) if hasattr(dataset, "row") else {"tokens": dataset.sample(number)}
    return {name: blake2b(bytes(array)).hexdigest() for name, array in row.items()}


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Starts the tiny run on pool ranks or as the real command.

    `kernels` is what computes where a test names nothing; None leaves it to the model.
    """

    config: Path
    ranks: Callable[..., list[object]]
    programs: Programs
    kernels: str | None

    def overrides(self, given: tuple[str, ...]) -> list[str]:
        named = any(override.startswith(("model.kernels", "model=")) for override in given)
        chosen = [] if self.kernels is None or named else [f"model.kernels={self.kernels}"]
        return [*chosen, *given]

    def train(
        self,
        out: Path,
        *overrides: str,
        nproc: int = 1,
        on_event=None,
        kinds: tuple[type, ...] = (),
        backend: str = "inductor",
    ) -> Path:
        """Train on pool ranks; every rank runs what the command runs.

        `kinds` are of layers that a test adds: a rank knows those that reach it. `backend` is what
        torch.compile has in place of inductor.
        """
        config, given = self.config, self.overrides(overrides)

        def body() -> None:
            assert all(kinds)
            import torch
            import torch.distributed as dist
            from mt_parallel_state import DistributedEnv
            from mt_train import load_config, run

            env = DistributedEnv(
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                local_rank=dist.get_rank(),
                local_world_size=dist.get_world_size(),
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
                run(load_config(config, given), env, out, on_event=on_event)

        self.ranks(nproc, body, timeout=120 if backend == "inductor" else 300)
        return out

    def train_recorded(
        self, out, log, overrides, layout, *, on_event=None, begin=None, rank=0
    ) -> None:
        """Train on the ranks of a layout, which record what they read in files that `log` begins.

        `layout` is a number of ranks and overrides of its own; `begin` is called on `rank`.
        """
        nproc, *own = layout
        config, given = self.config, self.overrides((*overrides, *own))

        def body() -> None:
            import torch.distributed as dist
            from mt_parallel_state import DistributedEnv
            from mt_train import load_config, run

            own = dist.get_rank()
            env = DistributedEnv(rank=own, world_size=nproc, local_rank=own, local_world_size=nproc)
            call_off = begin() if begin is not None and own == rank else None
            recorder = Recorder(log.with_name(f"{log.name}-{own}.jsonl"))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("mt_train.session.run.BatchSampler", recorder.sampler())
                run(load_config(config, given), env, out, on_event=on_event)
            if call_off is not None:
                call_off()

        self.ranks(nproc, body, timeout=120)

    def command(self, out: Path, *overrides: str, nproc: int = 1, real: bool = False) -> list[str]:
        """Return the command line of the same run, whose processes have imported torch already.

        With `real` they are those that a user has, which a test of a process's end needs.
        """
        python = sys.executable if real else str(self.programs.python)
        run = [python, "-m", "mt_train", "run", str(self.config)]
        run += self.overrides(overrides)
        return [*run, "--out", str(out), "--nproc", str(nproc)]


@pytest.fixture(scope="session")
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, ranks, programs
) -> Runner:
    from mt_data import build_corpus, read_documents, standard_library_sources
    from mt_tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    data = folder / "data"
    data.mkdir()
    documents = list(read_documents(standard_library_sources()[:24]))
    tokenizer = train_tokenizer((document.text for document in documents), 384)
    tokenizer.save(data / "tokenizer.json")
    build_corpus(documents[:20], data / "train", tokenizer)
    build_corpus(documents[20:], data / "validation", tokenizer)
    config = folder / "tiny.yaml"
    config.write_text(TINY.format(data=data))
    kernels = request.config.getoption("--kernels")
    return Runner(config=config, ranks=ranks, programs=programs, kernels=kernels)


@pytest.fixture(scope="session")
def short(tiny: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of a few tokens, several in every row; the second set for blends."""
    from mt_data import IndexedDataset, IndexedWriter
    from mt_tokenizer import load_tokenizer

    data, folder = tiny.config.parent / "data", tmp_path_factory.mktemp("short")
    eod = load_tokenizer(data / "tokenizer.json").eod_id
    for name, seed in (("a", 0), ("b", 1), ("held", 2)):
        random = np.random.default_rng(seed)
        tokens = IndexedDataset(data / "train").stream(0, 9000)
        tokens = tokens[tokens != eod]
        with IndexedWriter(folder / name, np.uint16) as writer:
            for start in range(0, 8000, 40):
                length = int(random.integers(1, 38))
                writer.add_document([*tokens[start : start + length], eod])
    return folder


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def losses() -> Callable[[Path], dict[int, float]]:
    return lambda run: {row["step"]: row["loss"] for row in metrics(run) if "loss" in row}


@pytest.fixture(scope="session")
def metrics_of() -> Callable[[Path], list[dict]]:
    return metrics


Consumed = dict[int, dict[str, dict[str, str]]]  # of a step, a sample and an array, the digest


def _consumed(folder: Path) -> Consumed:
    """Return the samples of each step, over all ranks and attempts, each with the same content."""
    steps: Consumed = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                read = json.loads(line)
            except json.JSONDecodeError:
                continue  # its rank was killed as it wrote
            known = steps.setdefault(read["step"], {})
            for number, row in read["rows"].items():
                assert known.setdefault(number, row) == row, (path, read["step"], number)
    return steps


@pytest.fixture(scope="session")
def consumed() -> Callable[[Path], Consumed]:
    return _consumed


@pytest.fixture(scope="session")
def held_out() -> Callable[[Path], float]:
    return lambda run: next(row["val_loss"] for row in metrics(run) if "val_loss" in row)


@pytest.fixture(scope="session")
def arrays() -> Callable[..., dict[str, np.ndarray]]:
    """Read a step's arrays with stock zarr-python, by their global names."""

    def read(run: Path, step: int = 8, prefix: str = "model/") -> dict[str, np.ndarray]:
        import zarr

        group = zarr.open_group(run / "checkpoints" / f"step_{step:08d}", mode="r")
        members = dict(group.members(max_depth=None))
        return {
            name: array[...]
            for name, array in members.items()
            if isinstance(array, zarr.Array) and name.startswith(prefix)
        }

    return read


POINTS = ("train.forward_backward", "train.reduce", "train.update", "save.data", "save.manifest")


@pytest.fixture
def kills_change_nothing(
    tmp_path: Path, arrays, losses, record_property
) -> Callable[..., set[str]]:
    """Kill runs of 6 steps with 3 saves, each once, and let them go on, as the undisturbed run.

    A third goes on with another layout. All consume the same content, which is why a run's loss is
    the same to its rounding; where the layout is the same, it and all that is saved are the same
    bits. Returns the names of the arrays that each consumed row has.
    """

    def run(runner: Runner, given, layouts: dict[str, tuple], name: str, kills: int) -> set[str]:
        layout, draw = layouts[name], np.random.default_rng([*name.encode()])
        others = [(1,), *(each for each in layouts.values() if each != layout)]
        given = (*given, "training.steps=6", "checkpoint={every: 2, keep: 2}")
        same, log = tmp_path / "same", tmp_path / "log-same"
        log.mkdir()
        runner.train_recorded(same, log / "one", given, layout)
        expected, wanted = _consumed(log), arrays(same, 6, prefix="")
        for turn in range(kills):
            out, log = tmp_path / str(turn), tmp_path / f"log-{turn}"
            log.mkdir()
            point = str(draw.choice(POINTS))
            nth, rank = int(draw.integers(1, 6 if "train" in point else 4)), int(draw.integers(2))
            kill = KillAt(point, rank=0 if point == "save.manifest" else rank, nth=nth)
            with pytest.raises(RankDied) as death:
                runner.train_recorded(out, log / "first", given, layout, on_event=kill)
            assert (death.value.point, death.value.rank) == (kill.point, kill.rank)
            goes_on = others[int(draw.integers(len(others)))] if turn % 3 == 2 else layout
            runner.train_recorded(out, log / "then", given, goes_on)
            assert _consumed(log) == expected
            if goes_on == layout:
                ours = arrays(out, 6, prefix="")
                assert ours.keys() == wanted.keys()
                for array, value in ours.items():
                    np.testing.assert_array_equal(value, wanted[array], err_msg=array)
                assert losses(out) == losses(same)
            else:
                assert losses(out) == pytest.approx(losses(same), rel=1e-9)
            shutil.rmtree(out)
        record_property("kills", kills)
        record_property("goings on with another layout", kills // 3)
        return set.intersection(*({*row} for step in expected.values() for row in step.values()))

    return run


@pytest.fixture(scope="session")
def programs(ranks: RankPool) -> Iterator[Programs]:
    """Stand-ins for `python` and our programs, which need not import torch."""
    with ranks.programs(*IMPORTED) as found:
        yield found


@pytest.fixture(scope="session")
def cli(programs: Programs) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command to its end; an interpreter of it is one that has imported torch."""

    def call(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [str(argument) for argument in arguments]
        if command[0] == sys.executable:
            command[0] = str(programs.python)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)

    return call


@pytest.fixture(scope="session")
def published_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cli
) -> Path:
    """A folder with SmolLM2-135M-Instruct; made once, and kept in pytest's cache."""
    cache = request.config.cache  # None with `-p no:cacheprovider`
    kept = tmp_path_factory.getbasetemp() if cache is None else cache.mkdir("published_model")
    folder = kept / "smollm2"
    if (folder / "config.json").exists():
        return folder
    script = request.config.rootpath / "tools/published_model.py"
    made = cli(sys.executable, script, folder, timeout=600)
    if "no model: " in made.stdout:
        pytest.skip(made.stdout.strip())
    assert made.returncode == 0, made.stderr
    return folder
