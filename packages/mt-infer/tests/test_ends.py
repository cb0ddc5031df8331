"""Where a text ends: at the ids that the folder names, at a stop text, or with an error."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mt_hf import import_pretrained
from mt_infer import Generator, LogitsError, Sampling, load_run
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import load_tokenizer

GREEDY = Sampling(temperature=0)


def continued(folder: Path) -> list[int]:
    """The greedy tokens after a prompt."""
    with ParallelState(ParallelLayout(), device="cpu") as state:
        generator = load_run(folder, state)
        prompt = generator.tokenizer.encode("to be")
        return list(generator.tokens(prompt, 16, GREEDY))


@pytest.fixture
def whole(folder) -> list[int]:
    found = continued(folder)
    assert len(set(found)) > 4
    return found


def write(path: Path, **fields: object) -> None:
    given = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(given | fields))


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize(
    ("generation", "config", "place"),
    [
        ([0, 3], 1, 3),  # generation_config.json decides, and may have a list
        (None, 2, 2),
        (None, [4, 2], 2),
        ("absent", 2, 2),
    ],
)
def test_a_text_ends_at_the_first_id_that_the_files_name(
    folder, whole, tmp_path, generation, config, place, imported
) -> None:
    def ids(places: Any) -> Any:
        if isinstance(places, list):
            return [whole[each] if each else 260 for each in places]
        return None if places is None else whole[places]

    if generation != "absent":
        write(folder / "generation_config.json", eos_token_id=ids(generation))
    write(folder / "config.json", eos_token_id=ids(config))
    if imported:
        import_pretrained(folder, tmp_path / "run")
    expected = whole[: whole.index(whole[place])]
    assert continued(tmp_path / "run" if imported else folder) == expected


@pytest.mark.parametrize("wrong", ["2", [1, "2"], 1.5, True])
def test_an_id_of_another_type_is_named_with_its_file(folder, generate, wrong) -> None:
    write(folder / "generation_config.json", eos_token_id=wrong)
    code, _, err = generate(folder)
    assert code == 1
    assert "generation_config.json" in err
    assert "eos_token_id" in err


@pytest.mark.parametrize("stop", [slice(3, 5), slice(0, 1), slice(2, 6)])
def test_a_stop_text_ends_the_continuation_before_it(folder, whole, generate, stop) -> None:
    text = load_tokenizer(folder / "tokenizer.json").decode(whole)
    found = text[stop]
    options = ("--max-tokens", 16, "--greedy", "--stop", "never seen", "--stop", found)
    assert generate(folder, *options) == (0, text[: text.find(found)] + "\n", "")


def test_an_empty_stop_text_is_refused(saved_run, generate) -> None:
    code, _, err = generate(saved_run, "--stop", "")
    assert code == 2
    assert "--stop" in err


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=1)])
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_an_error(sampling, cuda_graphs, value) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
    model = GPT(gpt(vocab_size=64, max_sequence_length=32, **sizes), seed=1).eval()
    with torch.no_grad():
        model.final_norm.weight[3] = value
    tokenizer = cast("Any", SimpleNamespace(vocab_size=60, eod_id=0))
    how: dict[str, Any] = {"config": model.config, "tokenizer": tokenizer}
    generator = Generator(model=model, cuda_graphs=cuda_graphs, **how)
    with pytest.raises(LogitsError, match="token 3 of the text"):
        list(generator.tokens([5, 9, 3], 20, sampling))
