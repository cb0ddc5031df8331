"""A run whose checkpoints are in an object store ends in the bits of one with a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mt_testing import KillAt, RankDied, UnsteadyStore, unsteady_store

OPTIONS = (
    "training.steps=4",
    "training.micro_batch_size=4",
    "checkpoint.every=2",
    "checkpoint.keep=2",
)


@pytest.fixture(scope="module")
def server() -> Iterator[UnsteadyStore]:
    with unsteady_store() as found:
        yield found


@pytest.fixture
def store(server, monkeypatch) -> Iterator[UnsteadyStore]:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    server.fail_some(0.05, seed=0)
    yield server
    server.fault = None


def train(tiny, store: UnsteadyStore, out: Path, *overrides: str, on_event: Any = None) -> None:
    """Train on two ranks, each of which keeps a shard of the moments."""
    config, variables = tiny.config, store.variables

    def body() -> None:
        import torch.distributed as dist
        from mt_parallel_state import DistributedEnv
        from mt_train import load_config, run

        rank = dist.get_rank()
        env = DistributedEnv(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            chosen = [*OPTIONS, "data_parallel.strategy=optimizer", *overrides]
            run(load_config(config, chosen), env, out, on_event=on_event)

    tiny.ranks(2, body, timeout=240)


def everything(root: Any) -> dict[str, bytes]:
    """Return the bytes of every array of the last step."""
    import torch
    from mt_ckpt import TensorShard, open_arrays

    found: dict[str, bytes] = {}
    with open_arrays(root) as arrays:
        for name, spec in arrays.manifest.arrays.items():
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            arrays.fill(TensorShard(name, tensor))
            found[name] = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


@pytest.mark.parametrize(
    ("point", "background"),
    [
        ("save.before_rename", True),
        pytest.param("save.data", False, marks=pytest.mark.campaign),
        pytest.param("save.after_rename", True, marks=pytest.mark.campaign),
    ],
)
def test_a_run_that_is_killed_in_a_save_ends_in_the_bits_of_a_local_one(
    point, background, tiny, store, tmp_path, losses
) -> None:
    from mt_ckpt import inspect_checkpoint, verify_checkpoint

    local, out, root = tmp_path / "local", tmp_path / "run", f"s3://bucket/{point}/checkpoints"
    train(tiny, store, local)
    stored = (f"checkpoint.dir={root}", f"checkpoint.async={str(background).lower()}")
    with pytest.raises(RankDied):
        train(tiny, store, out, *stored, on_event=KillAt(point, rank=0, nth=2))
    train(tiny, store, out, *stored)
    assert not (out / "checkpoints").exists()
    assert losses(out) == losses(local)
    assert verify_checkpoint(root) == []
    assert inspect_checkpoint(root).step == 4
    assert everything(root) == everything(local / "checkpoints")
    # Another run starts from it, on the same ranks.
    train(tiny, store, tmp_path / "next", f"checkpoint.load={root}", "training.steps=5")
    assert inspect_checkpoint(tmp_path / "next/checkpoints").step == 5
