"""Runs of documents with neighbours: alike on every layout, and what they refuse."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from mt_data import DataError, IndexedDataset, IndexedWriter
from mt_files import UserError
from mt_hf import save_pretrained
from mt_model import GPT, gpt
from mt_parallel_state import DistributedEnv
from mt_retro import Database, build_database, find_neighbours
from mt_train import load_config
from mt_train import run as train

CHUNK, LENGTH = 8, 64
LAYOUTS = {
    "tp2": (2, "parallel.tp=2", "parallel.sequence_parallel=true"),
    "cp2": (2, "parallel.cp=2"),
    "pp2": (2, "parallel.pp=2", "training.micro_batch_size=2"),
    "dp2": (2, "training.micro_batch_size=2", "data_parallel.strategy=optimizer"),
    "tp2-cp2": (4, "parallel.tp=2", "parallel.cp=2"),
    "pp3": (3, "parallel.pp=3", "training.micro_batch_size=2"),
    "tp2-pp2": (4, "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.pp=2"),
    "cp2-pp2": (4, "parallel.cp=2", "parallel.pp=2"),
}
IN_CI = ("tp2", "cp2", "pp2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with documents of few different tokens, a database of half of them."""
    path, draw = tmp_path_factory.mktemp("retro"), np.random.default_rng(6)
    for name, count in (("a", 60), ("b", 30), ("library", 80), ("held", 20), ("other", 20)):
        with IndexedWriter(path / name, np.uint16) as writer:
            for _ in range(count):
                writer.add_document(draw.integers(0, 24, draw.choice([0, 1, 7, 8, 20, 90])))
    database = build_database([path / "library", path / "a"], path / "db", chunk=CHUNK)
    for name in ("a", "b", "held"):
        find_neighbours(database, IndexedDataset(path / name), path / f"near-{name}", neighbours=3)
    return path


@pytest.fixture(scope="module")
def options(folder: Path) -> tuple[str, ...]:
    names = ", ".join(f"{folder}/near-{name}" for name in ("a", "b", "held"))
    data = f"{{kind: retro, train: [{folder}/a], validation: {folder}/held, database: {folder}/db"
    return (
        f"data={data}, neighbours: [{names}], overlap: [0.3]}}",
        "model.vocab_size=24",
        f"training.sequence_length={LENGTH}",
        "training.global_batch_size=4",
        "training.micro_batch_size=4",
        "training.dtype=fp64",
        "training.steps=6",
        "optimizer.schedule=constant",
        "optimizer.lr=0.01",
        "evaluation.max_windows=null",
    )


@pytest.fixture(scope="module")
def one_process(tiny, options, tmp_path_factory) -> Path:
    return tiny.train(tmp_path_factory.mktemp("one"), *options)


@pytest.fixture(scope="module")
def begun(tiny, options, tmp_path_factory) -> Path:
    return tiny.train(tmp_path_factory.mktemp("begun"), *options, "training.steps=3")


def evaluated(metrics_of, run: Path) -> dict[str, float]:
    last = [row for row in metrics_of(run) if "val_loss" in row][-1]
    return {name: value for name, value in last.items() if name.startswith("val_")}


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.campaign) for n in LAYOUTS]
)
def test_a_run_resumes_and_evaluates_alike_on_every_layout(
    tiny, options, one_process, begun, tmp_path, losses, metrics_of, layout
) -> None:
    nproc, *own = LAYOUTS[layout]
    run = shutil.copytree(begun, tmp_path / "run")
    tiny.train(run, *options, *own, nproc=nproc)
    ours, theirs = losses(run), losses(one_process)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-9)
    found = evaluated(metrics_of, run)
    assert found == pytest.approx(evaluated(metrics_of, one_process), rel=1e-9)


def test_held_out_loss_is_reported_with_neighbours_without_and_by_overlap(
    one_process, metrics_of
) -> None:
    """This model reads no neighbours, so that masking them changes nothing."""
    found = evaluated(metrics_of, one_process)
    parts = ["val_overlap_0_to_0.3", "val_overlap_0.3_to_1"]
    names = [f"{part}{ending}_loss" for part in parts for ending in ("", "_without_neighbours")]
    assert found.keys() == {"val_loss", "val_without_neighbours_loss", *names}
    assert found["val_without_neighbours_loss"] == found["val_loss"]
    for part in parts:
        assert found[f"{part}_without_neighbours_loss"] == found[f"{part}_loss"]
    assert len(set(found.values())) == 3


def test_rows_of_a_run_have_as_many_neighbours_as_all_folders(tiny, folder, options) -> None:
    from mt_train import Sources, load_config

    find = {"database": Database(folder / "db"), "dataset": IndexedDataset(folder / "b")}
    find_neighbours(**find, out=folder / "fewer", neighbours=2)
    data = load_config(
        tiny.config, [options[0].replace("near-b", "fewer"), *options[1:]]
    ).config.data
    model = load_config(tiny.config, list(options)).model(24)
    sources = {"tokenizer": None, "model": model, "sequence_length": LENGTH, "seed": 1}
    names = Path(data.train[0]), folder / "b"
    for rows in data.datasets(Sources(train=names, num_samples=8, **sources)):
        row = rows.row(0)
        assert row["neighbours"].shape == (LENGTH // CHUNK, 2, 2 * CHUNK)
        assert (row["neighbour_lengths"] > 0).any()
        assert {dim: rows.sizes[dim] for dim in data.sizes(LENGTH)} == data.sizes(LENGTH)


def test_seed_length_blend_and_layout_use_the_stored_neighbours(
    tiny, folder, options, tmp_path, losses
) -> None:
    """Each run reads the folders of one query, in which nothing changes."""
    stored = [path for path in folder.rglob("*") if path.parent != folder]
    before = [path.stat().st_mtime_ns for path in stored]
    blend = options[0].replace(f"train: [{folder}/a]", f"train: [{folder}/a, {folder}/b]")
    found = [
        losses(tiny.train(tmp_path / name, *options, *own, "training.steps=2"))
        for name, own in {
            "first": [],
            "seed": ["training.seed=7"],
            "length": ["training.sequence_length=128"],
            "blend": [blend],
        }.items()
    ]
    assert len({each[2] for each in found}) == len(found)
    assert [path.stat().st_mtime_ns for path in stored] == before


def test_other_data_or_another_database_is_refused_by_name(tiny, folder, options, tmp_path) -> None:
    from mt_parallel_state import DistributedEnv
    from mt_train import load_config, run

    def start(*own: str) -> None:
        run(load_config(tiny.config, [*options, *own]), DistributedEnv(), tmp_path / "run")

    named = options[0].replace(f"{folder}/held", f"{folder}/other", 1)
    with pytest.raises(DataError, match=r"other: no folder has neighbours of this dataset.*near-a"):
        start(named)
    build_database([folder / "other"], tmp_path / "db2", chunk=CHUNK)
    with pytest.raises(DataError, match=r"these neighbours are of another database than .*/db2"):
        start(options[0].replace(f"database: {folder}/db", f"database: {tmp_path}/db2"))
    moved = shutil.copytree(folder, tmp_path / "moved")
    with IndexedWriter(moved / "library", np.uint16, overwrite=True) as writer:
        writer.add_document(range(24))
    with pytest.raises(DataError, match=r"library\.idx: is not the dataset of the database"):
        start(options[0].replace(str(folder), str(moved)))


def test_what_does_not_fit_the_model_is_named(tiny, folder, options) -> None:
    from mt_train import ConfigError, load_config

    def refused(*own: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(tiny.config, [*options, *own]).check_world(1)
        return str(caught.value)

    assert "use 64" in refused("training.sequence_length=60")
    assert "in ascending order" in refused(options[0].replace("[0.3]", "[0.5, 0.3]"))
    assert "mt-retro build made" in refused(options[0].replace(f", database: {folder}/db", ""))
    assert "near-a/missing does not exist" in refused(
        options[0].replace("near-a,", "near-a/missing,")
    )
    cut = load_config(tiny.config, [*options, "training.sequence_length=72", "parallel.cp=2"])
    with pytest.raises(ConfigError, match=r"72 is not divisible by 32, .* use 96"):
        cut.check_world(2)
    assert "folders of data.neighbours 8 and 3" in refused(RETRO.replace("chunk: 8", "chunk: 4"))
    with pytest.raises(ConfigError, match=r"which these rows lack; use data\.kind: retro"):
        load_config(tiny.config, [RETRO]).check_world(1)


RETRO = f"model.retro={{chunk: {CHUNK}, neighbours: 3, encoder_layers: 1, first: 1, every: 1}}"


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.campaign) for n in LAYOUTS]
)
def test_a_model_that_attends_to_neighbours_trains_alike_on_every_layout(
    tiny, options, tmp_path, losses, metrics_of, layout
) -> None:
    nproc, *own = LAYOUTS[layout]
    runs = [
        tiny.train(tmp_path / "one", *options, RETRO),
        tiny.train(tmp_path / "own", *options, RETRO, *own, nproc=nproc),
    ]
    ours, theirs = losses(runs[1]), losses(runs[0])
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-9)
    found = evaluated(metrics_of, runs[0])
    assert found["val_without_neighbours_loss"] != found["val_loss"]
    assert evaluated(metrics_of, runs[1]) == pytest.approx(found, rel=1e-9)


@pytest.mark.campaign
@pytest.mark.parametrize(("nproc", "tp"), [(2, 1), (4, 2)])
def test_a_mixture_of_experts_that_attends_to_neighbours_trains_alike(
    tiny, options, tmp_path, losses, nproc, tp
) -> None:
    given = (*options, RETRO, "model.moe={num_experts: 4, top_k: 2, ffn_size: 16}")
    own = [f"parallel.tp={tp}", "parallel.ep=2", "training.micro_batch_size=2"]
    one = losses(tiny.train(tmp_path / "one", *given))
    run = losses(tiny.train(tmp_path / "own", *given, *own, nproc=nproc))
    np.testing.assert_allclose(list(run.values()), list(one.values()), rtol=1e-9)


OLD = "training.freeze=[embedding, final_norm, 'layers.*mixer*', 'layers.*feed_forward*']"


@pytest.mark.parametrize("source", ["run", "hugging_face"])
def test_new_parts_begin_as_the_model_without_them_and_train_alone(
    source, tiny, options, one_process, tmp_path, losses, metrics_of
) -> None:
    """A decoder becomes a Retro model, of which only what attends to neighbours is new."""
    if source == "run":
        given = (*options, f"checkpoint.load={one_process}", "checkpoint.load_mode=weights")
    else:
        sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_sequence_length": LENGTH}
        model = GPT(gpt(**sizes, vocab_size=384, tied=True), seed=3)
        save_pretrained(model, tmp_path / "model")
        shutil.copy(tiny.config.parent / "data/tokenizer.json", tmp_path / "model")
        sections = yaml.safe_load(tiny.config.read_text())
        sections["model"] = {"from": str(tmp_path / "model"), "vocab_multiple": 1}
        tiny = replace(tiny, config=tmp_path / "run.yaml")
        tiny.config.write_text(yaml.safe_dump(sections))
        given = tuple(each for each in options if not each.startswith("model."))
    still = tiny.train(tmp_path / "still", *given, "optimizer.lr=1e-30", "training.steps=1")
    run = tiny.train(tmp_path / "run", *given, RETRO, OLD)
    assert losses(run)[1] == losses(still)[1]
    begun, found = (evaluated(metrics_of, each) for each in (still, run))
    assert found["val_without_neighbours_loss"] == pytest.approx(begun["val_loss"], rel=1e-12)
    assert found["val_loss"] != pytest.approx(begun["val_loss"], rel=1e-4)
    adapters = load_config(tiny.config, [*given, RETRO, "lora={rank: 2}"])
    with pytest.raises(UserError, match=r"no parts of model\.retro"):
        train(adapters, DistributedEnv(), tmp_path / "adapters")


def begin_and_go_on(tiny, options, out: Path, nproc: int, first, then) -> Path:
    tiny.train(out, *options, RETRO, *first, "training.steps=3", nproc=nproc)
    return tiny.train(out, *options, RETRO, *then, nproc=nproc)


SHARDED = ["training.micro_batch_size=2", "data_parallel.strategy=full"]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (LAYOUTS["tp2"][1:], LAYOUTS["cp2"][1:]),
        pytest.param(LAYOUTS["cp2"][1:], SHARDED, marks=pytest.mark.campaign),
        pytest.param(SHARDED, LAYOUTS["pp2"][1:], marks=pytest.mark.campaign),
    ],
)
def test_checkpoints_of_a_model_with_neighbours_go_on_with_another_layout(
    tiny, options, tmp_path, losses, first, then
) -> None:
    one = tiny.train(tmp_path / "one", *options, RETRO)
    run = begin_and_go_on(tiny, options, tmp_path / "run", 2, first, then)
    np.testing.assert_allclose(list(losses(run).values()), list(losses(one).values()), rtol=1e-9)


@pytest.mark.campaign
def test_adapters_of_a_model_with_neighbours_train_alike(tiny, options, tmp_path, losses) -> None:
    """The projections to neighbours have adapters too; the base is frozen."""
    base = tiny.train(tmp_path / "base", *options, RETRO)
    own = [RETRO, "lora={rank: 2, layers: ['*.cross.*', '*.mixer.*']}"]
    own += [f"checkpoint.load={base}", "checkpoint.load_mode=weights"]
    runs = [
        tiny.train(tmp_path / "one", *options, *own),
        tiny.train(tmp_path / "tp2", *options, *own, *LAYOUTS["tp2"][1:], nproc=2),
    ]
    ours, theirs = losses(runs[1]), losses(runs[0])
    assert len(set(theirs.values())) > 1
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-9)


@pytest.mark.campaign
@pytest.mark.parametrize("layout", [*IN_CI, "dp2"])
def test_kills_of_a_run_with_neighbours_change_no_neighbour_and_no_bit(
    layout, tiny, options, kills_change_nothing
) -> None:
    arrays = kills_change_nothing(tiny, [*options, RETRO], LAYOUTS, layout, 25)
    assert {"neighbours", "neighbour_lengths"} <= arrays
