"""Runs of a LLaVA on conversations with images: transformers' numbers, alike on every layout."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mt_context_parallel import segments
from mt_data import Rows
from mt_files import ObjectStore
from mt_hf import from_pretrained, open_pretrained, save_pretrained
from mt_model import GPT, ClassPoolingConfig, ImageInputConfig, gpt, kept_by_module, vit
from mt_multimodal import ImageForm, ImageTextDataset, read_image_preprocessing
from mt_parallel_state import ParallelState
from mt_testing import unsteady_store
from mt_tokenizer import ChatTemplate, load_tokenizer, train_tokenizer
from mt_train import ConfigError, load_config, memory
from mt_train.config.loading import planned_vocab_size
from mt_train.training.freezing import freeze
from mt_train.training.stages import stage_options
from PIL import Image
from transformers import AutoProcessor, modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration

TEMPLATE = """\
{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
SPECIAL = ["<|eod|>", "<|user|>", "<|assistant|>", "<|end|>", "<image>"]
LENGTH = 32
LAYOUTS = {
    "dp2": (2, "training.micro_batch_size=1"),  # ranks have other numbers of images, or none
    "pp2": (2, "parallel.pp=2", "training.micro_batch_size=2"),
    "tp2": (2, "parallel.tp=2"),
    "cp2": (2, "parallel.cp=2"),  # most cuts lie inside an image
    "sp2": (2, "parallel.tp=2", "parallel.sequence_parallel=true"),
    "full": (2, "data_parallel.strategy=full", "training.micro_batch_size=1"),
    "tp2-cp2": (4, "parallel.tp=2", "parallel.cp=2"),
}
IN_CI = ("dp2", "pp2", "tp2", "cp2")


def conversations(draw: np.random.Generator, count: int) -> list[tuple[int, dict]]:
    """Return conversations with their numbers of images: 0, 1 or 3."""
    found = []
    for number in range(count):
        images = (1, 0, 3, 0, 0, 1)[number % 6]
        asked = "<image>\n" * images + "one " * (1 + number % 2)
        said = "two " * int(draw.integers(1, 4))
        turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]
        found.append((images, {"conversations": turns}))
    return found


def write_tar(path: Path, seed: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    with tarfile.open(path, "w") as tar:
        for number, (images, talk) in enumerate(conversations(draw, count)):
            members = [(f"{number}.json", json.dumps(talk).encode())]
            for place in range(images):
                file = io.BytesIO()
                pixels = draw.integers(0, 256, (int(draw.integers(5, 20)), 12, 3), np.uint8)
                Image.fromarray(pixels).save(file, "PNG")
                members.append((f"{number}.{place}.png", file.getvalue()))
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a LLaVA with random weights, beside tars of conversations."""
    path = tmp_path_factory.mktemp("llava")
    train_tokenizer(["one two"] * 3, 280, SPECIAL).save(path / "tokenizer.json")
    tokenizer = load_tokenizer(path / "tokenizer.json", eod="<|eod|>")
    size = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    pooling = ClassPoolingConfig(norm=True)
    tower = vit(**size, embedding_norm=True, final_norm=False, patch_bias=False, pooling=pooling)
    images = ImageInputConfig(tower=tower, token_id=tokenizer.special_tokens["<image>"])
    config = gpt(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=48,
        max_sequence_length=64,
        images=images,
    )
    save_pretrained(GPT(config, seed=5, dtype=torch.float64), path / "model")
    shutil.copy(path / "tokenizer.json", path / "model")
    (path / "model/chat_template.jinja").write_text(TEMPLATE)
    preprocessor = {"size": {"height": 8, "width": 8}, "image_processor_type": "CLIPImageProcessor"}
    preprocessor["do_center_crop"] = False
    (path / "model/preprocessor_config.json").write_text(json.dumps(preprocessor))
    for seed, (name, count) in enumerate((("a", 30), ("held", 7))):
        write_tar(path / f"{name}.tar", seed, count)
    texts = [{"prompt": "one " * (n % 3 + 1), "completion": "two"} for n in range(12)]
    (path / "texts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in texts))
    return path


@pytest.fixture(scope="module")
def rows(folder: Path):
    """Return a function that opens the rows of the tar, and the template that it needs."""
    model = folder / "model"
    images = open_pretrained(model).config.images
    form = ImageForm(
        preprocessing=read_image_preprocessing(model),
        token_id=images.token_id,
        num_tokens=images.num_tokens,
    )
    tokenizer = load_tokenizer(model / "tokenizer.json", eod="<|eod|>")
    with ChatTemplate(TEMPLATE, tokenizer) as template:
        yield lambda **how: ImageTextDataset(
            folder / "a.tar", template, form, sequence_length=LENGTH, **how
        )


class WideTorch:
    """`torch` for a module of transformers that computes in fp32 whatever the model's dtype is."""

    def __getattr__(self, name: str) -> object:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


def batch_of(data: ImageTextDataset, numbers: list[int]) -> dict[str, torch.Tensor]:
    found = Rows().read(data, np.array(numbers))
    batch = {name: torch.from_numpy(array) for name, array in found.items()}
    return {**batch, "pixel_values": batch["pixel_values"].double()}


def our_gradients(model: GPT, batch: dict[str, torch.Tensor]) -> tuple[float, dict]:
    model.zero_grad()
    losses = model(None, batch)
    losses["lm"].backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses["lm"].item(), {name: grad.clone() for name, grad in grads.items()}


def test_loss_and_gradients_of_rows_are_those_of_transformers(folder, rows, monkeypatch) -> None:
    """Rows with no image, one and three, in one batch."""
    data = rows(packing="none")
    counts = [data.row(n)["pixel_values"].shape[0] for n in range(len(data))]
    numbers = [counts.index(count) for count in (0, 1, 3)]
    batch = batch_of(data, numbers)
    ours = from_pretrained(folder / "model", dtype=torch.float64)
    for module in (modeling_llama, modeling_rope_utils):
        monkeypatch.setattr(module, "torch", WideTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    theirs = LlavaForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float64)
    found = open_pretrained(folder / "model")
    logits = theirs(input_ids=batch["tokens"], pixel_values=batch["pixel_values"]).logits
    how = {"ignore_index": -100, "reduction": "sum"}
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), **how
    )
    expected.backward()
    loss, grads = our_gradients(ours, batch)
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    stored = {_stored(name): param.grad for name, param in theirs.named_parameters()}
    rounding = 1e-9 * max(grad.norm() for grad in stored.values() if grad is not None)
    assert grads["images.tower.layers.0.mixer.qkv.weight"].norm() > rounding
    for name, param in ours.named_parameters():
        for link in found.links[name]:
            wanted = stored[link.source]
            if wanted is None:
                continue
            wanted = link.window(wanted, param.shape)
            got = grads[name][tuple(slice(*ends) for ends in link.area(param.shape))]
            assert (got - wanted).norm() <= max(1e-9 * wanted.norm(), rounding), link.source


def _stored(name: str) -> str:
    """Return the name in a file of a parameter in memory."""
    for ours, file in (
        ("lm_head.", "language_model.lm_head."),
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ):
        if name.startswith(ours):
            return file + name.removeprefix(ours)
    raise AssertionError(name)


def test_packed_rows_have_the_loss_and_gradients_of_rows_apart(folder, rows) -> None:
    model = from_pretrained(folder / "model", dtype=torch.float64)
    packed, apart = rows(), rows(packing="none")
    assert len(packed) < len(apart) / 1.5
    ours = our_gradients(model, batch_of(packed, list(range(len(packed)))))
    theirs = our_gradients(model, batch_of(apart, list(range(len(apart)))))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-10)
    largest = max(grad.norm() for grad in theirs[1].values())
    for name, grad in theirs[1].items():
        assert (ours[1][name] - grad).norm() <= 1e-10 * largest, name


def test_half_of_a_row_in_two_ends_inside_an_image(folder, rows) -> None:
    """As the layouts with cp 2 have it."""
    images, data = open_pretrained(folder / "model").config.images, rows()
    tokens = [data.row(number)["tokens"] == images.token_id for number in range(len(data))]
    cuts = {place for rank in (0, 1) for run in segments(LENGTH, ranks=2, rank=rank)
            for place in (run.start, run.start + run.length) if 0 < place < LENGTH}  # fmt: skip
    inside = [row[:cut].sum() % images.num_tokens and row[cut] for row in tokens for cut in cuts]
    assert sum(map(bool, inside)) >= 3


@pytest.fixture(scope="module")
def started(tiny, folder: Path, tmp_path_factory: pytest.TempPathFactory):
    given = yaml.safe_load(tiny.config.read_text())
    given["model"] = {"from": str(folder / "model")}
    given["data"] = {"kind": "image-text"}  # a blend with a source of texts alone
    given["data"]["train"] = [str(folder / "a.tar"), str(folder / "texts.jsonl")]
    given["data"] |= {"validation": str(folder / "held.tar"), "eod": "<|eod|>"}
    given["data"]["weights"] = [1, 1]  # half of the rows have no image
    given["logging"] = {"every": 1}
    given["training"] |= {"dtype": "fp64", "steps": 5, "sequence_length": LENGTH}
    given["training"] |= {"global_batch_size": 4, "micro_batch_size": 4}
    config = tmp_path_factory.mktemp("config") / "run.yaml"
    config.write_text(yaml.safe_dump(given))
    return dataclasses.replace(tiny, config=config)


@pytest.fixture(scope="module")
def one_rank(started, tmp_path_factory) -> Path:
    return started.train(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def begun(started, tmp_path_factory) -> Path:
    return started.train(tmp_path_factory.mktemp("begun"), "training.steps=2")


def trained(metrics_of, run: Path) -> list[dict]:
    return [row for row in metrics_of(run) if "loss" in row]


def by_rank(row: dict) -> tuple[list[int], list[int]]:
    """Return the images and the tokens of each rank at a step."""
    found = (
        [row[key] for key in row if key.startswith(f"{name}/rank")] for name in ("images", "tokens")
    )
    images, tokens = found
    assert min(tokens) > 0
    return images, tokens


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.campaign) for n in LAYOUTS]
)
def test_a_run_resumes_and_evaluates_alike_on_every_layout(
    started, folder, one_rank, begun, tmp_path, losses, metrics_of, layout
) -> None:
    nproc, *own = LAYOUTS[layout]
    run = shutil.copytree(begun, tmp_path / "run")
    started.train(run, *own, nproc=nproc)
    assert losses(run) == pytest.approx(losses(one_rank), rel=1e-9)
    assert len(losses(run)) == 5
    ours, theirs = (by_rank(trained(metrics_of, each)[-1]) for each in (run, one_rank))
    assert [sum(each) for each in ours] == [sum(each) for each in theirs]
    model = open_pretrained(folder / "model").config
    for row in trained(metrics_of, run):
        images = sum(by_rank(row)[0]) * model.images.flops_per_image(model.hidden_size)
        assert operations(row) == pytest.approx(
            4 * LENGTH * model.flops_per_token(LENGTH) + images, rel=1e-9
        )
    if layout in ("dp2", "full"):  # other numbers of images on each rank, and none on one
        counts = [by_rank(row)[0] for row in trained(metrics_of, run)[2:]]
        assert len({tuple(each) for each in counts}) > 1
        assert any(0 in each and any(each) for each in counts)
    ours, theirs = (
        [row["val_loss"] for row in metrics_of(each) if "val_loss" in row][-1]
        for each in (run, one_rank)
    )
    assert ours == pytest.approx(theirs, rel=1e-9)


def operations(row: dict) -> float:
    return row["tflops_per_second"] * row["seconds"] * 1e12


MEMORY = {
    "frozen": (1, ("training.freeze=[images.tower]", "training.recompute=selective")),
    "pp2": (2, ("parallel.pp=2", "training.micro_batch_size=2")),
    "tp2": (2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
}


@pytest.mark.parametrize(
    "layout", ["frozen", "pp2", pytest.param("tp2", marks=pytest.mark.campaign)]
)
def test_memory_is_counted_of_the_micro_batch_with_the_most_images(
    started, rows, ranks, layout
) -> None:
    nproc, overrides = MEMORY[layout]
    loaded = load_config(started.config, list(overrides))
    counted, config = memory.count(loaded), loaded.config
    data, size = rows(), config.training.micro_batch_size
    numbers = np.argsort(data.images_of_rows)[-size:]
    batch = {n: torch.from_numpy(x) for n, x in Rows().read(data, numbers).items()}
    assert counted[0].items == {"images": len(batch["pixel_values"])}
    model = loaded.model(planned_vocab_size(loaded))

    def kept() -> dict[str, int]:
        with ParallelState(loaded.layout(nproc)) as state:
            (layers,) = counted[state.index("pp")].layers
            stage = model.build(state, layers=layers, **stage_options(config))
            freeze([stage], config.training.freeze)
            sizes = size, LENGTH // state.size("tp"), model.hidden_size
            x = torch.zeros(sizes, dtype=torch.float64, requires_grad=True)
            found = kept_by_module(stage, batch, None if stage.has_embedding else x)
            return {name: each.device for name, each in found.items()}

    for rank, found in enumerate(ranks(nproc, kept) if nproc > 1 else [kept()]):
        expected = counted[rank if layout == "pp2" else 0].plans["run"].modules
        assert found == expected
        tower = [name for name in expected if name.startswith("images.tower.layers.")]
        assert bool(tower) == (layout != "frozen" and (layout, rank) != ("pp2", 1))
    if layout == "pp2":  # the first stage makes an encoder's layer again too
        first, last = (each.plans["full"].flops for each in counted)
        assert first > last > 0


@pytest.mark.parametrize(
    ("layout", "kills"),
    [("dp2", 1), *(pytest.param(n, 25, marks=pytest.mark.campaign) for n in IN_CI)],
)
def test_kills_and_other_layouts_change_no_image_and_no_bit(
    layout, kills, started, kills_change_nothing
) -> None:
    given = ["training.micro_batch_size=1"]
    assert "pixel_values" in kills_change_nothing(started, given, LAYOUTS, layout, kills)


@pytest.mark.campaign
def test_a_tar_in_an_object_store_is_read_by_range_with_the_losses_of_a_file(
    started, folder, one_rank, tmp_path, losses, monkeypatch
) -> None:
    """The store fails one request in ten; the index is made from the object, and kept in memory."""
    own = "data.train=[s3://bucket/a.tar, s3://bucket/texts.jsonl]"
    command = started.command(tmp_path / "run", own, real=True)
    with unsteady_store() as store:
        for name, value in {**store.variables, "HOME": str(tmp_path / "home")}.items():
            monkeypatch.setenv(name, value)
        for name in ("a.tar", "texts.jsonl"):
            ObjectStore("s3://bucket").put(name, (folder / name).read_bytes())
        store.fail_some(0.1, seed=0)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert store.faults
    assert losses(tmp_path / "run") == losses(one_rank)


def test_held_out_rows_are_evaluated_by_a_mixture_that_takes_images(
    started, folder, tmp_path, metrics_of
) -> None:
    """The last batch is filled up with rows of nothing, which no expert may see."""
    given, model = yaml.safe_load(started.config.read_text()), folder / "model"
    images = open_pretrained(model).config.to_dict()["images"]
    experts = {"num_experts": 4, "top_k": 2, "ffn_size": 16, "aux_loss": 0.01}
    given["model"] = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "moe": experts}
    given["model"]["images"] = images
    given["data"]["tokenizer"] = str(model / "tokenizer.json")
    given["data"]["preprocessor"] = str(model / "preprocessor_config.json")
    given["training"]["steps"] = 1
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    runner, found = dataclasses.replace(started, config=tmp_path / "run.yaml"), []
    for size in (1, 3, 5):
        own = f"evaluation.micro_batch_size={size}"
        run = runner.train(tmp_path / str(size), own)
        found += [row["val_loss"] for row in metrics_of(run) if "val_loss" in row]
    assert found == pytest.approx([found[0]] * 3, rel=1e-9)


def test_parts_are_frozen_and_have_learning_rates_of_their_own(
    started, folder, tmp_path, metrics_of
) -> None:
    frozen, model = (
        ("images.tower", "layers", "embedding"),
        open_pretrained(folder / "model").config,
    )
    run = started.train(
        tmp_path / "run",
        f"training.freeze=[{', '.join(frozen)}]",
        "optimizer.overrides=[{names: 'images.projector.up.*', lr_scale: 0.0}]",
        f"export.hugging_face={tmp_path / 'out'}",
        "export.dtype=fp64",
    )
    rest = 4 * LENGTH * model.flops_per_token(LENGTH)
    for row in trained(metrics_of, run):
        each = model.images.flops_per_image(model.hidden_size, trains_tower=False)
        assert operations(row) == pytest.approx(rest + sum(by_rank(row)[0]) * each, rel=1e-9)
    before = dict(from_pretrained(folder / "model", dtype=torch.float64).named_parameters())
    after = dict(from_pretrained(tmp_path / "out", dtype=torch.float64).named_parameters())
    same = {name for name in before if torch.equal(before[name], after[name])}
    changed = {"images.projector.down.weight", "images.projector.down.bias", "final_norm.weight"}
    assert before.keys() - same == changed
    kept = {"chat_template.jinja", "preprocessor_config.json"}
    assert kept <= {path.name for path in (tmp_path / "out").iterdir()}
    assert kept | {"tokenizer_config.json"} <= {path.name for path in run.iterdir()}


def test_a_run_answers_a_conversation_with_images_like_its_export_in_transformers(
    tiny, started, folder, rows, tmp_path
) -> None:
    """The prompt and the pixel values equal a training row's."""
    out = tmp_path / "out"
    run = started.train(tmp_path / "run", "training.dtype=fp32", f"export.hugging_face={out}")
    picture, talk = tmp_path / "picture.png", tmp_path / "talk.json"
    pixels = np.random.default_rng(3).integers(0, 256, (9, 12, 3), np.uint8)
    Image.fromarray(pixels).save(picture)
    talk.write_text(json.dumps([{"role": "user", "content": "<image>\none one "}]))
    asked = ["generate", str(run), "--chat", str(talk), "--image", str(picture), "--greedy"]
    command = [str(tiny.programs.python), "-m", "mt_infer", *asked, "--max-tokens", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    without = [each for each in command if each not in ("--image", str(picture))]
    for name, said in (("picture.png", done.stdout), ("../other.png", ""), ("s3://a/b", "")):
        parts = [{"type": "image", "image": name}, {"type": "text", "text": "one one "}]
        talk.write_text(json.dumps([{"role": "user", "content": parts}]))
        own = subprocess.run(without, capture_output=True, text=True, check=False)
        assert own.stdout == said, own.stderr
        assert said or (own.returncode == 2 and "is no file beside" in own.stderr)
    images = open_pretrained(out).config.images
    tokenizer = load_tokenizer(run / "tokenizer.json", eod="<|eod|>")
    special = tokenizer.special_tokens
    text = tokenizer.encode("one one ")
    prompt = [special["<|user|>"], *[images.token_id] * images.num_tokens, *text]
    prompt += [special["<|end|>"], special["<|assistant|>"]]
    text = "<|user|><image>one one <|end|><|assistant|>"
    processor = AutoProcessor.from_pretrained(out)
    assert processor(text=text, images=Image.open(picture))["input_ids"] == [prompt]
    theirs = LlavaForConditionalGeneration.from_pretrained(out)
    found = theirs.generate(
        input_ids=torch.tensor([prompt]),
        pixel_values=torch.from_numpy(read_image_preprocessing(run).pixels(picture))[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=5,
        do_sample=False,
    )
    expected = tokenizer.decode(found[0, len(prompt) :].tolist())
    assert done.stdout.strip() == expected.strip()


def test_what_does_not_fit_images_is_refused_by_name(started, folder, tmp_path) -> None:
    other = tmp_path / "preprocessor_config.json"
    other.write_text(json.dumps({"size": {"height": 8, "width": 9}}))
    model = shutil.copytree(folder / "model", tmp_path / "model")
    (model / "preprocessor_config.json").unlink()
    for overrides, match in (
        ([f"data.preprocessor={other}"], r"data\.preprocessor: .*\[8, 9\].*\[8, 8\]"),
        ([f"model.from={model}"], r"data\.preprocessor: .*missing"),
        (["data.kind=chat"], r"takes images, and the data has none; use data\.kind: image-text"),
    ):
        with pytest.raises(ConfigError, match=match):
            load_config(started.config, overrides)


def test_a_preprocessor_inside_a_processor_is_read_and_kept_apart(started, folder, tmp_path):
    """As transformers 5 saves the folder of a model."""
    model = shutil.copytree(folder / "model", tmp_path / "model")
    fields = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").unlink()
    (model / "processor_config.json").write_text(json.dumps({"image_processor": fields}))
    data = load_config(started.config, [f"model.from={model}"]).config.data
    assert json.loads(data.files()["preprocessor_config.json"]) == fields
    (model / "processor_config.json").write_text(json.dumps({"image_token": "<image>"}))
    with pytest.raises(ConfigError, match="missing"):
        load_config(started.config, [f"model.from={model}"])


@pytest.mark.parametrize("tied", [True, False])
def test_the_example_of_the_first_stage_trains_the_projection_alone(folder, tied) -> None:
    """A head of its own too stays as it is, as LLaVA 1.5 has one."""
    example = Path(__file__).parents[2] / "packages/mt-train/examples/llava-align.yaml"
    config = dataclasses.replace(open_pretrained(folder / "model").config, tied=tied)
    model = GPT(config, device="meta", seed=None)
    freeze([model], yaml.safe_load(example.read_text())["training"]["freeze"])
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    parts = [f"{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")]
    assert trained == {f"images.projector.{part}" for part in parts}
