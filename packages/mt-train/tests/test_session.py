"""One run on one rank: continued to the same bits, with changes, from weights alone."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import yaml
from mt_files import UserError
from mt_testing import sample
from mt_train import ConfigError, load_config
from mt_train.reporting.history import read_history
from mt_train.session.saved import ResumeError, read_saved
from mt_train.session.starting import find_start

MIX = "data.train=[{data}/a,{data}/b]"


class InterruptError(Exception):
    """Stands for a kill: nothing of the run's own handles it."""


def interrupt_at(step: int):
    count = 0

    def on_event(name: str) -> None:
        nonlocal count
        count += name == "train.update"
        if count == step:
            raise InterruptError

    return on_event


def assert_same_run(out: Path, expected: Path, step: int, losses, weights) -> None:
    assert losses(out) == losses(expected)
    ours, theirs = weights(out, step), weights(expected, step)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    tiny.run(out)
    return out


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_an_interrupted_run_continues_to_the_same_bits(
    tiny, finished, tmp_path, losses, weights
) -> None:
    with pytest.raises(InterruptError):
        tiny.run(tmp_path, "checkpoint.every=2", on_event=interrupt_at(3))
    outcome = tiny.run(tmp_path)
    assert outcome.step == 4
    assert not outcome.stopped
    assert_same_run(tmp_path, finished, 4, losses, weights)


def test_a_finished_run_says_so_and_changes_nothing(tiny, copy, capsys) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    outcome = tiny.run(copy, "training.steps=2", "optimizer.lr=1e-4")
    assert "finished" in capsys.readouterr().out
    assert outcome.evaluation["step"] == 4
    after = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert after == before


def test_another_evaluation_of_a_finished_run_is_made_and_said(tiny, copy, capsys, rows) -> None:
    tiny.run(copy, "evaluation.max_windows=2")
    assert "finished at step 4; evaluating" in capsys.readouterr().out
    assert sum("val_loss" in row for row in rows(copy)) == 1
    assert yaml.safe_load((copy / "config.yaml").read_text())["evaluation"]["max_windows"] == 4


def test_changes_are_said_and_kept_with_their_step(tiny, copy, capsys) -> None:
    tiny.run(copy, "training.steps=6", "optimizer.lr=1e-3")
    printed = capsys.readouterr().out
    assert "from step 5 on: training.steps: 4 -> 6" in printed
    assert "from step 5 on: optimizer.lr: 0.01 -> 0.001" in printed
    first, second = read_history(copy / "history.jsonl")
    assert (first["step"], second["step"]) == (0, 4)
    assert second["changes"] == ["training.steps: 4 -> 6", "optimizer.lr: 0.01 -> 0.001"]
    assert first["config"]["training"]["steps"] == 4
    assert yaml.safe_load((copy / "config.yaml").read_text()) == second["config"]
    tiny.run(copy, "training.steps=7", "optimizer.lr=1e-3")
    assert [row["step"] for row in read_history(copy / "history.jsonl")] == [0, 4, 6]


def seen_samples(monkeypatch) -> list[int]:
    """Note the number of every sample that is drawn, in order."""
    from mt_data import MixedSamples

    seen: list[int] = []
    original = MixedSamples.__getitem__

    def noting(self, index):
        seen.append(index)
        return original(self, index)

    monkeypatch.setattr(MixedSamples, "__getitem__", noting)
    return seen


def test_another_batch_size_goes_on_with_the_next_sample(tiny, copy, monkeypatch, losses) -> None:
    seen = seen_samples(monkeypatch)
    tiny.run(copy, "training.global_batch_size=6", "training.steps=6")
    tiny.run(copy, "training.global_batch_size=2", "training.steps=8")
    assert seen == list(range(16, 16 + 2 * 6 + 2 * 2))
    assert sorted(losses(copy)) == list(range(1, 9))


def drawn(monkeypatch) -> list[tuple[str, int]]:
    """Note which sample of which data set is drawn."""
    from mt_data import GPTDataset

    found: list[tuple[str, int]] = []
    original = GPTDataset.sample

    def noting(self, index, *part):
        found.append((Path(self.indexed.prefix).name, index))
        return original(self, index, *part)

    monkeypatch.setattr(GPTDataset, "sample", noting)
    return found


def test_changed_sources_go_on_where_each_was(tiny, tmp_path, monkeypatch) -> None:
    found = drawn(monkeypatch)
    mix = MIX.format(data=tiny.data)
    tiny.run(tmp_path, mix, "data.weights=[1,1]", "checkpoint.every=2")
    tiny.run(tmp_path, mix, "data.weights=[3,1]", "training.steps=8")  # other shares
    tiny.run(tmp_path, "training.steps=10")  # one of the two
    tiny.run(tmp_path, mix, "data.weights=[3,1]", "training.steps=12")  # and back
    for name in ("a", "b"):
        numbers = [index for source, index in found if source == name]
        assert numbers == list(range(len(numbers))), name
    assert sum(name == "a" for name, _ in found[:16]) == 8
    assert sum(name == "a" for name, _ in found[16:32]) == 12


def test_a_changed_mixture_continues_to_the_same_bits(tiny, tmp_path, losses, weights) -> None:
    changed = (MIX.format(data=tiny.data), "data.weights=[1,3]", "training.steps=8")
    for out in ("whole", "parts"):
        tiny.run(tmp_path / out, "training.steps=3")
    tiny.run(tmp_path / "whole", *changed)
    with pytest.raises(InterruptError):
        tiny.run(tmp_path / "parts", *changed, "checkpoint.every=1", on_event=interrupt_at(3))
    tiny.run(tmp_path / "parts", *changed)
    assert_same_run(tmp_path / "parts", tmp_path / "whole", 8, losses, weights)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("training.seed=1", "training.seed: saved with 1234, now 1"),
        ("training.sequence_length=8", "training.sequence_length: saved with 16, now 8"),
        ("training.dtype=fp32", "training.dtype: saved with fp64, now fp32"),
        ("model.num_layers=2", "model.num_layers: 1 -> 2"),
    ],
)
def test_what_can_not_be_continued_is_refused_with_the_way_out(
    change, said, tiny, copy, capsys
) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(ResumeError) as caught:
        tiny.run(copy, change, "training.steps=8")
    assert said in str(caught.value)
    assert "checkpoint.load_mode=weights" in str(caught.value)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_packing_changes_from_a_step_on_and_is_said_recorded_and_evaluated(
    tiny, copy, capsys, rows
) -> None:
    (before,) = [row["val_loss"] for row in rows(copy) if "val_loss" in row]
    tiny.run(copy, "training.steps=5", "data.packing=documents")
    assert "from step 5 on: data.packing: none -> documents" in capsys.readouterr().out
    assert yaml.safe_load((copy / "config.yaml").read_text())["data"]["packing"] == "documents"
    assert read_history(copy / "history.jsonl")[1]["config"]["data"]["packing"] == "documents"
    tiny.run(copy, "training.steps=5")  # finished, and evaluated otherwise than it would be now
    assert "finished at step 5; evaluating" in capsys.readouterr().out
    found = [row["val_loss"] for row in rows(copy) if "val_loss" in row]
    assert found[0] == before
    assert len(found) == 2


def test_a_corpus_is_built_once_for_both_packings(tiny, tmp_path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"words {i} " * 40}) + "\n" for i in range(30)))
    options = (
        "data.train=[]",
        "data.validation=null",
        "data.tokenizer=null",
        "data.vocab_size=280",
    )
    options = (*options, f"data.corpus={texts}")
    tiny.run(tmp_path / "run", *options, "training.steps=1")
    tiny.run(tmp_path / "run", *options, "training.steps=2", "data.packing=documents")
    assert [path.name for path in (tmp_path / "run").glob("data*")] == ["data"]


def test_packing_without_documents_is_refused(tiny, tmp_path) -> None:
    from mt_data import IndexedDataset, IndexedWriter
    from mt_train import ConfigError

    with IndexedWriter(tmp_path / "one", np.uint16) as writer:
        writer.add_document(IndexedDataset(tiny.data / "a").stream(0, 400))
    packed = ("data.packing=documents", f"data.train=[{tmp_path}/one]")
    with pytest.raises(ConfigError, match=r"one\.idx has all its tokens in one document") as caught:
        tiny.run(tmp_path / "run", *packed)
    assert "use none" in str(caught.value)
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    book = (packed[0], f"data.train=[{tmp_path}/one,{tiny.data}/b]")  # one of several may be
    assert tiny.run(tmp_path / "run", *book).step == 4


def test_weights_start_another_run(tiny, finished, tmp_path, capsys, weights, losses) -> None:
    changes = (
        f"data.train=[{tiny.data}/b]",
        "training.sequence_length=24",
        "training.seed=5",
        "training.dtype=fp32",
        "training.global_batch_size=2",
        "optimizer.schedule=constant",
        "optimizer.lr=1e-9",
    )
    load = (f"checkpoint.load={finished}", "checkpoint.load_mode=weights")
    outcome = tiny.run(tmp_path, *changes, *load)
    assert outcome.step == 4
    assert "starting with the weights of" in capsys.readouterr().out
    ours, theirs = weights(tmp_path, 4), weights(finished, 4)
    for name, value in theirs.items():
        if name.startswith("model/"):
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-7)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]
    assert read_history(tmp_path / "history.jsonl")[0]["from"].endswith("step_00000004")
    outcome = tiny.run(tmp_path, *changes, *load, "training.steps=5")  # its own folder goes on
    assert outcome.step == 5


def test_load_continues_another_run_in_a_new_folder(tiny, finished, tmp_path, losses) -> None:
    outcome = tiny.run(tmp_path, f"checkpoint.load={finished}", "training.steps=6")
    assert outcome.step == 6
    assert sorted(losses(tmp_path)) == [5, 6]


def test_what_is_loaded_stays_while_its_own_run_goes_on(tiny, tmp_path) -> None:
    theirs, saving = tmp_path / "theirs", ("checkpoint.every=1", "checkpoint.keep=1")
    tiny.run(theirs, "training.steps=2", *saving)
    loaded = load_config(tiny.config, [f"checkpoint.load={theirs}"])
    with ExitStack() as held:
        start = find_start(loaded, tmp_path / "ours", held)
        tiny.run(theirs, "training.steps=4", *saving)
        assert start.path is not None
        assert start.saved == read_saved(start.path)
        assert find_start(loaded, tmp_path / "ours", held, step=2).path == start.path  # other ranks
        newer = find_start(loaded, tmp_path / "ours", held).path
        assert newer is not None
        assert newer.name == "step_00000004"
    tiny.run(theirs, "training.steps=5", *saving, "checkpoint.keep_every=4")
    left = sorted(path.name[-1] for path in (theirs / "checkpoints").glob("step_*"))
    assert left == ["4", "5"]


@pytest.mark.parametrize("strategy", ["none", "optimizer", "full"])
def test_a_run_that_ended_leaves_no_model_and_no_buffer_behind(strategy, tiny, tmp_path) -> None:
    def held() -> set[int]:
        gc.collect()
        kinds = ("Trainer", "GradBuffer", "GPT")
        return {id(o) for o in gc.get_objects() if type(o).__name__ in kinds}

    before = held()
    tiny.run(tmp_path, f"data_parallel.strategy={strategy}", "training.steps=1")
    assert held() <= before


def test_weights_that_are_not_finite_are_never_saved(tiny, tmp_path) -> None:
    from mt_train.training.trainer import NonFiniteLossError

    def poison(name: str) -> None:
        if name == "train.update":
            gc.collect()
            (trainer,) = (o for o in gc.get_objects() if type(o).__name__ == "Trainer")
            trainer.optimizer.inner.master("embedding.weight")[0, 0] = float("inf")

    with pytest.raises(NonFiniteLossError, match="after step 1 some weights are not finite"):
        tiny.run(tmp_path, "checkpoint.every=1", on_event=poison)
    assert not list(tmp_path.glob("checkpoints/step_*"))
    assert tiny.run(tmp_path).step == 4


def test_a_first_step_that_diverges_says_how_to_go_back(tiny, tmp_path) -> None:
    from mt_train.training.trainer import NonFiniteLossError

    options = ("training.dtype=fp32", "optimizer.warmup=0", "checkpoint.every=1")
    tiny.run(tmp_path, *options, "training.steps=2", "optimizer.lr=1e-3")
    with pytest.raises(NonFiniteLossError, match="step 4: "):  # 3 is finite, and saved
        tiny.run(tmp_path, *options, "optimizer.lr=1e37", "optimizer.schedule=constant")
    with pytest.raises(NonFiniteLossError, match="step_00000002 is the newest older step"):
        tiny.run(tmp_path, *options, "optimizer.lr=1e-3")


def test_a_poisoned_checkpoint_names_an_older_step(tiny, tmp_path, monkeypatch) -> None:
    from mt_train.session import saving

    with monkeypatch.context() as patch:  # as an older version saved it
        patch.setattr(saving, "_is_finite", lambda trainer: True)

        def poison(name: str) -> None:
            if name == "save.begin" and list(tmp_path.glob("checkpoints/step_00000003")):
                next(iter(trainers)).optimizer.inner.master("embedding.weight").fill_(float("nan"))

        trainers: list = []
        original = saving.save
        patch.setattr(saving, "save", lambda t, *a: (trainers.append(t), original(t, *a))[1])
        tiny.run(tmp_path, "checkpoint.every=1", on_event=poison)
    with pytest.raises(ResumeError, match=r"model/embedding\.weight") as caught:
        tiny.run(tmp_path, "training.steps=6")
    assert "step_00000003 is the newest older step" in str(caught.value)
    (tmp_path / "checkpoints" / "latest").write_text("step_00000003\n")
    assert tiny.run(tmp_path, "training.steps=6").step == 6


def test_one_folder_takes_one_run_at_a_time(tiny, copy) -> None:
    from mt_files import FolderLock, LockedError

    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file() and p.name != ".lock"}
    with FolderLock(copy, purpose="training"), pytest.raises(LockedError, match="process"):
        tiny.run(copy, "training.steps=6")
    after = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == before


def test_one_flipped_bit_of_the_tokens_is_named(tiny, copy, tmp_path) -> None:
    data = Path(shutil.copytree(tiny.data, tmp_path / "data"))
    tokens = bytearray((data / "a.bin").read_bytes())
    tokens[100] ^= 1
    (data / "a.bin").write_bytes(tokens)
    with pytest.raises(Exception, match=r"a\.bin.*content has changed"):
        tiny.run(copy, f"data.train=[{data}/a]", "training.steps=6")


@pytest.mark.parametrize("size", ["10000000", "3"])
def test_evaluation_rows_are_no_more_than_there_are(size, tiny, copy, rows) -> None:
    before = [row["val_loss"] for row in rows(copy) if "val_loss" in row]
    tiny.run(copy, f"evaluation.micro_batch_size={size}")
    after = [row["val_loss"] for row in rows(copy) if "val_loss" in row]
    assert after == pytest.approx(before, rel=1e-12)


@pytest.mark.parametrize(
    "damage",
    sample(
        ((b"\xff\xfe",), (b'{"seed": ' + b"9" * 6000 + b"}",), (b"[" * 100_000,), (b"[]",), (b"",)),
        every=2,
    ),
)
def test_a_damaged_description_of_the_corpus_is_one_error(damage, tiny, tmp_path) -> None:
    from mt_train import ConfigError

    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"words {i} " * 40}) + "\n" for i in range(30)))
    corpus = ("data.train=[]", "data.validation=null", "data.tokenizer=null", "data.vocab_size=280")
    options = (*corpus, f"data.corpus={texts}")
    out = tmp_path / "run"
    tiny.run(out, *options, "training.steps=1")
    (out / "data" / "corpus.json").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"corpus\.json is missing or damaged"):
        tiny.run(out, *options, "training.steps=2")
    shutil.rmtree(out / "data")
    assert tiny.run(out, *options, "training.steps=2").step == 2


def test_another_corpus_is_made_with_the_runs_tokenizer(tiny, tmp_path) -> None:
    corpus = ("data.train=[]", "data.validation=null", "data.tokenizer=null", "data.vocab_size=280")
    for name in ("first", "second"):
        lines = (json.dumps({"text": f"{name} {i} " * 40}) + "\n" for i in range(30))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    out = tmp_path / "run"
    first = f"data.corpus={tmp_path / 'first.jsonl'}"
    tiny.run(out, *corpus, first, "training.steps=1")
    tokenizer = (out / "tokenizer.json").read_bytes()
    second = f"data.corpus={tmp_path / 'second.jsonl'}"
    assert tiny.run(out, *corpus, second, "training.steps=2").step == 2
    assert tiny.run(out, *corpus, first, "training.steps=3").step == 3
    assert (out / "tokenizer.json").read_bytes() == tokenizer
    tuned = tmp_path / "tuned"
    load = (f"checkpoint.load={out}", "checkpoint.load_mode=weights")
    tiny.run(tuned, *corpus, second, *load, "training.steps=1")
    assert (tuned / "tokenizer.json").read_bytes() == tokenizer


def test_a_picture_that_can_not_be_drawn_is_no_failure(tiny, tmp_path, capsys) -> None:
    (tmp_path / "loss.png").mkdir()
    outcome = tiny.run(tmp_path)
    assert outcome.step == 4
    assert "the losses are not drawn" in capsys.readouterr().out


def test_overrides_reach_the_parameters_that_they_name(tiny, tmp_path, weights) -> None:
    entries = "[{names: embedding.*, lr_scale: 0}, {names: '*.up.weight', wd_scale: 0}]"
    out = tmp_path / "run"
    tiny.run(out, f"optimizer.overrides={entries}", "checkpoint.every=1")
    first, last = weights(out, 1), weights(out, 4)
    moved = [n for n in first if n.startswith("model/") and not np.array_equal(first[n], last[n])]
    assert "model/embedding.weight" not in moved
    assert len(moved) > 4


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            "[{names: embeding.weight, lr_scale: 0}]",
            "optimizer.overrides\\[0\\].names: 'embeding.weight' is the name of no parameter. Did "
            "you mean embedding.weight?",
        ),
        (
            "[{names: '*.weight', lr_scale: 2}, {names: embedding.*, lr_scale: 3}]",
            "parameter 'embedding.weight' has lr_scale 2.0 from override '\\*.weight' and 3.0 from "
            "'embedding.\\*'",
        ),
    ],
)
def test_overrides_that_can_not_be_are_one_error(tiny, tmp_path, entries, message) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny.run(tmp_path, f"optimizer.overrides={entries}")


def test_an_override_of_betas_for_a_matrix_of_muon_is_refused(tiny, tmp_path) -> None:
    entries = "optimizer.overrides=[{names: '*', betas: [0.5, 0.6]}]"
    with pytest.raises(ConfigError, match=r"sets betas of parameter '.*', which muon steps"):
        tiny.run(tmp_path, entries, "optimizer.name=muon")


def test_skipped_steps_count_for_the_data_and_not_for_the_schedules(
    tiny, tmp_path, rows, weights, losses
) -> None:
    """A norm between those of the steps skips some; a resumed run goes on with the count."""
    options = ["training.steps=8", "checkpoint.every=4", "optimizer.warmup=3"]
    plain = tiny.run(tmp_path / "plain", *options)
    assert plain.step == 8
    norms = sorted(row["grad_norm"] for row in rows(tmp_path / "plain") if "grad_norm" in row)
    options.append(f"optimizer.skip_above={norms[4]}")
    tiny.run(tmp_path / "run", *options)
    steps = [row for row in rows(tmp_path / "run") if "loss" in row]
    skipped = [row["grad_norm"] > norms[4] for row in steps]
    assert 0 < sum(skipped) < 8
    assert [row["skipped_steps"] for row in steps] == list(np.cumsum(skipped))
    same = [a["lr"] == b["lr"] for a, b in itertools.pairwise(steps)]
    assert same[: len(skipped) - 1] == skipped[:-1]
    load = f"checkpoint.load={tmp_path / 'run' / 'checkpoints' / 'step_00000004'}"
    tiny.run(tmp_path / "rest", *options, load)
    for step, loss in losses(tmp_path / "rest").items():
        assert loss == losses(tmp_path / "run")[step]
    ours, theirs = weights(tmp_path / "rest", 8), weights(tmp_path / "run", 8)
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def test_a_wider_model_slows_its_hidden_matrices(tiny, tmp_path, weights) -> None:
    for width in (1, 4):
        options = [f"optimizer.width_multiplier={width}", "training.steps=1", "optimizer.warmup=0"]
        options += ["optimizer.weight_decay=0", "optimizer.eps=1e-20"]
        tiny.run(tmp_path / str(width), *options)
    tiny.run(tmp_path / "still", "training.steps=1", "optimizer.lr=1e-30")
    still, one, four = (weights(tmp_path / name, 1) for name in ("still", "1", "4"))
    for name, factor in (("layers.0.mixer.out.weight", 0.25), ("embedding.weight", 1.0)):
        way = one[f"model/{name}"] - still[f"model/{name}"]
        shorter = four[f"model/{name}"] - still[f"model/{name}"]
        np.testing.assert_allclose(shorter, way * factor, rtol=1e-3, atol=1e-8)


class Spoiler:
    """Puts a value into a gradient of the step that is numbered, between reduction and update."""

    def __init__(
        self, *steps: int, value: float = float("nan"), name: str = "final_norm.weight"
    ) -> None:
        self.steps, self.value, self.name = steps, value, name

    def __call__(self, name: str) -> None:
        if name == "train.update":
            gc.collect()
            (trainer,) = (o for o in gc.get_objects() if type(o).__name__ == "Trainer")
            if trainer.progress.step + 1 in self.steps:
                (piece,) = (p for p in trainer.optimizer.shards if p.name == self.name)
                piece.grad.view(-1)[1] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_names_step_rank_and_parameter(value, tiny, tmp_path) -> None:
    from mt_train.training.trainer import NonFiniteLossError

    with pytest.raises(NonFiniteLossError) as caught:
        tiny.run(tmp_path, on_event=Spoiler(3, value=value))
    message = str(caught.value)
    assert message.startswith("step 3: gradient norm ")
    assert f"rank 0 final_norm.weight {value}; loss " in message


def test_a_skipped_step_is_told_and_moves_neither_weights_nor_schedule(
    tiny, tmp_path, rows, capsys
) -> None:
    scaled = "optimizer.loss_scale={initial: 16, hysteresis: 1, growth_interval: 2}"
    outcome = tiny.run(tmp_path, scaled, "training.steps=6", on_event=Spoiler(2, 3))
    assert outcome.step == 6
    found = [row for row in rows(tmp_path) if "loss" in row]
    assert [row["loss_scale"] for row in found] == [16, 16, 8, 4, 4, 8]
    assert [row["skipped_steps"] for row in found] == [0, 1, 2, 2, 2, 2]
    assert [row["step"] for row in found if "skipped" in row] == [2, 3]
    assert found[1]["lr"] == found[2]["lr"] == found[3]["lr"] > found[4]["lr"]
    line = "step 2: gradient norm nan, loss scale 16: rank 0 final_norm.weight nan"
    assert found[1]["skipped"] == line
    assert f"skipped {line}\n" in capsys.readouterr().out
    assert found[1]["grad_norm"] is None


def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit_in_fp64(
    tiny, finished, tmp_path, losses, weights
) -> None:
    tiny.run(tmp_path, "optimizer.loss_scale=65536")
    assert losses(tmp_path) == losses(finished)
    for name, value in weights(finished, 4).items():
        np.testing.assert_array_equal(weights(tmp_path, 4)[name], value)


def test_fp16_trains_and_resumes_with_its_scale(tiny, tmp_path, rows, weights) -> None:
    options = (
        "training.dtype=fp16",
        "optimizer.loss_scale={growth_interval: 3}",
        "training.steps=40",
        "optimizer.schedule=constant",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny.run(whole, *options, "checkpoint.every=25")
    tiny.run(parts, *options, f"checkpoint.load={whole}/checkpoints/step_00000025")
    found = [row for row in rows(whole) if "loss" in row]
    again = [row for row in rows(parts) if "loss" in row]
    assert found[0]["loss_scale"] == 2.0**32
    assert 0 < found[-1]["skipped_steps"] < 30
    assert found[-1]["loss"] < found[0]["loss"]
    keys = ("step", "loss", "lr", "loss_scale", "skipped_steps", "grad_norm")
    assert [[row[k] for k in keys] for row in again] == [
        [row[k] for k in keys] for row in found[25:]
    ]
    for name, value in weights(whole, 40).items():
        np.testing.assert_array_equal(weights(parts, 40)[name], value)


def test_a_hundred_skipped_steps_one_after_another_end_the_run(tiny, tmp_path) -> None:
    from mt_train.training.trainer import NonFiniteLossError

    options = ("training.steps=200", "optimizer.loss_scale=2")
    with pytest.raises(NonFiniteLossError, match=r"step 102: .*100 steps were skipped one after"):
        tiny.run(tmp_path, *options, on_event=Spoiler(*range(3, 200)))


def test_a_norm_above_the_threshold_is_skipped_and_named(tiny, tmp_path, rows) -> None:
    tiny.run(tmp_path, "optimizer.skip_above=50", on_event=Spoiler(2, value=1e3))
    found = [row for row in rows(tmp_path) if "loss" in row]
    assert [row["skipped_steps"] for row in found] == [0, 1, 1, 1]
    assert found[1]["skipped"].startswith("step 2: gradient norm 1000.0")
    assert "rank 0 final_norm.weight large (1000)" in found[1]["skipped"]


def test_gradients_are_described_by_layer(tiny, tmp_path, rows) -> None:
    groups = '[{"names": "layers.*", "max_norm": 0.5}]'
    tiny.run(
        tmp_path,
        "model.tied=false",  # rows of the embedding that no token reads have no gradient
        "logging.gradients=true",
        "logging.zeros=true",
        f"optimizer.norm_groups={groups}",
    )
    for row in (row for row in rows(tmp_path) if "loss" in row):
        layers = ("embedding", "layers.0", "final_norm", "head")
        norms = [row[f"gradients/{name}/norm"] for name in layers]
        assert row["grad_norm"] == pytest.approx(sum(n * n for n in norms) ** 0.5, rel=1e-12)
        assert row["grad_norm/layers.*"] == pytest.approx(row["gradients/layers.0/norm"], rel=1e-12)
        assert row["zeros"] == sum(row[f"gradients/{name}/zeros"] for name in layers) > 0
        assert all(row[f"gradients/{name}/largest"] > 0 for name in layers)


def test_the_largest_value_of_a_gradient_reaches_the_step(tiny, tmp_path, weights) -> None:
    options = ["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0"]
    options += ["optimizer.schedule=constant", "optimizer.warmup=0", "checkpoint.every=1"]
    options += ["training.steps=2", "optimizer.lr=1", "optimizer.max_value=1e-4"]
    tiny.run(tmp_path, *options)
    first, second = weights(tmp_path, 1), weights(tmp_path, 2)
    ways = [np.abs(second[name] - first[name]).max() for name in first if name.startswith("model/")]
    assert max(ways) == pytest.approx(1e-4, rel=1e-6)


def test_a_plan_of_recomputation_says_what_layers_keep(tiny, tmp_path, rows, losses, capsys):
    wrong = "training.recompute={rules: [{modules: [mixr]}]}"
    with pytest.raises(ConfigError, match=r"training\.recompute.*mixr.*Did you mean mixer"):
        tiny.run(tmp_path / "wrong", wrong)
    plan = "training.recompute={rules: [{first: 1}], offload: {every: 3, min_bytes: 0}}"
    tiny.run(tmp_path / "planned", "training.steps=2", plan)
    assert "of activations and " in capsys.readouterr().out
    tiny.run(tmp_path / "plain", "training.steps=2")
    assert losses(tmp_path / "planned") == losses(tmp_path / "plain")
    first, second = (row for row in rows(tmp_path / "planned") if "loss" in row)
    assert first["offloaded_bytes"] > 0
    for name in ("activation_bytes", "offloaded_bytes"):
        assert first[name] == pytest.approx(first[f"expected_{name}"], rel=0.03)
    assert "activation_bytes" not in second


def test_kernels_are_told_once_and_change_no_loss(tiny, tmp_path, losses, capsys) -> None:
    tiny.run(tmp_path / "auto", "training.steps=2", "training.dtype=fp64")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kernel ")]
    operations = ["gemm", "residual", "rms_norm", "attention", "rope", "gated", "loss"]
    assert [line.split()[1] for line in said] == operations
    assert "not fused: slower on a CPU than the next" in said[2]
    tiny.run(tmp_path / "fused", "training.steps=2", "training.dtype=fp64", "model.kernels=fused")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kernel ")]
    assert sum("fused (asked for)" in line for line in said) == 5
    assert losses(tmp_path / "fused") == pytest.approx(losses(tmp_path / "auto"), rel=1e-12)
    assert load_config(tmp_path / "fused" / "config.yaml").config.model.kernels == "fused"


def test_a_run_goes_on_with_other_kernels(tiny, copy, capsys) -> None:
    tiny.run(copy, "training.steps=13", "model.kernels={norm: reference, loss: fused}")
    assert "model.kernels: auto -> " in capsys.readouterr().out


def test_a_kernel_that_does_not_serve_ends_the_run_with_the_reason(tiny, tmp_path) -> None:
    changes = "model.kernels=fused", "model.activation=relu"
    with pytest.raises(UserError, match=r"'fused' of gated does not serve: .*use"):
        tiny.run(tmp_path / "run", *changes)
