"""A name takes its candidate or raises with reasons; `auto` the first that serves and is fast."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from mt_kernels import AUTO, Candidate, KernelError, Registry, Selector, eager_obstacle
from torch import Tensor

SIX = Candidate("six", "6", lambda n: f"{n} is odd to 6" if n % 6 else None)
SLOW = Candidate("slow", "s", drawback=lambda n: "slow")
TWO = Candidate("two", "2", lambda n: f"{n} is odd to 2" if n % 2 else None)
REGISTRY = Registry("size", (SIX, SLOW, TWO))


def test_auto_is_the_first_without_obstacle_and_drawback_and_a_name_is_that_one() -> None:
    assert [REGISTRY.find(AUTO, n) for n in (12, 4)] == [SIX, TWO]
    assert REGISTRY.find("two", 12) is TWO
    assert REGISTRY.find("slow", 12) is SLOW


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("ten", 12, r"size must be one of auto, six, slow, two, got 'ten'"),
        ("six", 4, r"'six'.*4 is odd to 6; use auto, slow, two"),
        ("auto", 5, r"\(six: 5 is odd to 6; slow: slow; two: 5 is odd to 2\)"),
    ],
)
def test_what_does_not_serve_is_refused_with_the_reasons(name, number, message) -> None:
    with pytest.raises(KernelError, match=message):
        REGISTRY.find(name, number)


def test_a_choice_prints_what_was_taken_and_why_not_the_others() -> None:
    text = str(REGISTRY.choose(AUTO, 4))
    assert text.startswith("size: two (")
    assert "not six: 4 is odd to 6" in text
    assert "not slow: slow" in text
    assert "asked for" in str(REGISTRY.choose("slow", 4))
    assert REGISTRY.obstacles(4) == {"six": "4 is odd to 6", "slow": None, "two": None}


def test_with_candidate_is_a_new_registry_that_prefers_it() -> None:
    mine = Candidate("mine", "m")
    assert REGISTRY.with_candidate(mine).find(AUTO, 6) is mine
    assert REGISTRY.find(AUTO, 6) is SIX


def test_an_entry_point_is_found_by_name_and_never_by_auto(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "kernels_of_others.py").write_text(
        "from mt_kernels import Candidate\n"
        "mine = Candidate('mine', 'm')\nother = Candidate('other', 'o')\n"
    )
    info = tmp_path / "kernels_of_others-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels-of-others\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[mt.kernels]\nsize.mine = kernels_of_others:mine\nsize.wrong = kernels_of_others:other\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert REGISTRY.names == ("auto", "six", "slow", "two", "mine", "wrong")
    assert REGISTRY.find("mine", 6).function == "m"
    assert REGISTRY.find(AUTO, 6) is SIX
    with pytest.raises(KernelError, match=r"size.wrong.*'wrong'.*other"):
        REGISTRY.get("wrong")
    with pytest.raises(KernelError, match="mine"):
        REGISTRY.get("nobody")
    sys.modules.pop("kernels_of_others")


def counting(searches: list[object]) -> Registry[object]:
    def obstacle(x: Tensor, *_: object) -> None:
        searches.append(x.dtype)

    return Registry("twice", (Candidate("plain", lambda x: 2 * x, obstacle),))


def test_a_selector_searches_once_for_each_device_dtype_and_key() -> None:
    searches: list[object] = []
    selector = Selector(counting(searches))
    x = torch.ones(3)
    for _ in range(5):
        selector.find(x).function(x)
    assert len(searches) == 1
    selector.find(x.double())
    selector.find(x.double(), key=3)
    selector.find(x.double(), key=3)
    assert len(searches) == 3


def test_a_selector_is_traced_without_a_break_and_not_searched_again() -> None:
    eager = Candidate("eager", lambda x: 3 * x, eager_obstacle)
    selector = Selector(Registry("twice", (eager, Candidate("plain", lambda x: 2 * x))))
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    twice = torch.compile(lambda x: selector.find(x).function(x), backend=backend, fullgraph=True)
    for _ in range(3):
        assert twice(torch.ones(3)).tolist() == [2, 2, 2]
    assert len(graphs) == 1
    assert selector.find(torch.ones(1)).function(1) == 3


def test_a_selector_refuses_an_unknown_name_when_it_is_made() -> None:
    with pytest.raises(KernelError, match="nobody"):
        Selector(REGISTRY, "nobody")
