"""Runs that learn from a teacher: the layout changes nothing, and the student comes nearer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from mt_data import read_documents, standard_library_sources
from mt_hf import export_checkpoint
from mt_parallel_state import ParallelLayout
from mt_tokenizer import load_tokenizer, train_tokenizer
from mt_train import ConfigError, load_config
from mt_train.parts.distillation import Distillation

COMMON = ["training.steps=3", "evaluation.max_windows=4", "optimizer.warmup=1"]
COMMON += ["training.micro_batch_size=2", "model.num_layers=4"]
HEAT = ["distillation.weight=2", "distillation.lm_weight=0.5", "distillation.temperature=2"]
SEQUENCE_PARALLEL = "parallel.sequence_parallel=true"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, ["parallel.tp=2"]),
    "tp2-sp": (2, ["parallel.tp=2", SEQUENCE_PARALLEL]),
    "pp2": (2, ["parallel.pp=2"]),
    "interleaved": (2, ["parallel.pp=2", "pipeline.schedule=interleaved", "pipeline.chunks=2"]),
    "zero-bubble": (2, ["parallel.pp=2", "pipeline.schedule=zb-v"]),
    "dualpipe": (2, ["parallel.pp=2", "pipeline.schedule=dualpipe"]),
    "cp2": (2, ["parallel.cp=2"]),
    "dp2": (2, []),
    "optimizer_gradients": (2, ["data_parallel.strategy=optimizer_gradients"]),
    "full": (2, ["data_parallel.strategy=full"]),
    "recompute": (1, ["training.recompute=full"]),
    "compile": (1, ["training.compile=true"]),
    "packing": (1, ["data.packing=documents"]),
    "ep2": (2, ["parallel.ep=2", "model.moe={num_experts: 4, top_k: 2}"]),
    "kernels": (1, ["model.kernels=fused"]),
    "tp2-sp-pp2": (4, ["parallel.tp=2", "parallel.pp=2", SEQUENCE_PARALLEL]),
}
IN_CI = ("tp2-sp-pp2", "full")
GRID = [
    pytest.param(layout, marks=() if layout in IN_CI else pytest.mark.campaign)
    for layout in LAYOUTS
]


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory):
    """A run of another depth and width, with the student's tokens."""
    wide = ["model.hidden_size=48", "model.num_layers=5", "training.steps=12"]
    return tiny.train(tmp_path_factory.mktemp("teacher"), *wide, "evaluation.max_windows=4")


@pytest.fixture(scope="module")
def one(tiny, teacher, tmp_path_factory):
    """One process with the same teacher."""
    made = {}

    def get(*given):
        if given not in made:
            made[given] = tiny.train(tmp_path_factory.mktemp("one"), *given)
        return made[given]

    return get


def numbers(metrics_of, run):
    names = ("loss", "distillation_loss", "total_loss", "grad_norm")
    names += ("val_loss", "val_distillation_loss")
    return [row[name] for row in metrics_of(run) for name in names if name in row]


@pytest.mark.parametrize("layout", GRID)
def test_every_layout_learns_like_one_process(
    layout, tiny, teacher, one, tmp_path, metrics_of, arrays
) -> None:
    nproc, overrides = LAYOUTS[layout]
    given = [*COMMON, *HEAT, f"distillation.teacher={teacher}", "training.dtype=fp64"]
    same = [each for each in overrides if each.startswith(("data.packing", "model.moe"))]
    run = tiny.train(tmp_path, *given, *overrides, nproc=nproc)
    whole = one(*given, *same)
    found, expected = (numbers(metrics_of, each) for each in (run, whole))
    assert len(found) > 12
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    ours, theirs = arrays(run, 3, prefix=""), arrays(whole, 3, prefix="")
    assert ours.keys() == theirs.keys()  # nothing of the teacher
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-6, atol=1e-9, err_msg=name)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(
    tiny, teacher, tmp_path, metrics_of
) -> None:
    like = ["model.hidden_size=48", "model.num_layers=5", f"checkpoint.load={teacher}"]
    like += ["checkpoint.load_mode=weights", f"distillation.teacher={teacher}"]
    alone = ["distillation.lm_weight=0", "optimizer.weight_decay=0", "training.dtype=fp64"]
    run = tiny.train(tmp_path, *COMMON[:-1], *like, *alone)
    rows = metrics_of(run)
    assert all(row["distillation_loss"] < 1e-12 for row in rows if "loss" in row)
    assert all(row["grad_norm"] < 1e-6 for row in rows if "grad_norm" in row)


def test_a_rounded_student_comes_nearer_to_its_teacher_and_goes_on_with_the_same_bits(
    tiny, teacher, tmp_path, metrics_of, arrays
) -> None:
    folder, rules = tmp_path / "folder", tmp_path / "rules.yaml"
    export_checkpoint(teacher, folder)
    rules.write_text("rules: [{name: '*head*', optional: true}, {weight: int4-g16}]")
    like = ["model.hidden_size=48", "model.num_layers=5", f"checkpoint.load={teacher}"]
    like += ["checkpoint.load_mode=weights", f"distillation.teacher={folder}"]
    like += [f"quantization.config={rules}", "optimizer.schedule=constant", "optimizer.lr=1e-3"]
    like += ["evaluation.max_windows=8"]
    taught = [*like, "distillation.lm_weight=0"]
    first = tiny.train(tmp_path / "run", *taught, "training.steps=6")
    run = tiny.train(tmp_path / "run", *taught, "training.steps=12")
    whole = tiny.train(tmp_path / "whole", *taught, "training.steps=12")
    alone = tiny.train(tmp_path / "alone", *like, "distillation.weight=1e-9", "training.steps=12")
    apart, of_text = (_last(metrics_of(each), "val_distillation_loss") for each in (run, alone))
    assert 0 < apart < 0.7 * of_text
    assert first == run
    assert _last(metrics_of(whole), "val_distillation_loss") == apart
    found, expected = (arrays(each, 12, prefix="") for each in (run, whole))
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def _last(rows, name):
    return [row[name] for row in rows if name in row][-1]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["model.vocab_size=512"], "512; use a teacher with the same tokenizer"),
        (["training.sequence_length=64"], "training.sequence_length is 64"),
        (["parallel.pp=8", "model.num_layers=8"], "does not fit the layout"),
        (["training.cuda_graphs=layer"], "does not go with distillation.teacher"),
        (["distillation.temperature=0"], "distillation.temperature"),
        (["distillation.teacher=/nowhere"], "does not exist"),
        (["distillation.teacher=null", "distillation.weight=2"], "needs distillation.teacher"),
    ],
    ids=str,
)
def test_a_teacher_that_does_not_fit_is_refused_before_anything_is_written(
    given, text, tiny, teacher, tmp_path
) -> None:
    out = tmp_path / "out"
    layout = ParallelLayout(pp=8 if "parallel.pp=8" in given else 1)
    with pytest.raises(ConfigError, match=text):
        check(load_config(tiny.config, [f"distillation.teacher={teacher}", *given]), layout)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["run", "folder", "folder without a tokenizer"])
def test_a_teacher_of_another_tokenizer_is_refused_and_one_without_is_said(
    kind, tiny, teacher, tmp_path
) -> None:
    folder = teacher
    if kind != "run":
        folder = tmp_path / "folder"
        export_checkpoint(teacher, folder)
    other = train_tokenizer(
        (document.text for document in read_documents(standard_library_sources()[30:40])), 384
    )
    other.save(tmp_path / "other.json")
    given = [f"distillation.teacher={folder}", f"data.tokenizer={tmp_path / 'other.json'}"]
    own = tiny.config.parent / "data" / "tokenizer.json"
    if kind == "folder without a tokenizer":
        (folder / "tokenizer.json").unlink()
        check(load_config(tiny.config, given), ParallelLayout())
        assert "no tokenizer" in "".join(
            Distillation.lines(SimpleNamespace(_section=SimpleNamespace(teacher=str(folder))))
        )
        return
    with pytest.raises(ConfigError, match=r"distillation\.teacher: ") as caught:
        check(load_config(tiny.config, given), ParallelLayout())
    digests = [other.sha256, load_tokenizer(own).sha256]
    assert all(digest in str(caught.value) for digest in digests)


def check(loaded, layout):
    model = loaded.model(384)
    tokenizer = load_tokenizer(loaded.config.data.tokenizer)
    Distillation.check(loaded, model, tokenizer)
    Distillation.check_layout(loaded, model, layout)
