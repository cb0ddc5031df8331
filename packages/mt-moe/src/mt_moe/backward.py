"""Whether a forward is made again for a backward that runs."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether autograd runs a backward now: a forward inside of it is a recomputation."""
    return torch._C._current_graph_task_id() != -1
