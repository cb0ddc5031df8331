"""Commands in odd surroundings: signals, consoles, environments, arguments, runs that go on."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from world import CODES, Result, Row, World, children, demand, expect, infer, losses, train

HOSTILE = ("-1", "0", "1e999", "nan", "x", "", "9" * 50, "--greedy", "é\0"[:1], "-", "[]", "0.0")
OPTIONS = (
    "--max-tokens",
    "--temperature",
    "--top-k",
    "--top-p",
    "--seed",
    "--nproc",
    "--dtype",
    "--step",
    "--kv-cache-dtype",
    "--json-schema",
    "--regex",
    "--grammar",
    "--prompts",
    "--batch",
    "--bogus",
)
ROUNDING = ("--recipe", "--config", "--calibration", "--samples", "--length", "--step", "--dtype")
ROUNDING += ("--kv-cache-dtype",)
LONG = ("training.steps=100000", "checkpoint.every=1000", "evaluation.every=null")


def hostile_arguments(world: World, rng: random.Random, scratch: Path) -> None:
    """Generate with arguments that make no sense."""
    prompt = rng.choice(["old", "", "x" * 50_000, "\udcff", "🙂" * 50, "<|eod|>"])
    arguments = ["generate", str(world.run), "--prompt", prompt]
    for option in rng.sample(OPTIONS, rng.choice([1, 1, 2])):
        value = rng.choice(HOSTILE)
        if option != "--max-tokens" or len(value) < 9:
            arguments += [option, value]
    if rng.random() < 0.2:
        arguments[1] = rng.choice(["/dev/null", "missing", str(world.folder), "", "x" * 5000])
    expect(infer([*arguments, "--max-tokens", "2"]))


def hostile_rounding(world: World, rng: random.Random, scratch: Path) -> None:
    """Quantise with arguments that make no sense: what fails leaves nothing behind."""
    out = scratch / "low"
    arguments = ["quantize", str(world.run), str(out), "--recipe", rng.choice(["int8", "fp8"])]
    for option in rng.sample(ROUNDING, rng.choice([1, 1, 2])):
        arguments += [option, rng.choice([*HOSTILE, str(world.config), "int4-gptq", "/dev/zero"])]
    if rng.random() < 0.2:
        place = rng.choice([1, 2])
        arguments[place] = rng.choice(
            ["/dev/null", str(world.folder), "x" * 5000, f"{scratch}/\udcff"]
        )
    result = infer(arguments)
    expect(result)
    demand(result.code == 0 or not out.exists(), f"{out} is there after exit {result.code}")


def beside_training(world: World, rng: random.Random, scratch: Path) -> None:
    """Generate again and again while a run saves every step and keeps one."""
    out = scratch / "run"
    every = rng.choice([1, 1, 5])
    more = ("training.steps=100000", f"checkpoint.every={every}", "checkpoint.keep=1")
    with started(world, out, *more, python=world.python) as process:
        wait_for(lambda: (out / "checkpoints" / "latest").exists(), process)
        for _ in range(10):
            result = infer(["generate", str(out), "--prompt", "old", "--max-tokens", "1"])
            expect(result, [0])
        process.send_signal(signal.SIGTERM)
        demand(process.wait(60) == 75, f"exit code {process.returncode}")


def signals(world: World, rng: random.Random, scratch: Path) -> None:
    """Send signals to a run: it saves, says so, and continues; a second one ends it at once."""
    out, nproc = scratch / "run", rng.choice([1, 2])
    number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    with started(world, out, *LONG, nproc=nproc, python=world.python) as process:
        wait_for(lambda: (out / "metrics.jsonl").exists() and losses(out), process)
        time.sleep(rng.uniform(0, 1))
        process.send_signal(number)
        if rng.random() < 0.3:
            time.sleep(rng.uniform(0, 0.3))
            process.send_signal(number)
            code = process.wait(20)
            demand(code != 0, "exit code 0 for a run that is not done")
            return
        output, errors = process.communicate(timeout=60)
    result = Result(code=process.returncode, output=output.decode(), errors=errors.decode())
    demand(result.code == 75, f"exit code {result.code}: {result.errors[-1500:]}")
    step = max(losses(out))
    demand((out / "checkpoints" / f"step_{step:08d}").is_dir(), f"step {step} was not saved")
    more = f"training.steps={step + 1}"
    expect(train(world.train(out, *LONG, more)), [0])
    demand(max(losses(out)) == step + 1, "did not continue")


def early_signal(world: World, rng: random.Random, scratch: Path) -> None:
    """Send a signal before the first step: it ends soon, and a later start is as the first."""
    out, nproc = scratch / "run", rng.choice([1, 2])
    number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    with started(world, out, nproc=nproc) as process:
        time.sleep(rng.uniform(0.1, 2))
        process.send_signal(number)
        output, errors = process.communicate(timeout=40)
    said = (output + errors).decode()
    # Python itself answers Ctrl-C with a traceback until it has come to the command.
    demand("Traceback" not in said or "/mt_" not in said, said[-2000:])
    if process.returncode == 0:
        demand(max(losses(out)) == 6, f"exit code 0 before the end: {said[-500:]}")
    expect(train(world.train(out)), [0])


def consoles(world: World, rng: random.Random, scratch: Path) -> None:
    """Close, fill or narrow the console; the training is saved all the same."""
    out = scratch / "run"
    how = rng.choice(["closed", "full", "ascii", "head", "stderr"])
    python = f"{sys.executable} -m mt_train " + " ".join(
        f"'{word}'" for word in world.train(out, "checkpoint.every=null")
    )
    shell = {
        "closed": f"{python} >&-",
        "full": f"{python} >/dev/full",
        "ascii": f"PYTHONIOENCODING=ascii {python}",
        "head": f"{python} | head -1; exit ${{PIPESTATUS[0]}}",
        "stderr": f"{python} 2>&-",
    }[how]
    done = subprocess.run(["bash", "-c", shell], capture_output=True, check=False)
    errors = done.stderr.decode(errors="replace")
    demand("Traceback" not in errors, f"{how}: {errors[-2000:]}")
    demand(done.returncode in (*CODES, 75), f"{how}: exit code {done.returncode}: {errors}")
    saved = sorted((out / "checkpoints").glob("step_*"))
    demand(saved, f"{how}: nothing was saved: {errors[-1500:]}")
    expect(train(world.train(out)), [0])


def environments(world: World, rng: random.Random, scratch: Path) -> None:
    """Run in an odd environment, with modules of the same names in the working directory."""
    for name in ("tokenizers", "zarr", "numpy", "yaml", "random", "mt_ckpt"):
        (scratch / f"{name}.py").write_text("open('ran', 'w'); raise SystemExit(77)")
    variables = rng.choice(
        [
            {},
            {"HOME": "/nonexistent"},
            {"HOME": ""},
            {"LANG": "C", "LC_ALL": "C"},
            {"TMPDIR": "/nonexistent"},
            {"OMP_NUM_THREADS": "x"},
            {"COLUMNS": "0"},
            {"TERM": ""},
            {"PYTHONIOENCODING": "latin-1"},
            {"RANK": "x"},
            {"SLURM_PROCID": "0"},
            {"MASTER_PORT": "0"},
            {"TORCH_LOGS": "bogus"},
            {"TORCH_COMPILE_DEBUG": "x", "TORCHINDUCTOR_CACHE_DIR": "/dev/null"},
        ]
    )
    nproc = rng.choice(["1", "2"])
    few_files = rng.random() < 0.2
    script = "from mt_train.cli import main; import sys; main(sys.argv[1:])"
    command = [sys.executable, "-P", "-c", script, *world.train(scratch / "run", "--nproc", nproc)]
    done = subprocess.run(
        command,
        cwd=scratch,
        env={**os.environ, **variables},
        capture_output=True,
        check=False,
        preexec_fn=_few_files if few_files else None,
    )
    result = Result(
        code=done.returncode,
        output=done.stdout.decode(errors="replace"),
        errors=done.stderr.decode(errors="replace"),
    )
    expect(result)
    demand(not (scratch / "ran").exists(), "code of the working directory ran")


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))


def dead_rank(world: World, rng: random.Random, scratch: Path) -> None:
    """Kill a rank: one message names it, and nobody else has a traceback."""
    out = scratch / "run"
    with started(world, out, *LONG, nproc=rng.choice([4, 2])) as process:
        wait_for(lambda: (out / "metrics.jsonl").exists() and losses(out), process)
        os.kill(rng.choice(children(process.pid)), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    text = errors.decode(errors="replace")
    demand(process.returncode not in (0, 75), f"exit code {process.returncode}")
    demand("was killed by SIGKILL" in text, text[-2000:])
    demand("Traceback" not in text and text.count("\n") < 20, text[-4000:])


class started:
    """Start training; whatever is left of it is killed at the end."""

    def __init__(
        self, world: World, out: Path, *more: str, nproc: int = 1, python: str = sys.executable
    ) -> None:
        arguments = world.train(out, *more, "--nproc", str(nproc))
        command = [python, "-m", "mt_train", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def wait_for(fact, process: subprocess.Popen[bytes]) -> None:
    """Wait until a fact holds, while a process is at work."""
    deadline = time.monotonic() + 60
    while not fact():
        ended = process.poll() is not None
        demand(not ended, f"ended early: {process.stderr.read()[-1500:]!r}" if ended else "")
        demand(time.monotonic() < deadline, "did not start within 60 s")
        time.sleep(0.05)


def console_encodings(world: World, rng: random.Random, scratch: Path) -> None:
    """Read help, versions and configurations on consoles that take little."""
    arguments = rng.choice(
        [["--help"], ["--version"], ["config", str(world.config)], ["bogus"], []]
    )
    module = rng.choice(["mt_train", "mt_infer"])
    end = rng.choice(["", " >&-", " >/dev/full", " | head -1"])
    words = " ".join(f"'{word}'" for word in arguments)
    shell = f"PYTHONIOENCODING=ascii {sys.executable} -m {module} {words}{end}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, check=False)
    errors = done.stderr.decode(errors="replace")
    demand("Traceback" not in errors and "Exception ignored" not in errors, f"{shell}: {errors}")
    demand(done.returncode in (*CODES, 75), f"{shell}: exit code {done.returncode}: {errors}")


ROWS = [
    Row(name="mt-infer with hostile arguments", attack=hostile_arguments, cases=80, sample=1),
    Row(name="mt-infer quantize, hostile", attack=hostile_rounding, cases=80, sample=1),
    Row(name="mt-infer beside training", attack=beside_training, cases=5, sample=0, seconds=150),
    Row(name="signals", attack=signals, cases=16, sample=0, seconds=150),
    Row(name="signals before the first step", attack=early_signal, cases=10, sample=0, seconds=120),
    Row(name="consoles that close or fill", attack=consoles, cases=10, sample=0, seconds=90),
    Row(
        name="consoles and encodings of short commands",
        attack=console_encodings,
        cases=20,
        sample=1,
    ),
    Row(name="environments", attack=environments, cases=24, sample=0, seconds=120),
    Row(name="a rank dies", attack=dead_rank, cases=5, sample=0, seconds=120),
]
