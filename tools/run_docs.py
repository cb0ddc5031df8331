"""Run what the documentation shows: every bash and python block, and every example.

    python tools/run_docs.py [--fresh] [PAGE_OR_EXAMPLE ...]

Each page has a scratch copy of the repository as its working folder, in which its blocks run in
order, every python block in an interpreter of its own. A block under `<!-- not-run: reason -->` is
not run and its reason is printed. Pages run side by side, one on each core or in each of
`MT_LANES`, those with the most blocks first.

Interpreters and our programs are forks of a process that has imported torch; `--fresh` starts real
ones, which takes several times as long.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fences import Block, FenceError, blocks_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "packages/*/README.md", "tests-integration/README.md")
EXAMPLES = ("packages/*/examples/*.py",)
TESTED = ("retro.py",)  # long, and run on few documents by tests-integration
LIMIT_S = 180
FRESH = "--fresh"
HYPOTHESIS = "from hypothesis"  # it reads the source of every module that is loaded, for seconds
# What programs import when they begin: modules of ours by the names of their files, and others.
BEGINNINGS = ("cli.py", "run.py", "generation.py")
IMPORTED = ("zarr", "tokenizers", "yaml", "tyro", "typeguard", "numpy.testing")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "dist", "build")


def run_page(path: Path, programs: Path | None = None) -> bool:
    """Run the blocks of one page in order; returns whether all passed."""
    try:
        blocks = found_in(path)
    except FenceError as error:
        print(f"FAILED {error}", flush=True)
        return False
    if not blocks:
        return True
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "repository"
        shutil.copytree(ROOT, scratch, ignore=LEFT_OUT)
        # All of them, failed or not.
        passed = [run_block(block, scratch, programs) for block in blocks]
        return all(passed)


def found_in(page: Path) -> list[Block]:
    """Return the blocks of a page."""
    return blocks_of(page.relative_to(ROOT), page.read_text(encoding="utf-8"))


def run_block(block: Block, scratch: Path, programs: Path | None) -> bool:
    """Run one block in the folder `scratch`; returns whether it passed."""
    if block.reason is not None:
        print(f"not run {block}: {block.reason}", flush=True)
        return True
    if block.language == "bash":
        return run(str(block), ["bash", "-euo", "pipefail", "-c", block.code], scratch, programs)
    doctest = any(line.startswith(">>>") for line in block.code.splitlines())
    script = scratch.parent / f"line_{block.line}.{'txt' if doctest else 'py'}"
    script.write_text(block.code, encoding="utf-8")
    options = ["-m", "doctest", "-o", "ELLIPSIS"] if doctest else []
    if HYPOTHESIS in block.code:
        programs = None
    return run(str(block), ["python", *options, str(script)], scratch, programs)


def run_example(path: Path, programs: Path | None = None) -> bool:
    """Run one example from an empty folder; returns whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        return run(str(path.relative_to(ROOT)), ["python", str(path)], Path(folder), programs)


def run(title: str, command: list[str], folder: Path, programs: Path | None) -> bool:
    """Run `command` in `folder` and report it in one line, with its output where it fails."""
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(programs),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nended after {LIMIT_S} s"
    seconds = time.monotonic() - start
    if process.returncode == 0:
        print(f"ok {seconds:6.1f} s  {title}", flush=True)
        return True
    tail = "\n".join(f"    {line}" for line in output.splitlines()[-40:])
    print(f"FAILED {seconds:.1f} s  {title} (exit code {process.returncode})\n{tail}", flush=True)
    return False


def environment(programs: Path | None) -> dict[str, str]:
    """Return the variables of a block: this environment's programs, and no change to it.

    Those in the folder `programs` go first.
    """
    folders = [*([] if programs is None else [programs]), Path(sys.executable).parent]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]]),
        "VIRTUAL_ENV": sys.prefix,
        "UV_PROJECT_ENVIRONMENT": sys.prefix,
        "UV_NO_SYNC": "1",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }


def length(path: Path) -> int:
    """Return about how long a page or an example takes, to start the longest first."""
    try:
        blocks = found_in(path) if path.suffix == ".md" else []
    except FenceError:  # running the page reports it
        return 0
    lines = sum(block.code.count("\n") for block in blocks if block.language == "bash")
    return 3 * lines + len(blocks)


def main(arguments: list[str]) -> int:
    """Run the pages and examples named, or all; returns the exit code."""
    wanted = [Path(argument).resolve() for argument in arguments if argument != FRESH]
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    found = [path for pattern in EXAMPLES for path in sorted(ROOT.glob(pattern))]
    examples = [path for path in found if path.name not in TESTED]
    if unknown := set(wanted) - set(pages) - set(examples):
        print(f"no page or example: {', '.join(sorted(map(str, unknown)))}", file=sys.stderr)
        return 2
    chosen = [path for path in [*pages, *examples] if not wanted or path in wanted]
    with ExitStack() as stack:
        programs = None if FRESH in arguments else stack.enter_context(forked_programs())
        results = run_all(sorted(chosen, key=length, reverse=True), programs)
    failed = sum(not result for result in results)
    print(f"{len(results)} pages and examples, {failed} failed")
    return 1 if failed else 0


def run_all(paths: list[Path], programs: Path | None) -> list[bool]:
    """Run pages and examples in this order, side by side; returns which passed."""
    lanes = int(os.environ.get("MT_LANES", os.cpu_count() or 1))
    with ThreadPoolExecutor(max_workers=lanes) as pool:
        ran = [
            pool.submit(run_page if path.suffix == ".md" else run_example, path, programs)
            for path in paths
        ]
    return [each.result() for each in ran]


@contextmanager
def forked_programs() -> Iterator[Path]:
    """Give a folder with programs that are forks of a process with torch."""
    from mt_testing import RankPool

    sources = [
        file for name in BEGINNINGS for file in sorted(ROOT.glob(f"packages/*/src/**/{name}"))
    ]
    ours = [".".join(file.relative_to(ROOT).with_suffix("").parts[3:]) for file in sources]
    with RankPool() as pool, pool.programs(*ours, *IMPORTED) as programs:
        yield programs.folder


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
