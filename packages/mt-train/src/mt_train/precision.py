"""The linear layers of a run that multiply in 8 or 4 bits, and the state of their scales."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from mt_files import did_you_mean, multiples_near, shorten
from mt_fp8 import Recipe, end_step
from mt_fp8 import recipe as recipe_of
from mt_model import GPT, ModelConfig
from mt_parallel_state import ParallelLayout, ParallelState, sharding_of, share_json
from mt_tensor_parallel import (
    ColumnParallelLinear,
    QuantizedGemm,
    RowParallelLinear,
    quantize_gemms,
)
from torch import Tensor, nn

from mt_train.config import RunConfig
from mt_train.loading import LoadedConfig
from mt_train.precision_section import PrecisionSection


class LowPrecision:
    """The quantised linear layers of a rank's stages; none without a recipe.

    Every rank makes one. The state of delayed scaling is the same on all ranks that have a layer.

    Args:
        config: The run.
        stages: Of this rank, with their parameters where they will be.
        state: This rank's place.
    """

    def __init__(self, config: RunConfig, stages: Sequence[GPT], state: ParallelState) -> None:
        self._section, self._state, self._stages = config.precision, state, stages
        self._gemms: dict[str, QuantizedGemm] = {}
        own = (layer for stage in stages for layer in _linears(stage).values())
        self._is_mirrored = any("mirror" in sharding_of(x.weight).partial_grad for x in own)
        if config.precision.recipe is None:
            return
        recipe = read_recipe(config.precision)
        for stage in stages:
            chosen = chosen_linears(config.precision, stage, stage.config.num_layers)
            self._gemms |= quantize_gemms(
                stage,
                lambda name, chosen=chosen: recipe if name in chosen else None,
                context_group=state.group("cp"),
                joint_group=state.group("tp-cp"),
                keeps_weight=config.data_parallel.strategy != "full",
                seed=config.training.seed,
            )

    def begin_step(self, step: int) -> None:
        """Say which step is trained, on which its random rounding depends."""
        for gemm in self._gemms.values():
            gemm.begin_step(step, part=self._state.index("dp"), parts=self._state.size("dp"))

    def end_step(self) -> None:
        """Make the scales of the next step, and let go of this step's weights; all ranks call it.

        With delayed scaling that is an all-reduce (MAX) over all ranks that have the same layers.
        """
        ordered = [self._gemms[name] for name in sorted(self._gemms)]  # as mirrored stages have it
        delayed = [gemm.delayed for gemm in ordered if gemm.delayed is not None]
        mirror = self._state.group("mirror") if self._is_mirrored else None
        end_step(delayed, self._state.group("tp-cp-dp"), mirror)
        self.forget_weights()

    def forget_weights(self) -> None:
        """Have weights quantised again at their next use, as they have changed."""
        for gemm in self._gemms.values():
            gemm.forget_weight()

    def resume(self) -> None:
        """Go on from weights and state that were loaded."""
        self.forget_weights()
        for gemm in self._gemms.values():
            if gemm.delayed is not None:
                gemm.delayed.resume()

    def state_tensors(self) -> dict[str, tuple[Tensor, bool]]:
        """Return the state of delayed scaling by global names, and whether another stage saves it.

        Shape:
            `NAME.history`: [history, 3]. `NAME.factor`: [3]. NAME is the layer's.
        """
        found: dict[str, tuple[Tensor, bool]] = {}
        for stage in self._stages:
            for name, layer in _linears(stage).items():
                if name in self._gemms and (delayed := self._gemms[name].delayed) is not None:
                    is_copy = sharding_of(layer.weight).is_copy
                    found[f"{name}.history"] = (delayed.history, is_copy)
                    found[f"{name}.factor"] = (delayed.factor, is_copy)
        return found

    def lines(self) -> Iterator[str]:
        """Say once what is quantised, and what is not; all ranks of a pipeline call it together."""
        if self._section.recipe is None:
            return
        names = [name for stage in self._stages for name in _linears(stage)]
        own = [[name, name in self._gemms] for name in names]
        shared = share_json(own, self._state.group("pp"), device=self._state.device)
        chosen = {str(name): bool(is_in) for rank in shared for name, is_in in rank}
        yield f"precision {self._section.recipe}: {sum(chosen.values())} linear layers"
        kept = [name for name, is_in in chosen.items() if not is_in]
        if kept:
            yield f"precision: as training.dtype {', '.join(kept[:8])}{_more(kept[8:])}"


def read_recipe(section: PrecisionSection) -> Recipe:
    """Return the recipe that a section names, which it does."""
    given = {name: getattr(section, name) for name in ("history", "largest", "margin")}
    changes = {name: value for name, value in given.items() if value is not None}
    return recipe_of(section.recipe or "", **changes)


def chosen_linears(section: PrecisionSection, stage: nn.Module, num_layers: int) -> set[str]:
    """Return the names of the linear layers of a stage that are quantised."""
    found: set[str] = set()
    for name in _linears(stage):
        index = int(name.split(".")[1])
        inner = section.keep_first <= index < num_layers - section.keep_last
        if inner and not any(fnmatchcase(name, glob) for glob in section.keep):
            found.add(name)
    return found


def check_precision(loaded: LoadedConfig, model: ModelConfig) -> None:
    """Check that there is something to quantise, and that ranks' parts are whole blocks.

    Raises:
        ConfigError: A glob is of no layer, all layers are kept, or a size is no multiple.
    """
    section = loaded.config.precision
    if section.recipe is None:
        return
    whole = model.build(ParallelState(ParallelLayout()), device="meta", seed=None)
    linears = _linears(whole)
    for index, glob in enumerate(section.keep):
        if not any(fnmatchcase(name, glob) for name in linears):
            text = f"{shorten(glob)} is the name of no linear layer of a block. "
            raise loaded.error(f"precision.keep[{index}]", text + did_you_mean(glob, linears))
    chosen = chosen_linears(section, whole, model.num_layers)
    if not chosen:
        text = f"{section.recipe} has no layers: keep, keep_first and keep_last leave all "
        text += f"{len(linears)} as they are; keep fewer, or leave the recipe out"
        raise loaded.error("precision.recipe", text)
    size = read_recipe(section).block_size
    tp = loaded.config.parallel.tp
    misfits = {name: bad for name in chosen if (bad := _misfit(linears[name], size, tp))}
    if misfits:
        raise loaded.error("precision.recipe", _misfit_text(section, misfits, size))
    _check_tokens(loaded, size)


def _check_tokens(loaded: LoadedConfig, size: int) -> None:
    """Check that blocks of tokens do not reach over two sequences, or into another rank's."""
    parallel, training = loaded.config.parallel, loaded.config.training
    shards = parallel.tp if parallel.sequence_parallel else 1
    # Of two chunks for each cp rank, and of the parts of its chunks together.
    parts = math.lcm(2 * parallel.cp if parallel.cp > 1 else 1, parallel.cp * shards)
    spans = loaded.config.data.spans
    lengths = {"training.sequence_length": training.sequence_length}
    if spans is not None:
        encoder, decoder = spans.lengths(training.sequence_length)
        lengths = {"training.sequence_length": encoder, "data.spans.decoder_length": decoder}
    for field, length in lengths.items():
        if length % (parts * size):
            text = f"{length} is no multiple of {parts * size}: precision.recipe "
            text += f"{loaded.config.precision.recipe} has blocks of {size} tokens, of which each "
            text += f"of {parts} parts has whole ones; use {multiples_near(length, parts * size)}"
            raise loaded.error(field, text)


def _linears(stage: nn.Module) -> Mapping[str, ColumnParallelLinear | RowParallelLinear]:
    """Return the parallel linear layers of a stage's blocks by their global names."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    named = ((name, m) for name, m in stage.named_modules() if name.startswith("layers."))
    return {name: m for name, m in named if isinstance(m, kinds)}


def _misfit(layer: ColumnParallelLinear | RowParallelLinear, size: int, tp: int) -> str | None:
    """Say which features of a layer tensor-parallel ranks cut into parts of no whole blocks."""
    if tp == 1 or layer.run % (tp * size) == 0:
        return None
    what = "outputs" if isinstance(layer, ColumnParallelLinear) else "inputs"
    return f"{layer.run // tp} {what}"


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
