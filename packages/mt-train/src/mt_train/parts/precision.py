"""The linear layers of a run that multiply in 8 or 4 bits, and the state of their scales."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from mt_ckpt import RunFolder
from mt_data_parallel import GradBuffer
from mt_files import did_you_mean, multiples_near, shorten
from mt_fp8 import DelayedScales, PrimaryWeights, Recipe, end_step
from mt_fp8 import recipe as recipe_of
from mt_model import GPT, ModelConfig, block_linears, grouped_layers
from mt_moe import GroupedLinear, LowPrecisionExperts
from mt_parallel_state import (
    ParallelLayout,
    ParallelState,
    PartitionSpec,
    shard_param,
    sharding_of,
    share_json,
)
from mt_tensor_parallel import (
    ColumnParallelLinear,
    QuantizedGemm,
    RowParallelLinear,
    quantize_gemms,
)
from mt_tokenizer import Tokenizer
from torch import Tensor, nn

from mt_train.config.loading import LoadedConfig
from mt_train.config.parallel_section import ParallelSection
from mt_train.config.precision_section import PrecisionSection
from mt_train.config.run_config import RunConfig
from mt_train.parts.part import Setup, TrainerPart


class LowPrecision(TrainerPart):
    """Quantisation of linear layers by a recipe, with the state of their scales.

    All ranks with a layer hold the same state of delayed scaling, and so do all ranks with an
    expert.
    """

    folder = RunFolder.SCALING
    uncounted = "precision.recipe", "what quantised layers keep is not counted; leave it out"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._section, self._state = setup.config.precision, setup.state
        self._stages = setup.stages
        self._gemms: dict[str, QuantizedGemm] = {}
        self._experts: list[LowPrecisionExperts] = []
        own = (layer for stage in setup.stages for layer in block_linears(stage).values())
        self._is_mirrored = any("mirror" in sharding_of(x.weight).partial_grad for x in own)
        self._primary = primary_weights(setup.config, setup.stages)

    @staticmethod
    def is_wanted(config: RunConfig) -> bool:
        """Return whether a recipe is given."""
        return config.precision.recipe is not None

    @staticmethod
    def check(loaded: LoadedConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        """Check that there is something to quantise, and that ranks' parts are whole blocks.

        Raises:
            ConfigError: A glob matches no layer, all layers are kept, or a size is no multiple.
        """
        del tokenizer
        section = loaded.config.precision
        whole = model.build(ParallelState(ParallelLayout()), device="meta", seed=None)
        named = _names(whole)
        names = list(dict.fromkeys(each for own in named.items() for each in (own[0], *own[1])))
        for index, glob in enumerate(section.keep):
            if not any(fnmatchcase(name, glob) for name in names):
                text = f"{shorten(glob)} is the name of no linear layer of a block. "
                raise loaded.error(f"precision.keep[{index}]", text + did_you_mean(glob, names))
        chosen = chosen_linears(section, whole, model.num_layers)
        if not chosen:
            text = f"{section.recipe} has no layers: keep, keep_first and keep_last leave all "
            count = sum(map(len, named.values()))
            text += f"{count} as they are; keep fewer, or leave the recipe out"
            raise loaded.error("precision.recipe", text)
        size = read_recipe(section).block_size
        cut = [name for name, own in named.items() if not chosen.isdisjoint(own)]
        layers, layout = {**block_linears(whole), **grouped_layers(whole)}, loaded.config.parallel
        misfits = {name: bad for name in cut if (bad := _misfit(layers[name], size, layout))}
        if misfits:
            raise loaded.error("precision.recipe", _misfit_text(section, misfits, size))
        _check_tokens(loaded, size)

    def shard_options(self) -> Mapping[str, Any]:
        """Return the holder of weights that are kept only in 8 bits."""
        return {"encoding": self._primary}

    def parameters_ready(self, buffer: GradBuffer) -> None:
        """Choose the strategies of layers and experts."""
        config, state = self.setup.config, self._state
        recipe = read_recipe(self._section)
        keeps_weight = config.data_parallel.strategy != "full"
        for stage in self._stages:
            chosen = chosen_linears(self._section, stage, stage.config.num_layers)
            self._gemms |= quantize_gemms(
                stage,
                lambda name, chosen=chosen: recipe if name in chosen else None,
                context_group=state.group("cp"),
                joint_group=state.group("tp-cp"),
                keeps_weight=keeps_weight,
                seed=config.training.seed,
            )
            for name, layer in grouped_layers(stage).items():
                if chosen.isdisjoint(_experts(name, layer)):
                    continue
                how = {"state": state, "keeps_weight": keeps_weight, "seed": config.training.seed}
                self._experts.append(LowPrecisionExperts(name, layer, chosen, recipe, **how))
        if self._primary is not None:
            self._bind(self._primary)
            buffer.gather_params()  # codes of the initial values, by the recipe's scales

    def _bind(self, primary: PrimaryWeights) -> None:
        """Have layers multiply by their primary weights."""
        for stage in self._stages:
            for name, layer in {**block_linears(stage), **grouped_layers(stage)}.items():
                if f"{name}.weight" not in primary.names:
                    continue
                if isinstance(layer, GroupedLinear):
                    weight, gemms = layer.weight.flatten(1, -2), layer.gemms.all
                else:
                    weight, gemms = layer.matrix(), [layer.gemm]
                products = [cast("QuantizedGemm", gemm) for gemm in gemms]
                primary.bind(f"{name}.weight", weight, products)

    def begin_step(self, step: int) -> None:
        """Tell the layers which step begins, since random rounding depends on it."""
        for gemm in self._gemms.values():
            gemm.begin_step(step, part=self._state.index("dp"), parts=self._state.size("dp"))
        for layer in self._experts:
            layer.begin_step(step)

    def end_passes(self) -> None:
        """Make the scales of the next step, and release this step's weights; all ranks call it.

        Delayed scaling does an all-reduce (MAX) over the ranks with the same layers, and another
        over the ranks with the same experts.
        """
        mirror = self._state.group("mirror") if self._is_mirrored else None
        end_step(_delayed(self._gemms), self._state.group("tp-cp-dp"), mirror)
        groups = self._state.group("etp"), self._state.group("edp"), mirror
        end_step(_delayed(self._expert_gemms()), *groups, may_rest=True)
        self._forget_weights()

    def _forget_weights(self) -> None:
        """Have weights quantised again at their next use, since they have changed."""
        for gemm in (self._gemms | self._expert_gemms()).values():
            gemm.forget_weight()

    def weights_loaded(self) -> None:
        """Continue from loaded scales, by which primary weights are encoded next."""
        self._forget_weights()
        for delayed in _delayed(self._gemms | self._expert_gemms()):
            delayed.resume()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state of delayed scaling by global names, with records of how it is split.

        Shape:
            `NAME.history`: [history, 3]. `NAME.factor`: [3]. NAME is the layer's name; for a layer
            with experts both have a leading dim of experts.
        """
        found: dict[str, Tensor] = {}
        for stage in self._stages:
            for name, layer in block_linears(stage).items():
                if name not in self._gemms or (delayed := self._gemms[name].delayed) is None:
                    continue
                is_copy = sharding_of(layer.weight).is_copy
                for kind, tensor in (("history", delayed.history), ("factor", delayed.factor)):
                    shard_param(cast("nn.Parameter", tensor), PartitionSpec(), is_copy=is_copy)
                    found[f"{name}.{kind}"] = tensor
        for experts in self._experts:
            found |= experts.state_tensors()
        return found

    def lines(self) -> Iterator[str]:
        """Yield the quantised layers and the others; all ranks of a pipeline call it together."""
        own = [
            [name, len(names), len(chosen.intersection(names))]
            for stage in self._stages
            for chosen in [chosen_linears(self._section, stage, stage.config.num_layers)]
            for name, names in _names(stage).items()
        ]
        shared = share_json(own, self._state.group("pp"), device=self._state.device)
        rows = {
            str(name): (int(total), int(number)) for rank in shared for name, total, number in rank
        }
        chosen = sum(number for _, number in rows.values())
        yield f"precision {self._section.recipe}: {chosen} linear layers"
        kept = [
            f"{name} ({total - number} of {total} experts)" if number else name
            for name, (total, number) in rows.items()
            if number < total
        ]
        if kept:
            yield f"precision: as training.dtype {', '.join(kept[:8])}{_more(kept[8:])}"

    def _expert_gemms(self) -> dict[str, QuantizedGemm]:
        return {name: gemm for layer in self._experts for name, gemm in layer.gemms.items()}


def primary_weights(config: RunConfig, stages: Sequence[GPT]) -> PrimaryWeights | None:
    """Return the holder of quantised weights in 8 bits; None if layers keep their values.

    A layer whose experts are not all quantised keeps its values.
    """
    section = config.precision
    if not section.primary_weights:
        return None
    found: list[str] = []
    for stage in stages:
        chosen = chosen_linears(section, stage, stage.config.num_layers)
        found += [f"{n}.weight" for n, names in _names(stage).items() if chosen.issuperset(names)]
    return PrimaryWeights(found)


def read_recipe(section: PrecisionSection) -> Recipe:
    """Return the recipe of a section with a recipe."""
    given = {name: getattr(section, name) for name in ("history", "largest", "margin")}
    changes = {name: value for name, value in given.items() if value is not None}
    return recipe_of(section.recipe or "", **changes)


def chosen_linears(section: PrecisionSection, stage: nn.Module, num_layers: int) -> set[str]:
    """Return the names of quantised linear layers and experts, over all ranks."""
    found: set[str] = set()
    for name, names in _names(stage).items():
        index = int(name.split(".")[1])
        if section.keep_first <= index < num_layers - section.keep_last:
            kept = {each for each in names for glob in section.keep if fnmatchcase(each, glob)}
            is_kept = any(fnmatchcase(name, glob) for glob in section.keep)
            found |= set() if is_kept else set(names) - kept
    return found


def _check_tokens(loaded: LoadedConfig, size: int) -> None:
    """Check that blocks of tokens do not span two sequences, or the tokens of two ranks."""
    parallel, training = loaded.config.parallel, loaded.config.training
    shards = parallel.tp if parallel.sequence_parallel else 1
    # Of two chunks for each cp rank, and of the parts of its chunks together.
    parts = math.lcm(2 * parallel.cp if parallel.cp > 1 else 1, parallel.cp * shards)
    for field, length in loaded.config.data.lengths(training.sequence_length).items():
        if length % (parts * size):
            text = f"{length} is no multiple of {parts * size}: precision.recipe "
            text += f"{loaded.config.precision.recipe} has blocks of {size} tokens, of which each "
            text += f"of {parts} parts has whole ones; use {multiples_near(length, parts * size)}"
            raise loaded.error(field, text)


def _names(stage: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of each layer for a run's choice: its own name, or its experts' names."""
    named = {name: (name,) for name in block_linears(stage)}
    return named | {name: _experts(name, layer) for name, layer in grouped_layers(stage).items()}


def _experts(name: str, layer: GroupedLinear) -> tuple[str, ...]:
    return tuple(f"{name}.{expert}" for expert in range(layer.num_experts))


def _delayed(gemms: Mapping[str, QuantizedGemm]) -> list[DelayedScales]:
    """Return the states by name, the order that mirrored stages have too."""
    return [d for name in sorted(gemms) if (d := gemms[name].delayed) is not None]


def _misfit(
    layer: ColumnParallelLinear | RowParallelLinear | GroupedLinear,
    size: int,
    parallel: ParallelSection,
) -> str | None:
    """Name the features of a layer whose parts on tensor-parallel ranks are not whole blocks."""
    if isinstance(layer, GroupedLinear):
        default = parallel.tp if parallel.ep == 1 else 1
        ranks = default if parallel.etp is None else parallel.etp
        is_out, run = layer.split == "out", layer.weight.shape[-2 if layer.split == "out" else -1]
    else:
        ranks, is_out, run = parallel.tp, isinstance(layer, ColumnParallelLinear), layer.run
    if ranks == 1 or run % (ranks * size) == 0:
        return None
    return f"{run // ranks} {'outputs' if is_out else 'inputs'}"


def _misfit_text(section: PrecisionSection, misfits: Mapping[str, str], size: int) -> str:
    first = min(misfits)
    kinds = Counter(name.split(".", 2)[2] for name in misfits)
    globs = ", ".join(f"layers.*.{kind}" for kind in sorted(kinds))
    return (
        f"{section.recipe} has blocks of {size}, and {first} has {misfits[first]} in a row on each "
        f"tensor-parallel rank{_more(list(misfits)[1:])}; use other sizes or fewer ranks, another "
        f"recipe, or precision.keep [{globs}]"
    )


def _more(names: Sequence[str]) -> str:
    return f" and {len(names)} more" if names else ""
