"""A folder of Hugging Face is generated from once it is imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mt_hf import from_pretrained, import_pretrained, save_pretrained
from mt_infer import Engine
from mt_model import (
    GPT,
    AttentionConfig,
    ClassPoolingConfig,
    ImageInputConfig,
    MLPConfig,
    RelativeConfig,
    encoder_decoder_layers,
    gpt,
    preset,
    vit,
)
from mt_tokenizer import load_tokenizer, train_tokenizer
from PIL import Image

PROMPT = "to be"


def test_the_greedy_text_is_that_of_the_folder(folder, tmp_path, generate) -> None:
    import_pretrained(folder, tmp_path / "run")
    code, out, _ = generate(tmp_path / "run", "--max-tokens", 12, "--temperature", 0, prompt=PROMPT)
    tokenizer, model = load_tokenizer(folder / "tokenizer.json"), from_pretrained(folder)
    ids = given = tokenizer.encode(PROMPT)
    for _ in range(12):
        best = int(model.logits(torch.tensor([ids]))[0, -1, : tokenizer.vocab_size].argmax())
        if best == tokenizer.eod_id:
            break
        ids = [*ids, best]
    assert code == 0
    assert len(ids) > len(given)
    assert tokenizer.decode(ids[len(given) :]) in out


def test_an_id_of_the_hub_is_found_in_its_cache(folder, tmp_path, generate, monkeypatch) -> None:
    from huggingface_hub import constants

    own, commit = tmp_path / "cache/models--acme--tiny", "c0ffee" * 6 + "0000"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    code, _, err = generate("acme/tiny", prompt=PROMPT)
    assert code != 0
    assert "hf download acme/tiny" in err
    shutil.copytree(folder, own / "snapshots" / commit)
    (own / "refs").mkdir()
    (own / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    asked = ("--max-tokens", 4, "--temperature", 0)
    found = generate("acme/tiny", *asked, prompt=PROMPT)
    assert found[0] == 0, found
    assert found[1] == generate(folder, *asked, prompt=PROMPT)[1]
    assert generate("acme/other", "--download", *asked, prompt=PROMPT)[1] == found[1]
    assert generate("acme/other", *asked, prompt=PROMPT)[0] != 0


def test_a_prompt_is_said_in_the_chat_template(folder, tmp_path, generate) -> None:
    source = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}to"
    (folder / "chat_template.jinja").write_text(source)
    import_pretrained(folder, tmp_path / "run")
    asked = ["--max-tokens", 8, "--greedy"]
    for given in (folder, tmp_path / "run"):
        said = generate(given, *asked, "--chat", "--system", "be", prompt="or not")
        assert said[0] == 0, said
        assert said[1] == generate(given, *asked, prompt="<system> be <user> or not to")[1]
    assert generate(folder, *asked, "--system", "be")[0] == 2
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "or not"}]
    for content in (talk, {"messages": talk, "tools": []}):
        (tmp_path / "talk.json").write_text(json.dumps(content))
        answered = generate(folder, *asked, "--chat", tmp_path / "talk.json", prompt=None)
        assert answered == said
    assert generate(folder, *asked, "--chat", tmp_path / "talk.json")[0] == 2
    (tmp_path / "talk.json").write_text('["be"]')
    code, _, err = generate(folder, *asked, "--chat", tmp_path / "talk.json", prompt=None)
    assert code != 0
    assert "list of objects" in err
    (folder / "chat_template.jinja").unlink()
    code, _, err = generate(folder, *asked, "--chat")
    assert code == 1
    assert "chat_template" in err


def test_a_dtype_has_two_names_and_another_is_refused(folder) -> None:
    for named in ("bf16", torch.bfloat16):
        assert Engine.from_folder(folder, dtype=named).model.shard.dtype == torch.bfloat16
    for wrong in ("bfloat16", torch.int8):
        with pytest.raises(ValueError, match="is not known; use fp64, fp32, "):
            Engine.from_folder(folder, dtype=wrong)


def test_weights_without_a_tokenizer_are_refused(folder, tmp_path, generate) -> None:
    (folder / "tokenizer.json").unlink()
    import_pretrained(folder, tmp_path / "run")
    code, _, err = generate(tmp_path / "run")
    assert code != 0
    assert "tokenizer" in err


def test_a_model_that_takes_images_continues_texts_with_and_without_them(
    folder, tmp_path, generate
) -> None:
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    (seen,) = tokenizer.encode("n")
    tower = vit(
        **{"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_layers": 2, "num_heads": 2},
        **{"embedding_norm": True, "final_norm": False, "patch_bias": False},
        pooling=ClassPoolingConfig(norm=True),
    )
    images = ImageInputConfig(tower=tower, token_id=seen)
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_sequence_length": 32}
    config = gpt(vocab_size=261, **sizes, images=images, init_std=1)
    save_pretrained(GPT(config), tmp_path / "llava")
    shutil.copy(folder / "tokenizer.json", tmp_path / "llava")
    pictures = [tmp_path / "red.png", tmp_path / "blue.png"]
    for path in pictures:
        Image.new("RGB", (20, 10), path.stem).save(path)
    asked = "--max-tokens", 6, "--greedy", "--image"
    code, _, err = generate(tmp_path / "llava", *asked, pictures[0], prompt="nb")
    assert code != 0
    assert "preprocessor_config.json" in err
    (tmp_path / "llava/preprocessor_config.json").write_text('{"size": {"height": 8, "width": 8}}')
    import_pretrained(tmp_path / "llava", tmp_path / "run")
    texts = {generate(tmp_path / "run", *asked, path, prompt="nb")[:2] for path in pictures}
    assert {code for code, _ in texts} == {0}
    assert len(texts) == 2
    code, _, err = generate(tmp_path / "run", "--max-tokens", 2, prompt="b")
    assert code == 0, err
    code, _, err = generate(tmp_path / "run", "--max-tokens", 2, prompt="n")
    assert code != 0
    assert f"1 image tokens ({seen})" in err


@pytest.fixture
def answering(tmp_path: Path) -> Path:
    """A folder of an encoder and a decoder."""
    attention = AttentionConfig(
        num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0, score_bias=RelativeConfig()
    )
    mlp = MLPConfig(ffn_size=24, activation="relu", gated=False)
    config = gpt(
        vocab_size=261,
        hidden_size=16,
        layers=encoder_decoder_layers(attention, mlp, encoder=2, decoder=1),
        encoder_layers=2,
        positions="none",
        logit_scale=0.25,
        norm_eps=1e-6,
        max_sequence_length=32,
        init_std=1,
    )
    save_pretrained(config.build(seed=6), tmp_path / "model")
    train_tokenizer(["to be or not to be"], 260).save(tmp_path / "model/tokenizer.json")
    return tmp_path / "model"


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_an_encoder_gets_the_prompt_and_its_end(answering, tmp_path, pp) -> None:
    import_pretrained(answering, tmp_path / "run")
    command = [sys.executable, "-m", "mt_infer", "generate", tmp_path / "run", "--prompt", PROMPT]
    command += ["--max-tokens", "12", "--temperature", "0", "--pp", str(pp)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    tokenizer, model = load_tokenizer(answering / "tokenizer.json"), from_pretrained(answering)
    given = torch.tensor([[*tokenizer.encode(PROMPT), tokenizer.eod_id]])
    ids = [model.config.decoder_start]
    for _ in range(12):
        logits = model.logits(torch.tensor([ids]), encoder_tokens=given)
        best = int(logits[0, -1, : tokenizer.vocab_size].argmax())
        if best == tokenizer.eod_id:
            break
        ids = [*ids, best]
    assert done.returncode == 0, done.stderr
    assert len(ids) > 4
    assert tokenizer.decode(ids[1:]) in done.stdout


def test_a_model_that_sees_both_sides_continues_no_text(tmp_path, generate) -> None:
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "ffn_size": 32}
    config = preset("bert-base", vocab_size=261, max_sequence_length=32, **sizes)
    save_pretrained(GPT(config), tmp_path / "model")
    train_tokenizer(["to be or not to be"], 260).save(tmp_path / "model/tokenizer.json")
    import_pretrained(tmp_path / "model", tmp_path / "run")
    code, _, error = generate(tmp_path / "run", prompt=PROMPT)
    assert code not in (0, None)
    assert "sees tokens on both sides" in " ".join(error.split())
