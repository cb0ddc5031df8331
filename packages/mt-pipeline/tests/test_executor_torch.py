"""The executor against torch.distributed.pipelining: the same gradients, bit for bit."""

import copy

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor, TensorSpec
from mt_schedule import make_schedule
from torch import nn

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

WIDTH, ROWS = 6, 4
CASES = [
    ("gpipe", {}, "ScheduleGPipe", 0.0),
    ("1f1b", {}, "Schedule1F1B", 0.0),
    ("interleaved", {"chunks": 2}, "ScheduleInterleaved1F1B", 0.0),
    ("bfs", {"chunks": 2}, "ScheduleLoopedBFS", 1e-12),  # torch goes backward in another order
    ("zb-v", {}, "ScheduleZBVZeroBubble", 0.0),
    ("dualpipe-v", {}, "ScheduleDualPipeV", 0.0),
]


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.double()

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def sum_loss(output, target):
    return (output - target).square().sum()


def run_theirs(kind, schedule, modules, x, target):
    from torch.distributed.pipelining import PipelineStage

    held = schedule.stages_of(dist.get_rank())
    stages = [
        PipelineStage(module, number, schedule.stages, torch.device("cpu"))
        for number, module in zip(held, modules, strict=True)
    ]
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    runner = kind(
        stages[0] if single else stages,
        n_microbatches=schedule.microbatches,
        loss_fn=sum_loss,
        scale_grads=False,
    )
    last = schedule.stages - 1 in held
    losses = []
    runner.step(
        *((x,) if 0 in held else ()),
        target=target if last else None,
        losses=losses if last else None,
    )
    return losses


def run_ours(schedule, modules, x, target):
    stages = [lambda x, b, module=module: module(b[0] if x is None else x) for module in modules]
    executor = Executor(
        schedule,
        stages if len(stages) > 1 else stages[0],
        group=dist.group.WORLD,
        activation=lambda batch: TensorSpec(tuple(batch[0].shape), batch[0].dtype),
    )
    chunks = [whole.chunk(schedule.microbatches) for whole in (x, target)]
    batches = list(zip(*chunks, strict=True))
    outputs = executor.run(batches, objective=lambda output, batch: sum_loss(output, batch[1]))
    return [sum_loss(y, batch[1]) for y, batch in zip(outputs, batches, strict=bool(outputs))]


@pytest.mark.parametrize(("name", "options", "kind", "tolerance"), CASES)
@pytest.mark.parametrize("world", [2, 4])
def test_losses_and_gradients_are_those_of_torch(ranks, world, name, options, kind, tolerance):
    if not hasattr(schedules, kind):
        pytest.skip(f"this torch has no {kind}")
    if name in ("zb-v", "dualpipe-v") and torch.__version__ < "2.15":
        pytest.skip("torch 2.11's V-shaped schedules send to their own rank, which gloo refuses")

    def body():
        schedule = make_schedule(name, stages=world, microbatches=8, **options)
        ours = [Block(stage) for stage in schedule.stages_of(dist.get_rank())]
        theirs = copy.deepcopy(ours)
        torch.manual_seed(99)
        x, target = torch.randn(2, 8 * ROWS, WIDTH, dtype=torch.float64)
        expected = run_theirs(getattr(schedules, kind), schedule, theirs, x, target)
        losses = run_ours(schedule, ours, x, target)
        assert len(losses) == len(expected)
        for a, b in zip(losses, expected, strict=True):
            assert torch.equal(a, b)
        pairs = zip(
            nn.ModuleList(ours).parameters(), nn.ModuleList(theirs).parameters(), strict=True
        )
        for a, b in pairs:
            torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)

    ranks(world, body)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 5), (3, 4), (4, 8), (5, 7)])
def test_1f1b_order_equals_torch(p, m):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = schedules.Schedule1F1B.__new__(schedules.Schedule1F1B)
    if not hasattr(theirs, "_get_pipeline_order"):
        pytest.skip("this torch does not give its 1F1B order")
    theirs._num_stages = p
    theirs._n_microbatches = m
    ours = make_schedule("1f1b", stages=p, microbatches=m)
    for rank, actions in theirs._get_pipeline_order().items():
        wanted = [(a.computation_type.name, a.microbatch_index) for a in actions if a]
        letters = {"FORWARD": "F", "FULL_BACKWARD": "B"}
        wanted = [(letters[kind], number) for kind, number in wanted if kind in letters]
        mine = [(action.op.value, action.microbatch) for action in ours.ranks[rank]]
        if rank == p - 1:  # torch's table (not what it runs) numbers this rank's forwards from 1
            wanted = [(kind, number - (kind == "F")) for kind, number in wanted]
        assert mine == wanted
