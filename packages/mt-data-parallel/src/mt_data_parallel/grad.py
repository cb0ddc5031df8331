"""Access to a parameter's gradient, with or without a gradient buffer."""

from __future__ import annotations

from torch import Tensor

MAIN_GRAD = "main_grad"


def grad_of(param: Tensor) -> Tensor | None:
    """Return the gradient that an optimizer should use.

    Args:
        param: A parameter.

    Returns:
        ``param.main_grad`` where a `GradBuffer` holds the parameter, else ``param.grad``; None if
        there is no gradient yet, which counts as zero everywhere in mt.

    Raises:
        TypeError: It is no tensor.

    Shape:
        The parameter's shape; the dtype is the buffer's (fp32 for bf16 parameters by default).
    """
    if not isinstance(param, Tensor):
        raise TypeError(f"expected a parameter, got {param!r:.60} ({type(param).__name__})")
    main_grad: Tensor | None = getattr(param, MAIN_GRAD, None)
    return param.grad if main_grad is None else main_grad
