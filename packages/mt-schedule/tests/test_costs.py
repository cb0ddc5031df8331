"""Costs that can't be are refused, and the others count in the simulation."""

import dataclasses

import pytest
from mt_schedule import Costs, make_schedule, simulate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": [1.0], "backward": [2.0, 2.0]}, "forward 1, backward 2.*give one per stage"),
        ({"weight": 3.0}, "weight is 3.0 and backward 2.0 at stage 0"),
        ({"latency": -1.0}, "latency is -1.0"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0: expected more than 0"),
        ({"pair_share": 0.0}, "pair_share is 0.0: expected more than 0"),
        ({"forward": float("nan")}, "forward is nan: expected numbers of 0 or more"),
    ],
)
def test_costs_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Costs(**options)


def test_a_weight_that_is_not_given_stays_half_of_the_backward():
    costs = dataclasses.replace(Costs(), backward=4.0)
    assert costs.weight is None
    assert costs == Costs(backward=4.0)
    assert costs.merged(2).weight == (2.0, 2.0)
    uneven = dataclasses.replace(costs, backward=[2.0, 3.0])
    assert (uneven.merged(2).weight, uneven.merged(1).weight) == ((1.0, 1.5), (2.5,))
    # Half of 4.0: I and W take 2 each. A W of 1.0 would leave 3.
    schedule = make_schedule("zb-h1", 2, 1)
    assert (
        simulate(schedule, costs=costs).makespan == simulate(schedule, Costs(backward=4.0)).makespan
    )
    assert simulate(schedule, costs=costs).makespan == 1 + 1 + 2 + 2 + 2


def test_costs_are_joined_for_fewer_stages():
    costs = Costs(forward=[1, 2, 3, 4], message_bytes=[5, 6, 7, 8], activation_bytes=2.0)
    joined = costs.merged(2)
    assert joined.forward == (3.0, 7.0)
    assert joined.message_bytes == (6.0, 8.0)
    assert joined.activation_bytes == (4.0, 4.0)
    assert joined.backward == (4.0, 4.0)
    with pytest.raises(ValueError, match="4 stages cannot be joined to 3"):
        costs.merged(3)


def test_messages_queue_on_a_link_and_bytes_are_counted():
    costs = Costs(
        forward=1.0, backward=2.0, message_bytes=6.0, bandwidth=2.0, activation_bytes=[4.0, 3.0]
    )
    simulated = simulate(make_schedule("gpipe", 2, 2), costs=costs)
    # F0 ends at 1 and arrives at 4, F1 ends at 2 and arrives at 7: its transfer waited for F0's.
    assert [span.start for span in simulated.timeline[1]] == [4.0, 7.0, 8.0, 10.0]
    assert [span.start for span in simulated.timeline[0]] == [0.0, 1.0, 13.0, 16.0]
    assert simulated.peak_bytes == (8.0, 6.0)
