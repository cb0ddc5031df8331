"""What the parallel layers cost on one rank: MLP and loss, forward and backward, against torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from mt_fusions import cross_entropy
from mt_tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    parallel_linear,
)
from torch import Tensor, nn

TOKENS, HIDDEN, FFN, VOCAB = (4, 256), 256, 768, 4096
ROUNDS, STEPS = 15, 4


class Ours(nn.Module):
    """An MLP and a head of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, FFN, bias=False)
        self.down = RowParallelLinear(FFN, HIDDEN, bias=False)
        self.head = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.02)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token."""
        h = x + self.down(F.silu(self.up(x)))
        logits = parallel_linear(h, self.head, mode="column")
        return cross_entropy(logits, labels, reduction="none")


class Plain(nn.Module):
    """The same in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.head = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.02)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token."""
        h = x + self.down(F.silu(self.up(x)))
        logits = F.linear(h, self.head).flatten(0, -2)
        return F.cross_entropy(logits, labels.flatten(), reduction="none")


def seconds(model: Callable[..., Tensor], x: Tensor, labels: Tensor) -> float:
    started = time.perf_counter()
    for _ in range(STEPS):
        model(x, labels).sum().backward()
    return (time.perf_counter() - started) / STEPS


def main() -> None:
    """Print the ratio of times."""
    torch.manual_seed(0)
    x, labels = torch.randn(*TOKENS, HIDDEN), torch.randint(0, VOCAB, TOKENS)
    ours, plain = Ours(), Plain()
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x, labels).flatten(), plain(x, labels), rtol=1e-5, atol=1e-5)
    for model in (ours, plain):
        seconds(model, x, labels)
    ratios = sorted(seconds(ours, x, labels) / seconds(plain, x, labels) for _ in range(ROUNDS))
    quarter = ROUNDS // 4
    print(
        f"tp=1 step / plain torch: {statistics.median(ratios):.2f}x "
        f"(middle half {ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}), fp32, "
        f"{torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
