"""The pytest plugin: fixture `ranks`. Imports neither torch nor anything heavy."""

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
        "modules that the rank pool imports once, beside torch and every installed mt_* package",
        type="args",
        default=[],
    )


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
    """Tell which packages could not be preloaded; tests that need them say so themselves."""
    for name, text in config.stash.get(_ERRORS, {}).items():
        terminalreporter.section(f"mt_testing: could not preload {name} into the rank pool")
        terminalreporter.write_line(text.rstrip())
