"""What computes the operations of a model, as `mt-train run` says it once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mt_model import GPT, KernelChoice
from mt_parallel_state import ParallelState, share_json

_IN_GRAPHS = ("norm", "residual", "activation", "rope")


def kernel_lines(stages: Sequence[GPT], state: ParallelState, *, compiled: bool) -> Iterator[str]:
    """Yield a line for each operation with several kernels: which computes it, and why.

    All ranks of a pipeline call it together, as each knows its own stages: one `share_json`.

    Args:
        stages: Of this rank, that were built for the run.
        state: This rank's place.
        compiled: They run under torch.compile, where `auto` is the plain form.
    """
    own = [list(choice) for stage in stages for choice in stage.chosen_kernels()]
    shared = share_json(own, state.group("pp"), device=state.device)
    choices = dict.fromkeys(KernelChoice(*choice) for rank in shared for choice in rank)
    width = max((len(choice.operation) for choice in choices), default=0)
    for operation, kernel, reason in choices:
        if compiled and reason != "asked for" and operation in _IN_GRAPHS:
            kernel, reason = "reference", "torch.compile fuses the plain form"
        yield f"kernel {operation:<{width}}  {kernel} ({reason})"
