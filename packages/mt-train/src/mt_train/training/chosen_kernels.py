"""The lines with the kernel of each operation, which `mt-train run` prints once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mt_model import GPT
from mt_parallel_state import ParallelState, share_json

# Operations that the compiler fuses from plain forms, unless another kernel is requested.
_IN_GRAPHS = (
    *("rms_norm", "layer_norm", "residual", "rope"),
    *("gated", "squared_relu", "bias_gelu", "silu_product"),
)


def kernel_lines(stages: Sequence[GPT], state: ParallelState, *, compiled: bool) -> Iterator[str]:
    """Yield a line for each operation with several kernels: the chosen one, and the reason.

    All ranks of a pipeline call it together, since each knows only its stages: one `share_json`.

    Args:
        stages: Stages of this rank.
        state: Place of this rank.
        compiled: Whether they run under torch.compile, where `auto` is the plain form.
    """
    choices = (choice for stage in stages for choice in stage.chosen_kernels())
    own = [(c.operation, c.kernel, c.reason, list(c.others)) for c in choices]
    shared = share_json(own, state.group("pp"), device=state.device)
    found = {(name, *rest): others for rank in shared for name, *rest, others in rank}
    width = max((len(operation) for operation, *_ in found), default=0)
    for (operation, kernel, reason), others in found.items():
        if compiled and reason != "asked for" and operation in _IN_GRAPHS:
            kernel, reason, others = "reference", "torch.compile fuses the plain form", []
        why = "".join(f"; not {name}: {text}" for name, text in others)
        yield f"kernel {operation:<{width}}  {kernel} ({reason}{why})"
