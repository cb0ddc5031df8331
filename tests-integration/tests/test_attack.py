"""A sample of every row of the attack session finds nothing; the session itself has thousands."""

from __future__ import annotations

import sys
from pathlib import Path

ATTACK = Path(__file__).parents[1] / "attack" / "attack.py"


def test_a_sample_of_every_attack_finds_nothing(cli) -> None:
    result = cli(sys.executable, ATTACK, "--sample", timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " tried, 0 bad" in result.stdout


def test_a_case_that_goes_wrong_is_counted_and_can_be_run_again(tmp_path, cli) -> None:
    """What is bad is reported by an engine that attacks a broken row."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import time, attack\n"
        "from world import BadError, Row, World\n"
        "def bad(world, rng, scratch):\n"
        "    raise BadError('a hole')\n"
        "def hang(world, rng, scratch):\n"
        "    time.sleep(60)\n"
        "def greedy(world, rng, scratch):\n"
        "    bytearray(10**11)\n"
        "rows = [Row(name=f.__name__, attack=f, cases=1, seconds=1) for f in (bad, hang, greedy)]\n"
        "world = World(folder=None, config=None, run=None, run_of_two=None)\n"
        "cases = [attack.Case(row=row, number=0) for row in rows]\n"
        "found = {case.row.name: problem for case, problem, _ in attack.attack(cases, world, 0)}\n"
        "assert 'a hole' in found['bad'], found\n"
        "assert 'not done after 1 s' in found['hang'], found\n"
        "assert 'MemoryError' in found['greedy'], found\n"
    )
    result = cli(sys.executable, script, ATTACK.parent)
    assert result.returncode == 0, result.stderr
