"""Whatever is given in the place of an argument, a ValueError or TypeError names it."""

import pytest
import torch
from mt_data_parallel import GradBuffer, grad_of, plan_buckets, reduce_partial_grads
from mt_parallel_state import ParallelLayout, ParallelState
from torch import nn

STATE = ParallelState(ParallelLayout())
NAMED = tuple(nn.Linear(4, 2).named_parameters())


def start(**options):
    with GradBuffer(NAMED, group=None) as buffer:
        buffer.start(**options)


def sink(param):
    with GradBuffer(NAMED, group=None) as buffer:
        buffer.sink(param)


def make(**options):
    GradBuffer(**options).close()


GOOD = [
    (make, {"named_params": NAMED, "group": None, "bucket_size": 9, "grad_dtype": torch.float32}),
    (start, {"num_backwards": 2}),
    (sink, {"param": NAMED[0][1]}),
    (plan_buckets, {"numels": {"a": 5}, "bucket_size": 100, "world_size": 2}),
    (grad_of, {"param": torch.ones(2)}),
    (reduce_partial_grads, {"named_params": NAMED, "state": STATE}),
]
BAD = (None, -1, 1.5, float("nan"), 10**12, "x", [None], [("a", None)], {}, object())


@pytest.mark.parametrize(("function", "good"), GOOD, ids=lambda x: getattr(x, "__name__", ""))
def test_wrong_arguments_are_value_or_type_errors(function, good):
    function(**good)
    for name in good:
        for bad in BAD:
            try:
                function(**{**good, name: bad})
            except (ValueError, TypeError) as error:
                message = str(error)
            else:
                message = "taken"
            assert 0 < len(message) < 1000, (name, bad)
