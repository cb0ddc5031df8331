"""`mt-infer generate --prompts FILE --out FILE`: many prompts, each answered as it is alone."""

from __future__ import annotations

import fcntl
import json
import os

import pytest
from mt_infer import Engine

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
TALK = [{"role": "user", "content": "be"}]
LINES = [
    {"prompt": "to be"},
    {"prompt": "or", "completion": "is ignored"},
    {"messages": TALK},
    {"prompt": TALK, "completion": [{"role": "assistant", "content": "x"}]},
    {"prompt": "to be"},
]


@pytest.fixture
def asked(run, tmp_path):
    """A run with a chat template, a file of prompts, and one for the answers."""
    (run / "chat_template.jinja").write_text(TEMPLATE)
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(map(json.dumps, LINES)) + "\n")
    return run, path, tmp_path / "answers.jsonl"


def answers(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_answer_is_that_of_the_prompt_alone(asked, generate, tmp_path) -> None:
    run, path, out = asked
    how = ("--max-tokens", 4, "--greedy", "--dtype", "fp64")
    code, printed, said = generate(
        run, "--prompts", path, "--out", out, "--batch", 2, *how, prompt=None
    )
    assert (code, printed) == (0, "")
    assert said == f"mt-infer: 5 answers in {out}\n"
    found = answers(out)
    assert [each["line"] for each in found] == [1, 3, 5, 7, 9]
    talk = tmp_path / "talk.json"
    talk.write_text(json.dumps(TALK))
    alone = [generate(run, *how, prompt=text)[1] for text in ("to be", "or")]
    alone += [generate(run, "--chat", talk, *how, prompt=None)[1]] * 2
    assert [f"{each['text']}\n" for each in found] == [*alone, alone[0]]
    assert found[0] == found[4] | {"line": 1}
    generate(run, "--prompts", path, "--out", tmp_path / "said", "--chat", *how, prompt=None)
    said = generate(run, "--chat", *how, prompt="or")[1]
    assert f"{answers(tmp_path / 'said')[1]['text']}\n" == said


def test_a_killed_command_goes_on_behind_the_last_whole_answer(
    asked, generate, monkeypatch
) -> None:
    run, path, out = asked
    how = ("--prompts", path, "--out", out, "--max-tokens", 3)
    generate(run, *how, prompt=None)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    given, stream = [], Engine.stream
    monkeypatch.setattr(
        Engine,
        "stream",
        lambda own, rows, *a, **b: given.append(rows) or stream(own, rows, *a, **b),
    )
    for kept, rest in ((lines[0] + lines[1][:9], 4), (b"".join(lines), 0)):
        out.write_bytes(kept)
        code, _, said = generate(run, *how, prompt=None)
        assert code == 0
        assert f"{5 - rest} of them from before" in said
        assert sum(map(len, given)) == rest
        assert out.read_bytes() == whole
        given.clear()
    code, _, said = generate(run, *how, "--seed", 7, prompt=None)
    assert code == 2
    assert "of another model or setting; name another file" in said
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no prompts"),
        (b'{"prompt": "a"}\nnonsense\n', "prompts.jsonl:2: is not valid JSON"),
        (b"[1]", "prompts.jsonl:1: is [1]"),
        (b'{"prompt": 7}', "messages are no list of objects"),
        (b'{"messages": "hi"}', "messages are no list of objects"),
        (b'{"messages": [7]}', "messages are no list of objects"),
        (b'{"messages": [], "tools": {}}', "tools are no list of objects"),
        (b'{"prompt": "a", "prompt": "b"}', "twice"),
        (b'{"prompt": "' + b"to be " * 40 + b'"}', "prompts.jsonl:1: the prompt has "),
        (b'{"prompt": "\\ud800"}', "prompts.jsonl:1: the prompt is not valid text"),
        (b'{"messages": [{"role": "user"}], "tools": [], "x": ' + b"[" * 99_999, "too deeply"),
        (b'{"prompt": "\xff"}', "is not UTF-8"),
        (b"x" * ((1 << 24) + 1), "is longer than 16777216 bytes"),
    ],
)
def test_a_bad_line_is_one_message_before_anything_is_loaded(
    asked, generate, monkeypatch, content, words
) -> None:
    monkeypatch.setattr(Engine, "from_run", None)
    run, path, out = asked
    path.write_bytes(content)
    code, printed, said = generate(run, "--prompts", path, "--out", out, prompt=None)
    assert (code, printed) == (2, "")
    assert words in said
    assert said.count("\n") == 1
    assert len(said) < 2100
    assert not out.exists()


def test_options_and_files_that_do_not_go_together_are_one_message(
    asked, generate, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Engine, "from_run", None)
    run, path, out = asked
    both = ("--prompts", path, "--out", out)
    for options, prompt, status, words in (
        (both, "to", 2, "give one of --prompt"),
        (("--prompts", path), None, 2, "needs --out FILE"),
        (("--out", out), "to", 2, "needs --out FILE"),
        ((*both, "--batch", 0), None, 2, "--batch 0: use 1 or more"),
        ((*both, "--image", path), None, 2, "does not go with --image"),
        (("--prompts", tmp_path / "none", "--out", out), None, 1, "none: cannot read it"),
        (("--prompts", path, "--out", tmp_path / "no/where"), None, 1, "No such file"),
        (("--prompts", path, "--out", tmp_path), None, 1, "Is a directory"),
        (("--prompts", path, "--out", path), None, 1, "is no answer of this command"),
    ):
        code, _, said = generate(run, *options, prompt=prompt)
        assert (code, said.count("\n")) == (status, 1), said
        assert words in said
    assert path.read_text().count("\n") == 9
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(tmp_path / "aim")
    os.mkfifo(fifo)
    for each in (link, fifo):
        code, _, said = generate(run, "--prompts", path, "--out", each, prompt=None)
        assert (code, said.count("\n")) == (1, 1), said
    assert not (tmp_path / "aim").exists()
    with out.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, _, said = generate(run, *both, prompt=None)
    assert code == 1
    assert "is written by another process" in said
