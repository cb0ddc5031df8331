"""Linear layers, keys and values that are trained with the rounding of a recipe of mt-quant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from mt_model import GPT, ModelConfig, kv_formats
from mt_moe import GroupedLinear, unfuse_experts
from mt_parallel_state import Group, ParallelLayout, ParallelState, group_size, share_json
from mt_quant import (
    Decision,
    LinearShape,
    QuantizationConfig,
    QuantizationError,
    quantize_weight,
    round_activation,
)
from mt_tensor_parallel import (
    ColumnParallelLinear,
    Gemm,
    Operand,
    Role,
    RowParallelLinear,
    TorchGemm,
)
from torch import Tensor, nn

from mt_train.config import RunConfig
from mt_train.loading import LoadedConfig
from mt_train.precision import block_linears, grouped_layers
from mt_train.quantization_section import QuantizationSection

_BLOCKS = {"mxfp8": 32, "mxfp4": 32}


class FakeQuantizedGemm(TorchGemm):
    """torch's products of a rounded weight, and a rounded input where the rule has a format of it.

    Rounding passes gradients on as they are (the straight-through estimator, Bengio et al. 2013,
    https://arxiv.org/abs/1308.3432): the input's is made with the rounded weight, and the weight's,
    with the rounded input, goes to the weight before rounding.

    Args:
        shape: Of the layer's weight on this rank.
        decision: Formats of weight and input.
        keeps_weight: Whether a rounded weight stays until `forget_weight`.
    """

    def __init__(self, shape: LinearShape, decision: Decision, *, keeps_weight: bool) -> None:
        self._shape, self._decision, self._keeps_weight = shape, decision, keeps_weight
        self._weight: Tensor | None = None

    def operand(self, x: Tensor, role: Role) -> Operand:
        """Round a weight or an input; a gradient stays. See `Gemm.operand`.

        An all-gather of the weight where ranks split what shares a scale, an all-reduce (MAX) of
        the input's magnitudes where they split its features.
        """
        if role == "weight":
            rounded = self._weight if self._weight is not None else self._rounded(x)
            self._weight = rounded if self._keeps_weight else None
            return rounded
        if role == "input" and self._decision.input is not None:
            group = self._shape.group if self._shape.split == "inputs" else None
            return round_activation(x.flatten(0, -2), self._decision.input, group=group).view_as(x)
        return x

    def forget_weight(self) -> None:
        """Have the weight rounded again at its next use."""
        self._weight = None

    @torch.no_grad()
    def _rounded(self, weight: Tensor) -> Tensor:
        """Return this rank's part of the rounded whole weight, [out, in]."""
        shape, format = self._shape, self._decision.weight
        if format is None:
            raise ValueError("the decision has no format of the weight; leave the layer as it is")
        spans = _spans_ranks(shape, self._decision)
        whole = shape.gathered(weight.view(*shape.outputs, *shape.inputs)) if spans else weight
        if not bool(whole.isfinite().all()):
            return weight  # the loss will tell, on all ranks
        rounded = quantize_weight(whole, format).dequantize(weight.dtype)
        rows, columns = shape.own(weight.device) if spans else (None, None)
        rounded = rounded if rows is None else rounded[rows]
        return (rounded if columns is None else rounded[:, columns]).contiguous()

    def __repr__(self) -> str:
        return f"FakeQuantizedGemm(weight={self._decision.weight}, input={self._decision.input})"


def _spans_ranks(shape: LinearShape, decision: Decision) -> bool:
    """Whether numbers that share a scale lie on several ranks."""
    format = decision.weight
    if shape.split is None or format is None:
        return False
    if format.type == "nvfp4" or format.group == "tensor":
        return True
    return shape.split == "inputs" and not isinstance(format.group, int)


class FakeQuantization:
    """What of a rank's stages is rounded: linear layers, keys and values; none without a recipe.

    Args:
        config: The run.
        stages: Of this rank, with their parameters where they will be.
        state: This rank's place.
    """

    def __init__(self, config: RunConfig, stages: Sequence[GPT], state: ParallelState) -> None:
        self._section, self._stages, self._state = config.quantization, stages, state
        self._gemms: dict[str, FakeQuantizedGemm] = {}
        self._kept: list[str] = []
        if self._section.given is None or not stages:
            return
        rules = read_rules(self._section)
        decisions = rules.decide(_whole(stages[0].config))
        keeps = config.data_parallel.strategy != "full"
        for stage in stages:
            formats = kv_formats(stage, decisions)
            stage.round_kv(formats)
            self._kept += [f"layers.{index}" for index in formats]
            how = {"group": state.group("etp"), "keeps_weight": keeps}
            self._gemms |= fake_quantize(stage, decisions, **how)

    def forget_weights(self) -> None:
        """Have weights rounded again at their next use, as they have changed."""
        for gemm in self._gemms.values():
            gemm.forget_weight()

    def lines(self) -> Iterator[str]:
        """Say once what is rounded; all ranks of a pipeline call it together."""
        if self._section.given is None:
            return
        own = [sorted(self._gemms), self._kept]
        shared = share_json(own, self._state.group("pp"), device=self._state.device)
        count, kept = (len({str(n) for rank in shared for n in rank[i]}) for i in (0, 1))
        also = f", and the keys and values of {kept}" if kept else ""
        yield f"quantization {self._section.given}: {count} linear layers are rounded{also}"


def fake_quantize(
    stage: nn.Module,
    decisions: Mapping[str, Decision],
    *,
    group: Group = None,
    keeps_weight: bool = True,
) -> dict[str, FakeQuantizedGemm]:
    """Have the linear layers of a stage's blocks, and its experts, multiply rounded weights.

    Args:
        stage: A model, or a stage of it.
        decisions: Of the whole model's layers, by name, and of its experts by their numbers.
        group: The ranks that cut an expert (etp).
        keeps_weight: As of `FakeQuantizedGemm`.

    Returns:
        The strategies by the names of their layers.
    """
    made: dict[str, FakeQuantizedGemm] = {}
    for name, layer in block_linears(stage).items():
        decision = decisions[name]
        if decision.weight is None:
            continue
        shape = cast("LinearShape", LinearShape.of(layer))
        gemm = FakeQuantizedGemm(shape, decision, keeps_weight=keeps_weight)
        layer.choose_gemm(name, lambda _, gemm=gemm: gemm)
        made[name] = gemm
    for name, layer in grouped_layers(stage).items():
        shape = _shape_of_experts(layer, group)

        def gemm_for(expert: str, shape: LinearShape = shape) -> Gemm:
            if decisions[expert].weight is None:
                return TorchGemm()
            gemm = FakeQuantizedGemm(shape, decisions[expert], keeps_weight=keeps_weight)
            return made.setdefault(expert, gemm)

        layer.choose_gemm(name, gemm_for)
    return made


def _shape_of_experts(layer: GroupedLinear, group: Group) -> LinearShape:
    """Return how the weight of one expert lies."""
    _, *outputs, features = layer.weight.shape
    is_out = layer.split == "out"
    whole = group_size(group) == 1
    return LinearShape(
        outputs=tuple(outputs),
        inputs=(features,),
        split=None if whole else "outputs" if is_out else "inputs",
        dim=len(outputs) - 1 if is_out and not whole else 0,
        axis="etp",
        group=None if whole else group,
        communicate=False,
    )


def read_rules(section: QuantizationSection) -> QuantizationConfig:
    """Return the rules that a section names, which it does.

    Raises:
        QuantizationError: There is no such recipe, or a rule is wrong.
        FileError: The file can't be read.
    """
    if section.config is not None:
        return QuantizationConfig.from_yaml(section.config)
    return QuantizationConfig.named(section.recipe or "")


def check_quantization(loaded: LoadedConfig, model: ModelConfig) -> None:
    """Check that rules fit the model, its layout, and what training can round.

    Raises:
        ConfigError: They don't; every problem is named.
    """
    section = loaded.config.quantization
    if section.given is None:
        return
    field = "quantization.recipe" if section.config is None else "quantization.config"
    whole = _whole(model)
    try:
        decisions = read_rules(section).decide(whole)
        formats = kv_formats(whole, decisions)
    except QuantizationError as error:
        raise loaded.error(field, str(error)) from error
    linears, parallel = block_linears(whole), loaded.config.parallel
    etp = parallel.etp or (parallel.tp if parallel.ep == 1 else 1)
    problems: list[str] = []
    for name, decision in decisions.items():
        if decision.weight is not None:
            problem = _untrainable(decision) if name in linears else _ELSEWHERE
            ranks = etp if ".experts." in name else parallel.tp
            problem = problem or _cut(linears[name], decision, ranks)
            problems += [] if problem is None else [f"{name} {problem}"]
    problems += [
        f"layers.{index}.mixer has keys and values in {kept}, with scales from calibration; "
        f"training makes one for each head of each token: use {kept.type}"
        for index, kept in formats.items()
        if kept.is_static
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise loaded.error(field, f"{section.given}: {problems[0]}{more}")
    if not formats and all(decision.weight is None for decision in decisions.values()):
        text = f"{section.given}: no layer gets a format of its weight; name one, or leave it out"
        raise loaded.error(field, text)


_ELSEWHERE = (
    "is no linear layer of a block, and others are not rounded in training; leave it out with a "
    "rule without a format before"
)


def _untrainable(decision: Decision) -> str | None:
    """Say what of a decision is not a function of the weight and one token."""
    if decision.method != "rtn":
        return f"has the method {decision.method}, which reads data; training rounds by rtn"
    if decision.output is not None:
        return "has a format of its output; training rounds weight and input"
    form = decision.input
    if form is not None and (not form.dynamic or form.group == "tensor" or form.type == "nvfp4"):
        return (
            f"has inputs in {form}, with one scale for all tokens; training rounds with scales of "
            "each token, such as int8, fp8 or mxfp8"
        )
    return None


def _cut(
    layer: ColumnParallelLinear | RowParallelLinear, decision: Decision, tp: int
) -> str | None:
    """Say which group of inputs tensor-parallel ranks cut."""
    if tp == 1 or isinstance(layer, ColumnParallelLinear) or decision.weight is None:
        return None
    group, input = decision.weight.group, decision.input
    sizes = {group if isinstance(group, int) else 1}
    sizes |= {_BLOCKS.get(input.type, 1)} if input is not None else set()
    run = layer.run // tp
    for size in sizes:
        if layer.run % (tp * size):
            return (
                f"has groups of {size} inputs, and {run} in a row on each tensor-parallel rank; "
                f"use a divisor of {run}, or fewer ranks"
            )
    return None


def _whole(model: ModelConfig) -> GPT:
    """The model on no device, with experts that rules can name."""
    whole = model.build(ParallelState(ParallelLayout()), device="meta", seed=None)
    unfuse_experts(whole)
    return cast("GPT", whole)
