"""A registry with a custom candidate, and the reasons for the choice.

python own_candidate.py
"""

from __future__ import annotations

import torch
from mt_kernels import Candidate, Registry, Selector
from torch import Tensor


def reference(x: Tensor) -> Tensor:
    """Return the softmax of the last dim, written out."""
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def by_torch(x: Tensor) -> Tensor:
    """Return torch's softmax."""
    return x.softmax(-1)


def main() -> None:
    softmax = Registry("softmax", (Candidate("reference", reference),))
    softmax = softmax.with_candidate(
        Candidate("torch", by_torch, lambda x: "no rows" if x.dim() < 2 else None)
    )
    x = torch.randn(3, 5)
    print(softmax.choose("auto", x))
    print(softmax.choose("auto", x[0]))
    selector = Selector(softmax)
    torch.testing.assert_close(selector.find(x).function(x), reference(x))


if __name__ == "__main__":
    main()
