"""Quantisation-aware training by a recipe of mt-quant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from mt_data_parallel import GradBuffer
from mt_files import FileError
from mt_model import GPT, FakeQuantizedGemm, ModelConfig, block_linears, fake_quantize, kv_formats
from mt_moe import unfuse_experts
from mt_parallel_state import ParallelLayout, ParallelState, share_json
from mt_quant import Decision, QuantizationConfig, QuantizationError, training_obstacle
from mt_tensor_parallel import ColumnParallelLinear, RowParallelLinear
from mt_tokenizer import Tokenizer

from mt_train.config.loading import LoadedConfig
from mt_train.config.quantization_section import QuantizationSection
from mt_train.config.run_config import RunConfig
from mt_train.parts.part import Setup, TrainerPart


class FakeQuantization(TrainerPart):
    """Rounding of linear layers, keys and values of a rank's stages by the rules of a recipe."""

    uncounted = ("quantization", "what rounded layers keep is not counted; leave it out to count")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._gemms: dict[str, FakeQuantizedGemm] = {}
        self._kept: list[str] = []

    @staticmethod
    def is_wanted(config: RunConfig) -> bool:
        """Return whether rules are given."""
        return config.quantization.given is not None

    @staticmethod
    def check(loaded: LoadedConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        """Check that the rules fit the model and its layout, and that training can apply them.

        Raises:
            ConfigError: A rule doesn't fit; the error names every problem.
        """
        del tokenizer
        section = loaded.config.quantization
        field = "quantization.recipe" if section.config is None else "quantization.config"
        whole = _whole(model)
        try:
            decisions = read_rules(section).decide(whole)
            formats = kv_formats(whole, decisions)
        except (QuantizationError, FileError) as error:
            raise loaded.error(field, str(error)) from error
        linears, parallel = block_linears(whole), loaded.config.parallel
        etp = parallel.etp or (parallel.tp if parallel.ep == 1 else 1)
        problems: list[str] = []
        for name, decision in decisions.items():
            if decision.weight is not None:
                problem = training_obstacle(decision) if name in linears else _ELSEWHERE
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
            text = "no layer gets a format of its weight; name one, or leave it out"
            raise loaded.error(field, f"{section.given}: {text}")

    def parameters_ready(self, buffer: GradBuffer) -> None:
        """Choose the strategies of layers, and the formats of keys and values."""
        del buffer
        config, state = self.setup.config, self.setup.state
        decisions = read_rules(config.quantization).decide(_whole(self.setup.model))
        keeps = config.data_parallel.strategy != "full"
        for stage in self.setup.stages:
            formats = kv_formats(stage, decisions)
            stage.round_kv(formats)
            self._kept += [f"layers.{index}" for index in formats]
            how = {"group": state.group("etp"), "keeps_weight": keeps}
            self._gemms |= fake_quantize(stage, decisions, **how)

    def end_passes(self) -> None:
        """Have weights rounded again at their next use, since the optimizer will change them."""
        self._forget_weights()

    def weights_loaded(self) -> None:
        """Have weights rounded again at their next use, since they have changed."""
        self._forget_weights()

    def _forget_weights(self) -> None:
        for gemm in self._gemms.values():
            gemm.quantizer.forget_weight()

    def lines(self) -> Iterator[str]:
        """Yield the rounded layers; all ranks of a pipeline call it together."""
        state = self.setup.state
        own = [sorted(self._gemms), self._kept]
        shared = share_json(own, state.group("pp"), device=state.device)
        count, kept = (len({str(n) for rank in shared for n in rank[i]}) for i in (0, 1))
        also = f", and the keys and values of {kept}" if kept else ""
        given = self.setup.config.quantization.given
        yield f"quantization {given}: {count} linear layers are rounded{also}"


def read_rules(section: QuantizationSection) -> QuantizationConfig:
    """Return the rules of a section with a recipe or a file.

    Raises:
        QuantizationError: There is no such recipe, or a rule is wrong.
        FileError: The file can't be read.
    """
    if section.config is not None:
        return QuantizationConfig.from_yaml(section.config)
    return QuantizationConfig.named(section.recipe or "", group_size=section.group_size)


_ELSEWHERE = (
    "is no linear layer of a block, and others are not rounded in training; leave it out with a "
    "rule without a format before"
)


def _cut(
    layer: ColumnParallelLinear | RowParallelLinear, decision: Decision, tp: int
) -> str | None:
    """Name a group of inputs that tensor-parallel ranks cut; None without one."""
    if tp == 1 or isinstance(layer, ColumnParallelLinear) or decision.weight is None:
        return None
    run = layer.run // tp
    cut = decision.cut_group(run)
    if cut is None:
        return None
    return (
        f"has groups of {cut} inputs, and {run} in a row on each tensor-parallel rank; use a "
        f"divisor of {run}, or fewer ranks"
    )


def _whole(model: ModelConfig) -> GPT:
    """The model on no device, with experts that rules can name."""
    whole = model.build(ParallelState(ParallelLayout()), device="meta", seed=None)
    unfuse_experts(whole)
    return cast("GPT", whole)
