"""Digests of weights: of the files that they are read from, or of the tensors themselves."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from mt_ckpt import RunFolder, inspect_checkpoint
from mt_files import sha256_file
from mt_model import GPT, saved_buffers

from mt_infer.loading import Run


def run_digest(run: Run) -> str:
    """Return the digest of a folder's weights, in hexadecimal.

    It is the hash of the names and hashes of their files: of a run those that the checkpoint has
    recorded, without the optimizer's, and of a folder of Hugging Face all of its tensors' files.
    """
    if isinstance(run.source, Path):
        prefix = f"{RunFolder.WEIGHTS}/"
        records = inspect_checkpoint(run.source).files
        files = {name: each.sha256 for name, each in records.items() if name.startswith(prefix)}
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
