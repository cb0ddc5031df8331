"""A model that does not fit a rank's memory trains where its states are shared out, or elsewhere.

The limit is one of the system: once the ranks have what every run has (imports, groups, threads),
each lowers RLIMIT_DATA to what it has and the budget, and memory beyond it is refused. Files that
are mapped do not count, as the system can write them back and forget them.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

import pytest
import torch
from mt_data_parallel import shard
from mt_model import GPT, gpt, initializer
from mt_optim import DistributedOptimizer, OptimizerConfig, build_optimizer
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import RankPool

RANKS, STEPS = 2, 2
SIZES = {"vocab_size": 512, "hidden_size": 256, "num_heads": 4, "ffn_size": 768, "tied": False}
CONFIG, SMALL = (gpt(num_layers=layers, max_sequence_length=32, **SIZES) for layers in (24, 1))
# Bytes per parameter. With gradients in fp32: replicated 18, ZeRO-1 12, fully sharded 9. With
# gradients in bf16: 16, 10, and ZeRO-1 with its states in files 4, beside copies that gloo has of
# what it sums and gathers.
BUDGETS = {torch.float32: 11.0, torch.bfloat16: 9.5}
M_MMAP_THRESHOLD = -3  # of glibc


@pytest.fixture(scope="module")
def ranks():
    """Processes without memory that other tests took and freed, which would not count here."""
    with RankPool() as pool:
        yield pool


def held() -> int:
    """Return what RLIMIT_DATA counts, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def train(state, config, strategy, dtype, *, from_meta=False, folder=None):
    """Return the losses of some steps, and the bytes allocated for them."""
    before = held()
    if from_meta:
        model = GPT(config, state, dtype=torch.bfloat16, device="meta")
        options = {"init": initializer(model, config, state), "device": "cpu"}
    else:
        model, options = GPT(config, state, dtype=torch.bfloat16), {"bucket_size": 2**18}
    settings = OptimizerConfig(lr=1e-3, offload=0 if folder is None else 1, offload_dir=folder)
    losses = []
    options |= {"group": state.group("dp"), "grad_dtype": dtype}
    with shard(model, strategy, **options) as buffer:
        optimizer = DistributedOptimizer(buffer, lambda p: build_optimizer(p, settings, state))
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(RANKS * step + state.rank)
            tokens = torch.randint(0, config.vocab_size, (1, 33), generator=generator)
            batch = {"tokens": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
            buffer.start(1)
            loss = model(None, batch)["lm"] / (32 * RANKS)
            loss.backward()
            buffer.finish()
            optimizer.step()
            losses.append(loss.item())
        return losses, held() - before


def limited(most, strategy, dtype, **how):
    """Train within a budget; return the losses, or what went wrong."""
    # What is freed goes back to the system, and nothing is taken from what others freed before.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with ParallelState(ParallelLayout(dp=RANKS)) as state:
        train(state, SMALL, strategy, dtype)  # groups, threads, and code that is loaded on use
        gc.collect()
        try:
            if most is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (held() + most, hard))
            return train(state, CONFIG, strategy, dtype, **how)
        except (RuntimeError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def parameters() -> int:
    return sum(param.numel() for param in GPT(CONFIG, device="meta").parameters())


def budget(dtype) -> int:
    return int(BUDGETS[dtype] * parameters())


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("optimizer", torch.float32),  # the nearest to the budget
        *(
            pytest.param(*row, marks=pytest.mark.campaign)
            for row in [
                ("none", torch.float32),
                ("none", torch.bfloat16),
                ("optimizer", torch.bfloat16),
            ]
        ),
    ],
)
def test_without_enough_sharing_memory_is_refused(ranks, strategy, dtype):
    results = ranks(RANKS, limited, budget(dtype), strategy, dtype, timeout=90)
    for result in results:
        assert "Cannot allocate memory" in str(result)


def test_the_model_trains_under_full_sharding_within_the_budget(ranks):
    check(ranks, torch.float32, "full", from_meta=True)


@pytest.mark.campaign
def test_the_model_trains_with_states_offloaded_to_files_within_the_budget(ranks, tmp_path):
    check(ranks, torch.bfloat16, "optimizer", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def check(ranks, dtype, strategy, **how) -> None:
    """Compare a run within the budget with the replicated one, which has no limit."""
    most = budget(dtype)
    reference = ranks(RANKS, limited, None, "none", dtype, timeout=90)
    results = ranks(RANKS, lambda: limited(most, strategy, dtype, **how), timeout=90)
    for found, (expected, needed) in zip(results, reference, strict=True):
        assert not isinstance(found, str), found
        losses, taken = found
        assert taken < most < needed / 1.5
        assert losses == expected
