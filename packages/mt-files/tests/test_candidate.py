"""The first candidate that serves is taken, or the named one; no other is, silently."""

from dataclasses import dataclass

import pytest
from mt_files import AUTO, kernel_for


@dataclass(frozen=True)
class Divides:
    name: str
    by: int

    def obstacle(self, number: int) -> str | None:
        return f"{number} is odd to {self.by}" if number % self.by else None


SIX, TWO = Divides("six", 6), Divides("two", 2)


def test_auto_is_the_first_that_serves_and_a_name_is_that_one() -> None:
    assert [kernel_for((SIX, TWO), AUTO, number) for number in (12, 4)] == [SIX, TWO]
    assert kernel_for((SIX, TWO), "two", 12) is TWO


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("ten", 12, r"kernel must be one of auto, six, two, got 'ten'"),
        ("six", 4, r"kernel 'six' does not serve: 4 is odd to 6; use auto, two"),
        ("six", 5, r"kernel 'six' does not serve: 5 is odd to 6; none of the others does"),
        (
            "auto",
            5,
            r"no kernel serves this \(six: 5 is odd to 6; two: 5 is odd to 2\); add a plain",
        ),
    ],
)
def test_what_does_not_serve_is_refused_with_what_would(name, number, message) -> None:
    with pytest.raises(ValueError, match=message):
        kernel_for((SIX, TWO), name, number)
