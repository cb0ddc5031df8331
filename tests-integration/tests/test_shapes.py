"""The recipe llava.yaml: a small LLaVA names the shapes and colours of drawn images."""

from __future__ import annotations

import io
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mt_multimodal import TarIndex, read_image_preprocessing
from mt_tokenizer import load_tokenizer
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "packages/mt-train/examples"


def share(text: str) -> float:
    return float(text.split("%")[0])


def answers_of_transformers(folder: Path, run: Path) -> list[bool]:
    """Tell which held-out questions transformers' LLaVA answers right, from an export of a run."""
    from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(folder / "exported")
    tokenizer = load_tokenizer(run / "tokenizer.json", eod="<|eod|>")
    special, images = tokenizer.special_tokens, read_image_preprocessing(run)
    per_image = (images.output_size[0] // 6) * (images.output_size[1] // 6)
    tar, found = TarIndex(folder / "shapes/held-out.tar"), []
    for number in range(tar.num_samples):
        members = tar.sample(number)
        asked, said = json.loads(tar.read(members["json"]))["conversations"]
        question = asked["value"].removeprefix("<image>\n")
        prompt = [special["<|user|>"], *[special["<image>"]] * per_image]
        prompt += [*tokenizer.encode(question), special["<|end|>"], special["<|assistant|>"]]
        pixels = images.pixels(Image.open(io.BytesIO(tar.read(members["png"]))))
        given = {
            "input_ids": torch.tensor([prompt]),
            "pixel_values": torch.from_numpy(pixels)[None],
        }
        with torch.no_grad():
            token = int(model(**given).logits[0, -1].argmax())
        found.append(tokenizer.decode([token]).strip() == said["value"])
    return found


@pytest.fixture
def call(tmp_path: Path):
    """Return a function that runs Python in a folder with the files of the recipe."""
    for path in EXAMPLES.glob("llava*"):
        shutil.copy(path, tmp_path)

    def run(*command: object) -> str:
        given = [sys.executable, *map(str, command)]
        done = subprocess.run(given, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.campaign
def test_the_recipe_names_shapes_and_colours_that_it_has_not_seen_together(call, tmp_path) -> None:
    call("llava.py")
    export = f"export.hugging_face={tmp_path / 'exported'}"
    call("-m", "mt_train", "run", "llava.yaml", "--out", "runs/llava", export)
    own, of_others = map(share, call("llava.py", "runs/llava").splitlines())
    assert own >= 90
    assert of_others < 40
    theirs = answers_of_transformers(tmp_path, tmp_path / "runs/llava")
    assert 100 * sum(theirs) / len(theirs) == pytest.approx(own, abs=0.06)
    assert runpy.run_path(str(tmp_path / "llava.py"))["HELD_OUT"] == len(theirs)


@pytest.mark.campaign
def test_the_first_stage_trains_the_projection_alone_and_the_second_goes_on_from_it(
    call, tmp_path, metrics_of, arrays
) -> None:
    call("llava.py")
    export = f"export.hugging_face={tmp_path / 'llava-base'}"
    start = ("llava.yaml", "training.steps=100", "evaluation.max_windows=8", export)
    for files, name in (
        (start, "base"),
        (["llava-align.yaml"], "align"),
        (["llava-tune.yaml"], "tune"),
    ):
        call("-m", "mt_train", "run", *files, "--out", f"runs/{name}")
    runs = [tmp_path / "runs" / name for name in ("base", "align", "tune")]
    base, align, tune = (arrays(run, 100) for run in runs)

    def changed(before: dict, after: dict) -> set[str]:
        names = before.keys() & after.keys()
        return {
            name.removeprefix("model/") for name in names if (before[name] != after[name]).any()
        }

    first, second = changed(base, align), changed(align, tune)
    assert first
    assert all(name.startswith("images.projector.") for name in first)
    assert first < second
    assert {name.split(".")[0] for name in second} == {
        "images",
        "layers",
        "embedding",
        "final_norm",
    }
    assert not any(name.startswith("images.tower.") for name in second)
    evaluated = [metrics_of(run)[-1]["val_loss"] for run in runs]
    own, _ = map(share, call("llava.py", "runs/tune").splitlines())
    print(f"losses {evaluated}, {own}% right")
    assert evaluated[2] < min(evaluated[:2])
