"""Settings that meet: each combination trains like one process, or is refused by name.

A row is one value of each setting. What the table of refusals does not name has to train two steps
with the losses and weights of one process that has no layout at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mt_testing import pairwise
from mt_train import ConfigError, load_config, run

Row = dict[str, Any]
LR = 1e-2
# What changes the numbers, and so has a reference of its own.
NUMERICS = {
    "training.dtype": ("fp64", "fp32", "bf16", "fp16"),
    "optimizer.name": ("adamw", "adam", "sgd", "lion", "muon", "adaptive_muon", "soap"),
    "optimizer.moments_dtype": ("full", "bf16", "fp16", "fp8"),
    "data.packing": ("none", "documents"),
    "model.tied": (False, True),
    "model.dropout": (0.0, 0.1),
    "optimizer.ema": (None, 0.9),
}
SCHEDULES = ("1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")
FACTORS = NUMERICS | {
    "optimizer.masters": ("full", "remainder"),
    "optimizer.offload": (0.0, 0.5, 1.0),
    "data_parallel.strategy": ("none", "optimizer", "optimizer_gradients", "full"),
    "data_parallel.replicas": (1, 2),
    "data_parallel.overlap": (True, False),
    "data_parallel.prefetch": (0, 2),
    "data_parallel.local_sum": (False, True),
    "data_parallel.offload": (False, True),
    "data_parallel.shard_dtype": (None, "fp32"),
    "parallel.dp": (1, 2),
    "parallel.tp": (1, 2),
    "parallel.cp": (1, 2),
    "parallel.pp": (1, 2),
    "parallel.sequence_parallel": (False, True),
    "parallel.bucket_size": (500, 25 * 2**20 // 4),
    "pipeline.schedule": SCHEDULES,
    "training.recompute": ("none", "selective", "full"),
}
# What can't work together: when, and the field and the words of the message.
REFUSALS = [
    (
        lambda row: row["optimizer.masters"] == "remainder" and row["training.dtype"] != "bf16",
        "optimizer.masters",
        "remainder is what bf16 weights lack, and training.dtype is",
    ),
    (
        lambda row: row["data_parallel.strategy"] == "none" and row["data_parallel.replicas"] > 1,
        "data_parallel.replicas",
        "data_parallel.strategy none; leave it out, or use strategy optimizer",
    ),
    *(
        (
            lambda row, name=f"data_parallel.{name}": (
                row["data_parallel.strategy"] == "none" and row[name]
            ),
            f"data_parallel.{name}",
            "is about what is shared out, and data_parallel.strategy is none; leave it out",
        )
        for name in ("prefetch", "offload", "shard_dtype")
    ),
    (
        lambda row: row["data_parallel.shard_dtype"] and row["training.dtype"] == "fp64",
        "data_parallel.shard_dtype",
        "fp32 does not hold all that training.dtype fp64 does; use fp64, more bits, or leave",
    ),
    (
        lambda row: row["data_parallel.shard_dtype"] and row["optimizer.masters"] == "remainder",
        "data_parallel.shard_dtype",
        "fp32 leaves nothing for optimizer.masters remainder to keep; leave it out",
    ),
    (
        lambda row: row["data_parallel.offload"] and row["optimizer.offload"] > 0,
        "data_parallel.offload",
        "true has all that is stepped in the host's memory, of which optimizer.offload",
    ),
    (
        lambda row: row["parallel.dp"] * row["parallel.cp"] % row["data_parallel.replicas"],
        "data_parallel.replicas",
        "2 does not divide parallel.dp 1 x parallel.cp 1 = 1; use one of 1",
    ),
    (
        lambda row: row["data_parallel.strategy"] == "full" and "dualpipe" in schedule_of(row),
        "data_parallel.strategy",
        "full does not go with pipeline.schedule dualpipe",
    ),
]


def schedule_of(row: Row) -> str:
    return row["pipeline.schedule"]


def world(row: Row) -> int:
    return row["parallel.dp"] * row["parallel.tp"] * row["parallel.cp"] * row["parallel.pp"]


def sensible(row: Row) -> bool:
    """Schedules of several ranks where there are several."""
    return row["parallel.pp"] > 1 or schedule_of(row) == "1f1b"


def reasons(row: Row) -> list[tuple[str, str]]:
    return [(field, words) for when, field, words in REFUSALS if when(row)]


def trained(most: int, seed: int, **factors: tuple[Any, ...]) -> list[Row]:
    """Every pair of settings that can meet on this number of ranks."""
    return pairwise(
        FACTORS | factors,
        allowed=lambda row: world(row) <= most and sensible(row) and not reasons(row),
        seed=seed,
    )


ROWS = trained(4, seed=8)
FOUR_REPLICAS = trained(8, seed=4, **{"parallel.dp": (4,)})
REFUSED = pairwise(FACTORS, allowed=lambda row: sensible(row) and bool(reasons(row)), seed=8)


def label(row: Row) -> str:
    return "-".join(f"{key.split('.')[1]}={value}" for key, value in row.items())


def written(row: Row, names: Iterable[str]) -> list[str]:
    """Some settings of a row as overrides; fp16 needs a scale, and 1024 overflows nothing."""
    given = [f"{name}={json.dumps(row[name])}" for name in names]
    return [*given, *(["optimizer.loss_scale=1024.0"] if row["training.dtype"] == "fp16" else [])]


def options(row: Row) -> list[str]:
    """The row as it is written on the command line, with four micro-batches a rank."""
    chunks = ["pipeline.chunks=2"] if schedule_of(row) in ("interleaved", "bfs") else []
    micro = batch(row) // 4 // row["parallel.dp"]
    return [*written(row, FACTORS), *chunks, f"training.micro_batch_size={micro}"]


def batch(row: Row) -> int:
    """Return the global batch: a sample for each of four micro-batches at least."""
    return max(8, 4 * row["parallel.dp"])


def common(row: Row) -> list[str]:
    return [*COMMON, f"training.global_batch_size={batch(row)}"]


COMMON = ["model.num_layers=4", "training.steps=2"]
COMMON += [f"optimizer.lr={LR}", "evaluation.max_windows=1"]


def train(config: Path, out: Path, given: list[str]) -> None:
    """Run on every rank what the command runs."""
    import torch.distributed as dist
    from mt_parallel_state import DistributedEnv

    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    env = DistributedEnv(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    run(load_config(config, given), env, out)


@pytest.fixture(scope="session")
def references(tiny, ranks, tmp_path_factory):
    made: dict[tuple[Any, ...], Path] = {}

    def get(row: Row) -> Path:
        key = (batch(row), *(row[name] for name in NUMERICS))
        if key not in made:
            out = tmp_path_factory.mktemp("one")
            whole = f"training.micro_batch_size={batch(row)}"
            given = [*written(row, NUMERICS), whole, *common(row)]
            ranks(1, train, tiny.config, out, given, timeout=120)
            made[key] = out
        return made[key]

    return get


# By dtype: of losses, relative; of all weights, the largest and the mean difference. In 16 bits a
# gradient near zero may have another sign, which is two steps of Adam the other way, so the mean
# decides. In fewer bits a moment may be rounded to the number beside, and a row of another length
# has its scales elsewhere. The bases of soap multiply rounding.
TOLERANCES = {
    "fp64": (1e-10, 1e-9, 1e-9),
    "fp32": (1e-5, 1e-4, 1e-5),
    "bf16": (2e-2, 4.2 * LR, LR / 10),
    "fp16": (5e-3, 4.2 * LR, LR / 10),
}
MOMENTS = {"full": 0.0, "bf16": LR / 2**6, "fp16": LR / 2**8, "fp8": LR / 2}
SOAP = {"fp64": 100, "fp32": 100, "bf16": 5, "fp16": 5}


def assert_trains_like_one_process(row, tiny, references, ranks, out, losses, weights) -> None:
    given = [*common(row), *options(row)]
    load_config(tiny.config, given).check_world(world(row))
    ranks(world(row), train, tiny.config, out, given, timeout=120)
    whole = references(row)
    rtol, atol, mean = TOLERANCES[row["training.dtype"]]
    ours, theirs = losses(out), losses(whole)
    assert list(ours) == list(theirs) == [1, 2]
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=rtol)
    more = MOMENTS[row["optimizer.moments_dtype"]]
    times = SOAP[row["training.dtype"]] if row["optimizer.name"] == "soap" else 1
    found, expected = weights(out, 2), weights(whole, 2)
    assert found.keys() == expected.keys()
    names = [name for name in expected if name.startswith(("model/", "ema/"))]
    bound = min(times * atol, 4.2 * LR) + more
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=bound, err_msg=name)
    errors = np.concatenate([np.abs(found[name] - expected[name]).ravel() for name in names])
    assert errors.mean() <= times * mean + more


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if number % 13 == 0 else pytest.mark.campaign)
        for number, row in enumerate(ROWS)
    ],
    ids=label,
)
def test_every_pair_of_settings_trains_like_one_process(
    row, tiny, references, ranks, tmp_path, losses, weights
) -> None:
    assert_trains_like_one_process(row, tiny, references, ranks, tmp_path, losses, weights)


@pytest.mark.campaign
@pytest.mark.campaign_rows(
    "row", lambda: [row for seed in range(20) for row in trained(8, seed)], ids=label
)
def test_many_combinations_train_like_one_process(
    row, tiny, references, ranks, tmp_path, losses, weights
) -> None:
    assert_trains_like_one_process(row, tiny, references, ranks, tmp_path, losses, weights)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if number % 40 == 0 else pytest.mark.campaign)
        for number, row in enumerate(FOUR_REPLICAS)
    ],
    ids=label,
)
def test_four_replicas_with_all_else_train_like_one_process(
    row, tiny, references, ranks, tmp_path, losses, weights
) -> None:
    assert_trains_like_one_process(row, tiny, references, ranks, tmp_path, losses, weights)


@pytest.mark.parametrize("row", REFUSED, ids=label)
def test_what_can_not_work_is_refused_by_name_whatever_else_is_set(row, tiny) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tiny.config, [*common(row), *options(row)]).check_world(world(row))
    found = [str(problem) for problem in caught.value.problems]
    assert any(f"{field}: " in p and words in p for field, words in reasons(row) for p in found)
