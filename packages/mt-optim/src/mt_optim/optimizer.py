"""An optimizer with named state in full precision, for any update rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

import torch
from mt_data_parallel import ParamShard, grad_of
from torch import Tensor

from mt_optim.checks import check_function
from mt_optim.gradients.guard import StepGuard
from mt_optim.gradients.result import StepResult
from mt_optim.gradients.scaler import GradScaler, read_scale
from mt_optim.parameters.group import (
    MASTER_DTYPES,
    DecayFilter,
    apply_scales,
    check_options,
    read_group,
    read_groups,
    scaled_rates,
)
from mt_optim.rules.rule import Rule
from mt_optim.state.ema import EMA
from mt_optim.state.host import Traffic
from mt_optim.state.named_state import NamedState
from mt_optim.state.saved import read_options, read_state
from mt_optim.state.storage import StateStorage
from mt_optim.state.update import portions, update

RuleFilter = Callable[[str, Tensor], str]


class NamedOptimizer(NamedState):
    """A torch.optim.Optimizer that runs rules over full-precision masters, with named state.

    bf16 and fp16 parameters have an fp32 master, which is updated and rounded back; fp32 and fp64
    parameters are their own master. State is allocated at once: a checkpoint is loaded by
    `load_state_dict`, or by writing into `master` and `moment`, setting `step_count` and calling
    `sync_params`. After weights were loaded into the parameters themselves, call `sync_masters`.

    Gradients are read through `mt_data_parallel.grad_of`; a missing one counts as zero, as it would
    inside a GradBuffer (torch.optim skips such a parameter instead). Parameters with
    `requires_grad=False` are left out.

    Args:
        params: Parameters, pairs of name and parameter, or a list of groups: dicts with `params`
            and options of their own. Parameters without names are named by their number: `"0"`,
            `"1"` and so on.
        rules: The rule of all parameters, or several.
        lr: Learning rate.
        weight_decay: Weight decay; its meaning depends on the rule.
        decay_filter: Predicate of name and parameter for weight decay. Parameters that it refuses
            become a group with weight_decay 0. None: weight decay applies to all, as in torch.
            `default_decay_filter` spares biases and vectors.
        rule_filter: Function from name and parameter to the name of the rule, for several rules.
            The parameters of each rule become groups of their own.
        storage: Precision and place of the states; by default as the masters, on the device. Each
            optimizer needs its own.

    Attributes:
        param_groups: The groups with their options, which may be changed between steps.
        guard: Decides whether a step is taken; None (the default) takes every step.
        offload_traffic: Bytes that the last step copied between device and host.
        rescale: Function called after the update of a step. It returns, by name, factors of
            parameters, as QK-clip needs them: tensors that broadcast with `ParamShard.source`.
        ema: The average that every step updates; None (the default) for no average.

    Raises:
        ValueError: A setting is out of range, a parameter is listed twice or is not a leaf, or
            there is no parameter to train.
        TypeError: An item is not a parameter, or not fp16, bf16, fp32 or fp64.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rules: Rule | Sequence[Rule],
        *,
        lr: float | Tensor,
        weight_decay: float,
        decay_filter: DecayFilter | None = None,
        rule_filter: RuleFilter | None = None,
        storage: StateStorage | None = None,
    ) -> None:
        check_function("decay_filter", decay_filter, optional=True)
        check_function("rule_filter", rule_filter, optional=True)
        several = [rules] if isinstance(rules, Rule) else list(rules)
        self._rules = {rule.name: rule for rule in several}
        self._decays, self._rule_of = decay_filter, rule_filter or (lambda *_: several[0].name)
        self._shards: dict[str, ParamShard] = {}
        self.guard: StepGuard | None = None
        self.ema: EMA | None = None
        self.rescale: Callable[[], Mapping[str, Tensor]] | None = None
        self._storage = StateStorage() if storage is None else storage
        self._is_away = False
        self.offload_traffic = Traffic()
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        for rule in several:
            defaults |= rule.options
        check_options(defaults)
        for rule in several:
            rule.check(defaults)
        self._options = defaults  # of all rules
        super().__init__(read_groups(params), defaults)
        # Schedules of torch cycle `betas` of every group where there is a default, else `momentum`.
        if not all("betas" in rule.options for rule in several):
            self.defaults = {key: x for key, x in defaults.items() if key != "betas"}
        if not self._shards:
            raise ValueError(
                "there is no parameter to train: each has requires_grad=False; set it before"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, such as newly unfrozen layers.

        Args:
            param_group: `params`, and options in place of the optimizer's defaults.

        Raises:
            ValueError: As from the constructor; also if only some groups have names.
            TypeError: As from the constructor.
        """
        options, shards, is_named = read_group(param_group, len(self._shards), tuple(self._options))
        forced = options.pop("rule", None)
        if forced is not None and forced not in self._rules:
            raise ValueError(f"rule must be one of {', '.join(self._rules)}; got {forced!r:.60}")
        if self.param_groups and is_named != ("param_names" in self.param_groups[0]):
            raise ValueError("some groups have parameters with names and some without: give all")
        shards = [shard for shard in shards if shard.param.requires_grad]
        self._check_new(shards)
        self._storage.place(shards)
        parts: dict[tuple[str, bool], list[ParamShard]] = {}
        for shard in shards:
            rule = forced or self._rule_of(shard.name, shard.source)
            decays = self._decays is None or bool(self._decays(shard.name, shard.source))
            parts.setdefault((rule, decays), []).append(shard)
        if not parts:  # all are frozen: the group keeps its place
            parts[forced or next(iter(self._rules)), True] = []
        for rule, decays in sorted(parts, key=lambda key: not key[1]):
            given = options if decays else {**options, "weight_decay": 0.0, "wd_scale": 0.0}
            group = self._new_group(rule, given, parts[rule, decays], is_named=is_named)
            self.param_groups.append(group)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride] (torch's has overloads)
        self,
        closure: Callable[[], Any] | None = None,
        *,
        lr: float | None = None,
        weight_decay: float | None = None,
    ) -> StepResult:
        """Update every parameter from its gradient.

        Args:
            closure: Called first, with gradients enabled, if it is given.
            lr: Learning rate of all groups, from now on, times a group's `lr_scale` where it has
                one; by default each keeps its own.
            weight_decay: The same for weight decay and `wd_scale`, which is 0 where `decay_filter`
                refuses a parameter.

        Returns:
            The result of the step; `loss` is the result of the closure.

        Raises:
            ValueError: An option of a group is out of range; no parameter has changed then.
            TypeError: An option is not a number, or the closure not a function.
            RuntimeError: `offload_state` has moved the state to the host.
        """
        if self._is_away:
            raise RuntimeError("the state was moved to the host; call restore_state() first")
        if closure is not None and not callable(closure):
            raise TypeError(f"closure must be a function; for a learning rate write lr={closure!r}")
        groups, news = self.param_groups, self.rates(lr=lr, weight_decay=weight_decay)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        result = StepResult() if self.guard is None else self.guard.admit()
        if not result.stepped:
            return replace(result, loss=loss, step=self.step_count + 1)
        for group, new in zip(groups, news, strict=True):
            lr_tensor = group["lr"] if isinstance(group["lr"], Tensor) else None
            group.update(new)
            if lr_tensor is not None and "lr" in new:
                group["lr"] = lr_tensor.fill_(new["lr"])  # a captured graph reads this tensor
        self._update()
        if self.rescale is not None:
            self._rescale(self.rescale())
        if self.ema is not None:
            self.ema.update()
        return replace(result, loss=loss)

    def rates(
        self, *, lr: float | None = None, weight_decay: float | None = None
    ) -> list[dict[str, float]]:
        """Return the options that a step with these arguments sets in each group; check them."""
        news = scaled_rates(self.param_groups, lr=lr, weight_decay=weight_decay)
        for group, new in zip(self.param_groups, news, strict=True):
            self._check_group(self._rule(group), {**group, **new})
        return news

    @torch.no_grad()
    def update_on_device(self, rates: Sequence[Mapping[str, Tensor]], skip: Tensor) -> None:
        """Update every parameter with rates on the device; `DeviceStep` does the rest.

        Args:
            rates: For each group `lr` and `weight_decay`, fp64 without dims.
            skip: 1 to skip the step, 0 to take it.
        """
        self._update(rates=rates, skip=skip)
        if self.ema is not None:
            self.ema.update(skip=skip)

    def device_obstacle(self) -> str | None:
        """Return why `update_on_device` can't do a whole step without the host; None if it can."""
        if self.rescale is not None:
            return "QK-clip (rescale) has the host ask which weights it multiplies; use none"
        shards = self._by_param()
        for group in self.param_groups:
            own, rule = [shards[id(param)] for param in group["params"]], self._rule(group)
            if any(map(self._storage.is_offloaded, own)):
                return "offload has the host step a share of the states; use offload 0"
            why = next(filter(None, (rule.device_obstacle(shard.param) for shard in own)), None)
            if why is not None:
                return why
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch has it
        """Forget the gradients.

        A gradient that a GradBuffer holds is set to zero; `GradBuffer.start` does without that.

        Args:
            set_to_none: Whether `.grad` becomes None rather than zero.
        """
        zeroed: list[Tensor] = []
        for param in self._tensors():
            grad = grad_of(param)
            if grad is not None and not (set_to_none and grad is param.grad):
                zeroed.append(grad.detach())
            if set_to_none:
                param.grad = None
        if zeroed:
            torch._foreach_zero_(zeroed)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scale of fp16; None if there is none."""
        return None if self.guard is None else self.guard.scaler

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss before its backward; 1 without a scaler."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state, as torch does.

        The state of a bf16 parameter always has a `master`, even if the storage keeps only
        remainders, so that an optimizer with any storage can load it.
        """
        given = super().state_dict()
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        shards = self._by_param()
        with torch.no_grad():
            for number, param in zip(numbers, params, strict=True):
                if number in given["state"]:
                    state = given["state"][number]
                    given["state"][number] = self._storage.saved(shards[id(param)], state)
        return given if self.scaler is None else {**given, "loss_scale": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`: moments, masters, steps and the groups' options.

        Values are copied into the existing tensors, and 16-bit parameters are set to their masters,
        rounded. The state of torch.optim.AdamW can be loaded too if parameters are their own
        masters. A dynamic loss scale continues from its saved state.

        Args:
            state_dict: The state of an optimizer with the same groups.

        Raises:
            ValueError: It has other groups, parameters or shapes, or lacks an entry; nothing has
                changed then.
            TypeError: It is not such a dict.
        """
        given: Any = state_dict
        if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
            raise TypeError("expected what state_dict() gave: a dict with state and param_groups")
        given = dict(given)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = hook(self, given) or given
        # Everything is read and checked before the first tensor changes.
        options = read_options(given["param_groups"], self.param_groups)
        scale = read_scale(given["loss_scale"]) if "loss_scale" in given else None
        for group, read in zip(self.param_groups, options, strict=True):
            self._check_group(self._rule(group), {**group, **read})
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        shards = self._by_param()
        states: list[tuple[ParamShard, dict[str, Tensor]]] = []
        for group in self.param_groups:
            makes_more = self._rule(group).makes_more
            for param, number in zip(group["params"], numbers, strict=False):
                found, shard = given["state"].get(number), shards[id(param)]
                own, optional = self._storage.template(shard, self.state[param])
                values = read_state(
                    shard.name, found, own, makes_more=makes_more, optional=optional
                )
                states.append((shard, values))
        with torch.no_grad():
            for shard, values in states:
                self._storage.load(shard, self.state[shard.param], values)
        for group, read in zip(self.param_groups, options, strict=True):
            group.update(read)
        if self.scaler is not None and scale is not None:
            self.scaler.restore(scale)
        self.sync_params()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_rules": self._rules, "_decays": self._decays, "_shards": self._shards}
        own |= {"_rule_of": self._rule_of, "guard": self.guard, "_storage": self._storage}
        own |= {"_is_away": self._is_away, "offload_traffic": self.offload_traffic}
        own |= {"ema": self.ema, "rescale": self.rescale}
        return {**super().__getstate__(), **own}

    def _new_group(
        self,
        rule_name: str,
        options: Mapping[str, Any],
        shards: Sequence[ParamShard],
        *,
        is_named: bool,
    ) -> dict[str, Any]:
        """Make a group of one rule, and the state of its parameters."""
        rule = self._rules[rule_name]
        keys = ("lr", "weight_decay", *rule.options)
        kept = {key: value for key, value in options.items() if key not in self._options}
        group: dict[str, Any] = {"params": [shard.param for shard in shards]}
        group |= {key: options.get(key, self._options[key]) for key in keys} | kept
        self._check_group(rule, group)
        apply_scales(group, given=options)
        if len(self._rules) > 1:
            group["rule"] = rule_name
        if is_named:
            group["param_names"] = [shard.name for shard in shards]
        for shard in shards:
            self._shards[shard.name] = shard
            self.state[shard.param] = self._new_state(shard, rule)
        return group

    def _check_group(self, rule: Rule, group: Mapping[str, Any]) -> None:
        check_options(group)
        if isinstance(group["lr"], Tensor) and not rule.takes_tensor_lr:
            raise ValueError(f"lr is a tensor, and {rule.name} takes a number; use lr.item()")
        rule.check(group)

    def _new_state(self, shard: ParamShard, rule: Rule) -> dict[str, Tensor]:
        try:
            return self._storage.new(shard, rule)
        except ValueError as error:
            raise ValueError(f"parameter {shard.name!r}: {error}") from None

    def _update(
        self, *, rates: Sequence[Mapping[str, Any]] = (), skip: Tensor | None = None
    ) -> None:
        shards, work = self._by_param(), []
        for group, new in zip_longest(self.param_groups, rates, fillvalue={}):
            own, options = [shards[id(param)] for param in group["params"]], {**group, **new}
            work += portions(own, self._rule(group), options, self._storage, skip=skip)
        gradient = grad_of if self.guard is None else self.guard.gradient
        self.offload_traffic = update(work, self.state, self._storage, gradient)
        if self.guard is not None:
            self.guard.forget()
        # Full-precision parameters are their own masters; the mover has sent offloaded ones.
        narrow = (p for p in shards.values() if p.param.dtype != MASTER_DTYPES[p.param.dtype])
        self._sync(shard for shard in narrow if not self._storage.is_offloaded(shard))

    def _rescale(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply masters by factors; moments stay as they are."""
        changed = [self._shards[name] for name in factors if name in self._shards]
        for shard in changed:
            factor = factors[shard.name].expand(shard.source.shape).reshape(-1)
            own = factor[shard.start : shard.end].view(shard.param.shape)
            state = self.state[shard.param]
            master = self._storage.master(shard, state)
            self._storage.set_master(shard, state, master.mul_(own.to(master)))
        self._sync(changed)

    def _check_new(self, shards: list[ParamShard]) -> None:
        params = {name: shard.param for name, shard in self._shards.items()}
        names = {param: name for name, param in params.items()}
        for shard in shards:
            if shard.name in params or shard.param in names:
                first = names.get(shard.param, shard.name)
                raise ValueError(f"parameter {shard.name!r} is listed twice (first as {first!r})")
            params[shard.name], names[shard.param] = shard.param, shard.name
