"""Images of requests: `data:` URLs alone, decoded apart from the server and within limits."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mt_hf import save_pretrained
from mt_infer import Engine, Sampling
from mt_infer.server import create_app
from mt_model import GPT, ClassPoolingConfig, ImageInputConfig, gpt, vit
from mt_tokenizer import train_tokenizer
from PIL import Image
from serving import Site, served

TEMPLATE = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
{% for p in m.content %}{{ 'n' if p.type == 'image' else p.text }}{% endfor %}\
{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = tmp_path_factory.mktemp("pictures") / "model"
    tokenizer = train_tokenizer(["to be or not to be"], 260)
    (seen,) = tokenizer.encode("n")
    tower = vit(
        **{"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_layers": 2, "num_heads": 2},
        **{"embedding_norm": True, "final_norm": False, "patch_bias": False},
        pooling=ClassPoolingConfig(norm=True),
    )
    sizes: Any = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_sequence_length": 64}
    images = ImageInputConfig(tower=tower, token_id=seen)
    save_pretrained(GPT(gpt(vocab_size=261, **sizes, images=images, init_std=1), seed=1), path)
    tokenizer.save(path / "tokenizer.json")
    (path / "preprocessor_config.json").write_text('{"size": {"height": 8, "width": 8}}')
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return Engine.from_folder(path, blocks=64)


@pytest.fixture(scope="module")
def site(engine: Engine) -> Iterator[Site]:
    with served(create_app(engine)) as found:
        yield found


def url(image: Image.Image, kind: str = "png") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def shown(*urls: str) -> dict[str, Any]:
    """A chat with images behind a text."""
    images = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    content = [{"type": "text", "text": "be"}, *images]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 5, "temperature": 0}


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_an_image_in_a_chat_is_the_engines(site: Site, engine: Engine, kind: str) -> None:
    pictures = [Image.new("RGB", (20, 10), color) for color in ("red", "blue")]
    found = site.post("/v1/chat/completions", shown(*(url(each, kind) for each in pictures)))
    assert found.status == 200, found.text
    assert engine.tokenizer is not None
    tokens = engine.tokenizer.encode("benn")
    if kind == "png":  # which loses nothing
        (expected,) = engine.generate([tokens], Sampling(temperature=0, max_tokens=5), [pictures])
        assert found.body["choices"][0]["message"]["content"] == expected.text


def bomb() -> str:
    """A small file of an image with 10^10 pixels."""
    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    parts = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 99)), (b"IEND", b"")):
        sums = struct.pack(">I", zlib.crc32(kind + content))
        parts += struct.pack(">I", len(content)) + kind + content + sums
    return f"data:image/png;base64,{base64.b64encode(parts).decode()}"


WRONG = {
    "http://127.0.0.1:1/x.png": "nothing is fetched",
    "file:///etc/passwd": "nothing is fetched",
    "data:text/html;base64,AAAA": "is not served",
    "data:image/svg+xml,<svg/>": "is not served",
    "data:image/png;base64,!!!!": "is not base64",
    "data:image/png;base64,AAAA": "is no image; use one of PNG",
    url(Image.new("RGB", (9, 9)))[:-40]: "can't be read",
    bomb(): "can't be read",
    "data:image/png;base64," + "A" * (6 << 20): "has more than 4194304 bytes",
}


@pytest.mark.parametrize("given", WRONG, ids=lambda each: each[:30])
def test_a_wrong_image_is_refused(site: Site, given: str) -> None:
    found = site.post("/v1/chat/completions", shown(given))
    assert found.status == 400
    error = found.body["error"]
    assert (error["param"], error["code"]) == ("messages[0].content", "invalid_image_url")
    assert WRONG[given] in error["message"]


def test_images_go_with_no_receipt_and_no_other_role(site: Site) -> None:
    good = shown(url(Image.new("RGB", (8, 8))))
    found = site.post("/v1/chat/completions", good | {"receipt": True})
    assert (found.status, found.body["error"]["param"]) == (400, "receipt")
    good["messages"][0]["role"] = "assistant"
    found = site.post("/v1/chat/completions", good)
    assert (found.status, found.body["error"]["param"]) == (400, "messages[0].content")


def test_a_model_of_texts_takes_no_images(tmp_path: Path) -> None:
    config = gpt(vocab_size=261, hidden_size=16, num_layers=1, num_heads=2, max_sequence_length=64)
    save_pretrained(GPT(config, seed=1), tmp_path)
    train_tokenizer(["to be or not to be"], 260).save(tmp_path / "tokenizer.json")
    with served(create_app(Engine.from_folder(tmp_path, blocks=64))) as site:
        found = site.post("/v1/chat/completions", shown(url(Image.new("RGB", (8, 8)))))
        assert (found.status, "takes text alone" in found.text) == (400, True)
        body = {"messages": [{"role": "user", "content": "be"}]}
        found = site.post("/v1/chat/completions", body)
        assert (found.status, "has no chat template" in found.text) == (400, True)
