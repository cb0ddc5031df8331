"""Checkpoints of others, drawn by the thousand: Megatron-core's folders and Hugging Face's.

While a command reads, an audit hook sees what is opened, written, started and unpickled.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import mutate
from forged import (
    PATHS,
    TENSOR_NAMES,
    archive,
    described,
    forge_torch_dist,
    payload,
    run_arguments,
    spoil_file,
    tensors,
    write_torch_dist,
)
from world import MESSAGE_BYTES, BadError, Row, World, call, demand, files_of

NUMBER = 50  # folders of a case
SECONDS = 10  # of one folder
MEMORY_BYTES = 2**30
THROUGH_MAIN = 0.03  # parsing the arguments takes longer than most folders

# What may happen while a folder is read.

_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")
_NEVER = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen"),
    *("pickle.find_class", "socket.connect", "socket.bind", "os.chmod", "os.chown", "os.setxattr"),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# What Python itself reads: the standard library, what is installed, and the packages.
CODE = (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2] / "packages"))


@dataclass(kw_only=True)
class Guard:
    """Hears what happens, and keeps what must not.

    Attributes:
        inside: Folder in which everything may happen.
        is_on: Whether a folder is read now.
        seen: What happened that must not.
    """

    inside: str
    is_on: bool = False
    seen: list[str] = field(default_factory=list)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Look at one event; Python calls this."""
        if not self.is_on:
            return
        self.is_on = False  # what it does itself is no event
        try:
            if event in _NEVER or (event == "import" and arguments[0] == "antigravity"):
                self.seen.append(f"{event} {arguments!r:.200}")
            elif event == "open" or event in _WRITES:
                paths = arguments[: 2 if event in ("os.rename", "os.link") else 1]
                is_reading = event == "open" and not arguments[2] & _WRITING
                roots = (self.inside, *CODE) if is_reading else (self.inside,)
                self.seen += [f"{event} {p!r:.200}" for p in paths if _leads_out(p, roots)]
        finally:
            self.is_on = True


def _leads_out(path: object, roots: tuple[str, ...]) -> bool:
    """Return whether a path is below none of some folders; a descriptor was opened before."""
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    real = os.path.realpath(os.fsdecode(path))
    return not any(real == root or real.startswith(f"{root}/") for root in roots)


@contextlib.contextmanager
def guarded(scratch: Path) -> Iterator[Guard]:
    """Yield a guard of this process, which has little memory more than now."""
    guard = Guard(inside=os.path.realpath(scratch))
    sys.dont_write_bytecode = True
    sys.addaudithook(guard.hear)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.chdir(scratch)
    guard.is_on = True
    with contextlib.suppress(OSError), open("/etc/hostname"):
        pass
    guard.is_on = False
    demand(guard.seen, "the guard hears nothing")
    guard.seen.clear()
    try:
        yield guard
    finally:
        guard.is_on = False


def read(guard: Guard, folder: Path, source: str, rng: random.Random) -> bool:
    """Import a folder, and return whether it was imported: in time, or refused in a few words.

    Args:
        guard: Sees what happens meanwhile.
        folder: The folder.
        source: Format given to `mt-ckpt import`, or "" for `mt-hf import`.
        rng: Draws whether the whole command runs.
    """
    out = folder.parent / "out"
    began, code, said = time.monotonic(), 0, ""
    guard.is_on = True
    try:
        if rng.random() < THROUGH_MAIN:
            code, said = _command(folder, out, source)
        else:
            said = _run(folder, out, source)
            code = 2 if said else 0
    finally:
        guard.is_on = False
    took = time.monotonic() - began
    demand(code in (0, 1, 2), f"exit {code}: {said[-500:]}")
    demand(not code or said.strip(), "no message")
    demand(len(said) <= MESSAGE_BYTES, f"{len(said)} bytes of message: {said[:500]}")
    demand(not guard.seen, f"it did {guard.seen[:5]}")
    demand(not (folder.parent / "ran").exists(), "code of a pickle ran")
    demand(took < SECONDS, f"{took:.0f} s for a folder")
    demand(not code or not out.exists(), "something is left of a refused folder")
    shutil.rmtree(out, ignore_errors=True)
    left = [path.name for path in folder.parent.iterdir() if path.name.startswith(("out", ".out"))]
    demand(not left, f"left behind: {left}")
    return not code


def _run(folder: Path, out: Path, source: str) -> str:
    """Run the command behind the command line; return its message if it refuses."""
    from mt_ckpt.command.exchanging import Import
    from mt_files import FileError, UserError
    from mt_hf.commands.cli import Import as ModelImport

    command = Import(path=folder, out=out, source=source) if source else None
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            (command or ModelImport(folder=folder, out=out)).run()
    except (UserError, FileError) as error:
        demand(getattr(error, "exit_status", 2) in (1, 2), "another exit status")
        return str(error) or "no message"
    return ""


def _command(folder: Path, out: Path, source: str) -> tuple[int, str]:
    from mt_ckpt.command.cli import main
    from mt_hf.commands.cli import main as model_main

    words = ["import", str(folder), str(out)]
    result = call(main, [*words, "--from", source]) if source else call(model_main, words)
    demand("Traceback (most recent" not in result.errors, result.errors[-1500:])
    return result.code, result.errors if result.code else ""


def drawn_torch_dist(world: World, rng: random.Random, scratch: Path) -> None:
    """Import forged folders of Megatron-core as arrays."""
    _import_many(scratch, rng, "megatron-torch_dist", few=True)


def drawn_megatron_runs(world: World, rng: random.Random, scratch: Path) -> None:
    """Import forged folders of Megatron-core as runs."""
    _import_many(scratch, rng, "", few=False)


def _import_many(scratch: Path, rng: random.Random, source: str, *, few: bool) -> None:
    names = list(tensors())
    whole = scratch / "whole" / "in"
    whole.parent.mkdir()
    write_torch_dist(whole, described(names, tensors()), run_arguments())
    with guarded(scratch) as guard:
        demand(read(guard, whole, source, rng), "a folder without a fault is refused")
        for number in range(NUMBER):
            place = scratch / str(number)
            place.mkdir()
            forge_torch_dist(place / "in", rng, rng.sample(names, 2) if few else names)
            _read_named(guard, place / "in", source, rng, number)
            shutil.rmtree(place)


def _read_named(guard: Guard, folder: Path, source: str, rng: random.Random, number: int) -> None:
    """Read a folder; keep its number in what goes wrong."""
    try:
        read(guard, folder, source, rng)
    except BaseException as error:
        raise BadError(f"folder {number}") from error


# Folders of Hugging Face.


def write_hugging_face(folder: Path) -> None:
    """Write a small model, in several files with an index."""
    from mt_hf import save_pretrained
    from mt_model import GPT, gpt

    sizes = {"vocab_size": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
    save_pretrained(GPT(gpt(**sizes, max_sequence_length=16)), folder, file_size=1500)


def forge_header(path: Path, rng: random.Random) -> None:
    """Exchange something in the header of a safetensors file, whose length fits."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name, how = rng.choice(names), rng.randrange(9)
    entry = header[name]
    if how == 0:
        header = mutate(header, rng)
    elif how == 1:
        entry["shape"] = rng.choice(([2**62], [0, 2**62], [1] * 40, [-1], [2**40] * 3, "8", [8.0]))
    elif how == 2:
        entry["data_offsets"] = rng.choice(([0, 2**62], [-8, 0], [5, 3], [0], None, [0, 0], [1, 9]))
    elif how == 3:
        entry["dtype"] = rng.choice(("F4", "C64", "", None, "I8", "F64", "x" * 5000, "F8_E8M0"))
    elif how == 4:
        header[rng.choice((*TENSOR_NAMES[:-6], "a/b/../c", "é"))] = header.pop(name)
    elif how == 5:
        header["__metadata__"] = rng.choice((None, [], {"format": 5}, {"a": "x" * 10**6}, "pt"))
    elif how == 6:
        header |= {f"more.{n}": entry for n in range(rng.choice((1, 1000, 20_000)))}
    text = json.dumps(header).encode(errors="surrogatepass")
    if how == 7:
        text = rng.choice((b"[", b'{"a":', b"[[1],")) * rng.choice((10, 10_000, 100_000))
    length = len(text) if how != 8 else rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(text) + 1))
    path.write_bytes(length.to_bytes(8, "little") + text + rest)


def forge_hugging_face(folder: Path, rng: random.Random) -> None:
    """Damage a folder, or forge a header, the index or config.json."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    how = rng.choice(("header", "header", "header", "index", "config", "file", "file", "pickle"))
    if how == "header":
        forge_header(rng.choice(files), rng)
    elif how == "index":
        found = json.loads(index.read_text())
        named = found["weight_map"]
        if rng.random() < 0.5:
            named[rng.choice(list(named))] = rng.choice((*PATHS[:-1], "a.safetensors", 7, None))
        else:
            found = mutate(found, rng)
        index.write_text(json.dumps(found))
    elif how == "config":
        path = folder / "config.json"
        path.write_text(json.dumps(mutate(json.loads(path.read_text()), rng)))
    elif how == "pickle":  # the other format of weights, which nobody reads
        (folder / "pytorch_model.bin").write_bytes(archive({"a": payload(rng)}))
        if rng.random() < 0.8:
            for path in (*files, index):
                path.unlink()
    else:
        spoil_file(rng.choice(files_of(folder)), rng, folder.parent)


def drawn_folders(world: World, rng: random.Random, scratch: Path) -> None:
    """Import forged folders of Hugging Face, as arrays and as runs."""
    whole = scratch / "whole" / "in"
    whole.parent.mkdir()
    write_hugging_face(whole)
    with guarded(scratch) as guard:
        for source in ("safetensors", ""):
            demand(read(guard, whole, source, rng), "a folder without a fault is refused")
        for number in range(NUMBER):
            place = scratch / str(number)
            shutil.copytree(whole.parent, place)
            forge_hugging_face(place / "in", rng)
            _read_named(guard, place / "in", rng.choice(("safetensors", "")), rng, number)
            shutil.rmtree(place)


ROWS = [
    Row(name="checkpoints of Megatron-core drawn, 50 a case", attack=drawn_torch_dist, cases=20),
    Row(name="runs of Megatron-core drawn, 50 a case", attack=drawn_megatron_runs, cases=20),
    Row(name="folders of safetensors drawn, 50 a case", attack=drawn_folders, cases=20),
]
