"""Public functions with one argument that makes no sense: an error of the user's kind, at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from world import BadError, Row, World

NUMBERS = (
    -1,
    0,
    -(10**12),
    10**12,
    10**30,
    0.5,
    -0.0,
    math.nan,
    math.inf,
    1e300,
    None,
    "x",
    "",
    [],
    {},
)
TEXTS = ("", "x", "\0", "../x", "x" * 5000, None, 5, -1.5, [], b"x", ())
OBJECTS = (None, -1, 5, 0.5, "x", "", [], {}, (), object(), [None], {"x": None}, range(0), b"x")
USER_ERRORS = (ValueError, TypeError, OSError, ImportError)

Call = tuple[Callable[..., Any], dict[str, Any]]


def _layouts() -> dict[str, Call]:
    import mt_parallel_state as ps
    import torch

    layout = ps.ParallelLayout(tp=2, dp=2)
    return {
        "ParallelLayout": (
            ps.ParallelLayout,
            {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "order": "tp-cp-ep-dp-pp"},
        ),
        "ParallelState": (
            ps.ParallelState,
            {"layout": ps.ParallelLayout(), "rank": 0, "offset": 0},
        ),
        "coordinates": (layout.coordinates, {"rank": 1}),
        "cut_into_levels": (ps.cut_into_levels, {"ranks": [0, 1, 2, 3], "sizes": [2, 2]}),
        "random_uniform": (ps.random_uniform, {"key": 1, "index": torch.arange(4)}),
        "fill_normal_": (
            ps.fill_normal_,
            {
                "tensor": torch.empty(2, 2),
                "key": 1,
                "std": 0.1,
                "global_shape": (2, 2),
                "offsets": (0, 0),
            },
        ),
        "detect_env": (ps.detect_env, {"environ": {"RANK": "0"}}),
    }


def _data(world: World) -> dict[str, Call]:
    import mt_data as data
    import mt_tokenizer as tokenizers

    indexed = data.IndexedDataset(world.run / "data" / "train")
    samples = data.GPTDataset(indexed, sequence_length=16, num_samples=40, seed=1)
    return {
        "GPTDataset": (
            data.GPTDataset,
            {"indexed": indexed, "sequence_length": 16, "num_samples": 9, "seed": 1},
        ),
        "BatchSampler": (
            data.BatchSampler,
            {
                "dataset": samples,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "dp_rank": 0,
                "dp_size": 2,
            },
        ),
        "BlendedDataset": (
            data.BlendedDataset,
            {"datasets": [samples], "weights": [1.0], "num_samples": 20},
        ),
        "SequentialWindows": (
            data.SequentialWindows,
            {"indexed": indexed, "sequence_length": 16, "stride": 8},
        ),
        "Permutation": (data.Permutation, {"size": 10}),
        "IndexedDataset": (data.IndexedDataset, {"prefix": str(world.run / "data" / "train")}),
        "load_tokenizer": (tokenizers.load_tokenizer, {"path": str(world.run / "tokenizer.json")}),
        "parse_split": (data.parse_split, {"text": "9,1,0"}),
        "split_ranges": (data.split_ranges, {"text": "9,1,0", "count": 10}),
        "token_dtype": (data.token_dtype, {"vocab_size": 300}),
        "train_tokenizer": (
            tokenizers.train_tokenizer,
            {"texts": ["a b c"], "vocab_size": 300, "pattern": "gpt2"},
        ),
    }


def _schedules() -> dict[str, Call]:
    import mt_schedule as schedules

    schedule = schedules.make_schedule("1f1b", 2, 4)
    return {
        "make_schedule": (
            schedules.make_schedule,
            {"name": "1f1b", "stages": 2, "microbatches": 4},
        ),
        "simulate": (schedules.simulate, {"schedule": schedule}),
        "check": (schedules.check, {"schedule": schedule}),
        "balance_layers": (schedules.balance_layers, {"costs": [1.0, 2.0, 1.0], "stages": 2}),
        "split_layers": (schedules.split_layers, {"num_layers": 4, "stages": 2}),
        "parse_layout": (schedules.parse_layout, {"text": "Et|tL", "num_layers": 2, "stages": 2}),
    }


def _training() -> dict[str, Call]:
    import mt_data_parallel as dp
    import mt_optim as optim
    import torch

    params = list(torch.nn.Linear(4, 2).named_parameters())
    return {
        "AdamW": (
            optim.AdamW,
            {"params": params, "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        ),
        "LRSchedule": (
            optim.LRSchedule,
            {"kind": "cosine", "max_lr": 1.0, "min_lr": 0.1, "warmup": 2, "decay": 9},
        ),
        "plan_buckets": (
            dp.plan_buckets,
            {"numels": {"a": 5}, "bucket_size": 100, "world_size": 2},
        ),
        "GradBuffer": (dp.GradBuffer, {"named_params": params, "group": None, "bucket_size": 100}),
    }


def _layers() -> dict[str, Call]:
    import mt_context_parallel as cp
    import mt_fusions as fusions
    import mt_tensor_parallel as tp
    import torch

    q = torch.randn(1, 8, 2, 4)
    loss = {"hidden": torch.randn(4, 8), "weight": torch.randn(16, 8), "labels": torch.arange(4)}
    sizes = {"in_features": 4, "out_features": 4}
    return {
        "ColumnParallelLinear": (tp.ColumnParallelLinear, {**sizes, "group": None}),
        "RowParallelLinear": (tp.RowParallelLinear, {**sizes, "group": None}),
        "VocabParallelEmbedding": (
            tp.VocabParallelEmbedding,
            {"vocab_size": 16, "hidden_size": 4, "group": None},
        ),
        "linear_cross_entropy": (tp.linear_cross_entropy, loss),
        "LossOptions": (
            fusions.LossOptions,
            {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": 16},
        ),
        "add_lora": (
            tp.add_lora,
            {"module": torch.nn.Sequential(tp.ColumnParallelLinear(4, 4)), "rank": 2},
        ),
        "positions": (cp.positions, {"length": 16, "ranks": 2, "rank": 0, "split": "zigzag"}),
        "segments": (cp.segments, {"length": 16, "ranks": 2, "rank": 0, "split": "zigzag"}),
        "pad_length": (cp.pad_length, {"length": 15, "ranks": 2}),
        "AttentionMask": (cp.AttentionMask, {"window": 4}),
        "context_parallel_attention": (
            cp.context_parallel_attention,
            {"q": q, "k": q, "v": q, "group": None},
        ),
    }


def _models(world: World) -> dict[str, Call]:
    import mt_ckpt as ckpt
    import mt_infer as infer
    import mt_model as model
    import torch

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "ffn_size": 64}
    step = world.run / "checkpoints" / "step_00000006"
    return {
        "gpt": (
            model.gpt,
            {
                **sizes,
                "num_kv_heads": 2,
                "max_sequence_length": 32,
                "rope_theta": 1e4,
                "rope": {"theta": 1e4, "scaling": {"type": "linear", "factor": 2.0}},
                "score_bias": {"type": "relative", "buckets": 8},
            },
        ),
        "preset": (model.preset, {"name": "tiny"}),
        "flops_per_token": (model.gpt(**sizes).flops_per_token, {"sequence_length": 16}),
        "validate_split": (model.validate_split, {"config": model.gpt(**sizes), "tp": 2}),
        "Sampling": (infer.Sampling, {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 1}),
        "TensorShard": (
            ckpt.TensorShard,
            {"name": "a", "tensor": torch.ones(2), "global_shape": (4,), "offsets": (2,)},
        ),
        "verify_checkpoint": (ckpt.verify_checkpoint, {"path": str(step)}),
        "latest_checkpoint": (ckpt.latest_checkpoint, {"root": str(step.parent)}),
        "load": (ckpt.load, {"path": str(step)}),
        "save_checkpoint": (
            ckpt.save_checkpoint,
            {
                "root": str(world.folder / "saved"),
                "step": 1,
                "shards": [],
                "metadata": {},
                "keep": 1,
            },
        ),
    }


def _calls(world: World) -> Mapping[str, Call]:
    return {
        **_layouts(),
        **_data(world),
        **_schedules(),
        **_training(),
        **_layers(),
        **_models(world),
    }


def _odd_value(value: object, rng: random.Random) -> object:
    if isinstance(value, (int, float)):
        return rng.choice(NUMBERS)
    return rng.choice(TEXTS if isinstance(value, str) else OBJECTS)


def odd_argument(world: World, rng: random.Random, scratch: Path) -> None:
    """Call a public function with one argument exchanged."""
    calls = _calls(world)
    name = rng.choice(sorted(calls))
    function, arguments = calls[name]
    which = rng.choice(sorted(arguments))
    odd = _odd_value(arguments[which], rng)
    if name == "save_checkpoint" and which == "root" and isinstance(odd, str):
        odd = str(scratch / "x")
    try:
        function(**{**arguments, which: odd})
    except Exception as error:
        said = f"{name}({which}={odd!r:.60}): {type(error).__name__}: {error}"
        if not _is_for_users(error):
            raise BadError(said) from error
        if len(said) > 25_000:
            raise BadError(f"{name}({which}={odd!r:.60}): a message of {len(said)}") from None


def _is_for_users(error: Exception) -> bool:
    """Tell whether an error says what its caller did wrong."""
    ours = type(error).__module__.startswith("mt_")
    no_memory = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return ours or no_memory or isinstance(error, USER_ERRORS)


ROWS = [
    Row(
        name="public functions with an odd argument",
        attack=odd_argument,
        cases=400,
        sample=12,
        seconds=15,
    ),
]
