"""Gradient buckets that leave while a pipeline still runs, under every kind of schedule."""

import copy

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer, grad_of
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


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "dualpipe-v"]
)
def test_buckets_sum_the_gradients_of_all_replicas(ranks, name):
    def body():
        with ParallelState(ParallelLayout(pp=2, dp=2)) as state:
            schedule = make_schedule(name, stages=2, microbatches=MICROBATCHES)
            stages = [Stage(number) for number in schedule.stages_of(state.index("pp"))]
            alone = [copy.deepcopy(stages) for _ in range(2)]
            for seed, replica in enumerate(alone):
                run(schedule, replica, group=state.group("pp"), seed=seed)
            named = dict(nn.ModuleList(stages).named_parameters())
            launched = []
            buffer = GradBuffer(named.items(), group=state.group("dp"), bucket_size=40)
            reduce = dist.all_reduce

            def logged(tensor, *args, **kwargs):
                launched.append(tensor.numel())
                return reduce(tensor, *args, **kwargs)

            dist.all_reduce = logged
            try:
                for _ in range(2):  # the second step starts anew
                    launched.clear()
                    buffer.start(MICROBATCHES)
                    run(schedule, stages, group=state.group("pp"), seed=state.index("dp"))
                    before_finish = len(launched)
                    buffer.finish()
            finally:
                dist.all_reduce = reduce
            sums = [
                a.grad + b.grad
                for one, other in zip(*alone, strict=True)
                for a, b in zip(one.parameters(), other.parameters(), strict=True)
            ]
            for parameter, expected in zip(named.values(), sums, strict=True):
                torch.testing.assert_close(grad_of(parameter), expected, rtol=1e-12, atol=1e-12)
            buffer.close()
            return before_finish, len(launched)

    for before_finish, total in ranks(4, body):
        assert before_finish == total > 2  # all buckets left from within the backward
