"""Quantisation of a trained model to a folder of Hugging Face."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from mt_ckpt import RunFolder, inspect_checkpoint
from mt_files import read_text
from mt_hf import Pretrained, files_beside, quantize_for_folder, save_pretrained
from mt_model import DTYPES, GPT
from mt_quant import CalibrationError, Progress, QuantizationConfig
from mt_tokenizer import Tokenizer
from torch import Tensor

from mt_infer.loading import Run, RunError, check_ema

_LENGTH = 2048
_MAX_TEXT = 1 << 28


@dataclass(kw_only=True)
class Calibration:
    """Batches of one sequence each from a text, which the first batch reads.

    Attributes:
        path: The text file.
        tokenizer: The model's tokenizer.
        samples: Largest number of sequences.
        length: Length of a sequence in tokens.
        is_read: Whether the text was read.
    """

    path: Path
    tokenizer: Tokenizer
    samples: int
    length: int
    is_read: bool = field(default=False, init=False)

    @classmethod
    def of(
        cls, path: Path | None, run: Run, samples: int, length: int | None
    ) -> Calibration | None:
        """Return the batches for a model; None without a text.

        Raises:
            RunError: Sequences exceed the model's context, or the model has an encoder.
        """
        if path is None:
            return None
        limit = run.config.max_sequence_length
        if length is not None and length > limit:
            raise RunError(f"--length {length}: the model's context is {limit} tokens; use less")
        if run.config.encoder_layers:
            raise RunError(
                "--calibration: a model with an encoder is not run on one text; use a recipe that "
                "needs none, such as int8 or fp8"
            )
        chosen = min(_LENGTH, limit) if length is None else length
        return cls(path=path, tokenizer=run.tokenizer, samples=samples, length=chosen)

    def __iter__(self) -> Iterator[Tensor]:
        self.is_read = True
        tokens = torch.tensor(self.tokenizer.encode(read_text(self.path, limit=_MAX_TEXT)))
        if not len(tokens):
            raise CalibrationError(f"{self.path} is empty; use a text like those the model is for")
        length = min(self.length, len(tokens))
        whole = len(tokens) // length
        for index in range(min(self.samples, whole)):
            start = index * whole // min(self.samples, whole) * length
            yield tokens[None, start : start + length].long()


def check_source(run: Run, *, ema: bool) -> None:
    """Check the run before weights are read.

    Raises:
        RunError: The folder is quantised already, or has no average of the weights.
    """
    if ema:
        check_ema(run)
    if isinstance(run.source, Pretrained) and run.source.given.get("quantization_config"):
        raise RunError(
            f"{run.folder} is in low precision already; pass the folder that it was made from"
        )


def stored_dtype(run: Run) -> str:
    """Return the dtype of a stored model: for a run, its widest dtype up to fp32."""
    if isinstance(run.source, Pretrained):
        found = run.source.dtype
    else:
        arrays = inspect_checkpoint(run.source).arrays
        prefix = f"{RunFolder.WEIGHTS}/"
        kept = [getattr(torch, spec.dtype) for n, spec in arrays.items() if n.startswith(prefix)]
        found = max(kept, key=lambda dtype: dtype.itemsize)
    names = (name for name, dtype in DTYPES.items() if dtype == found and name != "fp64")
    return next(names, "fp32")


def quantize_model(
    model: GPT,
    run: Run,
    config: QuantizationConfig,
    out: Path,
    *,
    layout: str = "compressed-tensors",
    calibration: Calibration | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> str:
    """Quantise a run's model, write it with its tokenizer, and return a table of its sizes.

    Args:
        model: The whole model, in this process; changed in place. Scales, and tensors that stay in
            full precision, have its dtype.
        run: The folder that it was read from.
        config: The rules.
        out: The folder to make; it must not exist, or be empty.
        layout: The folder's layout; see `mt_hf.save_pretrained`.
        calibration: Text for rules that read activations.
        progress: Called after each layer.

    Raises:
        QuantizationError: The rules don't fit the model, or a weight is not finite.
        CalibrationError: Data is needed and missing, empty, or leads to values that aren't finite.
        ExchangeError: The model belongs to no family of Hugging Face, or the layout can't hold the
            result of a rule. Nothing is left at `out`.
    """
    before = sum(param.nbytes for param in model.parameters())
    sizes = quantize_for_folder(model, config, calibration, layout=layout, progress=progress)
    like, beside = _beside(run)
    save_pretrained(model, out, like=like, beside=beside, layout=layout)
    after = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    kept = Counter(str(scheme.format) for scheme in model.kv_schemes.values())
    lines = [f"layers with keys and values in {format}: {n}" for format, n in kept.items()]
    return "\n".join([sizes.report(model), *lines, f"{before} -> {after} bytes in {out}"])


def _beside(run: Run) -> tuple[Path | None, dict[str, bytes]]:
    """Return the folder whose other files to copy, or files to write beside the weights."""
    if isinstance(run.source, Pretrained):
        return run.folder, {}
    origin = RunFolder(run.folder).hugging_face
    like = origin if origin.is_dir() else None
    return like, files_beside(run.tokenizer, like, run.folder, run.config)
