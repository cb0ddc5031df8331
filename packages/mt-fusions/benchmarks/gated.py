"""SwiGLU and GeGLU against torch's, eager and compiled.

    python packages/mt-fusions/benchmarks/gated.py [inductor]

Prints the times of the others over ours (above 1 ours is faster) and the share of a copy of
the bytes that have to move: gate, up and the result forward; backward all three and two gradients.
"""

import sys

import torch
import torch.nn.functional as F
from mt_fusions import geglu, swiglu
from timing import eager_and_inductor, forward_of, report, step_of

ROWS, WIDTH = 4096, 1024


def plain_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def plain_geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate) * up


def main() -> None:
    inductor = "inductor" in sys.argv
    for dtype in (torch.float32, torch.bfloat16):
        gate, up, grad = torch.randn(3, ROWS, WIDTH).to(dtype)
        for ours, plain in ((swiglu, plain_swiglu), (geglu, plain_geglu)):
            torch.testing.assert_close(ours(gate, up), plain(gate, up))
            functions = {"ours": ours, **eager_and_inductor(plain, inductor=inductor)}
            name = f"{ours.__name__} {dtype}"
            forward = {name: forward_of(f, gate, up) for name, f in functions.items()}
            report(f"{name} forward", forward, 3 * gate.nbytes)
            step = {name: step_of(f, grad, gate, up) for name, f in functions.items()}
            report(f"{name} with backward", step, 8 * gate.nbytes)


if __name__ == "__main__":
    main()
