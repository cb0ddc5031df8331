"""What the search finds runs in the executor with the gradients of the model without a pipeline."""

import pytest
import torch
import torch.distributed as dist
from mt_pipeline import Costs, Executor, TensorSpec, optimise
from torch import nn

WIDTH, MICROBATCHES = 5, 8
PROFILES = {
    "uneven head": {"forward": [1.0] * 7 + [1.8], "backward": [2.0] * 7 + [3.6]},
    "slow link": {"latency": 0.5, "forward": [1.0] * 8},
    "W cheaper than I": {"weight": 0.6, "forward": [1.0] * 8},
}


def make_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(8)]


def run_on_this_rank(schedule, batches) -> None:
    layers, reference = make_layers(), make_layers()
    each = len(layers) // schedule.depth

    def stage(number):
        part = nn.Sequential(*layers[number * each : (number + 1) * each])
        return lambda x, batch: part(batch if x is None else x)

    held = schedule.stages_of(dist.get_rank())
    executor = Executor(
        schedule,
        [stage(number) for number in held],
        group=dist.group.WORLD,
        activation=lambda batch: TensorSpec(tuple(batch.shape), batch.dtype),
    )
    executor.run(batches, objective=lambda y, batch: (y * batch).sum())
    for batch in batches:
        (nn.Sequential(*reference)(batch) * batch).sum().backward()
    for number in held:
        for layer in range(number * each, (number + 1) * each):
            pairs = zip(layers[layer].parameters(), reference[layer].parameters(), strict=True)
            for own, wanted in pairs:  # in another order of the micro-batches, perhaps
                torch.testing.assert_close(own.grad, wanted.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("world", [2, 4])
def test_found_schedules_give_the_gradients_of_the_model(ranks, world, name):
    costs = Costs(activation_bytes=1.0, **PROFILES[name])
    schedule = optimise(
        costs, 12.0, ranks=world, microbatches=MICROBATCHES, trials=100, two_copies=False
    )

    def body():
        torch.manual_seed(4)
        run_on_this_rank(schedule, [torch.randn(2, WIDTH).double() for _ in range(MICROBATCHES)])

    ranks(world, body)
