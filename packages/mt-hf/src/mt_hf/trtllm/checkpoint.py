"""Writing of a checkpoint of TensorRT-LLM: config.json and a file for each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from mt_files import safetensors_header, write_file

from mt_hf.family.error import ExchangeError
from mt_hf.family.windows import windows_of
from mt_hf.reading.files import CONFIG
from mt_hf.trtllm.description import ARCHITECTURES, DTYPES, TRTLLMType, check_model, config_of
from mt_hf.trtllm.rank_tensors import RankTensor, stage_tensors
from mt_hf.writing.files import Planned, check_free, new_folder, write_tensor
from mt_hf.writing.source import NamedTensors, Source, open_source


@dataclass(frozen=True, kw_only=True)
class TRTLLMReport:
    """What a checkpoint has.

    Attributes:
        architecture: TensorRT-LLM's name of the architecture.
        ranks: Number of ranks.
        windows: Attention window of each layer, which TensorRT-LLM takes when it serves; None
            without windows, and where config.json says them.
    """

    architecture: str
    ranks: int
    windows: tuple[int, ...] | None


def export_trtllm(
    source: Source,
    folder: str | Path,
    *,
    kind: TRTLLMType = "bf16",
    tp: int = 1,
    pp: int = 1,
    ema: bool = False,
) -> TRTLLMReport:
    """Write a model as a checkpoint of TensorRT-LLM, tensor by tensor.

    Rank `stage * tp + t` has part t of the layers of a stage. The folder appears when it is whole.

    Args:
        source: A run folder or its checkpoint, or a checked folder of Hugging Face.
        folder: The folder to make; it must not exist, or be empty.
        kind: Dtype of the tensors; routers of experts are fp32.
        tp: Number of ranks that share each layer.
        pp: Number of stages with a part of the layers each; the first ones have one more where it
            does not divide them.
        ema: Whether to write the moving average of a run's weights.

    Returns:
        What the checkpoint has.

    Raises:
        ExchangeError: The family has no mapping, the ranks can't share the model, TensorRT-LLM
            would compute another model, or there is something at `folder`.
        CheckpointError: The checkpoint is damaged.
        FileError: A file can't be read or written.
    """
    check_free(Path(folder))
    with open_source(source, ema=ema) as tensors:
        check_model(tensors, tp, pp)
        with new_folder(Path(folder)) as temporary:
            content = config_of(tensors, kind, tp, pp)
            write_file(temporary / CONFIG, json.dumps(content, indent=2) + "\n")
            for stage, layers in enumerate(_stages(tensors.config.num_layers, pp)):
                wanted = list(stage_tensors(tensors, layers, tp))
                files = [temporary / f"rank{stage * tp + rank}.safetensors" for rank in range(tp)]
                _write_stage(tensors, wanted, files, DTYPES[kind])
    windows = windows_of(tensors.config)
    has_any = tensors.family != "gemma3_text" and any(size is not None for size in windows)
    longest = tensors.config.max_sequence_length
    return TRTLLMReport(
        architecture=ARCHITECTURES[tensors.family],
        ranks=tp * pp,
        windows=tuple(size or longest for size in windows) if has_any else None,
    )


def _write_stage(
    tensors: NamedTensors, wanted: list[RankTensor], files: Sequence[Path], dtype: torch.dtype
) -> None:
    """Write the files of a stage's ranks side by side, so that each tensor is read once."""
    wanted.sort(key=lambda each: not each.wide)  # so that all elements are aligned
    planned = [
        Planned(
            name=each.name,
            shape=each.shape(tensors),
            dtype=torch.float32 if each.wide else dtype,
        )
        for each in wanted
    ]
    with ExitStack() as stack:
        opened = [stack.enter_context(open(path, "xb")) for path in files]
        for file in opened:
            file.write(safetensors_header(planned))
        for each, plan in zip(wanted, planned, strict=True):
            values = [tensors.read(name) for name in each.sources]
            for rank, file in enumerate(opened):
                own = each.make(values, rank).to(plan.dtype).contiguous()
                if own.numel() and not all(map(torch.isfinite, own.aminmax())):
                    raise ExchangeError(
                        f"{each.name} has values that are not finite in {plan.dtype}; use f32 or "
                        "bf16"
                    )
                write_tensor(file, own)


def _stages(layers: int, pp: int) -> Iterator[range]:
    """Yield the layers of each stage; the first ones have one more where they differ."""
    least, more = divmod(layers, pp)
    start = 0
    for stage in range(pp):
        stop = start + least + (stage < more)
        yield range(start, stop)
        start = stop
