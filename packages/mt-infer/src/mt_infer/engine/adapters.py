"""The adapters of an engine: by name, loaded and removed while requests go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

from mt_hf import read_lora
from mt_model import GPT, AdapterBank
from torch import Tensor

AdapterSource = str | Path | Mapping[str, Tensor]
AdapterNames = str | None | Sequence[str | None]


class Adapters:
    """LoRA adapters of a model by name; whoever loads or removes holds the engine's lock.

    Each load has a unique number, which requests and keys of cached blocks carry. A removed adapter
    stays in memory while running requests use it.

    Args:
        model: The model, or one stage of it.
    """

    def __init__(self, model: GPT) -> None:
        self._model, self._bank = model, None
        self._numbers: dict[str, int] = {}
        self._leaving: set[int] = set()
        self._next = count(1)

    def __len__(self) -> int:
        """Number of adapters in memory."""
        return len(self._numbers) + len(self._leaving)

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which requests may have an adapter."""
        return tuple(self._numbers)

    def load(self, name: str, source: AdapterSource, alpha: float | None) -> None:
        """Load an adapter; see `Engine.load_adapter`."""
        matrices = read_lora(source, self._model, alpha=alpha)
        if self._bank is None:
            self._bank = AdapterBank(self._model)
        number = next(self._next)
        self._bank.add(number, matrices)
        if name in self._numbers:
            self._leaving.add(self._numbers[name])
        self._numbers[name] = number

    def remove(self, name: str) -> None:
        """Forget a name; see `Engine.remove_adapter`."""
        self._leaving.add(self.number(name))
        del self._numbers[name]

    def number(self, name: str | None) -> int:
        """Return the number of an adapter, or 0 for none.

        Raises:
            ValueError: There is no adapter of that name.
        """
        if name is None:
            return 0
        if name not in self._numbers:
            known = ", ".join(map(repr, self._numbers)) or "none"
            raise ValueError(f"adapter={name!r}: the engine has {known}; call load_adapter first")
        return self._numbers[name]

    def drop_unused(self, used: Iterable[int]) -> None:
        """Drop the matrices of removed adapters that no request uses.

        Args:
            used: Numbers of all requests that have not ended.
        """
        if not self._leaving:
            return
        for number in self._leaving - set(used):
            assert self._bank is not None, "it held them"  # noqa: S101
            self._bank.remove(number)
            self._leaving.remove(number)


def adapter_of_each(adapter: AdapterNames, prompts: int) -> list[str | None]:
    """Return the adapter's name of each prompt.

    Raises:
        ValueError: A list has another length.
    """
    if adapter is None or isinstance(adapter, str):
        return [adapter] * prompts
    if len(adapter) != prompts:
        raise ValueError(f"adapter has {len(adapter)} names for {prompts} prompts; give one each")
    return list(adapter)
