"""The pytest plugin: fixture `ranks`, mark `campaign_rows`. Imports nothing heavy, nor torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mt_testing.pool import RankPool

_ERRORS = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini option `mt_testing_preload`."""
    parser.addini(
        "mt_testing_preload",
        "modules that the rank pool imports once, besides torch and every installed mt_* package",
        type="args",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark `campaign_rows`."""
    text = "campaign_rows(names, rows): parametrize with rows(), called if campaigns are selected"
    config.addinivalue_line("markers", text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the rows of a campaign when it is selected: large grids take seconds to draw."""
    mark = metafunc.definition.get_closest_marker("campaign_rows")
    if mark is None:
        return
    names, rows = mark.args
    left_out = "not campaign" in metafunc.config.option.markexpr
    count = len(names.split(","))
    # One row in place of all, which is deselected with them.
    row = pytest.param(*[None] * count, id="not-drawn", marks=pytest.mark.campaign)
    metafunc.parametrize(names, [row] if left_out else rows(), ids=mark.kwargs.get("ids"))


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """The session's `RankPool`; its processes start with the first call."""
    from mt_testing.pool import RankPool

    with RankPool(preload=pytestconfig.getini("mt_testing_preload")) as pool:
        yield pool
        pytestconfig.stash[_ERRORS] = pool.preload_errors


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Report packages that could not be preloaded; the tests that need them fail by themselves."""
    for name, text in config.stash.get(_ERRORS, {}).items():
        terminalreporter.section(f"mt_testing: could not preload {name} into the rank pool")
        terminalreporter.write_line(text.rstrip())
