"""Whether a forward is a recomputation for a running backward."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Return whether autograd runs a backward; a forward inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1
