"""How evenly the experts of a run are chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mt_model import GPT, expert_loads
from mt_parallel_state import ParallelState, share_json
from torch import Tensor

from mt_train.reporting.metrics import Record


class ExpertLoads:
    """How often each expert of the whole model is chosen, as numbers that ranks sum up.

    Every rank makes one: the ranks of a pipeline tell each other which layers they have.

    Args:
        stages: Of this rank.
        state: This rank's place.
        every: Steps from one record of all experts to the next.
    """

    def __init__(self, stages: Sequence[GPT], state: ParallelState, *, every: int) -> None:
        self._stages, self._device, self._every = stages, state.device, every
        own = [[name, len(load)] for name, load in expert_loads(stages).items()]
        has_experts = stages[0].config.has_experts
        shared = share_json(own, state.group("pp"), device=state.device) if has_experts else []
        sizes = {str(name): int(size) for rank in shared for name, size in rank}
        self._sizes = {name: sizes[name] for name in sorted(sizes)}

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return sum(self._sizes.values())

    def own(self) -> Tensor:
        """Return this rank's part of the sums of the step so far, on the device.

        Shape:
            fp64 [size].
        """
        loads = expert_loads(self._stages)
        parts = [
            loads[name].double() if name in loads else torch.zeros(size, device=self._device)
            for name, size in self._sizes.items()
        ]
        return torch.cat(parts) if parts else torch.zeros(0, device=self._device)

    def record(self, sums: Sequence[float], step: int) -> Record:
        """Name the sums over all ranks.

        Returns:
            `expert_imbalance`: how often the busiest expert of any layer is chosen, over the mean;
            1 is even. `dropped_choices`: the share of choices that no expert took. On some steps
            `experts/NAME/load` too: each expert's share of the layer's choices.
        """
        if not self._sizes:
            return {}
        rest, found, worst, dropped, total = list(sums), Record(), 0.0, 0.0, 0.0
        for name, size in self._sizes.items():
            (*load, none), rest = rest[:size], rest[size:]
            chosen = max(sum(load), 1.0)
            worst = max(worst, max(load) / chosen * len(load))
            dropped, total = dropped + none, total + chosen
            if step % self._every == 0:
                found[f"experts/{name}/load"] = [round(each / chosen, 6) for each in load]
        return {"expert_imbalance": worst, "dropped_choices": dropped / total, **found}
