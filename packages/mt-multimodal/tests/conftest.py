"""A small tokenizer with a chat template that takes images, and drawn images."""

import io
import json
import tarfile

import numpy as np
import pytest
from mt_multimodal import ImageForm, ImagePreprocessing
from mt_tokenizer import ChatTemplate, load_tokenizer
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<image>"]
IMAGE, PER_IMAGE = 4, 4


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    vocab = {name: number for number, name in enumerate(SPECIAL)}
    vocab |= {chr(code): len(vocab) + code for code in range(32, 127)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return load_tokenizer(path, eod="<|end|>")


@pytest.fixture(scope="session")
def template(tokenizer):
    with ChatTemplate(TEMPLATE, tokenizer) as found:
        yield found


@pytest.fixture(scope="session")
def form():
    """The form of images in the rows of the tests."""
    preprocessing = ImagePreprocessing(size={"height": 6, "width": 8})
    return ImageForm(preprocessing=preprocessing, token_id=IMAGE, num_tokens=PER_IMAGE)


def picture(seed, mode="RGB", size=(20, 14)):
    draw = np.random.default_rng(seed)
    pixels = draw.integers(0, 256, (*size[::-1], 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def png(seed, **how):
    file = io.BytesIO()
    picture(seed, **how).save(file, "PNG")
    return file.getvalue()


def write_tar(path, members, *, format=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def talk(images, *, answer="yes", question="q"):
    """A conversation with images before the question, in LLaVA's form."""
    turns = [
        {"from": "human", "value": "<image>\n" * images + question},
        {"from": "gpt", "value": answer},
    ]
    return json.dumps({"conversations": turns}).encode()


class Made:
    picture, png, write_tar, talk = map(staticmethod, (picture, png, write_tar, talk))


@pytest.fixture(scope="session")
def made():
    return Made
