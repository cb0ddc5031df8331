"""Stages that torch has compiled or wrapped: torch.compile, DDP, FSDP2, gradient hooks."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Executor
from mt_schedule import make_schedule
from mt_testing import sample
from stages import spec
from torch import nn

WIDTH = 8


def objective(output, batch):
    return (output * batch.cos()).sum()


def make_batches(number, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(4, WIDTH, dtype=torch.float64) for _ in range(number)]


class Layers(nn.Module):
    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def as_stage(module):
    return lambda x, batch: module(batch if x is None else x)


def run(schedule, modules, *, group, seed=0, **options):
    stages = [as_stage(module) for module in modules]
    executor = Executor(
        schedule,
        stages if len(stages) > 1 else stages[0],
        group=group,
        activation=spec,
        **options,
    )
    executor.run(make_batches(schedule.microbatches, seed), objective=objective)


def gradients(modules):
    return [p.grad for module in modules for p in module.parameters()]


@pytest.mark.parametrize(
    ("name", "backend"),
    sample(
        (
            (name, backend)
            for backend in ("aot_eager", "inductor")
            for name in ("zb-v", "1f1b", "zb-h1", "dualpipe-v")
        ),
        every=8,
    ),
)
def test_compiled_stages_run_every_kind_of_schedule(ranks, name, backend):
    def body():
        schedule = make_schedule(name, stages=2, microbatches=4)
        eager = [Layers(s) for s in schedule.stages_of(dist.get_rank())]
        compiled = copy.deepcopy(eager)
        run(schedule, eager, group=dist.group.WORLD)
        run(
            schedule,
            [torch.compile(module, backend=backend, fullgraph=True) for module in compiled],
            group=dist.group.WORLD,
        )
        for ours, theirs in zip(gradients(compiled), gradients(eager), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    ranks(2, body, timeout=240)


def expected_sum(schedule, modules):
    """The gradients of both replicas' batches, added."""
    copies = [copy.deepcopy(modules) for _ in range(2)]
    group = pipeline_group()
    for seed, each in enumerate(copies):
        run(schedule, each, group=group, seed=seed)
    return [a + b for a, b in zip(*map(gradients, copies), strict=True)]


def pipeline_group():
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return pipelines[dist.get_rank() // 2]


def replica_group():
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return replicas[dist.get_rank() % 2]


NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]


def setup(name):
    schedule = make_schedule(name, stages=2, microbatches=4)
    modules = [Layers(s) for s in schedule.stages_of(dist.get_rank() % 2)]
    return schedule, modules, expected_sum(schedule, modules)


def assert_equal(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_hooks_that_count_backwards_reduce_while_the_pipeline_runs(ranks, name):
    """What a gradient buffer does: reduce a parameter as soon as its last gradient is there."""

    def body():
        schedule, modules, expected = setup(name)
        group, works, counts = replica_group(), [], {}

        def arrived(parameter):
            counts[parameter] = counts.get(parameter, 0) + 1
            if counts[parameter] == schedule.microbatches:
                works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))

        for module in modules:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(arrived)
        run(schedule, modules, group=pipeline_group(), seed=dist.get_rank() // 2)
        assert len(works) == len(counts) == 6 * len(modules)
        for work in works:
            work.wait()
        assert_equal(gradients(modules), expected)

    ranks(4, body)


@pytest.mark.parametrize("name", NAMES)
def test_fully_sharded_stages_gather_and_reduce_by_their_own_hooks(ranks, name):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def body():
        schedule, modules, expected = setup(name)
        mesh = DeviceMesh.from_group(replica_group(), "cpu")
        for module in modules:
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
        run(schedule, modules, group=pipeline_group(), seed=dist.get_rank() // 2)
        ours = [grad.full_tensor() for grad in gradients(modules)]
        assert_equal(ours, expected)

    ranks(4, body)


@pytest.mark.parametrize("name", NAMES)
def test_ddp_stages_reduce_where_the_caller_lets_them(ranks, name):
    """DDP takes it that a backward follows each forward, so no_sync and the caller do its work."""
    from torch.nn.parallel import DistributedDataParallel

    def body():
        schedule, modules, expected = setup(name)
        group = replica_group()
        wrapped = [DistributedDataParallel(module, process_group=group) for module in modules]
        with contextlib.ExitStack() as stack:
            for module in wrapped:
                stack.enter_context(module.no_sync())
            run(schedule, wrapped, group=pipeline_group(), seed=dist.get_rank() // 2)
        for grad in gradients(modules):
            dist.all_reduce(grad, group=group)
        assert_equal(gradients(modules), expected)

    ranks(4, body)


def test_a_stage_that_was_compiled_whole_is_called_whole(ranks):
    class InParts(Layers):
        def forward(self, x, batch):
            return super().forward(batch if x is None else x)

        def parts(self, batch):
            raise AssertionError

    def body():
        schedule = make_schedule("dualpipe-v", stages=2, microbatches=4)
        plain = [Layers(s) for s in schedule.stages_of(dist.get_rank())]
        run(schedule, plain, group=dist.group.WORLD)
        stages = [InParts(s) for s in schedule.stages_of(dist.get_rank())]
        compiled = [torch.compile(stage, backend="eager") for stage in stages]
        group = dist.group.WORLD
        executor = Executor(schedule, compiled, group=group, activation=spec)
        executor.run(make_batches(4, 0), objective=objective)
        for ours, theirs in zip(gradients(stages), gradients(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

    ranks(2, body)


def test_a_stage_in_parts_is_sharded_by_its_submodules(ranks):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    class InParts(Layers):
        def forward(self, x, batch):
            return super().forward(batch if x is None else x)

        def parts(self, batch):
            return [lambda x: self(x, batch)]

    def body():
        group = dist.group.WORLD
        stage = fully_shard(InParts(0), mesh=DeviceMesh.from_group(group, "cpu"))
        schedule = make_schedule("dualpipe-v", stages=2, microbatches=4)
        with pytest.raises(ValueError, match=r"stage \d was given to fully_shard .* submodules"):
            Executor(schedule, [stage, stage], group=group, activation=spec)

    ranks(2, body)
