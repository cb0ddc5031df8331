"""Steps of every strategy beside torch's own, in one run: ratios of time, and bytes per rank.

`OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/sharding.py`
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mt_data_parallel import GradBuffer, shard
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

Step = Callable[[], None]
WIDTH, LAYERS, ROWS, ROUNDS = 512, 8, 64, 36


class Net(nn.Module):
    """Equal layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return a sum, as losses are here."""
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def ours(strategy: Any, x: Tensor) -> tuple[Step, GradBuffer]:
    model = Net()
    buffer = shard(model, strategy, group=dist.group.WORLD)
    optimizer = torch.optim.AdamW([p.param for p in buffer.shards()], fused=True)

    def step() -> None:
        buffer.start(1)
        model(x).backward()
        buffer.finish()
        optimizer.step()
        buffer.gather_params()

    return step, buffer


def torch_ddp(x: Tensor) -> tuple[Step, None]:
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return stepper(model, optimizer, x), None


def torch_fsdp(x: Tensor) -> tuple[Step, None]:
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return stepper(model, optimizer, x), None


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    return step


def seconds(step: Step) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def held(buffer: GradBuffer, numel: int) -> float:
    """Bytes per parameter between steps: parameters, gradients and two fp32 moments."""
    memory = {}
    for bucket in buffer.buckets:
        for tensor in (bucket.grads, bucket.params, bucket.own_grads, bucket.own_params):
            if tensor is not None:
                storage = tensor.untyped_storage()
                memory[storage._cdata] = storage.size()
    if not buffer.is_sharded:
        memory["params"] = 4 * numel
    moments = 8 * sum(piece.param.numel() for piece in buffer.shards())
    return (sum(memory.values()) + moments) / numel


def main() -> None:
    dist.init_process_group("gloo")
    x = torch.randn(ROWS, WIDTH)
    numel = sum(p.numel() for p in Net().parameters())
    names = ("none", "optimizer", "optimizer_gradients", "full")
    runs: dict[str, tuple[Step, GradBuffer | None]] = {name: ours(name, x) for name in names}
    runs |= {"torch DDP": torch_ddp(x), "torch fully_shard": torch_fsdp(x)}
    for step, _ in runs.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS):
        first = number % len(runs)  # they take turns
        for name in [*runs, *runs][first : first + len(runs)]:
            times[name].append(seconds(runs[name][0]))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {numel / 1e6:.1f}M parameters")
        base = {"full": "torch fully_shard"}
        for name in names:
            other = base.get(name, "torch DDP")
            ratios = [a / b for a, b in zip(times[name], times[other], strict=True)]
            low, middle, high = statistics.quantiles(ratios)
            buffer = runs[name][1]
            bytes_per = held(buffer, numel) if buffer is not None else 0
            print(
                f"{name:20} {bytes_per:5.2f} B per parameter; step / {other}: "
                f"{middle:.2f} (quartiles {low:.2f} to {high:.2f})"
            )
    for _, buffer in runs.values():
        if buffer is not None:
            buffer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
