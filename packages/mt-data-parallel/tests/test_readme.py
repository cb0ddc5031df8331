"""The README's loops are short, and do on several ranks what they do on one."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
FENCES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
LINES = 20


def fence(word):
    (found,) = [text for text in FENCES if word in text]
    return found


def trained(text):
    """Run a loop on all ranks of this world."""
    found = {}
    exec(text, found)
    with found["buffer"] as buffer, buffer.gathered():
        return [param.detach().clone() for param in found["model"].parameters()]


@pytest.mark.parametrize("word", ["GradBuffer(", "shard("])
def test_a_loop_is_embedded_in_under_20_lines(word, capsys):
    text = fence(word)
    assert len(text.splitlines()) < LINES
    assert trained(text)
    assert capsys.readouterr().out


@pytest.mark.parametrize("word", ["GradBuffer(", "shard("])
def test_a_loop_trains_on_two_ranks_what_it_trains_on_one(ranks, word):
    seeded = "import torch\ntorch.manual_seed(0)\n" + fence(word)
    on_two = seeded.replace("group=None", "group=torch.distributed.group.WORLD")
    on_two = on_two.replace("in rows.chunk(4)", "in rows.chunk(4)[torch.distributed.get_rank()::2]")
    on_two = on_two.replace("num_backwards=4", "num_backwards=2")
    assert all(changed in on_two for changed in ("WORLD", "get_rank", "backwards=2"))
    (expected,) = ranks(1, trained, seeded)
    for params in ranks(2, trained, on_two):
        for own, other in zip(params, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)
