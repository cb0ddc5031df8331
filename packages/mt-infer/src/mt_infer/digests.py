"""Digests of weights: of their files, or of the tensors themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import torch
from mt_ckpt import RunFolder, SavedModel, inspect_checkpoint
from mt_files import sha256_file
from mt_model import GPT, saved_buffers

from mt_infer.loading import Run


def run_digest(run: Run) -> str:
    """Return the digest of a folder's weights, in hexadecimal.

    It is the hash of the names and hashes of their files: for a run the files that the checkpoint
    records, without the optimizer's, and for a folder of Hugging Face all files with tensors.
    """
    if isinstance(run.source, Path):
        digests = inspect_checkpoint(run.source).digests(f"{RunFolder.WEIGHTS}/")
        # The first format version had no names of algorithms, and these digests stay.
        files = {name: digest.removeprefix("sha256:") for name, digest in digests.items()}
        adapters = inspect_checkpoint(run.source).metadata_as(SavedModel).adapters
        if adapters is not None:
            files["base"] = adapters.sha256
    else:
        paths = {each.path for each in run.source.tensors.values()}
        files = {path.name: sha256_file(path) for path in paths}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def model_digest(model: GPT) -> str:
    """Return the digest of a model's parameters and saved buffers, in hexadecimal."""
    digest = hashlib.sha256()
    for name, x in sorted((dict(model.named_parameters()) | saved_buffers([model])).items()):
        plain = x.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {list(plain.shape)}\n".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Identity:
    """Step and digest of an engine's weights; a swap replaces both at once.

    Args:
        step: Step that made the weights; None for a folder of Hugging Face.
        find_digest: Function that returns the digest; called at the first read of the digest.
        is_of_files: Whether the weights come from files, and not from a caller.
    """

    def __init__(
        self, step: int | None, find_digest: Callable[[], str], *, is_of_files: bool
    ) -> None:
        self.step, self.is_of_files, self._find_digest = step, is_of_files, find_digest

    @classmethod
    def of_run(cls, run: Run) -> Identity:
        """Return the identity of an opened folder's weights."""
        made = cls(run.step, partial(run_digest, run), is_of_files=True)
        if run.step is not None:  # the record of a step's files is at hand while the step is held
            _ = made.digest
        return made

    @classmethod
    def of_model(cls, model: GPT, step: int | None) -> Identity:
        """Return the identity of weights that a caller gave to a model."""
        return cls(step, partial(model_digest, model), is_of_files=False)

    @cached_property
    def digest(self) -> str:
        """Digest of the weights, in hexadecimal: of their files, or of updated tensors."""
        return self._find_digest()
