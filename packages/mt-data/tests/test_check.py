"""`mt-data check`: what would be learnt of a file of conversations, and its wrong lines."""

import json

import pytest
from mt_data.cli import main
from mt_tokenizer import train_tokenizer

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def talk(question, answer):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def test_the_command_shows_what_is_learnt_and_names_wrong_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    special = ["<|eod|>", "<|im_start|>", "<|im_end|>"]
    train_tokenizer(["one two three"] * 3, 300, special).save("tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    write(tmp_path / "a.jsonl", talk("one", "two"), talk("one", "three"))
    with pytest.raises(SystemExit) as ended:
        main(["check", "a.jsonl", "--tokenizer", "tokenizer.json"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "assistant\n[[two<|im_end|>]]\n" in out
    assert "conversations  2" in out
    assert "2 learnt, of which 2 end with a special token" in out
    write(tmp_path / "b.jsonl", talk("one", "two"), {"text": "x"}, {"prompt": 1, "completion": 2})
    with pytest.raises(SystemExit) as ended:
        main(["check", "a.jsonl", "b.jsonl", "--tokenizer", "tokenizer.json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert "conversations  3" in out
    assert "b.jsonl:2" in err
    assert "b.jsonl:3" in err
    assert "2 lines are wrong" in err
