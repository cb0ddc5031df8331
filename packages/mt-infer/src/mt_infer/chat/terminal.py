"""A conversation in a terminal: lines of the user, and answers as they come."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from mt_files import SchemaError, UserError, did_you_mean, shorten
from mt_tokenizer import Content, Reasoning

from mt_infer.chat.settings import Settings, with_setting
from mt_infer.chat.speaker import Ended, Message, Speaker
from mt_infer.console import say
from mt_infer.text import PromptError

HELP = """/set NAME VALUE   set temperature, top_p, top_k, min_p, seed, max_tokens or a penalty
/set              print the settings
/system TEXT      what the system says before the conversation; alone, nothing
/reset            forget the conversation
/quit             end, as does Ctrl-D; Ctrl-C ends an answer"""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_NOTES = {
    "length": "the answer has max_tokens tokens; /set max_tokens N allows more",
    "context": "the model's context is full; /reset begins anew",
}


class Terminal:
    """A conversation.

    Args:
        speaker: Speaker that answers.
        system: System message; empty for none.
    """

    def __init__(self, speaker: Speaker, system: str = "") -> None:
        self._speaker, self._system = speaker, system
        self._messages: list[Message] = []
        self._settings: dict[str, Any] = {}
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            "/system": self._set_system,
            "/reset": self._reset,
            "/help": self._help,
        }

    def run(self) -> None:
        """Answer lines of the standard input until it ends."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            import readline  # noqa: F401 - `input` then edits lines and keeps their history
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        while True:
            try:
                line = input("> " if is_terminal else "").strip()
            except EOFError:
                if is_terminal:
                    _write("\n")
                return
            except UnicodeDecodeError:
                say("the line is not UTF-8")
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self._do(line)
            elif line:
                self._answer(line)

    def _do(self, line: str) -> None:
        """Run a command."""
        name, _, rest = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            known = [*self._commands, "/quit"]
            say(f"{shorten(name)} is no command. {did_you_mean(name, known)}")
            return
        try:
            command(rest.strip())
        except (SchemaError, ValueError) as error:
            say(str(error))

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            known = Settings(**self._settings)
            _write("".join(f"{key} = {each}\n" for key, each in vars(known).items()))
            return
        if not value.strip():
            raise ValueError(f"/set {name}: give a value, as in /set temperature 0.5")
        self._settings = with_setting(self._settings, name, value.strip())

    def _set_system(self, rest: str) -> None:
        self._system = rest

    def _reset(self, _: str) -> None:
        self._messages.clear()

    def _help(self, _: str) -> None:
        _write(HELP + "\n")

    def _answer(self, line: str) -> None:
        """Print the answer to a line, and keep both in the conversation."""
        system: list[Message] = [{"role": "system", "content": self._system}]
        self._messages.append({"role": "user", "content": line})
        given = [*(system if self._system else []), *self._messages]
        content: list[str] = []
        try:
            self._print(given, content)
        except (UserError, OSError, PromptError) as error:
            say(str(error))
        except KeyboardInterrupt:
            _write("\n")
        if content:
            self._messages.append({"role": "assistant", "content": "".join(content)})
        else:
            self._messages.pop()

    def _print(self, messages: list[Message], content: list[str]) -> None:
        """Print an answer, and collect its content."""
        is_dim = False
        with closing(self._speaker.answer(messages, self._settings)) as parts:
            for part in parts:
                if isinstance(part, Ended):
                    _write("\n")
                    if part.reason in _NOTES:
                        say(_NOTES[part.reason])
                elif isinstance(part, Reasoning):
                    _write(part.text, _DIM if not is_dim else "")
                    is_dim = True
                elif isinstance(part, Content):
                    if is_dim:
                        _write("\n", _PLAIN)
                        is_dim = False
                    content.append(part.text)
                    _write(part.text)
        if is_dim:
            _write("", _PLAIN)


def _write(text: str, style: str = "") -> None:
    """Write text without characters that control a terminal."""
    shown = "".join(char for char in text if char.isprintable() or char in "\n\t")
    sys.stdout.write((style if sys.stdout.isatty() else "") + shown)
    sys.stdout.flush()
