"""Reports of a model's modules about the kernels that compute them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from mt_kernels import Choice
from torch import Tensor


@runtime_checkable
class ChoosesKernels(Protocol):
    """A module some of whose operations have several kernels."""

    def kernel_choices(self, like: Tensor) -> Iterator[Choice[Any]]:
        """Yield what computes them for tensors of the device and dtype of `like`.

        Raises:
            KernelError: A named kernel does not serve.
        """
        ...
