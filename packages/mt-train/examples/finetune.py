"""Conversations for finetune.yaml: a user asks for a method, and the assistant writes it.

    python finetune.py                # writes conversations/train.jsonl and held-out.jsonl
    python finetune.py answers.jsonl  # counts the right answers to the held-out questions

A question asks for one of six kinds of method for an attribute, whose name is of two words. The
names in held-out.jsonl occur in no conversation of train.jsonl.
"""

import json
import random
import sys
from itertools import product
from pathlib import Path

FOLDER = Path("conversations")
TRAINED, HELD_OUT = 2000, 200
METHODS = {
    "Write a method that returns {}.": "def get_{0}(self):\n    return self._{0}",
    "Write a method that sets {}.": "def set_{0}(self, {0}):\n    self._{0} = {0}",
    "Write a method that forgets {}.": "def clear_{0}(self):\n    self._{0} = None",
    "Write a method that adds to {}.": "def add_to_{0}(self, value):\n    self._{0} += value",
    "Is there a {}?": "def has_{0}(self):\n    return self._{0} is not None",
    "Make {} a property.": "@property\ndef {0}(self):\n    return self._{0}",
}
FIRST = (
    "first last next old new current default base local global max min total file line "
    "token class module user host start end input output error buffer time table string key"
)
SECOND = (
    "name size count type value index path list code data level offset length mode state "
    "id text date format width node parent result handler flags version address port limit number"
)


def conversation(name: str, method: str) -> dict[str, list[dict[str, str]]]:
    """Return a question and its answer, as prompt and completion."""
    question, answer = method.format(name), METHODS[method].format(name)
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def write() -> None:
    """Write the conversations; held-out ones have different names."""
    chance = random.Random(0)  # noqa: S311 - names, no secrets
    names = [f"{first}_{second}" for first, second in product(FIRST.split(), SECOND.split())]
    chance.shuffle(names)
    held_out, trained = names[: len(names) // 5], names[len(names) // 5 :]
    FOLDER.mkdir(exist_ok=True)
    for file, some, count in (("train", trained, TRAINED), ("held-out", held_out, HELD_OUT)):
        chosen = chance.sample(list(product(some, METHODS)), count)
        lines = [json.dumps(conversation(*each)) + "\n" for each in chosen]
        (FOLDER / f"{file}.jsonl").write_text("".join(lines))


def share_of_right(answers: Path) -> float:
    """Return the share of the held-out questions whose answer is the expected text."""
    expected = (FOLDER / "held-out.jsonl").read_text().splitlines()
    given = answers.read_text().splitlines()
    pairs = zip(map(json.loads, expected), map(json.loads, given), strict=True)
    right = [each["completion"][0]["content"] == answer["text"] for each, answer in pairs]
    return sum(right) / len(right)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(f"{share_of_right(Path(sys.argv[1])):.1%} of the answers are right")
    else:
        write()
