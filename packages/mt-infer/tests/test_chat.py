"""`mt-infer chat`: conversations in a terminal, with a model in the process or behind a server."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from mt_hf import save_pretrained
from mt_infer import Engine, Sampling
from mt_infer.cli import main
from mt_infer.server import create_app
from mt_model import GPT, gpt
from mt_tokenizer import train_tokenizer
from serving import served

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CONTEXT = 192


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A folder of Hugging Face with a chat template."""
    path = tmp_path_factory.mktemp("chatty") / "model"
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 4}
    config = gpt(vocab_size=261, **sizes, max_sequence_length=CONTEXT, init_std=1)
    save_pretrained(GPT(config, seed=3), path)
    train_tokenizer(["to be or not to be"], 260).save(path / "tokenizer.json")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def talk(monkeypatch, capsys):
    """Exit code, standard output and standard error of a conversation."""

    def call(model, *lines, options=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{each}\n" for each in lines)))
        with pytest.raises(SystemExit) as stop:
            main(["chat", str(model), *options])
        return stop.value.code, *capsys.readouterr()

    return call


def printable(text):
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def test_answers_are_those_of_the_engine_to_the_whole_conversation(chatty, talk):
    lines = ("/set temperature 0", "/set max_tokens 6", "to be", "or not", "/reset", "to be")
    code, out, _ = talk(chatty, "/system be", *lines)
    engine = Engine.from_folder(chatty, blocks=20, max_batch=1)
    how = Sampling(temperature=0.0, max_tokens=6)
    prompt = "system: be\nuser: to be\nassistant:"
    tokenizer = engine.tokenizer
    first = engine.generate(tokenizer.encode_chat(prompt), how)[0].text
    longer = f"{prompt.removesuffix('assistant:')}assistant: {first}\nuser: or not\nassistant:"
    second = engine.generate(tokenizer.encode_chat(longer), how)[0].text
    assert (code, out) == (0, "".join(f"{printable(each)}\n" for each in (first, second, first)))


def test_a_mistake_is_a_message_and_the_conversation_goes_on(chatty, talk):
    wrong = {
        "/set temprature 1": "Did you mean temperature?",
        "/set temperature hot": "expected a number",
        "/set top_p 7": "top_p",
        "/set seed": "give a value",
        "/sytem be": "Did you mean /system?",
        "x" * CONTEXT: "/reset begins anew",
    }
    code, out, err = talk(chatty, *wrong, "/set max_tokens 1", "/set seed none", "hi", "/set")
    assert code == 0
    for line, message in zip(err.splitlines(), wrong.values(), strict=False):
        assert message in line
    assert "max_tokens = 1\n" in out
    assert "seed = None\n" in out


def test_the_room_for_a_conversation_ends_an_answer(chatty, talk):
    options = ("--context", "32")
    code, _, err = talk(chatty, "/set temperature 0", "hi", "more", options=options)
    assert code == 0
    assert "the model's context is full" in err
    assert "and there is room for 32" in err


def test_a_model_without_a_template_sees_plain_text(saved_run, talk):
    code, _, err = talk(saved_run, "/set max_tokens 1", "to")
    assert code == 0
    assert "has no chat template" in err
    assert "plain text" in err
    assert "16" in err  # the context is shorter than the prompt


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("http://", (), "is no address of a server"),
        ("http://127.0.0.1:1", ("--step", "2"), "--step is for a folder"),
        ("http://127.0.0.1:1", (), "no answer from http://127.0.0.1:1"),
        ("nothing", (), "nothing is not a folder"),
        ("nothing", ("--name", "x"), "--name is for a server"),
        ("nothing", ("--context", "0"), "use 1 or more"),
    ],
)
def test_a_model_that_is_not_there_is_one_message(talk, model, options, message):
    code, out, err = talk(model, options=options)
    assert code in (1, 2)
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_model_behind_a_server_answers_as_one_in_the_process(chatty, talk):
    lines = ("/set temperature 0", "/set max_tokens 6", "to be", "or not")
    expected = talk(chatty, *lines)
    with served(create_app(Engine.from_folder(chatty, max_batch=1))) as site:
        url = f"http://127.0.0.1:{site.port}"
        assert talk(url, *lines)[:2] == expected[:2]
        code, out, err = talk(url, "x" * CONTEXT, "/set max_tokens 1", "hi")
    assert code == 0
    assert out.count("\n") == 1
    assert "answers with 400" in err


class PseudoTerminal:
    """A program in a terminal of its own."""

    def __init__(self, *command):
        self.output = b""
        own, other = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": other, "stdout": other, "stderr": other}
        self.process = subprocess.Popen(
            command, **pipes, env=environment, start_new_session=True, close_fds=True
        )
        os.close(other)
        self._own = own

    def wait_for(self, pattern, seconds=120):
        """Read until the output has a pattern, and forget it up to there."""
        until = time.monotonic() + seconds
        while (found := re.search(pattern, self.output)) is None:
            assert time.monotonic() < until, self.output
            if select.select([self._own], [], [], 0.1)[0]:
                self.output += os.read(self._own, 4096)
        self.output = self.output[found.end() :]
        return found

    def type(self, text):
        os.write(self._own, text.encode())

    def close(self):
        os.close(self._own)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def test_a_conversation_in_a_terminal(tmp_path):
    config = gpt(vocab_size=261, hidden_size=64, num_layers=4, num_heads=4, init_std=1)
    save_pretrained(GPT(config, seed=3), tmp_path)
    train_tokenizer(["to be or not to be"], 260).save(tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    terminal = PseudoTerminal(sys.executable, "-m", "mt_infer", "chat", str(tmp_path))
    try:
        terminal.wait_for(b"> $")
        terminal.type("/set temperature 0.5\n/set max_tokens 100000\n/set seed 1\n")
        terminal.wait_for(rb"seed 1\r\n> ")
        terminal.type("to be\n")
        terminal.wait_for(rb"to be\r\n.+")
        os.kill(terminal.process.pid, signal.SIGINT)  # ends the answer alone
        terminal.wait_for(rb"\r\n> $")
        terminal.type("/set max_tokens 3\nor not\n")
        terminal.wait_for(rb"or not\r\n.+\r\n.*max_tokens tokens.*\r\n> $")
        terminal.type("/set\n")
        terminal.wait_for(rb"temperature = 0.5\r\n")
        terminal.wait_for(rb"max_tokens = 3\r\n> $")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
