"""What data-parallel ranks share out changes no number: every strategy against one process."""

from __future__ import annotations

import gc

import mt_train.training.trainer as trainer_module
import numpy as np
import pytest
import torch
import torch.distributed as dist
from mt_parallel_state import DistributedEnv
from mt_testing import RankFailure
from mt_train import load_config, run

STRATEGIES = ("optimizer", "optimizer_gradients", "full")
MICRO = "training.micro_batch_size=1"
# name: (processes, data-parallel size, overrides)
LAYOUTS = {
    "dp2": (2, 2, []),
    "dp4": (4, 4, []),
    "dp4-replicas2": (4, 4, ["data_parallel.replicas=2"]),
    "tp2-dp2": (4, 2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "pp2-dp2": (4, 2, ["parallel.pp=2"]),
    "dp2-cp2": (4, 2, ["parallel.cp=2"]),
    "pp2-dp2-zb-v": (4, 2, ["pipeline.schedule=zb-v", "parallel.pp=2"]),
    "pp2-dp2-dualpipe": (4, 2, ["pipeline.schedule=dualpipe", "parallel.pp=2", MICRO]),
}


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """One process, the whole batch in one micro-batch."""
    out = tmp_path_factory.mktemp("reference")
    return tiny.train(out, "training.dtype=fp64", "model.tied=true")


def strategy_options(strategy, dp):
    return [
        f"data_parallel.strategy={strategy}",
        "training.dtype=fp64",
        "model.tied=true",
        f"training.micro_batch_size={8 // dp // 2 or 1}",
        "parallel.bucket_size=5000",
    ]


# Each strategy and each kind of layout; a campaign has the cross.
IN_CI = {
    ("optimizer_gradients", "dp4-replicas2"),
    ("full", "tp2-dp2"),
    ("optimizer", "dp2-cp2"),
    ("full", "pp2-dp2-zb-v"),
    ("optimizer_gradients", "pp2-dp2-dualpipe"),
}
CASES = [
    pytest.param(
        strategy, layout, marks=() if (strategy, layout) in IN_CI else pytest.mark.campaign
    )
    for layout in LAYOUTS
    for strategy in STRATEGIES
    if (strategy, layout) != ("full", "pp2-dp2-dualpipe")
]


@pytest.mark.parametrize(("strategy", "layout"), CASES)
def test_every_strategy_trains_like_one_process(
    strategy, layout, tiny, reference, tmp_path, losses, held_out, arrays
) -> None:
    nproc, dp, overrides = LAYOUTS[layout]
    run = tiny.train(tmp_path, *strategy_options(strategy, dp), *overrides, nproc=nproc)
    ours, theirs = losses(run), losses(reference)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-10)
    np.testing.assert_allclose(held_out(run), held_out(reference), rtol=1e-9)
    wanted = arrays(reference)
    found = arrays(run)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-9, err_msg=name)


# The strategy and layout that save, and those that go on from there.
RESUMED = [
    ("full", "pp2-dp2", "optimizer_gradients", LAYOUTS["dp4-replicas2"]),
    *(
        pytest.param(*row, marks=pytest.mark.campaign)
        for row in [
            ("optimizer", "dp4", "optimizer", LAYOUTS["tp2-dp2"]),
            ("optimizer", "dp4", "none", (1, 1, [])),
            ("none", "dp2", "optimizer", LAYOUTS["pp2-dp2"]),
            ("optimizer", "dp2", "full", LAYOUTS["tp2-dp2"]),
        ]
    ),
]


@pytest.mark.parametrize(("first", "layout", "second", "other"), RESUMED)
def test_a_checkpoint_of_one_strategy_resumes_under_another(
    first, layout, second, other, tiny, reference, tmp_path, losses, arrays
) -> None:
    nproc, dp, overrides = LAYOUTS[layout]
    options = [*strategy_options(first, dp), *overrides, "checkpoint.every=4"]
    saved = tiny.train(tmp_path / "saved", *options, nproc=nproc)
    moments = arrays(saved, prefix="optimizer/")
    wanted = arrays(reference, prefix="optimizer/")
    assert moments.keys() == wanted.keys()
    for name, value in moments.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-7, atol=1e-9, err_msg=name)
    nproc, dp, overrides = other
    step = saved / "checkpoints" / "step_00000004"
    options = [*strategy_options(second, dp), *overrides, f"checkpoint.load={step}"]
    rest = losses(tiny.train(tmp_path / "resumed", *options, nproc=nproc))
    assert list(rest) == list(range(5, 9))
    whole = losses(reference)
    np.testing.assert_allclose(list(rest.values()), [whole[s] for s in rest], rtol=1e-10)


# name: (processes, data-parallel size, overrides)
OPTIONS = {
    "offload": (2, 2, ["data_parallel.offload=true"]),
    "nothing-overlaps": (2, 2, ["data_parallel.overlap=false", "data_parallel.prefetch=0"]),
    "local-sum": (
        2,
        2,
        ["data_parallel.local_sum=true", "data_parallel.pad_for_bandwidth=true"],
    ),
    "all-with-replicas": (
        4,
        4,
        [
            "data_parallel.replicas=2",
            "data_parallel.offload=true",
            "data_parallel.prefetch=2",
            "data_parallel.local_sum=true",
        ],
    ),
    "all-with-pipeline": (
        4,
        2,
        [
            "parallel.pp=2",
            "pipeline.schedule=zb-h1",
            "data_parallel.offload=true",
            "data_parallel.prefetch=3",
        ],
    ),
}
OPTION_CASES = [
    pytest.param(
        strategy,
        name,
        # The last two have the offloading of the first.
        marks=() if (row + column) % 3 == 0 and row > 1 else pytest.mark.campaign,
    )
    for row, name in enumerate(OPTIONS)
    for column, strategy in enumerate(STRATEGIES)
]


@pytest.mark.parametrize(("strategy", "name"), OPTION_CASES)
def test_where_shares_are_kept_and_how_they_travel_changes_no_number(
    strategy, name, tiny, reference, tmp_path, losses, held_out, arrays
) -> None:
    nproc, dp, overrides = OPTIONS[name]
    run = tiny.train(tmp_path, *strategy_options(strategy, dp), *overrides, nproc=nproc)
    np.testing.assert_allclose(
        list(losses(run).values()), list(losses(reference).values()), rtol=1e-10
    )
    np.testing.assert_allclose(held_out(run), held_out(reference), rtol=1e-9)
    wanted = arrays(reference)
    for array, value in arrays(run).items():
        np.testing.assert_allclose(value, wanted[array], rtol=0, atol=1e-9, err_msg=array)


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(s, marks=() if s == "full" else pytest.mark.campaign) for s in STRATEGIES],
)
def test_shards_as_masters_train_a_bf16_model_bit_for_bit(
    strategy, tiny, tmp_path, losses, arrays
) -> None:
    options = [f"data_parallel.strategy={strategy}", "training.dtype=bf16", MICRO]
    plain = tiny.train(tmp_path / "plain", *options, nproc=2)
    shards = "data_parallel.shard_dtype=fp32"
    masters = tiny.train(tmp_path / "masters", *options, shards, nproc=2)
    assert losses(masters) == losses(plain)
    wanted = arrays(plain)
    for name, value in arrays(masters).items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


def test_local_sums_of_bf16_addends_are_the_same_shared_out_or_not(tiny, tmp_path, losses) -> None:
    sums = ["data_parallel.reduce_dtype=bf16", "data_parallel.local_sum=true", MICRO]
    runs = [
        losses(tiny.train(tmp_path / s, f"data_parallel.strategy={s}", *sums, nproc=2))
        for s in ("none", "optimizer")
    ]
    assert runs[0] == runs[1]
    exact = losses(tiny.train(tmp_path / "exact", MICRO, nproc=2))
    assert exact != runs[0]
    np.testing.assert_allclose(list(runs[0].values()), list(exact.values()), rtol=2e-3)


def _runs_out_of_memory(config, options, out):
    """Run, but on one rank a module of the second step has no memory left."""
    seen = 0

    def count(*_) -> None:
        nonlocal seen
        seen += 1
        if dist.get_rank() == 1 and seen == 60:
            raise torch.OutOfMemoryError("CUDA out of memory")

    env = DistributedEnv(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=dist.get_rank(),
        local_world_size=dist.get_world_size(),
    )
    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        run(load_config(config, options), env, out)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("full", "pp2-dp2"),
        pytest.param("none", "tp2-pp2", marks=pytest.mark.campaign),
    ],
)
def test_a_rank_without_memory_ends_the_run_and_nobody_waits(
    strategy, layout, tiny, ranks, tmp_path
) -> None:
    overrides = {"pp2-dp2": ["parallel.pp=2"], "tp2-pp2": ["parallel.pp=2", "parallel.tp=2"]}
    options = [f"data_parallel.strategy={strategy}", MICRO, *overrides[layout]]
    with pytest.raises(RankFailure) as caught:
        ranks(4, _runs_out_of_memory, tiny.config, options, tmp_path, timeout=60)
    assert caught.value.error_type == "StageError"
    # A peer may report its lost connection first, but the rank that ran out says so itself.
    assert "OutOfMemoryError: CUDA out of memory" in caught.value.tracebacks[1]


def _alive() -> int:
    """Bytes of the fp64 tensors that exist."""
    storages = (
        tensor.untyped_storage()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype == torch.float64
    )
    return sum({storage._cdata: storage.size() for storage in storages}.values())


def _starting(config, options, out):
    """The most bytes alive while parameters get their values, and the bytes of all of them."""
    most, sizes = [], {}
    original = trainer_module.initial_values

    def watched(*args, **kwargs):
        fill, before = original(*args, **kwargs), _alive()

        def fill_and_count(name, param):
            fill(name, param)
            sizes[name] = param.nbytes
            most.append(_alive() - before)

        return fill_and_count

    trainer_module.initial_values = watched
    env = DistributedEnv(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=dist.get_rank(),
        local_world_size=dist.get_world_size(),
    )
    try:
        run(load_config(config, options), env, out)
    finally:
        trainer_module.initial_values = original
    return max(most), sizes


@pytest.mark.parametrize("offload", ["false", pytest.param("true", marks=pytest.mark.campaign)])
def test_no_rank_has_the_whole_model_while_a_run_starts(offload, tiny, ranks, tmp_path) -> None:
    options = ["training.dtype=fp64", "training.steps=1", "model.num_layers=16", MICRO]
    options += ["data_parallel.strategy=full", f"data_parallel.offload={offload}"]
    for most, sizes in ranks(4, _starting, tiny.config, options, tmp_path, timeout=120):
        whole = sum(sizes.values())
        unit = max(sizes.values()) + sum(
            size for name, size in sizes.items() if name.startswith("layers.0.")
        )
        # A quarter of parameters and gradients each, and what is made: a unit and its gradients.
        assert most < whole / 2 + 2.5 * unit < 0.9 * whole
