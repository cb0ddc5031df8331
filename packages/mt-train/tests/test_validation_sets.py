"""Several held-out sets by name: each alone, and all together."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from mt_data import split_files
from mt_train import ConfigError, load_config
from mt_train.data.corpus import split_corpus

SETS = "data.validation={{held: {data}/held, both: [{data}/a, {data}/b]}}"
EVALUATED = ("evaluation.max_windows=null", "evaluation.every=2")


def test_each_set_is_evaluated_as_if_it_were_alone_and_all_together(
    tiny, tmp_path, rows, capsys
) -> None:
    named = SETS.format(data=tiny.data)
    ended = tiny.run(tmp_path / "sets", named, *EVALUATED).evaluation
    said = capsys.readouterr().out
    assert f"held out at step 4: loss {ended['val_loss']:.4f}" in said
    assert f"  both: loss {ended['val_loss/both']:.4f}" in said
    for name, prefix in (("held", "held"), ("a", "a"), ("b", "b")):
        alone = tiny.run(tmp_path / name, f"data.validation={tiny.data}/{prefix}", *EVALUATED)
        ended[f"alone/{name}"] = alone.evaluation
    for key in ("val_loss", "bits_per_byte"):
        assert ended[f"{key}/held"] == ended["alone/held"][key]
    low, high = sorted(ended[f"alone/{name}"]["val_loss"] for name in "ab")
    assert low < ended["val_loss/both"] < high
    low, high = sorted((ended["val_loss/held"], ended["val_loss/both"]))
    assert low < ended["val_loss"] < high
    steps = [row["step"] for row in rows(tmp_path / "sets") if "val_loss/both" in row]
    assert steps == [2, 4]
    assert (tmp_path / "sets" / "loss.png").is_file()


def test_a_run_with_sets_goes_on_and_other_sets_are_evaluated(tiny, tmp_path, capsys) -> None:
    named = SETS.format(data=tiny.data)
    first = tiny.run(tmp_path, named).evaluation
    assert tiny.run(tmp_path, named).evaluation == first  # nothing to do
    assert "nothing was changed" in capsys.readouterr().out
    second = tiny.run(tmp_path, f"data.validation={{held: {tiny.data}/held}}").evaluation
    assert second["val_loss/held"] == first["val_loss/held"] == second["val_loss"]


def test_chat_joins_files_of_a_set(tiny, tmp_path) -> None:
    line = '{"prompt": "one 1", "completion": "and one"}\n'
    for name in ("train", "x", "y"):
        (tmp_path / f"{name}.jsonl").write_text(line * 8)
    data = f"data={{kind: chat, tokenizer: {tiny.data}/tokenizer.json, packing: none"
    data += f", train: [{tmp_path}/train.jsonl]"
    data += (
        f", validation: {{x: {tmp_path}/x.jsonl, xy: [{tmp_path}/x.jsonl, {tmp_path}/y.jsonl]}}}}"
    )
    found = tiny.run(tmp_path / "run", data, "evaluation.max_windows=null").evaluation
    assert found["val_loss/x"] == pytest.approx(found["val_loss/xy"], rel=1e-12)


@pytest.mark.parametrize(
    ("validation", "text"),
    [
        ("{a b: {data}/held}", "'a b' is no name of a set"),
        ("{a: []}", "data.validation: a has no paths"),
        ("{a: {data}/none}", "data.validation.a: "),
        ("[{data}/held]", "data.validation: expected text"),
    ],
)
def test_wrong_sets_say_what_to_write(tiny, validation, text) -> None:
    given = validation.replace("{data}", str(tiny.data))
    with pytest.raises(ConfigError) as caught:
        load_config(tiny.config, [f"data.validation={given}"])
    assert text in str(caught.value)


def test_a_corpus_holds_its_own_documents_out(tiny) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation: is for data\.train"):
        load_config(tiny.config, ["data.train=[]", "data.corpus=standard-library"])


def test_a_corpus_is_divided_by_name_and_never_kept_in_memory(tiny, tmp_path) -> None:
    path, count = tmp_path / "corpus.jsonl", 1500
    with path.open("w") as file:
        file.writelines(json.dumps({"text": f"{n} " + "x " * 4000}) + "\n" for n in range(count))
    corpus = f"data={{corpus: {path}, validation_fraction: 0.2}}"
    loaded = load_config(tiny.config, [corpus])
    tracemalloc.start()
    numbers = [[document.line for document in read()] for read in split_corpus(loaded)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 4
    names = [f"{path}:{line}" for line in range(1, count + 1)]
    sides = split_files(names, fraction=0.2, seed=loaded.config.training.seed)
    assert [[f"{path}:{line}" for line in side] for side in numbers] == [
        [str(name) for name in side] for side in sides
    ]
