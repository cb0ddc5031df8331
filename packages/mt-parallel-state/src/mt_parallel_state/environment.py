"""Finds out from environment variables which rank this process is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mt_files import check_type

from mt_parallel_state.layout import MOST_RANKS


@dataclass(frozen=True, kw_only=True)
class DistributedEnv:
    """This process's place among the launched ones.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank on this node.
        local_world_size: Number of ranks on this node.
        master_addr: Host of the rendezvous store.
        master_port: Its port.
        launcher: `"torchrun"`, `"slurm"`, `"pet"` or `"none"`.
        store_is_served: Whether the launcher hosts the store; else rank 0 does.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    launcher: str = "none"
    store_is_served: bool = False

    def __post_init__(self) -> None:
        for index, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            i, n = getattr(self, index), getattr(self, size)
            check_type(index, i, int)
            check_type(size, n, int)
            if n < 1 or not 0 <= i < n:
                raise ValueError(f"{index}={i} must be from 0 to {size} - 1, with {size}={n}")
        if self.local_world_size > self.world_size:
            raise ValueError(
                f"local_world_size={self.local_world_size} exceeds world_size={self.world_size}"
            )
        if self.world_size > MOST_RANKS:
            raise ValueError(f"world_size={self.world_size} must be at most {MOST_RANKS}")
        check_type("master_addr", self.master_addr, str)
        check_type("master_port", self.master_port, int)
        if not 0 < self.master_port < 65536:
            raise ValueError(f"master_port must be from 1 to 65535, got {self.master_port}")


def detect_env(environ: Mapping[str, str] | None = None) -> DistributedEnv:
    """Read the launcher's variables: torchrun's, then SLURM's, then PET_*; none is one rank.

    torchrun's own variables win, since `srun torchrun` sets both kinds. An empty value counts as
    not set.

    Args:
        environ: The variables; `None` reads `os.environ`.

    Raises:
        ValueError: A variable is missing, malformed, or contradicts another; the message names it.
    """
    if environ is not None:
        check_type("environ", environ, Mapping)
    env = {}
    for name, value in (os.environ if environ is None else environ).items():
        check_type(f"environ[{name!r:.80}]", value, str)
        if value.strip():
            env[name] = value
    if "RANK" in env or "WORLD_SIZE" in env or "LOCAL_RANK" in env:
        return _from_torchrun(env)
    if "SLURM_PROCID" in env:
        return _from_slurm(env)
    if any(name in env for name in ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE")):
        return _from_pet(env)
    return DistributedEnv()


def _integer(env: Mapping[str, str], name: str, *, launcher: str, low: int = 0) -> int:
    if name not in env:
        raise ValueError(
            f"{name} is not set, but other variables of {launcher} are; set {name}, or unset the "
            "others to run one process"
        )
    try:
        value = int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} is not an integer") from None
    if value < low:
        raise ValueError(f"{name}={value} must be at least {low}")
    return value


def _below(value: int, name: str, limit: int, limit_name: str) -> int:
    if value >= limit:
        raise ValueError(
            f"{name}={value} contradicts {limit_name}={limit}: it must be 0 to {limit - 1}"
        )
    return value


def _port(env: Mapping[str, str], name: str, *, launcher: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    port = _integer(env, name, launcher=launcher, low=1)
    if port > 65535:
        raise ValueError(f"{name}={port} must be from 1 to 65535")
    return port


def _same(env: Mapping[str, str], first: str, second: str) -> None:
    if first in env and second in env and env[first] != env[second]:
        raise ValueError(
            f"{first}={env[first]!r} and {second}={env[second]!r} say the same thing twice and "
            "differ; unset one of them"
        )


def _from_torchrun(env: Mapping[str, str]) -> DistributedEnv:
    by = "torchrun"
    world = _integer(env, "WORLD_SIZE", launcher=by, low=1)
    local_world = _integer(env, "LOCAL_WORLD_SIZE", launcher=by, low=1)
    rank = _below(_integer(env, "RANK", launcher=by), "RANK", world, "WORLD_SIZE")
    local_rank = _integer(env, "LOCAL_RANK", launcher=by)
    _below(local_rank, "LOCAL_RANK", local_world, "LOCAL_WORLD_SIZE")
    if local_world > world:
        raise ValueError(f"LOCAL_WORLD_SIZE={local_world} exceeds WORLD_SIZE={world}")
    if "MASTER_ADDR" not in env:
        raise ValueError("MASTER_ADDR is not set, but other variables of torchrun are")
    return DistributedEnv(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        master_addr=env["MASTER_ADDR"],
        master_port=_port(env, "MASTER_PORT", launcher=by),
        launcher="torchrun",
        store_is_served=env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
    )


def _from_slurm(env: Mapping[str, str]) -> DistributedEnv:
    _same(env, "SLURM_NTASKS", "SLURM_NPROCS")
    count = "SLURM_NTASKS" if "SLURM_NTASKS" in env else "SLURM_NPROCS"
    if "SLURM_STEP_NUM_TASKS" in env:  # a step of `srun -n` may be smaller than the job
        count = "SLURM_STEP_NUM_TASKS"
    if count not in env:
        raise ValueError("SLURM_NTASKS is not set, but SLURM_PROCID is; start ranks with srun")
    world = _integer(env, count, launcher="SLURM", low=1)
    rank = _below(_integer(env, "SLURM_PROCID", launcher="SLURM"), "SLURM_PROCID", world, count)
    local_rank = _integer(env, "SLURM_LOCALID", launcher="SLURM")
    local_world, source = _slurm_local_world_size(env, world)
    _below(local_rank, "SLURM_LOCALID", local_world, source)
    job = _integer(env, "SLURM_JOB_ID", launcher="SLURM") if "SLURM_JOB_ID" in env else 0
    return DistributedEnv(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        master_addr=env.get("MASTER_ADDR") or _slurm_first_host(env, world),
        master_port=_port(env, "MASTER_PORT", launcher="SLURM", default=29500 + job % 1000),
        launcher="slurm",
    )


def _slurm_local_world_size(env: Mapping[str, str], world: int) -> tuple[int, str]:
    """Return the tasks on this node, and the variable that says so."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name not in env or "SLURM_NODEID" not in env:
            continue
        counts: list[int] = []
        for part in env[name].split(","):
            match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
            if match is None:
                raise ValueError(f"{name}={env[name]!r} is not a list such as '4(x2),3'")
            counts += [int(match[1])] * int(match[2] or 1)
        node = _integer(env, "SLURM_NODEID", launcher="SLURM")
        return counts[_below(node, "SLURM_NODEID", len(counts), f"nodes in {name}")], name
    if "SLURM_NTASKS_PER_NODE" in env:
        name = "SLURM_NTASKS_PER_NODE"
        return min(_integer(env, name, launcher="SLURM", low=1), world), name
    if world == 1:
        return 1, "SLURM_NTASKS"
    raise ValueError(
        "SLURM_NTASKS_PER_NODE is not set, so the number of ranks on this node is unknown; start "
        "the job with --ntasks-per-node"
    )


def _slurm_first_host(env: Mapping[str, str], world: int) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in env:
            return _first_host(env[name], name)
    if world == 1:
        return "127.0.0.1"
    raise ValueError("SLURM_JOB_NODELIST is not set and neither is MASTER_ADDR; set one of them")


def _first_host(nodelist: str, name: str) -> str:
    """Return the first host of a list such as `node[003-005,9],login1` or `r[1-2]n[01-04]`."""
    match = re.match(r"(?:[^\[\],\s]|\[[\d,\-]+\])+", nodelist)
    if match is None or nodelist[match.end() : match.end() + 1] not in ("", ","):
        raise ValueError(f"{name}={nodelist!r} is not a node list such as 'node[003-005,9]'")
    return re.sub(r"\[(\d+)[\d,\-]*\]", r"\1", match[0])


def _from_pet(env: Mapping[str, str]) -> DistributedEnv:
    _same(env, "PET_MASTER_ADDR", "MASTER_ADDR")
    _same(env, "PET_MASTER_PORT", "MASTER_PORT")
    nodes_text = env.get("PET_NNODES", "1")
    low, _, high = nodes_text.partition(":")
    if high and high != low:
        raise ValueError(
            f"PET_NNODES={nodes_text!r} is an elastic range, which only torchrun can resolve; "
            "start the program with torchrun"
        )
    nodes = _integer({"PET_NNODES": low}, "PET_NNODES", launcher="PET", low=1)
    per_node = env.get("PET_NPROC_PER_NODE", "1")
    if per_node != "1":
        raise ValueError(
            f"PET_NPROC_PER_NODE={per_node!r} asks for several ranks per node, but this process "
            "was not started by torchrun (RANK is not set); start the program with torchrun"
        )
    if nodes == 1:
        return DistributedEnv(launcher="pet")
    rank = _integer(env, "PET_NODE_RANK", launcher="PET")
    address = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR")
    if address is None:
        raise ValueError("PET_MASTER_ADDR is not set, but PET_NNODES is")
    port_name = "PET_MASTER_PORT" if "PET_MASTER_PORT" in env else "MASTER_PORT"
    return DistributedEnv(
        rank=_below(rank, "PET_NODE_RANK", nodes, "PET_NNODES"),
        world_size=nodes,
        master_addr=address,
        master_port=_port(env, port_name, launcher="PET", default=29500),
        launcher="pet",
    )
