"""The layout never changes the numbers: every layout against one process, from one YAML."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

# name: (processes, data-parallel size, overrides)
LAYOUTS = {
    "tp2": (2, 1, ["parallel.tp=2"]),
    "pp2": (2, 1, ["parallel.pp=2"]),
    "dp2": (2, 2, []),
    "tp2-pp2": (4, 1, ["parallel.tp=2", "parallel.pp=2"]),
    "tp2-dp2": (4, 2, ["parallel.tp=2"]),
    "tp2-cp2": (4, 1, ["parallel.tp=2", "parallel.cp=2"]),
    "cp4": (4, 1, ["parallel.cp=4"]),
    "cp2-pp2": (4, 1, ["parallel.cp=2", "parallel.pp=2"]),
    "tp2-pp2-dp2": (8, 2, ["parallel.tp=2", "parallel.pp=2"]),
}
SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
ROWS = [(name, sequence_parallel) for name in LAYOUTS for sequence_parallel in (False, True)]
ROWS = [(name, sp) for name, sp in ROWS if not sp or "tp2" in name]


# One row for each layout, with both values of each setting among them: mt-train's combinations have
# the pairs of settings, and the campaign the whole cross.
IN_CI = {
    ("tp2", True, "fp64", False, 4),
    ("dp2", False, "fp32", True, 1),
    ("cp2-pp2", False, "fp64", True, 4),
    ("tp2-pp2-dp2", True, "fp64", False, 4),
}

CASES = [
    pytest.param(
        layout,
        sequence_parallel,
        dtype,
        tied,
        accumulation,
        id=f"{layout}-{'sp-' if sequence_parallel else ''}{dtype}-"
        f"{'tied' if tied else 'untied'}-{accumulation}",
        marks=()
        if (layout, sequence_parallel, dtype, tied, accumulation) in IN_CI
        else pytest.mark.campaign,
    )
    for layout, sequence_parallel in ROWS
    for dtype in ("fp32", "fp64")
    for tied in (True, False)
    for accumulation in (1, 4)
]
# Per-step relative loss tolerance, and absolute tolerance of final parameters.
TOLERANCE = {"fp32": (1e-5, 1e-4), "fp64": (1e-10, 1e-9)}


@pytest.fixture(scope="module")
def one_process(tiny, tmp_path_factory):
    """One process, the whole batch in one micro-batch, by what else is given."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*options: str) -> Path:
        if options not in made:
            made[options] = tiny.train(tmp_path_factory.mktemp("one"), *options)
        return made[options]

    return get


@pytest.fixture(scope="module")
def reference(one_process):
    """One process by dtype and by whether the head is tied."""
    return lambda dtype, tied: one_process(
        f"training.dtype={dtype}", f"model.tied={str(tied).lower()}"
    )


def assert_same_run(run, expected, dtype, losses, held_out, arrays) -> None:
    rtol, atol = TOLERANCE[dtype]
    ours, theirs = losses(run), losses(expected)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=rtol)
    np.testing.assert_allclose(held_out(run), held_out(expected), rtol=10 * rtol)
    parameters, wanted = arrays(run), arrays(expected)
    assert parameters.keys() == wanted.keys()
    for name, value in parameters.items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(("layout", "sequence_parallel", "dtype", "tied", "accumulation"), CASES)
def test_every_layout_trains_like_one_process(
    dtype,
    layout,
    sequence_parallel,
    tied,
    accumulation,
    tiny,
    reference,
    tmp_path,
    losses,
    held_out,
    arrays,
) -> None:
    nproc, dp, overrides = LAYOUTS[layout]
    run = tiny.train(
        tmp_path,
        *overrides,
        f"training.dtype={dtype}",
        f"model.tied={str(tied).lower()}",
        f"training.micro_batch_size={8 // dp // accumulation}",
        *([SEQUENCE_PARALLEL] if sequence_parallel else []),
        nproc=nproc,
    )
    assert_same_run(run, reference(dtype, tied), dtype, losses, held_out, arrays)


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [
        ("fp64", False),
        pytest.param("fp32", True, marks=pytest.mark.campaign),
        pytest.param("fp32", False, marks=pytest.mark.campaign),
        pytest.param("fp64", True, marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize(
    "algorithm",
    [
        *(
            pytest.param(n, marks=pytest.mark.campaign)
            for n in ("all_gather", "ulysses", "hierarchical")
        ),
        "[ring, ulysses, hierarchical, ring]",
    ],
)
def test_every_context_algorithm_trains_like_one_process(
    dtype, algorithm, tied, tiny, reference, tmp_path, losses, held_out, arrays
) -> None:
    options = ["parallel.cp=4", "parallel.cp_inner=2", f"parallel.cp_algorithm={algorithm}"]
    options += [f"training.dtype={dtype}", f"model.tied={str(tied).lower()}"]
    run = tiny.train(tmp_path, *options, nproc=4)
    assert_same_run(run, reference(dtype, tied), dtype, losses, held_out, arrays)


@pytest.mark.parametrize(
    "options",
    [
        ["parallel.tp=2", "parallel.pp=2", SEQUENCE_PARALLEL],
        pytest.param(["parallel.tp=2", "parallel.cp=2"], marks=pytest.mark.campaign),
        pytest.param(["parallel.pp=2", "training.recompute=full"], marks=pytest.mark.campaign),
        pytest.param(["training.recompute=selective"], marks=pytest.mark.campaign),
        pytest.param(["training.compile=true"], marks=pytest.mark.campaign),
    ],
    ids="-".join,
)
def test_fused_kernels_train_like_those_of_one_process(
    options, tiny, reference, tmp_path, losses, held_out, arrays
) -> None:
    options = [*options, "model.kernels=fused", "training.dtype=fp64", "model.tied=false"]
    ranks = 2 ** sum("=2" in option for option in options)
    run = tiny.train(tmp_path, *options, nproc=ranks)
    assert_same_run(run, reference("fp64", False), "fp64", losses, held_out, arrays)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
@pytest.mark.campaign  # the compiler takes seconds in every rank
@pytest.mark.parametrize(
    "options",
    [
        ["parallel.tp=2", "parallel.pp=2", SEQUENCE_PARALLEL, "pipeline.schedule=zb-h1"],
        ["parallel.tp=2", "parallel.cp=2"],
        ["parallel.dp=2", "parallel.pp=2", "training.micro_batch_size=2"],
        ["parallel.dp=2", "data_parallel.strategy=optimizer_gradients"],
        ["parallel.dp=2", "data_parallel.strategy=full"],
        ["parallel.tp=2", "training.recompute=full"],
        ["parallel.pp=2", "pipeline.schedule=dualpipe-v", "training.micro_batch_size=2"],
    ],
    ids="-".join,
)
def test_compiled_layers_train_like_one_process(
    options, tiny, reference, tmp_path, losses, held_out, arrays
) -> None:
    ranks = 2 ** sum(option.startswith("parallel.") and "=2" in option for option in options)
    if not any("micro_batch" in option for option in options):
        options = [*options, "training.micro_batch_size=4"]
    options = [*options, "training.compile=true", "training.dtype=fp64", "model.tied=false"]
    run = tiny.train(tmp_path, *options, nproc=ranks, backend="aot_eager")
    assert_same_run(run, reference("fp64", False), "fp64", losses, held_out, arrays)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ["step", "parallel.pp=2", "pipeline.schedule=interleaved", "pipeline.chunks=2"],
            marks=pytest.mark.campaign,
        ),
        ["layer", "data_parallel.strategy=optimizer", "dp=2"],
        pytest.param(
            ["layer", "parallel.tp=2", "parallel.pp=2", SEQUENCE_PARALLEL],
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            ["step", "data_parallel.strategy=optimizer", "dp=2"], marks=pytest.mark.campaign
        ),
        pytest.param(["layer", "parallel.pp=2", "dp=2"], marks=pytest.mark.campaign),
        pytest.param(["step", "parallel.tp=2", "parallel.pp=2"], marks=pytest.mark.campaign),
        pytest.param(["layer", "parallel.tp=2", "dp=2"], marks=pytest.mark.campaign),
    ],
    ids="-".join,
)
def test_graphs_have_the_bits_of_the_same_layout_without(
    options, tiny, tmp_path, losses, held_out, arrays
) -> None:
    graphs, *options = options
    ranks = 2 ** sum(option.endswith("p=2") for option in options)
    options = [option for option in options if option != "dp=2"]
    options += ["training.dtype=fp32", "training.micro_batch_size=2", "training.steps=3"]
    run = tiny.train(tmp_path / "run", *options, f"training.cuda_graphs={graphs}", nproc=ranks)
    plain = tiny.train(tmp_path / "plain", *options, nproc=ranks)
    assert losses(run) == losses(plain)
    assert held_out(run) == held_out(plain)
    found, expected = arrays(run, 3), arrays(plain, 3)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize(
    "sequence_parallel", [pytest.param(False, marks=pytest.mark.campaign), True]
)
def test_more_ranks_than_key_value_heads_train_like_one_process(
    sequence_parallel, tiny, reference, tmp_path, losses, held_out, arrays
) -> None:
    options = ["parallel.tp=4", "training.dtype=fp64", "model.tied=false"]
    options += [SEQUENCE_PARALLEL] if sequence_parallel else []
    run = tiny.train(tmp_path, *options, nproc=4)
    assert_same_run(run, reference("fp64", False), "fp64", losses, held_out, arrays)


@pytest.mark.parametrize(
    ("recompute", "options"),
    [
        pytest.param(
            "selective",
            ["parallel.pp=2", "pipeline.schedule=zb-h1", SEQUENCE_PARALLEL],
            marks=pytest.mark.campaign,
        ),
        ("full", ["parallel.cp=2"]),
        pytest.param(
            "full", ["parallel.pp=2", "pipeline.schedule=zb-v"], marks=pytest.mark.campaign
        ),
    ],
)
def test_recomputation_trains_like_one_process(
    recompute, options, tiny, reference, tmp_path, losses, held_out, arrays
) -> None:
    options = [*options, "parallel.tp=2", f"training.recompute={recompute}", "training.dtype=fp64"]
    options += ["model.tied=true", "training.micro_batch_size=2"]
    run = tiny.train(tmp_path, *options, nproc=4)
    assert_same_run(run, reference("fp64", True), "fp64", losses, held_out, arrays)


OPTIONS = ["model.dropout=0.1", "model.positions=learned", "model.gated=false"]
AXES = ("parallel.cp=2", "parallel.pp=2")


@pytest.mark.parametrize(
    ("options", "other"),
    [
        (OPTIONS, "parallel.cp=2"),
        *(pytest.param(OPTIONS[:1], axis, marks=pytest.mark.campaign) for axis in AXES),
        *(pytest.param(OPTIONS[1:2], axis, marks=pytest.mark.campaign) for axis in AXES),
        *(pytest.param(OPTIONS[2:], axis, marks=pytest.mark.campaign) for axis in AXES),
    ],
)
def test_model_options_keep_parity(
    options, other, tiny, tmp_path, losses, held_out, arrays
) -> None:
    expected = tiny.train(tmp_path / "one", *options, "training.dtype=fp64")
    run = tiny.train(
        tmp_path / "four",
        *options,
        "training.dtype=fp64",
        "training.micro_batch_size=2",
        "parallel.tp=2",
        other,
        SEQUENCE_PARALLEL,
        nproc=4,
    )
    assert_same_run(run, expected, "fp64", losses, held_out, arrays)


@pytest.mark.parametrize(
    ("nproc", "options"),
    [
        (4, ["parallel.tp=2", "parallel.pp=2", "pipeline.schedule=zb-v", SEQUENCE_PARALLEL]),
        pytest.param(
            4, ["parallel.pp=2", "data_parallel.strategy=optimizer"], marks=pytest.mark.campaign
        ),
        pytest.param(4, ["parallel.pp=2", "parallel.cp=2"], marks=pytest.mark.campaign),
        pytest.param(
            2, ["parallel.pp=2", "pipeline.schedule=dualpipe"], marks=pytest.mark.campaign
        ),
        pytest.param(2, ["data_parallel.strategy=full"], marks=pytest.mark.campaign),
        pytest.param(
            *(2, ["parallel.pp=2", "pipeline.schedule=dualpipe", "training.recompute=full"]),
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["tp2-zb-v", "pp2-dp2", "cp2-pp2", "dualpipe", "full", "dualpipe-recompute"],
)
def test_a_table_that_all_stages_share_trains_like_one_process(
    nproc, options, tiny, one_process, tmp_path, losses, held_out, arrays
) -> None:
    bias = "{type: relative, buckets: 8, max_distance: 20}"
    common = ["model.positions=none", f"model.score_bias={bias}"]
    common += ["training.dtype=fp64", "model.tied=true"]
    expected = one_process(*common)
    run = tiny.train(
        tmp_path / "run", *common, *options, "training.micro_batch_size=2", nproc=nproc
    )
    assert "model/score_tables.relative.weight" in arrays(run)
    assert_same_run(run, expected, "fp64", losses, held_out, arrays)


@pytest.mark.parametrize(
    "other", [pytest.param("parallel.cp=2", marks=pytest.mark.campaign), "parallel.pp=2"]
)
def test_ropes_of_the_length_keep_parity(other, tiny, tmp_path, losses, held_out, arrays) -> None:
    rope = "{fraction: 0.5, scaling: {type: dynamic, factor: 2.0, original_length: 8}}"
    common = [f"model.rope={rope}", "training.dtype=fp64"]
    expected = tiny.train(tmp_path / "one", *common)
    options = ["parallel.tp=2", other, SEQUENCE_PARALLEL, "training.micro_batch_size=2"]
    run = tiny.train(tmp_path / "four", *common, *options, nproc=4)
    assert_same_run(run, expected, "fp64", losses, held_out, arrays)


@pytest.mark.campaign  # mt-train's combinations have rows in bf16
def test_bf16_layouts_agree_to_bf16_accuracy(tiny, tmp_path, losses) -> None:
    one = losses(tiny.train(tmp_path / "one", "training.dtype=bf16"))
    four = losses(
        tiny.train(
            tmp_path / "four",
            "training.dtype=bf16",
            "parallel.tp=2",
            "parallel.pp=2",
            "training.micro_batch_size=2",
            nproc=4,
        )
    )
    np.testing.assert_allclose(list(four.values()), list(one.values()), rtol=2e-2)


def test_a_checkpoint_of_tp2_pp2_resumes_on_one_process_and_on_dp2(
    tiny, reference, tmp_path, losses, held_out, arrays
) -> None:
    saved = tiny.train(
        tmp_path / "saved",
        "parallel.tp=2",
        "parallel.pp=2",
        "training.steps=4",
        "optimizer.schedule=constant",
        nproc=4,
    )
    whole = tiny.train(tmp_path / "whole", "optimizer.schedule=constant")
    for nproc in (1, 2):
        run = tiny.train(
            tmp_path / f"resumed{nproc}",
            "optimizer.schedule=constant",
            f"training.micro_batch_size={8 // nproc}",
            f"checkpoint.load={saved}",
            nproc=nproc,
        )
        steps = losses(run)
        assert list(steps) == list(range(5, 9))
        expected = losses(whole)
        np.testing.assert_allclose(
            list(steps.values()), [expected[step] for step in steps], rtol=1e-5
        )
        wanted = arrays(whole)
        for name, value in arrays(run).items():
            np.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "algorithm"),
    [
        pytest.param("tp2-pp2", "ring", marks=pytest.mark.campaign),
        ("cp4", "[ring, ulysses, hierarchical, all_gather]"),
        pytest.param("tp2-dp2", "ring", marks=pytest.mark.campaign),
        pytest.param("tp2-cp2", "ring", marks=pytest.mark.campaign),
    ],
)
def test_checked_collectives_change_no_bit(layout, algorithm, tiny, tmp_path, losses) -> None:
    nproc, dp, overrides = LAYOUTS[layout]
    options = [*overrides, f"training.micro_batch_size={4 // dp}"]
    options += [f"parallel.cp_algorithm={algorithm}", "parallel.cp_inner=2"]
    options += [SEQUENCE_PARALLEL] if "tp2" in layout else []
    plain = tiny.train(tmp_path / "plain", *options, "training.steps=5", nproc=nproc)
    checked = tiny.train(
        tmp_path / "checked", *options, "training.steps=5", "parallel.check_timeout=30", nproc=nproc
    )
    assert losses(checked) == losses(plain)


CAMPAIGN = pytest.mark.campaign
# name: (processes, overrides) of layouts on which each optimizer has to be one process's.
OPTIMIZERS = [
    ("muon", 2, ["parallel.tp=2", SEQUENCE_PARALLEL]),
    ("muon", 2, ["parallel.pp=2"]),
    ("muon", 2, ["data_parallel.strategy=optimizer", "training.micro_batch_size=4"]),
    ("muon", 4, ["parallel.tp=4", "optimizer.muon_tp=distributed"]),
    ("adaptive_muon", 2, ["parallel.tp=2", "optimizer.muon_tp=distributed"]),
    ("lion", 2, ["data_parallel.strategy=optimizer", "training.micro_batch_size=4"]),
    ("sgd", 2, ["parallel.tp=2"]),
    ("soap", 2, ["parallel.tp=2", SEQUENCE_PARALLEL]),
    ("soap", 2, ["data_parallel.strategy=optimizer", "training.micro_batch_size=4"]),
    ("soap", 4, ["parallel.tp=4"]),
]


@pytest.mark.parametrize(
    ("name", "nproc", "options"),
    [
        pytest.param(
            *row,
            id=f"{row[0]}-{row[2][0].split('.')[1]}",
            # The others are among mt-train's combinations and the runs that wander.
            marks=() if row[:2] == ("muon", 2) and "tp" in row[2][0] else CAMPAIGN,
        )
        for row in OPTIMIZERS
    ],
)
def test_every_optimizer_trains_like_one_process_and_resumes_elsewhere(
    name, nproc, options, tiny, tmp_path, losses, held_out, arrays
) -> None:
    common = ["training.dtype=fp64", f"optimizer.name={name}", "optimizer.schedule=constant"]
    common += ["model.tied=false", "checkpoint.every=4"]
    common += ["optimizer.lr=1e-3"] if name in ("lion", "sgd") else []
    run = tiny.train(tmp_path / "run", *common, *options, nproc=nproc)
    whole = tiny.train(tmp_path / "whole", *common)
    assert_same_run(run, whole, "fp64", losses, held_out, arrays)
    saved = run / "checkpoints" / "step_00000004"
    resumed = tiny.train(tmp_path / "resumed", *common, f"checkpoint.load={saved}")
    rest, expected = losses(resumed), losses(whole)
    np.testing.assert_allclose(list(rest.values()), [expected[s] for s in rest], rtol=1e-9)


def test_the_average_of_weights_is_the_same_on_every_layout_and_resumes_elsewhere(
    tiny, tmp_path, arrays
) -> None:
    common = ["training.dtype=fp64", "optimizer.ema=0.9", "optimizer.schedule=constant"]
    common += ["checkpoint.every=4"]
    whole = tiny.train(tmp_path / "whole", *common)
    sharded = ["parallel.tp=2", "data_parallel.strategy=optimizer", "training.micro_batch_size=4"]
    run = tiny.train(tmp_path / "run", *common, *sharded, nproc=4)
    load = f"checkpoint.load={run / 'checkpoints' / 'step_00000004'}"
    resumed = tiny.train(tmp_path / "resumed", *common, "parallel.pp=2", load, nproc=2)
    expected, weights = arrays(whole, prefix="ema/"), arrays(whole)
    assert {name.replace("ema/", "model/") for name in expected} == set(weights)
    for name, value in expected.items():
        assert not np.array_equal(value, weights[name.replace("ema/", "model/")])
        for other in (run, resumed):
            found = arrays(other, prefix="ema/")[name]
            np.testing.assert_allclose(found, value, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("nproc", "options"),
    [
        pytest.param(2, ["parallel.tp=2", SEQUENCE_PARALLEL], marks=pytest.mark.campaign),
        (4, ["parallel.cp=2", "data_parallel.strategy=optimizer", "training.micro_batch_size=2"]),
        pytest.param(
            *(2, ["parallel.pp=2", "pipeline.schedule=dualpipe", "training.micro_batch_size=2"]),
            marks=pytest.mark.campaign,
        ),
        pytest.param(4, ["parallel.tp=4"], marks=pytest.mark.campaign),
        pytest.param(
            *(2, ["data_parallel.strategy=full", "training.micro_batch_size=4"]),
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["tp2", "cp2-dp2", "dualpipe", "tp4", "full"],
)
def test_qk_clip_is_the_same_on_every_layout(
    nproc, options, tiny, one_process, tmp_path, losses, held_out, arrays
) -> None:
    common = ["training.dtype=fp64", "model.qk_norm=none", "model.tied=false", "model.bias=true"]
    clip = [*common, "optimizer.qk_clip={threshold: 0.05, alpha: 0.3}"]
    run = tiny.train(tmp_path / "run", *clip, *options, nproc=nproc)
    whole, plain = one_process(*clip), one_process(*common)
    assert_same_run(run, whole, "fp64", losses, held_out, arrays)
    assert losses(plain)[1] == losses(whole)[1]
    assert losses(plain)[8] != losses(whole)[8]


def test_an_average_begins_in_a_run_that_had_none(tiny, tmp_path, arrays) -> None:
    common = ["training.dtype=fp64", "optimizer.schedule=constant"]
    first = tiny.train(tmp_path / "first", *common, "training.steps=1")
    load = [f"checkpoint.load={first}", "training.steps=2"]
    second = tiny.train(tmp_path / "second", *common, *load, "optimizer.ema=0.9")
    before, after = arrays(first, step=1), arrays(second, step=2)
    for name, value in arrays(second, step=2, prefix="ema/").items():
        name = name.replace("ema/", "model/")
        mean = 3 / 12 * before[name] + 9 / 12 * after[name]
        np.testing.assert_allclose(value, mean, rtol=1e-12, atol=1e-15, err_msg=name)
    third = tiny.train(tmp_path / "third", *common, f"checkpoint.load={second}")
    assert arrays(third, prefix="ema/") == {}


@pytest.mark.parametrize(
    "moments",
    [*(pytest.param(name, marks=pytest.mark.campaign) for name in ("bf16", "fp16")), "fp8"],
)
def test_moments_in_fewer_bits_resume_bit_equal(moments, tiny, tmp_path, losses) -> None:
    options = [f"optimizer.moments_dtype={moments}", "data_parallel.strategy=optimizer"]
    options += ["training.micro_batch_size=4", "checkpoint.every=4"]
    options += ["optimizer.schedule=constant"]
    whole = tiny.train(tmp_path / "whole", *options, nproc=2)
    saved = whole / "checkpoints" / "step_00000004"
    resumed = tiny.train(tmp_path / "resumed", *options, f"checkpoint.load={saved}", nproc=2)
    rest, expected = losses(resumed), losses(whole)
    assert list(rest) == list(range(5, 9))
    assert list(rest.values()) == [expected[step] for step in rest]


@pytest.mark.parametrize(
    "strategy",
    [
        "optimizer",
        *(
            pytest.param(name, marks=pytest.mark.campaign)
            for name in ("none", "optimizer_gradients", "full")
        ),
    ],
)
def test_where_and_how_states_are_kept_changes_no_bit_and_a_run_can_change_it(
    strategy, tiny, tmp_path, losses, arrays
) -> None:
    common = [f"data_parallel.strategy={strategy}", "training.dtype=bf16", "checkpoint.every=4"]
    common += ["training.micro_batch_size=4", "optimizer.schedule=constant"]
    other = ["optimizer.masters=remainder", "optimizer.offload=0.5"]
    other += [f"optimizer.offload_dir={tmp_path}"]
    plain = tiny.train(tmp_path / "plain", *common, nproc=2)
    kept = tiny.train(tmp_path / "kept", *common, *other, nproc=2)
    assert losses(kept) == losses(plain)
    for step in (4, 8):
        for prefix in ("model/", "optimizer/"):
            ours, theirs = arrays(kept, step, prefix), arrays(plain, step, prefix)
            assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    for source, options in ((plain, other), (kept, [])):
        saved = source / "checkpoints" / "step_00000004"
        out = tmp_path / f"from_{source.name}"
        resumed = tiny.train(out, *common, *options, f"checkpoint.load={saved}", nproc=2)
        assert losses(resumed) == {step: losses(plain)[step] for step in range(5, 9)}


# Every schedule on 2 and 4 ranks, where it can: name, ranks, micro-batches, options.
SCHEDULES = [
    ("gpipe", 2, 4, []),
    ("1f1b", 4, 2, []),
    ("interleaved", 2, 4, ["pipeline.chunks=2"]),
    ("bfs", 2, 4, ["pipeline.chunks=2"]),
    ("zb-h1", 2, 4, []),
    ("zb-h2", 2, 4, []),
    ("zb-v", 2, 4, []),
    ("v-half", 2, 4, []),
    ("v-min", 2, 4, []),
    ("dualpipe", 2, 4, []),
    ("dualpipe", 4, 8, []),
    ("dualpipe-v", 2, 4, []),
    ("zb-h1", 4, 8, ["pipeline.layout=Et|t|t|tL"]),
    ("1f1b", 2, 4, ["pipeline.layout=Ettt|tL"]),
]
# One of each kind; mt-train's combinations have all of them in pairs with other settings.
FOR_CAMPAIGN = ["gpipe", "bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe"]
# CI takes every other one of them with a tied head, and the others without.
TIED_AND_NOT = [
    pytest.param(
        *row,
        tied,
        id=f"{row[0]}-{row[1]}-{'tied' if tied else 'untied'}-{index}",
        marks=()
        if tied == (index % 2 == 0) and row[0] not in FOR_CAMPAIGN and (row[1] == 2 or index == 1)
        else pytest.mark.campaign,
    )
    for index, row in enumerate(SCHEDULES)
    for tied in (True, False)
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "options", "tied"), TIED_AND_NOT)
def test_every_schedule_trains_like_one_process(
    name, stages, microbatches, options, tied, tiny, reference, tmp_path, losses, held_out, arrays
) -> None:
    overrides = [
        "training.dtype=fp64",
        f"model.tied={str(tied).lower()}",
        f"training.micro_batch_size={8 // microbatches}",
        f"pipeline.schedule={name}",
        f"pipeline.stages={stages}",
        f"pipeline.microbatches={microbatches}",
        *options,
    ]
    run = tiny.train(tmp_path / "run", *overrides, nproc=stages)
    assert_same_run(run, reference("fp64", tied), "fp64", losses, held_out, arrays)


@pytest.mark.parametrize(
    ("name", "nproc"),
    [
        ("zb-v", 4),
        pytest.param("dualpipe", 4, marks=pytest.mark.campaign),
        pytest.param("zb-v", 8, marks=pytest.mark.campaign),
        pytest.param("interleaved", 4, marks=pytest.mark.campaign),
    ],
)
def test_a_schedule_goes_with_the_other_axes_and_its_checkpoint_resumes_elsewhere(
    name, nproc, tiny, tmp_path, losses
) -> None:
    options = ["training.dtype=fp64", "training.micro_batch_size=1", "checkpoint.every=4"]
    options += [f"pipeline.schedule={name}", "pipeline.stages=2", "parallel.tp=2"]
    options += [SEQUENCE_PARALLEL, "model.dropout=0.1"]
    saved = tiny.train(tmp_path / "saved", *options, nproc=nproc)
    resumed = tiny.train(
        tmp_path / "resumed",
        "training.dtype=fp64",
        "model.dropout=0.1",
        f"checkpoint.load={saved / 'checkpoints' / 'step_00000004'}",
    )
    whole, rest = losses(saved), losses(resumed)
    assert list(rest) == list(range(5, 9))
    np.testing.assert_allclose(list(rest.values()), [whole[s] for s in rest], rtol=1e-10)
