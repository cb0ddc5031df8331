"""Gradient buckets that leave while a pipeline still runs, under every kind of schedule."""

import copy

import pytest
import torch
from mt_data_parallel import shard
from mt_parallel_state import ParallelLayout, ParallelState
from mt_pipeline import Executor, TensorSpec
from mt_schedule import make_schedule
from torch import nn

WIDTH, MICROBATCHES = 6, 4


class Stage(nn.Module):
    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.double()

    def forward(self, x, batch):
        h = batch if x is None else x
        return h + self.down(torch.tanh(self.up(self.norm(h))))


def run(schedule, stages, *, group, seed):
    torch.manual_seed(seed)
    batches = [torch.randn(2, 3, WIDTH, dtype=torch.float64) for _ in range(MICROBATCHES)]
    Executor(
        schedule,
        stages if len(stages) > 1 else stages[0],
        group=group,
        activation=lambda batch: TensorSpec(tuple(batch.shape), batch.dtype),
    ).run(batches, objective=lambda output, batch: (output * batch.cos()).sum())


SCHEDULES = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "dualpipe-v")
STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")


def reduced(name, strategy):
    """How much was reduced from within backward, and whether all of it is the sum of replicas."""
    with ParallelState(ParallelLayout(pp=2, dp=2)) as state:
        schedule = make_schedule(name, stages=2, microbatches=MICROBATCHES)
        stages = [Stage(number) for number in schedule.stages_of(state.index("pp"))]
        alone = [copy.deepcopy(stages) for _ in range(2)]
        for seed, replica in enumerate(alone):
            run(schedule, replica, group=state.group("pp"), seed=seed)
        model = nn.ModuleList(stages)
        sums = {
            name: sum(dict(nn.ModuleList(one).named_parameters())[name].grad for one in alone)
            for name, _ in model.named_parameters()
        }
        launched = []
        with shard(
            model, strategy, group=state.group("dp"), bucket_size=40, units=stages
        ) as buffer:
            for _ in range(2):  # the second step starts anew
                buffer.start(MICROBATCHES)
                run(schedule, stages, group=state.group("pp"), seed=state.index("dp"))
                launched.append(buffer.num_launched)
                buffer.finish()
                buffer.gather_params()
            for piece in buffer.shards():
                expected = sums[piece.name].view(-1)[piece.start : piece.end]
                found = piece.grad.reshape(-1)
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        return launched


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=() if i % 4 == j else pytest.mark.campaign)
        for i, name in enumerate(SCHEDULES)
        for j, strategy in enumerate(STRATEGIES)
    ],
)
def test_buckets_leave_from_within_the_backward_and_sum_all_replicas(ranks, name, strategy):
    """Also where weight gradients come later than backward: in the W of zero-bubble schedules."""
    for launched in ranks(4, reduced, name, strategy):
        for begun, total in launched:
            assert begun == total > (2 if strategy in ("none", "optimizer") else 1)
