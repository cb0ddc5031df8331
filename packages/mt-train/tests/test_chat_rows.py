"""A run of conversations: rows, files for inference, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mt_data import DataFileError
from mt_tokenizer import ChatTemplate, load_tokenizer
from mt_train import ConfigError, load_config

CONSTANT = ("optimizer.lr=0.03", "optimizer.schedule=constant")
TEMPLATE = """\
{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }}
{% else %}A{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}A{% endif %}"""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with conversations, of which one has a weight, and a template."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "template.jinja").write_text(TEMPLATE)
    for name, count in (("train", 40), ("held", 9)):
        talks = []
        for number in range(count):
            answer = {"role": "assistant", "content": f"two {number % 3}"}
            if name == "train" and number == 1:
                answer["weight"] = 0.5
            question = {"role": "user", "content": f"one {number % 3}"}
            talks.append({"messages": [question, answer]})
        lines = "".join(f"{json.dumps(talk)}\n" for talk in talks)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def options(tiny, chat: Path, **more: str) -> list[str]:
    data = {
        "kind": "chat",
        "train": f"[{chat}/train.jsonl]",
        "validation": f"{chat}/held.jsonl",
        "tokenizer": f"{tiny.data}/tokenizer.json",
        "template": f"{chat}/template.jinja",
        **more,
    }
    text = ", ".join(f"{name}: {value}" for name, value in data.items())
    return [f"data={{{text}}}", "training.sequence_length=32", *CONSTANT]


@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_a_run_learns_and_resumes_to_the_same_bits(tiny, chat, tmp_path, losses, packing) -> None:
    own = [*options(tiny, chat, packing=packing), "training.steps=6"]
    tiny.run(tmp_path / "whole", *own)
    tiny.run(tmp_path / "parts", *own, "training.steps=3")
    tiny.run(tmp_path / "parts", *own)
    found = losses(tmp_path / "whole")
    assert found == losses(tmp_path / "parts")
    assert found[6] < found[1] - 0.5


def test_the_folder_and_the_export_have_the_template(tiny, chat, tmp_path) -> None:
    export = tmp_path / "export"
    outcome = tiny.run(
        tmp_path / "run", *options(tiny, chat), "training.steps=1", f"export.hugging_face={export}"
    )
    assert outcome.evaluation["val_loss"] > 0
    tokenizer = load_tokenizer(tiny.data / "tokenizer.json")
    for folder in (tmp_path / "run", export):
        assert (folder / "chat_template.jinja").read_text() == TEMPLATE
        with ChatTemplate.from_folder(folder, tokenizer) as template:
            text = template.write([{"role": "user", "content": "one"}]).text
            whole = template.render([{"role": "user", "content": "one"}])
        assert text == "Q one\nA"
        assert whole.ids == tokenizer.encode("Q one\n")


def test_what_is_wrong_in_the_data_is_named(tiny, chat, tmp_path) -> None:
    with pytest.raises(DataFileError, match=r"train\.jsonl:1: has \d+ tokens, and a row takes 5"):
        tiny.run(tmp_path / "long", *options(tiny, chat), "training.sequence_length=4")
    with pytest.raises(ConfigError, match=r"data.corpus: is for text"):
        load_config(tiny.config, ["data={kind: chat, corpus: standard-library}"])
    with pytest.raises(ConfigError, match=r"data.template: .*does not exist"):
        load_config(tiny.config, options(tiny, chat, template="missing.jinja"))
    plain = options(tiny, chat)
    plain[0] = plain[0].replace(f", template: {chat}/template.jinja", "")
    with pytest.raises(DataFileError, match=r"train\.jsonl:1: .*need a chat template"):
        tiny.run(tmp_path / "none", *plain)
