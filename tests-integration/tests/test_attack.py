"""A sample of the attack session finds nothing; the session itself has thousands.

Rows of signals, consoles and kills have none: test_stopping and test_recovery have their like.
"""

from __future__ import annotations

import sys
from pathlib import Path

ATTACK = Path(__file__).parents[1] / "attack" / "attack.py"
LEDGER = Path(__file__).parents[2] / "docs" / "attack.md"


def test_a_sample_of_the_attacks_finds_nothing(cli) -> None:
    result = cli(sys.executable, ATTACK, "--sample", timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " tried, 0 bad" in result.stdout


def test_every_row_is_in_the_ledger_and_no_other(cli, tmp_path) -> None:
    """Missing rows are run before the ledger is committed, and deleted rows leave it."""
    result = cli(sys.executable, ATTACK, "--check", LEDGER)
    assert result.returncode == 0, result.stdout + result.stderr
    spoilt = tmp_path / "attack.md"
    lines = LEDGER.read_text().splitlines()
    spoilt.write_text("\n".join(line.replace("| signals |", "| gone |") for line in lines))
    result = cli(sys.executable, ATTACK, "--check", spoilt)
    assert result.returncode == 1
    assert "'signals'" in result.stdout
    assert "'gone'" in result.stdout


def test_an_attack_goes_on_where_its_ledger_ends(tmp_path, cli) -> None:
    """With every row done at this commit nothing is left, not even a run to attack."""
    script = tmp_path / "whole.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import attack, ledger\n"
        "from pathlib import Path\n"
        "same = dict(seed=7, bad=0, seconds=1, date='today', commit=ledger.commit())\n"
        "done = [ledger.Entry(attack=r.name, tried=r.cases, **same) for r in attack.rows()]\n"
        "Path(sys.argv[2]).write_text(ledger.render(done))\n"
        "sys.exit(attack.main(['--seed', '7', '--out', sys.argv[2]]))\n"
    )
    result = cli(sys.executable, script, ATTACK.parent, tmp_path / "attack.md")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("\n") == 1
    assert " tried, 0 bad" in result.stdout


def test_a_case_that_goes_wrong_is_counted_and_can_be_run_again(tmp_path, cli) -> None:
    """The engine reports bad cases of a broken row."""
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
