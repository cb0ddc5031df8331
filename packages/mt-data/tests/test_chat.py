"""Rows of conversations: labels, left-out conversations, and packing."""

import json

import numpy as np
import pytest
from mt_data import PADDING, ChatDataset, DataError, DataFileError, Rows
from mt_tokenizer import ChatTemplate, train_tokenizer

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ["<|eod|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three four five"] * 3, 300, SPECIAL)


@pytest.fixture(scope="module")
def template(tokenizer):
    with ChatTemplate(CHATML, tokenizer) as opened:
        yield opened


def write(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def talk(question, answer, **more):
    messages = [{"role": "user", "content": question}]
    return {"messages": [*messages, {"role": "assistant", "content": answer, **more}]}


def learnt(dataset, tokenizer, index):
    """Return the text of the labels of each conversation of a row."""
    row = dataset.row(index)
    documents = row.get("documents", np.zeros(dataset.sequence_length))
    found = []
    for number in range(len(dataset.items(index))):
        labels = row["labels"][documents == number]
        found.append(tokenizer.decode(labels[labels != PADDING]))
    return found


def test_every_form_of_a_line_is_learnt(tmp_path, tokenizer, template):
    share = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
    messages = talk("one", "two")["messages"]
    path = write(
        tmp_path / "talks.jsonl",
        {"messages": messages},
        {"conversations": share, "system": "five"},
        {"prompt": messages[:1], "completion": messages[1:]},
        {"prompt": "one", "completion": " two"},
    )
    dataset = ChatDataset(path, tokenizer, template, sequence_length=64, packing="none")
    found = {dataset.items(n)[0]: learnt(dataset, tokenizer, n) for n in range(4)}
    answer = ["two<|im_end|>"]
    assert found == {0: answer, 1: answer, 2: answer, 3: [" two<|eod|>"]}
    row = next(dataset.row(n) for n in range(4) if dataset.items(n) == [3])
    prompt = tokenizer.encode_prompt("one")
    assert row["tokens"][: len(prompt)].tolist() == prompt
    assert dataset.report.conversations == len(dataset) == 4


def test_labels_weights_and_places_are_those_of_each_conversation(tmp_path, tokenizer, template):
    path = write(tmp_path / "a.jsonl", talk("one", "two", weight=0.5), talk("three", "four"))
    dataset = ChatDataset(path, tokenizer, template, sequence_length=64)
    row = dataset.row(0)
    assert len(dataset) == 1
    for number, each in enumerate(dataset.items(0)):
        ids, trained = template.render(json.loads(path.read_text().splitlines()[each])["messages"])
        own = row["documents"] == number
        assert row["tokens"][own].tolist() == ids[:-1]
        assert row["positions"][own].tolist() == list(range(len(ids) - 1))
        labels = [n if weight else PADDING for n, weight in zip(ids, trained, strict=True)]
        assert row["labels"][own].tolist() == labels[1:]
        assert row["label_weights"][own].tolist() == trained[1:]
    behind = row["documents"] == PADDING
    assert (row["labels"][behind] == PADDING).all()
    batch = Rows().read(dataset, np.array([0, -1]))
    assert batch["tokens"].shape == (2, 64)
    assert {field.name for field in dataset.fields} < set(batch)


def test_what_is_too_long_is_refused_dropped_or_cut(tmp_path, tokenizer, template):
    long = talk("one", "three " * 40)
    path = write(tmp_path / "a.jsonl", talk("one", "two"), long, talk("x " * 90, "two"))

    def opened(too_long):
        how = {"sequence_length": 48, "too_long": too_long}
        return ChatDataset(path, tokenizer, template, **how)

    with pytest.raises(DataFileError, match=r"a\.jsonl:2.*a row takes 49"):
        opened("refuse")
    assert (opened("drop").report.conversations, opened("drop").report.too_long) == (1, 2)
    cut = opened("cut").report  # the last one has no answer left
    assert (cut.conversations, cut.cut, cut.unlabelled) == (2, 2, 1)
    with pytest.raises(DataError, match="too_long is 'keep'"):
        opened("keep")
    untrained = write(tmp_path / "b.jsonl", talk("one", "two", train=False))
    with pytest.raises(DataError, match="nothing to learn"):
        ChatDataset(untrained, tokenizer, template, sequence_length=48)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"{", "JSON"),
        (b"[1]", "is list"),
        (b'{"text": "x"}', "has 'text'; a line has messages"),
        (b'{"messages": "x"}', "messages is 'x'"),
        (b'{"messages": [{"content": "x"}]}', "message 0 is no mapping with a role"),
        (b'{"prompt": "x", "completion": 1}', "both be texts"),
        (b'{"conversations": [{"from": "me", "value": "x"}]}', "is from 'me'"),
        (b'{"messages": [], "tools": 1}', "tools is 1"),
        (b'{"messages": [{"role": "assistant", "content": null}]}', "neither content"),
        (b"{" * 9000, "JSON|nest"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, tokenizer, template, line, word):
    path = write(tmp_path / "a.jsonl", talk("one", "two"))
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(DataFileError, match=rf"a\.jsonl:2: .*({word})"):
        ChatDataset(path, tokenizer, template, sequence_length=48)


def test_messages_need_a_template_and_texts_none(tmp_path, tokenizer):
    texts = write(tmp_path / "a.jsonl", {"prompt": "one", "completion": "two"})
    assert len(ChatDataset(texts, tokenizer, sequence_length=16)) == 1
    with pytest.raises(DataFileError, match="need a chat template"):
        ChatDataset(write(tmp_path / "b.jsonl", talk("a", "b")), tokenizer, sequence_length=16)


class SmallWindows(ChatDataset):
    window = 16


@pytest.mark.parametrize("packing", ["best-fit", "none"])
def test_each_conversation_of_an_epoch_comes_once_whatever_was_read_before(
    tmp_path, tokenizer, template, packing
):
    talks = [talk("one", " ".join(["two"] * (n % 9 + 1))) for n in range(50)]
    path = write(tmp_path / "a.jsonl", *talks)
    how = {"sequence_length": 40, "packing": packing, "seed": 7}
    dataset, other = (SmallWindows(path, tokenizer, template, **how) for _ in range(2))
    rows = [dataset.items(n) for n in range(150)]
    found, at = [], 0
    for _ in range(2):
        epoch: list[int] = []
        while len(epoch) < 50:
            epoch += rows[at]
            at += 1
        assert sorted(epoch) == list(range(50))
        found.append(epoch)
    assert found[0] != found[1]
    assert other.items(at - 1) == rows[at - 1]  # another was asked for nothing before
    assert other.fingerprint == dataset.fingerprint
    assert other.fingerprint != SmallWindows(path, tokenizer, template, **{**how, "seed": 8})
