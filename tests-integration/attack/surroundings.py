"""The surroundings of a run: full disks, folders of offloaded state, and listening sockets."""

from __future__ import annotations

import os
import random
import shlex
import sys
from pathlib import Path

from commands import LONG, started, wait_for
from world import (
    Result,
    Row,
    World,
    children,
    demand,
    expect,
    losses,
    replace_with,
    same_bits,
    spawn,
    train,
)

OFFLOAD = ("training.dtype=bf16", "optimizer.offload=1", "training.steps=1")
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def odd_offload_folder(world: World, rng: random.Random, scratch: Path) -> None:
    """Keep state in files where there is no folder: the key is named."""
    folder, elsewhere = scratch / "state", scratch / "elsewhere"
    how = rng.choice(["file", "fifo", "device", "gone", "link", "link to a file"])
    if how in ("fifo", "device"):
        replace_with(folder, how, scratch)
    elif how == "file":
        folder.write_text("")
    elif how == "link":
        elsewhere.mkdir()
        folder.symlink_to(elsewhere)
    elif how == "link to a file":
        elsewhere.write_text("")
        folder.symlink_to(elsewhere)
    given = (*OFFLOAD, f"optimizer.offload_dir={folder}")
    result = train(world.train(scratch / "run", *given))
    if how == "link":
        expect(result, [0])
        demand(not list(elsewhere.iterdir()), "files of offloaded state are left")
    else:
        expect(result, [2], named="optimizer.offload_dir")


def full_offload_folder(world: World, rng: random.Random, scratch: Path) -> None:
    """Keep state in files where there is no room for it: the folder is named."""
    folder = scratch / "state"
    folder.mkdir()
    given = (*OFFLOAD, f"optimizer.offload_dir={folder}")
    run = [sys.executable, "-m", "mt_train", *world.train(scratch / "run", *given)]
    result = _on_disk(folder, rng.choice(["4k", "64k", "128k"]), [run])
    expect(result, [1], named=str(folder))


def small_disk(world: World, rng: random.Random, scratch: Path) -> None:
    """Let two ranks run out of disk, then give it more: they continue to the same bits."""
    disk, kept = scratch / "disk", scratch / "kept"
    disk.mkdir()
    run = [sys.executable, "-m", "mt_train", *world.train(disk / "run", "--nproc", "2")]
    grown = ["mount", "-o", "remount,size=64m", str(disk)]
    copied = ["cp", "-r", str(disk / "run"), str(kept)]
    size = rng.choice(["16k", "64k", "200k", "500k", "900k", "1400k"])
    expect(_on_disk(disk, size, [run, grown, run, copied]), [0])
    same_bits(kept, world.run_of_two)


def _on_disk(folder: Path, size: str, commands: list[list[str]]) -> Result:
    """Run commands that see a folder as a small file system; the last one's exit code counts.

    A stand-in for the interpreter would not see it.
    """
    script = f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(folder))} || exit 99\n"
    script += "\n".join(shlex.join(command) for command in commands)
    return spawn(["unshare", "--map-root-user", "--mount", "bash", "-c", script])


def listeners(world: World, rng: random.Random, scratch: Path) -> None:
    """Look at the sockets of a run with two ranks: all of them are on the loopback."""
    out = scratch / "run"
    with started(world, out, *LONG, nproc=2) as process:
        wait_for(lambda: (out / "metrics.jsonl").exists() and losses(out), process)
        found = _addresses([process.pid, *children(process.pid)])
        process.terminate()
        process.communicate(timeout=60)
    demand(found, "no socket was found")
    outside = sorted(place for place in found if place not in LOOPBACK)
    demand(not outside, f"sockets beyond the loopback: {outside}")


def _addresses(pids: list[int]) -> set[str]:
    """Return the local addresses, in the kernel's hexadecimal digits, of processes' sockets."""
    links = [os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    open_here = {link.removeprefix("socket:[")[:-1] for link in links if link.startswith("socket")}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[9] in open_here:
                found.add(cells[1].partition(":")[0])
    return found


ROWS = [
    Row(name="folders of offloaded state odd", attack=odd_offload_folder, cases=16, seconds=90),
    Row(
        name="offloaded state on a full disk",
        attack=full_offload_folder,
        cases=4,
        sample=0,
        seconds=120,
    ),
    Row(name="two ranks on a small disk", attack=small_disk, cases=3, sample=0, seconds=200),
    Row(name="sockets of two ranks", attack=listeners, cases=2, sample=0, seconds=120),
]
