"""Experimental objects warn once, stay otherwise unchanged, and have a note in their docstring."""

import inspect
import pickle
import threading
import warnings
from dataclasses import dataclass

import pytest
from mt_files import ExperimentalWarning, experimental


@experimental(since="0.2", remove_in="0.4")
class Counter:
    """Count.

    Args:
        start: The first number.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = start


class Later(Counter):
    def __init__(self) -> None:
        super().__init__(5)


@experimental(since="0.2", remove_in="0.4")
@dataclass(frozen=True)
class Point:
    """A place."""

    x: int


def twice():
    """Return a fresh experimental function: each marks its own first use."""

    @experimental(since="0.2", remove_in="1.0.1")
    def double(number: int, *, plus: int = 0) -> int:
        """Double a number."""
        return 2 * number + plus

    return double


def warned(work):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return caught


def test_first_call_warns_by_name_at_the_callers_line_and_the_second_is_silent():
    double = twice()
    (first,) = warned(lambda: double(1))
    assert first.category is ExperimentalWarning
    assert first.filename == __file__
    assert str(first.message) == (
        f"{__name__.partition('.')[0]}.twice.<locals>.double is experimental since 0.2: it may "
        "change or go with any version, and is settled in 1.0.1"
    )
    assert warned(lambda: double(1)) == []


def test_each_marked_thing_warns_for_itself():
    one, other = twice(), twice()
    assert len(warned(lambda: (one(1), other(1), one(1)))) == 2


def test_threads_that_race_are_told_once():
    double, start = twice(), threading.Barrier(16)

    def run():
        start.wait()
        double(1)

    def race():
        threads = [threading.Thread(target=run) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(warned(race)) == 1


def test_warning_as_an_error_is_raised_by_every_use():
    double = twice()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ExperimentalWarning, match="double is experimental"):
                double(1)
    assert len(warned(lambda: double(1))) == 1


def test_function_keeps_result_signature_and_name():
    double = twice()
    with pytest.warns(ExperimentalWarning):
        assert double(3, plus=1) == 7
    assert str(inspect.signature(double)) == "(number: int, *, plus: int = 0) -> int"
    assert double.__name__ == "double"


def test_docstring_gains_its_line_below_the_summary():
    assert inspect.getdoc(twice()) == (
        "Double a number.\n\n"
        "Experimental since 0.2: it may change or go with any version, and is settled in 1.0.1."
    )
    assert Counter.__doc__ is not None
    summary, note, rest = Counter.__doc__.split("\n\n")
    assert (summary, rest) == ("Count.", "Args:\n    start: The first number.")
    assert note.startswith("Experimental since 0.2")


def test_class_stays_a_class():
    assert inspect.isclass(Counter)
    assert str(inspect.signature(Counter)) == "(start: int = 0) -> None"
    caught = warned(lambda: (Later(), Counter(3), Point(1)))  # a subclass counts as a use
    assert [each.category for each in caught] == [ExperimentalWarning] * 2
    assert all(each.filename == __file__ for each in caught)
    later = Later()
    assert isinstance(later, Counter)
    assert issubclass(Later, Counter)
    assert later.start == 5
    copied = pickle.loads(pickle.dumps(later))
    assert type(copied) is Later
    assert copied.start == 5
    assert Point(2) == Point(2)
    assert pickle.loads(pickle.dumps(Point(2))) == Point(2)


def test_class_without_a_constructor_still_refuses_arguments():
    @experimental(since="0.2", remove_in="0.4")
    class Empty:
        pass

    with pytest.warns(ExperimentalWarning), pytest.raises(TypeError, match="argument"):
        Empty(1)  # pyright: ignore[reportCallIssue]
    assert isinstance(Empty(), Empty)


@pytest.mark.parametrize(
    ("since", "remove_in", "error", "text"),
    [
        ("0.2", "0.2", ValueError, "remove_in='0.2' is not after since='0.2'"),
        ("0.10", "0.9", ValueError, "is not after"),
        ("0.2", "0.2.0", ValueError, "is not after"),
        ("1", "2.0", ValueError, 'since=\'1\' is not a version; write "X.Y" or "X.Y.Z"'),
        ("0.2", "0.4rc1", ValueError, "remove_in='0.4rc1' is not a version"),
        ("0.2", "0.04", ValueError, "remove_in='0.04' is not a version"),
        (0.2, "0.4", TypeError, "since must be a string"),
    ],
)
def test_versions_are_checked_where_they_are_written(since, remove_in, error, text):
    with pytest.raises(error) as raised:
        experimental(since=since, remove_in=remove_in)
    assert text in str(raised.value)


@pytest.mark.parametrize("wrong", [staticmethod(len), property(len), 3])
def test_what_is_no_function_and_no_class_is_refused(wrong):
    with pytest.raises(TypeError, match="marks functions and classes, got"):
        experimental(since="0.2", remove_in="0.4")(wrong)
