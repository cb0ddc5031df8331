"""The executor against the same model run without a pipeline, in fp64, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor, TensorSpec
from mt_schedule import Action, Op, Schedule, check, make_schedule
from stages import (
    WIDTH,
    assert_matches_unpipelined,
    grads,
    make_batches,
    make_executor,
    make_layers,
    make_stage,
    objective,
)
from torch import nn


@pytest.mark.parametrize("batch_p2p", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_1f1b_matches_unpipelined_loss_and_gradients(ranks, stages, batch_p2p):
    def body():
        for microbatches in (1, 2, 5, 8):
            schedule = make_schedule("1f1b", stages=stages, microbatches=microbatches)
            assert_matches_unpipelined(
                schedule, group=dist.group.WORLD, batch_p2p=batch_p2p, steps=2
            )

    ranks(stages, body)


def test_one_stage_needs_no_group():
    assert_matches_unpipelined(make_schedule("1f1b", stages=1, microbatches=3), group=None)


@pytest.mark.parametrize("batch_p2p", [False, True])
def test_several_stages_on_a_rank_match_unpipelined(ranks, batch_p2p):
    schedule = make_schedule("interleaved", 2, 4)

    def body():
        assert_matches_unpipelined(schedule, group=dist.group.WORLD, batch_p2p=batch_p2p)

    ranks(2, body)


def test_stages_in_a_v_hand_over_within_a_rank(ranks):
    def actions(stages):
        forwards = [[Action(Op.F, s, i) for s in stages] for i in range(3)]
        backwards = [[Action(Op.B, s, i) for s in reversed(stages)] for i in range(3)]
        return tuple(a for f, b in zip(forwards, backwards, strict=True) for a in (*f, *b))

    schedule = Schedule(
        name="v",
        stages=4,
        microbatches=3,
        ranks=(actions((0, 3)), actions((1, 2))),
        stage_ranks=(0, 1, 1, 0),
    )
    assert check(schedule) == []
    ranks(2, lambda: assert_matches_unpipelined(schedule, group=dist.group.WORLD))


def test_a_ring_of_ranks_that_have_never_met_does_not_wait_for_itself(ranks):
    schedule = make_schedule("interleaved", 3, 1)

    def body():
        group = dist.new_group([0, 1, 2])
        assert_matches_unpipelined(schedule, group=group, number_of_layers=6)

    ranks(3, body)


def test_the_pipeline_may_be_a_part_of_the_world(ranks):
    def body():
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
        group = groups[0] if dist.get_rank() in (1, 3) else groups[1]
        assert_matches_unpipelined(
            make_schedule("1f1b", stages=2, microbatches=3), group=group, batch_p2p=False
        )

    ranks(4, body)


@pytest.mark.parametrize("number", [0, 1, 4, 7])
def test_evaluate_takes_any_number_of_microbatches_and_no_gradients(ranks, number):
    def body():
        schedule = make_schedule("1f1b", stages=3, microbatches=4)
        executor, layers, _ = make_executor(schedule, 3, group=dist.group.WORLD)
        batches = make_batches(number)
        outputs = executor.evaluate(batches)
        assert all(grad is None for grad in grads(layers))
        assert len(outputs) == (number if dist.get_rank() == 2 else 0)
        stage = make_stage(make_layers(3), last=True)
        for output, batch in zip(outputs, batches, strict=False):
            assert torch.equal(output["y"], stage(None, batch)["y"])
            assert not output["y"].requires_grad
        executor.run(make_batches(4), objective=objective)  # training goes on after it

    ranks(3, body)


def test_a_frozen_first_stage_sends_activations_and_takes_no_gradient(ranks):
    def body():
        schedule = make_schedule("1f1b", stages=2, microbatches=3)
        executor, layers, _ = make_executor(schedule, 2, group=dist.group.WORLD)
        layers[0].requires_grad_(False)
        executor.run(make_batches(3), objective=objective)
        assert grads([layers[0]])[0] is None
        assert (grads([layers[1]])[0] is not None) == (dist.get_rank() == 1)

    ranks(2, body)


@pytest.mark.parametrize("batch_p2p", [False, True])
def test_integer_activations_get_no_gradient_back(ranks, batch_p2p):
    def body():
        table = nn.Embedding(9, WIDTH)

        def stage(x, batch):
            return batch + 1 if x is None else table(x)

        executor = Executor(
            make_schedule("1f1b", stages=2, microbatches=3),
            stage,
            group=dist.group.WORLD,
            activation=lambda batch: TensorSpec(tuple(batch.shape), torch.int64),
            batch_p2p=batch_p2p,
        )
        batches = [torch.tensor([i, i + 1]) for i in range(3)]
        outputs = executor.run(batches, objective=lambda y, _: y.sum())
        if dist.get_rank() == 1:
            assert [tuple(y.shape) for y in outputs] == [(2, WIDTH)] * 3
            counts = torch.tensor([0, 1, 2, 2, 1, 0, 0, 0, 0])
            assert torch.equal(table.weight.grad, counts[:, None].expand(-1, WIDTH).float())

    ranks(2, body)
