"""The README's loops are short, and do on several ranks what they do on one."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
FENCES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
LINES = 20


def fence(*words):
    """The one snippet with these words."""
    (found,) = [text for text in FENCES if all(word in text for word in words)]
    return found


@pytest.mark.parametrize(
    "words", [("DistributedOptimizer(", "shard("), ("import Muon",)], ids=["sharded", "muon"]
)
def test_a_loop_is_embedded_in_under_20_lines(words, capsys):
    text = fence(*words)
    assert len(text.splitlines()) < LINES
    assert "for step in range" in text
    exec(compile(text, str(README), "exec"), {})
    assert capsys.readouterr().out


def sharded(text):
    """Run the sharded loop on all ranks of this world, with the rows shared out."""
    found = {}
    exec(text, found)
    with found["buffer"], found["state"]:
        return [param.detach().clone() for param in found["model"].parameters()]


def test_the_sharded_loop_trains_on_two_ranks_what_it_trains_on_one(ranks):
    seeded = "import torch\ntorch.manual_seed(0)\n" + fence("DistributedOptimizer(", "shard(")
    on_two = seeded.replace("ParallelLayout()", "ParallelLayout(dp=2)")
    on_two = on_two.replace("model(rows)", "model(rows.chunk(2)[state.rank])")
    assert on_two.count("dp=2") == on_two.count("chunk(2)") == 1
    (expected,) = ranks(1, sharded, seeded)
    for params in ranks(2, sharded, on_two):
        for own, other in zip(params, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)
