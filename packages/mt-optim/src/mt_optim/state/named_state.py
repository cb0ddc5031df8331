"""The state of an optimizer, read and written by the parameters' names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from mt_data_parallel import ParamShard
from torch import Tensor

from mt_optim.checks import check_count
from mt_optim.rules.rule import Rule
from mt_optim.state.storage import StateStorage


class NamedState(torch.optim.Optimizer):
    """A torch.optim.Optimizer with named masters, moments and factors; subclasses step it."""

    _shards: dict[str, ParamShard]
    _rules: dict[str, Rule]
    _storage: StateStorage
    _is_away: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in the order of the groups."""
        return tuple(self._shards)

    def shard(self, name: str) -> ParamShard:
        """Return the shard of a named parameter.

        Raises:
            KeyError: There is no such parameter.
        """
        try:
            return self._shards[name]
        except (KeyError, TypeError):
            raise KeyError(
                f"no parameter {name!r} in this optimizer; it has {', '.join(self._shards)}"
            ) from None

    @property
    def step_count(self) -> int:
        """The number of steps taken; set it after loading the moments of a checkpoint."""
        return max(int(self.state[param]["step"]) for param in self._tensors())

    @step_count.setter
    def step_count(self, value: int) -> None:
        check_count("step_count", value, least=0)
        for param in self._tensors():
            self.state[param]["step"].fill_(float(value))

    def master(self, name: str) -> Tensor:
        """Return the full-precision parameter: the parameter itself, or its fp32 copy for 16 bits.

        Shape:
            The parameter's. Writing into it changes the state; call `sync_params` afterwards. If
            remainders are kept, it is a copy, and only `set_master` changes the state.
        """
        shard = self.shard(name)
        return self._storage.master(shard, self.state[shard.param]).detach()

    @torch.no_grad()
    def set_master(self, name: str, value: Tensor) -> None:
        """Set a master; call `sync_params` afterwards.

        Raises:
            KeyError: There is no such parameter.
            ValueError: It has another shape.
        """
        shard = self.shard(name)
        if value.shape != shard.param.shape:
            raise ValueError(
                f"the master of parameter {name!r} has shape {tuple(shard.param.shape)}, got "
                f"{tuple(value.shape)}"
            )
        self._storage.set_master(shard, self.state[shard.param], value)

    @property
    def moment_keys(self) -> tuple[str, ...]:
        """The names of the moments of all rules, whether or not a parameter here has them."""
        return tuple(dict.fromkeys(key for rule in self._rules.values() for key in rule.moments))

    def moments(self, name: str) -> tuple[str, ...]:
        """Return the names of the parameter's moments."""
        return self._rule_of_param(name).moments

    def moment(self, name: str, key: str) -> Tensor:
        """Return a moment of a parameter, such as `exp_avg`.

        Shape:
            The parameter's. Writing into it changes the state, except if moments have scales (fp16
            or fp8): then it is an fp32 copy, and only `set_moment` changes the state.
        """
        shard = self.shard(name)
        if key not in self.moments(name):
            raise KeyError(
                f"no moment {key!r} of {name!r}; it has {', '.join(self.moments(name)) or 'none'}"
            )
        return self._storage.moment(shard, self.state[shard.param], key)

    def factors(self, name: str) -> dict[str, Tensor]:
        """Return the state tensors of a parameter with shapes of their own, such as SOAP's bases.

        They belong to the whole parameter even if tensor parallelism splits it: each rank that
        steps a part has all of them. Writing into them changes the state.
        """
        state = self.state[self.shard(name).param]
        return {key: state[key] for key in self._rule_of_param(name).factors(state)}

    @torch.no_grad()
    def set_moment(self, name: str, key: str, value: Tensor) -> None:
        """Set a moment.

        Raises:
            KeyError: There is no such parameter or moment.
            ValueError: It has another shape.
        """
        own = self.moment(name, key)
        if value.shape != own.shape:
            raise ValueError(
                f"{key} of parameter {name!r} has shape {tuple(own.shape)}, got "
                f"{tuple(value.shape)}"
            )
        self._storage.set_moment(self.state[self.shard(name).param], key, value)

    @torch.no_grad()
    def non_finite(self) -> list[str]:
        """Name the parameters whose weights or moments are not all finite.

        Infinite weights, from an absurd learning rate, make every later loss infinite too: check
        before a checkpoint is written. It reads the state once and waits for the device. It does
        not communicate: each rank checks its own shards.

        Returns:
            The names, in order; empty if all are finite.
        """
        found: list[tuple[str, Tensor]] = []
        for name, shard in self._shards.items():
            if shard.param.numel():
                moments = [self.moment(name, key) for key in self.moments(name)]
                values = [self.master(name), *moments, *self.factors(name).values()]
                # The greatest magnitude is exact in any dtype, and NaN where there is a NaN.
                found += [(name, torch.linalg.vector_norm(v, math.inf).double()) for v in values]
        if not found:
            return []
        largest = torch.stack([value.to(found[0][1].device) for _, value in found]).tolist()
        pairs = zip(found, largest, strict=True)
        return list(dict.fromkeys(name for (name, _), value in pairs if not math.isfinite(value)))

    @torch.no_grad()
    def sync_params(self) -> None:
        """Set parameters of 16 bits to their masters, rounded to nearest even."""
        self._sync(self._shards.values())

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Set masters to their 16-bit parameters, after weights were loaded into the model."""
        for shard in self._shards.values():
            self._storage.set_master(shard, self.state[shard.param], shard.param.detach())

    @torch.no_grad()
    def offload_state(self) -> None:
        """Move masters and moments to the host to free memory on the device.

        Parameters stay. Until `restore_state` no step can be taken; everything else works.
        """
        self._move_state(away=True)

    @torch.no_grad()
    def restore_state(self) -> None:
        """Move masters and moments back to the device."""
        self._move_state(away=False)

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return self._rules[group["rule"]] if "rule" in group else next(iter(self._rules.values()))

    def _rule_of_param(self, name: str) -> Rule:
        param = self.shard(name).param
        return next(
            self._rule(group)
            for group in self.param_groups
            if any(param is own for own in group["params"])
        )

    def _sync(self, shards: Iterable[ParamShard]) -> None:
        """Set parameters that are not their own masters to these."""
        held = [shard.param for shard in shards if "master" in self.state[shard.param]]
        if held:
            torch._foreach_copy_(held, [self.state[param]["master"] for param in held])

    def _move_state(self, *, away: bool) -> None:
        if away == self._is_away:
            raise RuntimeError(
                "the state is on the host already; call restore_state() first"
                if away
                else "the state was not moved; call offload_state() first"
            )
        for shard in self._shards.values():
            if not self._storage.is_offloaded(shard):
                self._storage.move(shard, self.state[shard.param], away=away)
        self._is_away = away

    def _tensors(self) -> list[Tensor]:
        return [shard.param for shard in self._shards.values()]

    def _by_param(self) -> dict[int, ParamShard]:
        """Return the shards by the identity of their parameters, whose hash is the slower one."""
        return {id(shard.param): shard for shard in self._shards.values()}
