"""Run what the documentation shows: every bash and python block, and every example.

    python tools/run_docs.py [PAGE_OR_EXAMPLE ...]

Each page has a scratch copy of the repository as its working folder, in which its blocks run in
order, every python block in a fresh interpreter. A block under `<!-- not-run: reason -->` is not
run and its reason is printed. Pages run side by side, one on each core or in each of `MT_LANES`.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fences import Block, FenceError, blocks_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "packages/*/README.md", "tests-integration/README.md")
EXAMPLES = ("packages/*/examples/*.py",)
LIMIT_S = 180
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "runs", "dist", "build")


def run_page(path: Path) -> bool:
    """Run the blocks of one page in order; returns whether all passed."""
    try:
        blocks = blocks_of(path.relative_to(ROOT), path.read_text(encoding="utf-8"))
    except FenceError as error:
        print(f"FAILED {error}", flush=True)
        return False
    if not blocks:
        return True
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "repository"
        shutil.copytree(ROOT, scratch, ignore=LEFT_OUT)
        passed = [run_block(block, scratch) for block in blocks]  # all of them, failed or not
        return all(passed)


def run_block(block: Block, scratch: Path) -> bool:
    """Run one block in the folder `scratch`; returns whether it passed."""
    if block.reason is not None:
        print(f"not run {block}: {block.reason}", flush=True)
        return True
    if block.language == "bash":
        return run(str(block), ["bash", "-euo", "pipefail", "-c", block.code], scratch)
    doctest = any(line.startswith(">>>") for line in block.code.splitlines())
    script = scratch.parent / f"line_{block.line}.{'txt' if doctest else 'py'}"
    script.write_text(block.code, encoding="utf-8")
    options = ["-m", "doctest", "-o", "ELLIPSIS"] if doctest else []
    return run(str(block), ["python", *options, str(script)], scratch)


def run_example(path: Path) -> bool:
    """Run one example from an empty folder; returns whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        return run(str(path.relative_to(ROOT)), ["python", str(path)], Path(folder))


def run(title: str, command: list[str], folder: Path) -> bool:
    """Run `command` in `folder` and report it in one line, with its output where it fails."""
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
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


def environment() -> dict[str, str]:
    """The variables a block runs with: this environment's programs, and no change to it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
        "UV_PROJECT_ENVIRONMENT": sys.prefix,
        "UV_NO_SYNC": "1",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }


def main(arguments: list[str]) -> int:
    """Run the pages and examples named, or all; returns the exit code."""
    wanted = [Path(argument).resolve() for argument in arguments]
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    examples = [path for pattern in EXAMPLES for path in sorted(ROOT.glob(pattern))]
    if unknown := set(wanted) - set(pages) - set(examples):
        print(f"no page or example: {', '.join(sorted(map(str, unknown)))}", file=sys.stderr)
        return 2
    lanes = int(os.environ.get("MT_LANES", os.cpu_count() or 1))
    with ThreadPoolExecutor(max_workers=lanes) as pool:
        chosen = [path for path in [*pages, *examples] if not wanted or path in wanted]
        results = [
            pool.submit(run_page if path.suffix == ".md" else run_example, path) for path in chosen
        ]
    failed = sum(not result.result() for result in results)
    print(f"{len(results)} pages and examples, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
