"""Schedules written by hand, in the papers' notation."""

import re

import pytest
from mt_schedule import Action, Op, Schedule

# The order that Megatron-LM's interleaved schedule gives 2 ranks with 2 chunks each, 4
# micro-batches in groups of 2 (computed from its own tables).
INTERLEAVED = """
F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a
F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a
"""


MARK = re.compile(r"([A-Z_]+)(\d+)([a-z]?)")


def parse_orders(text: str, *, stages: int, microbatches: int, **options) -> Schedule:
    """Read orders in the papers' notation, one line per rank, a letter for each chunk of a rank."""
    lines = text.strip().splitlines()
    ranks = []
    for rank, line in enumerate(lines):
        marks = [MARK.fullmatch(mark).groups() for mark in line.split()]
        ranks.append(
            tuple(
                Action(Op(op), (ord(chunk or "a") - ord("a")) * len(lines) + rank, int(number))
                for op, number, chunk in marks
            )
        )
    return Schedule(
        name="by hand", stages=stages, microbatches=microbatches, ranks=tuple(ranks), **options
    )


@pytest.fixture(scope="session")
def parse():
    return parse_orders


@pytest.fixture(scope="session")
def interleaved():
    return INTERLEAVED
