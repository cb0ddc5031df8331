"""Balance of the choice of a run's experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mt_model import balance_experts, expert_loads
from mt_parallel_state import share_json
from torch import Tensor

from mt_train.parts.part import Setup, TrainerPart
from mt_train.reporting.metrics import Record


class ExpertLoads(TrainerPart):
    """Counts how often each expert of the whole model is chosen, and moves the routers' biases.

    The ranks of a pipeline tell each other which layers of experts they have.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._stages, self._device = setup.stages, setup.state.device
        self._sizes: dict[str, int] = {}
        if setup.model.has_experts:
            own = [[name, len(load)] for name, load in expert_loads(self._stages).items()]
            shared = share_json(own, setup.state.group("pp"), device=self._device)
            sizes = {str(name): int(size) for rank in shared for name, size in rank}
            self._sizes = {name: sizes[name] for name in sorted(sizes)}

    def own_numbers(self) -> Tensor:
        """Return the number of this rank's choices of each expert in the step so far."""
        loads = expert_loads(self._stages)
        parts = [
            loads[name].double() if name in loads else torch.zeros(size, device=self._device)
            for name, size in self._sizes.items()
        ]
        return torch.cat(parts) if parts else torch.zeros(0, device=self._device)

    def end_passes(self) -> None:
        """Move the biases that balance the choice of experts, and start counting anew."""
        balance_experts(self._stages)

    def record(self, sums: Sequence[float], so_far: Record) -> Record:
        """Return the balance of the choice of experts over all ranks.

        Returns:
            `expert_imbalance`: the number of choices of the busiest expert of any layer, over the
            mean; 1 is even. `dropped_choices`: the share of choices that no expert took. On steps
            shown on the console also `experts/NAME/load`: each expert's share of the choices.
        """
        if not self._sizes:
            return {}
        is_shown = so_far["step"] % self.setup.config.logging.every == 0
        rest, found, worst, dropped, total = list(sums), Record(), 0.0, 0.0, 0.0
        for name, size in self._sizes.items():
            (*load, none), rest = rest[:size], rest[size:]
            chosen = max(sum(load), 1.0)
            worst = max(worst, max(load) / chosen * len(load))
            dropped, total = dropped + none, total + chosen
            if is_shown:
                found[f"experts/{name}/load"] = [round(each / chosen, 6) for each in load]
        return {"expert_imbalance": worst, "dropped_choices": dropped / total, **found}
