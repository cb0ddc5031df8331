"""Mixtures whose shares change at stated samples."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mt_data import DataError, MixedSamples, Mixture, MixtureSource
from mt_files import FieldError

NAMES = ("a", "b", "c")


def sources(*weights):
    pairs = zip(NAMES, weights, strict=True)
    return tuple(MixtureSource(fingerprint=n, weight=w / sum(weights)) for n, w in pairs)


def planned(mixture, phases, samples):
    """Return the mixtures of a run from `samples` on, as a trainer plans them."""
    now = [own for begin, own in phases if begin <= samples][-1]
    found = [mixture.continued(now, samples) if mixture else Mixture(sources=now, order="split")]
    for begin, own in phases:
        if begin > samples:
            found.append(found[-1].continued(own, begin))
    return found


def samples_of(mixtures):
    return MixedSamples(NAMES, mixtures[0], num_samples=10_000, later=mixtures[1:])


SHARES = st.tuples(*[st.integers(0, 5)] * 3).filter(any)


@settings(max_examples=60, deadline=None)
@given(
    shares=st.lists(SHARES, min_size=2, max_size=5),
    starts=st.lists(st.integers(1, 150), min_size=4, max_size=4, unique=True),
    kills=st.lists(st.integers(0, 200), max_size=6),
)
def test_a_killed_run_draws_what_the_undisturbed_one_does(shares, starts, kills):
    phases = [(0, sources(*shares[0]))]
    phases += [(b, sources(*s)) for b, s in zip(sorted(starts), shares[1:], strict=False)]
    whole = samples_of(planned(None, phases, 0))
    expected = [whole.origin(n) for n in range(200)]
    for source in range(3):  # nothing is repeated, and nothing is left out
        numbers = [number for which, number in expected if which == source]
        assert numbers == list(range(len(numbers)))
        assert whole.taken(200)[source] == len(numbers)
    found, run = [], whole
    for kill in sorted(kills):
        found += [run.origin(n) for n in range(len(found), kill)]
        run = samples_of(planned(run.mixture_at(kill), phases, kill))
    assert found + [run.origin(n) for n in range(len(found), 200)] == expected


def test_a_source_without_a_share_gives_nothing_until_it_has_one():
    phases = [(0, sources(1, 0, 1)), (100, sources(0, 1, 0)), (150, sources(1, 1, 0))]
    run = samples_of(planned(None, phases, 0))
    assert [run.taken(n) for n in (100, 150, 200)] == [(50, 0, 50), (50, 50, 50), (75, 75, 50)]


@pytest.mark.parametrize(
    ("shares", "order", "text"),
    [((0.0, 0.0), "split", "all have share 0"), ((1.0, 0.0), "shortfall", "use split")],
)
def test_mixtures_of_nothing_are_refused(shares, order, text):
    own = tuple(MixtureSource(fingerprint=str(w), weight=w) for w in shares)
    with pytest.raises(FieldError, match=text):
        Mixture(sources=own, order=order)


def test_mixtures_out_of_order_or_of_other_data_sets_are_refused():
    one = Mixture(sources=sources(1, 1, 1), order="split")
    with pytest.raises(DataError, match=r"start at samples \[5, 3\]"):
        samples_of([replace(one, start=5), replace(one, start=3)])
    with pytest.raises(DataError, match="3 sources for 2 data sets"):
        MixedSamples(NAMES[:2], one, num_samples=1)
