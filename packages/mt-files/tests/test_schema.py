"""Plain values become dataclasses strictly, with every problem and its path in one pass."""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import pytest
from mt_files import (
    Checks,
    FieldError,
    PlainText,
    SchemaError,
    bind,
    build,
    divisors,
    shorten,
    to_plain,
)


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """What all kinds share."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Mixer):
    num_heads: int
    window: int | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "num_heads", "window")
        checks.at_most(1000, "num_heads")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class MambaConfig(Mixer):
    state_size: int = 16


@dataclass(frozen=True, kw_only=True)
class Layer:
    mixer: Mixer
    scale: float = 1.0
    norm: Literal["rms", "layer"] = "rms"


@dataclass(frozen=True, kw_only=True)
class Model:
    layers: tuple[Layer, ...]
    betas: tuple[float, float] = (0.9, 0.95)
    tied: bool = True
    every: int | Literal["auto"] | None = None
    name: str = "model"
    extra: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A base class with a usual kind."""

    default_kind: ClassVar[str] = "quick"


@dataclass(frozen=True, kw_only=True)
class QuickConfig(Part):
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class SlowConfig(Part):
    size: int = 2


@dataclass(frozen=True, kw_only=True)
class Engine:
    part: Part


@dataclass(frozen=True, kw_only=True)
class Train:
    max_items: ClassVar[Mapping[str, int]] = MappingProxyType({"cars": 2})
    cars: tuple[Part, ...]


ATTENTION = {"type": "attention", "num_heads": 4}
GOOD = {"layers": [{"mixer": ATTENTION}, {"mixer": {"type": "mamba"}, "scale": 2}]}


def test_a_value_survives_json_and_comes_back_equal() -> None:
    model = build(Model, {**GOOD, "extra": {"a": [1, None]}, "shape": {"x": 3}, "every": "auto"})
    assert model.layers[1] == Layer(mixer=MambaConfig(), scale=2.0)
    assert build(Model, json.loads(json.dumps(to_plain(model)))) == model
    assert to_plain(model)["layers"][1]["mixer"] == {"type": "mamba", "state_size": 16}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (
        {"layers": [{"mixer": ATTENTION, "scal": 1}]},
        "layers[0].scal: unknown key. Did you mean layers[0].scale?",
    ),
    "missing": ({}, "layers: missing; add `layers:` with a list, each a mapping"),
    "a bool is no int": (
        {"layers": [{"mixer": {"type": "attention", "num_heads": True}}]},
        "layers[0].mixer.num_heads: expected an integer, found True",
    ),
    "an int is no bool": ({**GOOD, "tied": 1}, "tied: expected true or false, found 1"),
    "a huge integer": (
        {"layers": [{"mixer": {"type": "attention", "num_heads": 10**5000}}]},
        "layers[0].mixer.num_heads: expected an integer, found an integer of 16610 bits",
    ),
    "NaN": (
        {"layers": [{"mixer": ATTENTION, "scale": math.nan}]},
        "layers[0].scale: expected a number, found nan",
    ),
    "infinity": (
        {"layers": [{"mixer": ATTENTION, "scale": math.inf}]},
        "layers[0].scale: expected a number, found inf",
    ),
    "text for a number": (
        {"layers": [{"mixer": ATTENTION, "scale": "2"}]},
        "layers[0].scale: expected a number, found '2' (remove the quotes)",
    ),
    "a choice": (
        {"layers": [{"mixer": ATTENTION, "norm": "rmz"}]},
        "layers[0].norm: 'rmz' is not one of rms, layer. Did you mean rms?",
    ),
    "a choice among others": (
        {**GOOD, "every": "aut"},
        "every: 'aut' is not one of auto or an integer. Did you mean auto?",
    ),
    "null": ({**GOOD, "name": None}, "name: expected text, found nothing"),
    "a mapping for text": ({**GOOD, "name": {}}, "name: expected text, found a mapping"),
    "a mapping for a choice": (
        {"layers": [{"mixer": ATTENTION, "norm": {}}]},
        "layers[0].norm: expected one of rms, layer, found a mapping",
    ),
    "a list for a mapping": ({"layers": [[]]}, "layers[0]: expected a mapping, found a list"),
    "length": ({**GOOD, "betas": [0.9]}, "betas: expected a list of 2, found 1"),
    "kind": (
        {"layers": [{"mixer": {"type": "atention"}}]},
        "layers[0].mixer.type: 'atention' is not known here. Did you mean attention?",
    ),
    "no kind": (
        {"layers": [{"mixer": {"num_heads": 4}}]},
        "layers[0].mixer.type: missing; add `type:` with one of attention, mamba",
    ),
    "a check of the dataclass": (
        {"layers": [{"mixer": {"type": "attention", "num_heads": 0}}]},
        "layers[0].mixer.num_heads: 0 is too small; use 1 or more",
    ),
    "a value of a mapping": (
        {**GOOD, "shape": {"x": "y"}},
        "shape.x: expected an integer, found 'y'",
    ),
    "a key of a mapping": ({**GOOD, "shape": {1: 2}}, "shape: the key 1 is no text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_one_problem_with_its_path(name: str) -> None:
    value, expected = WRONG[name]
    with pytest.raises(SchemaError) as caught:
        build(Model, value)
    assert [str(problem) for problem in caught.value.problems] == [expected]


def test_all_problems_come_in_one_pass_in_the_order_of_the_input() -> None:
    value = {"tied": "no", "layers": [{"mixer": {"type": "mamba", "size": 1}}], "betas": 1}
    bound = bind(Model, value)
    assert bound.value is None
    assert [problem.path for problem in bound.problems] == ["tied", "layers[0].mixer.size", "betas"]


def test_what_is_right_in_itself_is_kept_beside_the_problems() -> None:
    bound = bind(Model, {"layers": [{"mixer": ATTENTION}], "tied": 3})
    assert bound.parts["layers[0]"] == Layer(mixer=AttentionConfig(num_heads=4))


def test_a_base_class_may_have_a_usual_kind() -> None:
    assert build(Engine, {"part": {}}).part == QuickConfig()
    assert build(Engine, {"part": {"type": "slow"}}).part == SlowConfig()
    assert to_plain(Engine(part=QuickConfig())) == {"part": {"type": "quick", "size": 1}}


def test_a_list_longer_than_its_class_allows_is_refused_before_its_items_are_built() -> None:
    assert build(Train, {"cars": [{}] * 2}) == Train(cars=(QuickConfig(),) * 2)
    with pytest.raises(SchemaError) as caught:
        build(Train, {"cars": [{"odd": 1}] * 3})
    (problem,) = caught.value.problems
    assert (problem.path, problem.text) == ("cars", "a list of 3 is too long; use at most 2")


def test_text_without_quotes_takes_its_type_from_the_field() -> None:
    plain = PlainText
    value = {
        "layers": [{"mixer": ATTENTION, "scale": plain("1e-4")}],
        "tied": plain("false"),
        "name": plain("010"),
        "every": plain("10"),
        "betas": [plain("0.8"), plain("1")],
    }
    model = build(Model, value)
    assert (model.layers[0].scale, model.tied, model.name, model.every) == (1e-4, False, "010", 10)
    assert model.betas == (0.8, 1.0)
    assert build(Model, {**value, "every": plain("null")}).every is None
    for text in ("1e999", "nan", "inf", "1_0", "9" * 200, "no"):
        with pytest.raises(SchemaError, match=r"layers\[0\].scale: expected a number"):
            build(Model, {"layers": [{"mixer": ATTENTION, "scale": plain(text)}]})


def test_any_number_of_problems_gives_a_short_message_at_once() -> None:
    started = time.process_time()
    value = {f"key {i}" + "x" * 1000: i for i in range(60_000)}
    with pytest.raises(SchemaError) as caught:
        build(Model, value)
    assert time.process_time() - started < 5
    assert len(str(caught.value)) < 10_000
    assert str(caught.value).endswith("and 59981 more problems")
    with pytest.raises(SchemaError) as caught:
        build(Model, {**GOOD, "name": ["x" * 10**6], "tied": "y" * 10**6})
    assert len(str(caught.value)) < 1000


def test_a_constructor_checks_types_and_names_the_field() -> None:
    with pytest.raises(
        FieldError, match=r"AttentionConfig\.num_heads: expected an integer"
    ) as error:
        AttentionConfig(num_heads=4.0)  # type: ignore[arg-type]
    assert error.value.field == "num_heads"
    with pytest.raises(FieldError) as error:
        AttentionConfig(num_heads=2000, window=0)
    assert list(error.value.errors) == ["window", "num_heads"]
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.errors, str(again)) == (error.value.errors, str(error.value))


DEEP: object = "x"
for _ in range(60):  # of few bytes, but 2**60 texts
    DEEP = {"a": DEEP, "b": DEEP}


@pytest.mark.parametrize(
    "value",
    ["a" * 10**6, list(range(10**6)), 10**10**5, [10**10**5], {"a": DEEP}, b"x" * 999],
    ids=["text", "list", "integer", "integers", "mapping", "bytes"],
)
def test_a_value_is_shown_in_bounded_length(value: object) -> None:
    assert len(shorten(value)) < 150


def test_divisors_are_all_or_none() -> None:
    assert divisors(360) == [n for n in range(1, 361) if 360 % n == 0]
    assert divisors(10**18) == divisors(0) == []


@dataclass(frozen=True, kw_only=True)
class Line:
    """What all kinds share."""


@dataclass(frozen=True, kw_only=True)
class StraightLine(Line):
    type_name: ClassVar[str] = "straight"
    length: float = 1.0


@dataclass(frozen=True, kw_only=True)
class BentLine(Line):
    type_name: ClassVar[str] = "bent"


@dataclass(frozen=True, kw_only=True)
class Sketch:
    line: Line | None = None


def test_a_kind_may_say_what_it_is_called() -> None:
    sketch = Sketch(line=StraightLine(length=2.0))
    assert to_plain(sketch) == {"line": {"type": "straight", "length": 2.0}}
    assert build(Sketch, to_plain(sketch)) == sketch
    with pytest.raises(
        SchemaError, match=r"line.type: 'bend' is not known here. Did you mean bent"
    ):
        build(Sketch, {"line": {"type": "bend"}})


@dataclass(frozen=True, kw_only=True)
class Sender:
    from_: str
    to: str = "me"

    def __post_init__(self) -> None:
        if self.from_ == self.to:
            raise FieldError({"from_": "is who gets it"})


def test_a_key_that_python_reserves_has_no_underscore() -> None:
    assert build(Sender, {"from": "you"}) == Sender(from_="you")
    assert to_plain(Sender(from_="you")) == {"from": "you", "to": "me"}
    for given, says in (
        ({"from": "me"}, "from: is who gets it"),
        ({}, "from: missing; add `from:` with"),
        ({"from_": "you"}, "from_: unknown key. Did you mean from?"),
    ):
        with pytest.raises(SchemaError) as caught:
            build(Sender, given)
        assert says in str(caught.value)
