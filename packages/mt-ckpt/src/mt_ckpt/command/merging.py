"""`mt-ckpt merge`: the weighted average of checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mt_files import Progress, did_you_mean, new_folder, say
from torch import Tensor

from mt_ckpt.command.place import opened
from mt_ckpt.error import CheckpointError
from mt_ckpt.exchange.arrays import below, bytes_of, dtype_of, read_array, stored_name
from mt_ckpt.exchange.pages import Pages
from mt_ckpt.load import ArrayReader
from mt_ckpt.run import RunFolder, SavedModel
from mt_ckpt.save import save_checkpoint
from mt_ckpt.shard import TensorShard


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Average checkpoints of one model, of one run or of several.

    Sums are in float32, and in float64 for float64 arrays. Integer arrays, such as counters, must
    be equal. If there are weights (the group model), only they are averaged, since an average of
    optimizer moments means little; the result starts a run or answers requests.

    Attributes:
        out: A new folder, of the kind of the first source: a run folder or a folder of checkpoints.
        sources: Run folders, folders of checkpoints (meaning the latest), or step directories.
        weights: Weight of each source, divided by their sum; by default all the same.
        prefix: Group to average; by default model, or everything if there is no such group.
        step: Step of the result; by default the highest of the sources.
    """

    out: Path
    sources: tuple[Path, ...]
    weights: tuple[float, ...] = ()
    prefix: str | None = None
    step: int | None = None

    def run(self) -> int:
        """Run the command."""
        weights = self._weights()
        with contextlib.ExitStack() as stack:
            sources = [stack.enter_context(opened(path)) for path in self.sources]
            step = max(s.manifest.step for s in sources) if self.step is None else self.step
            metadata = _metadata(sources, weights)
            folder = stack.enter_context(new_folder(self.out))
            root = _prepared(folder, sources[0])
            pages = stack.enter_context(Pages.within(folder))
            averaged = Average(sources, weights, self._prefix(sources[0])).shards(pages)
            save_checkpoint(root, step, averaged, metadata)
        say(f"{self.out}: step {step}, the average of {len(self.sources)} checkpoints")
        return 0

    def _weights(self) -> list[float]:
        if len(self.sources) < 2:
            raise CheckpointError("name at least two checkpoints: mt-ckpt merge OUT A B ...")
        weights = self.weights or (1.0,) * len(self.sources)
        if len(weights) != len(self.sources):
            raise CheckpointError(
                f"--weights has {len(weights)} numbers for {len(self.sources)} checkpoints; give "
                "one for each"
            )
        total = math.fsum(weights)
        if not all(map(math.isfinite, weights)) or total <= 0:
            raise CheckpointError("--weights must be finite numbers with a sum above 0")
        return [weight / total for weight in weights]

    def _prefix(self, first: ArrayReader) -> str:
        if self.prefix is not None:
            return self.prefix
        start = f"{RunFolder.WEIGHTS}/"
        has_weights = any(name.startswith(start) for name in first.manifest.arrays)
        return RunFolder.WEIGHTS if has_weights else ""


@dataclass(frozen=True)
class Average:
    """The weighted average of checkpoints.

    Attributes:
        sources: The checkpoints.
        weights: Weight of each, with a sum of 1.
        prefix: Group of the averaged arrays; empty for all.
    """

    sources: Sequence[ArrayReader]
    weights: Sequence[float]
    prefix: str

    def shards(self, pages: Pages) -> list[TensorShard]:
        """Return the averaged arrays, as pages of files that need no memory.

        Args:
            pages: Place of these files.

        Raises:
            CheckpointError: The checkpoints have other arrays, shapes, or unequal integers.
        """
        first = self.sources[0]
        specs = below(first, self.prefix)
        for other in self.sources[1:]:
            self._check_same(other)
        total, done = sum(map(bytes_of, specs.values())), 0
        made, progress = [], Progress()
        try:
            for name, spec in specs.items():
                full = stored_name(self.prefix, name)
                paged = pages.empty(spec.shape, dtype_of(spec)).copy_(self._average(full))
                made.append(TensorShard(full, paged))
                done += bytes_of(spec)
                progress.update("averaging", done, total)
        finally:
            progress.clear()
        return made

    def _check_same(self, other: ArrayReader) -> None:
        ours, others = below(self.sources[0], self.prefix), below(other, self.prefix)
        for name in sorted({*ours, *others}):
            if name not in others or name not in ours:
                lacks = other if name in ours else self.sources[0]
                known = others if name in ours else ours
                raise CheckpointError(
                    f"{lacks.path} has no {stored_name(self.prefix, name)}, which another has. "
                    f"{did_you_mean(name, list(known)[:500])} Average a group with --prefix"
                )
            if ours[name].shape != others[name].shape:
                raise CheckpointError(
                    f"{stored_name(self.prefix, name)} has the shape {list(ours[name].shape)} in "
                    f"{self.sources[0].path} and {list(others[name].shape)} in {other.path}; only "
                    "checkpoints of one model can be averaged"
                )

    def _average(self, name: str) -> Tensor:
        first = self.sources[0]
        kind = dtype_of(first.manifest.arrays[name])
        values = read_array(first, name)
        if not kind.is_floating_point:
            for other in self.sources[1:]:
                if not torch.equal(values, read_array(other, name)):
                    raise CheckpointError(
                        f"{name} is {kind} and differs between {first.path} and {other.path}, so "
                        "it has no average; leave it out with --prefix",
                        tensor=name,
                    )
            return values
        wide = torch.float64 if kind == torch.float64 else torch.float32
        total = values.to(wide).mul_(self.weights[0])
        for other, weight in zip(self.sources[1:], self.weights[1:], strict=True):
            total.add_(read_array(other, name).to(wide), alpha=weight)
        return total.to(kind)


def _metadata(sources: Sequence[ArrayReader], weights: Sequence[float]) -> dict[str, Any]:
    """Return the description of the model, and the sources, without the state of a run."""
    names = [field.name for field in dataclasses.fields(SavedModel)]
    first = sources[0].manifest.metadata
    for other in sources[1:]:
        if other.manifest.metadata.get("model") != first.get("model"):
            raise CheckpointError(
                f"{other.path} holds another model than {sources[0].path}: their metadata differ "
                "in 'model'; only checkpoints of one model can be averaged"
            )
    merged = [
        {"step": source.manifest.step, "weight": weight}
        for source, weight in zip(sources, weights, strict=True)
    ]
    return {name: first[name] for name in names if name in first} | {"merged": merged}


def _prepared(folder: Path, first: ArrayReader) -> Path:
    """Return the folder of checkpoints in a new folder; a run's tokenizer is copied beside it."""
    source = RunFolder.of(first.path)
    if source.checkpoints.resolve() != first.path.resolve().parent:
        return folder
    made = RunFolder(folder)
    made.checkpoints.mkdir()
    if source.tokenizer.is_file():
        shutil.copyfile(source.tokenizer, made.tokenizer)
    if source.hugging_face.is_dir():
        shutil.copytree(source.hugging_face, made.hugging_face)
    return made.checkpoints
