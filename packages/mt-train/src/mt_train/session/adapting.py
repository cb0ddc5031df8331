"""The frozen base of a run that trains adapters."""

from __future__ import annotations

from pathlib import Path

from mt_ckpt import SavedAdapters
from mt_hf import base_digest, open_pretrained, read_adapter
from mt_model import ModelConfig
from mt_parallel_state import ParallelState, share_json
from torch import Tensor

from mt_train.agreement import WORLD
from mt_train.config.run_config import RunConfig
from mt_train.session.saved import ResumeError
from mt_train.session.starting import Start


def adapters_of(config: RunConfig, start: Start, state: ParallelState) -> SavedAdapters | None:
    """Return the description of a run's adapters and their base; None for a run without.

    Every rank calls it; the first one reads the base for its digest.

    Raises:
        ResumeError: The run started from adapters of another base, or there is no base.
    """
    lora, before = config.lora, None if start.continued is None else start.continued.adapters
    if lora is None:
        return None
    base = config.model.from_
    if base is None:
        base = str(start.path) if before is None else before.base
    digest = base_digest(Path(base)) if state.rank == 0 else ""
    digest = str(share_json([digest], state.group(WORLD), device=state.device)[0][0])
    if before is not None and before.sha256 != digest:
        raise ResumeError(
            f"{base} has changed, or is another base than that of the adapters in {start.path}: "
            f"its sha256 is {digest[:12]}..., and the checkpoint names {before.sha256[:12]}...; "
            "restore it"
        )
    return SavedAdapters(
        rank=lora.rank,
        alpha=lora.alpha,
        layers=lora.layers,
        base=base,
        sha256=digest,
        base_format=lora.base_format,
    )


def given_adapters(config: RunConfig, model: ModelConfig) -> dict[str, Tensor] | None:
    """Return the whole matrices of `lora.from` by their global names; None without it.

    Raises:
        ExchangeError: The folder's adapters do not fit the model.
        FileError: A file can't be read.
    """
    if config.lora is None or config.lora.from_ is None:
        return None
    base = config.model.from_
    family = None if base is None else open_pretrained(Path(base)).family.name
    return read_adapter(config.lora.from_, model, config.lora, family=family)
