"""``python -m mt_parallel_state`` prints a layout."""

from __future__ import annotations

import pytest
from mt_parallel_state.__main__ import main


def test_the_table_has_ranks_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tp", "2", "--cp", "2", "--pp", "2", "--world-size", "16"]) == 0
    printed = capsys.readouterr().out
    assert "dp=2" in printed
    assert "    dp-cp  {0,2,4,6} {1,3,5,7} {8,10,12,14} {9,11,13,15}\n" in printed
    assert len([line for line in printed.splitlines() if line.split()[:1] == ["15"]]) == 1


def test_a_large_world_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tp", "8", "--pp", "16", "--ep", "64", "--world-size", "16384"]) == 0
    printed = capsys.readouterr().out
    assert "... and 16320 more" in printed
    assert len(printed.splitlines()) < 90


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tp", "3", "--world-size", "16"], "a world of 16 ranks cannot hold tp=3"),
        (["--dp", "0"], "dp must be at least 1, got 0"),
        (["--dp", "2", "--world-size", "16"], "--dp 2 contradicts --world-size 16, which leaves"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"mt_parallel_state: {expected}")
    assert len(message.splitlines()) == 1
