"""Starting points: nothing, the run's last checkpoint, or another run's checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mt_ckpt import RunFolder, SavedModel, hold_checkpoint, latest_checkpoint
from mt_data import Mixture, MixtureSource
from mt_files import object_url, to_plain

from mt_train.config.loading import LoadedConfig
from mt_train.config.run_config import RunConfig
from mt_train.reporting.history import changes
from mt_train.session.saved import ResumeError, SavedRun, plain_sections, read_imported, read_saved
from mt_train.training.progress import Progress

# What may differ between two parts of a run: everything but the model, the tokenizer and these.
_FIXED = ("seed", "sequence_length")


def _of_adapters(lora: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of adapters that two parts of a run must have in common."""
    return None if lora is None else {"base_format": None, **lora, "dropout": None, "from": None}


@dataclass(frozen=True, kw_only=True)
class Start:
    """The starting point of a run.

    Attributes:
        path: The checkpoint; None for a new run.
        saved: Metadata of the checkpoint.
        own: Whether the checkpoint is the run's own.
        weights_only: Whether only the model is taken from the checkpoint.
        imported: Metadata of imported weights, which no run trained.
        pretrained: Hugging Face folder with the initial weights of a new run.
    """

    path: Path | None = None
    saved: SavedRun | None = None
    own: bool = False
    weights_only: bool = False
    imported: SavedModel | None = None
    pretrained: Path | None = None

    @property
    def continued(self) -> SavedRun | None:
        """The metadata of the continued run; None for a new run with any weights."""
        return None if self.weights_only else self.saved

    @property
    def progress(self) -> Progress:
        """The progress of the run."""
        return Progress() if self.continued is None else self.continued.progress

    @property
    def tokenizer(self) -> Path | None:
        """Tokenizer of another run, if the weights come from that run."""
        if self.path is None or self.own or object_url(self.path):
            return None
        path = RunFolder.of(self.path).tokenizer
        return path if path.is_file() else None

    def mixtures(
        self,
        phases: Sequence[tuple[int, Sequence[MixtureSource]]],
        order: Literal["split", "shortfall"] = "split",
    ) -> list[Mixture]:
        """Return the mixtures of the run: the one from here on, and one for each later phase.

        An unchanged mixture keeps its order. A phase begins where the one before leaves its
        sources, by numbers alone, so a continued run draws the same samples as without a stop.

        Args:
            phases: Sources and their shares, each with the number of samples before; 0 for the
                first.
            order: Order of a new mixture.
        """
        samples = self.progress.samples
        now = [sources for begin, sources in phases if begin <= samples][-1]
        if self.continued is None:
            found = [Mixture(sources=tuple(now), order=order)]
        else:
            found = [self.continued.data.continued(now, samples, order)]
        for begin, sources in phases:
            if begin > samples:
                found.append(found[-1].continued(sources, begin, order))
        return found

    def describe(self, config: RunConfig, tokenizer: str | None) -> list[str]:
        """Return lines on the run's starting point and the changed settings.

        Args:
            config: The configuration from here on.
            tokenizer: The SHA-256 of the tokenizer, if there is one.
        """
        if self.pretrained is not None or self.imported is not None:
            return [f"starting with the weights of {self.pretrained or self.path}"]
        if self.saved is None:
            return []
        differ = changes(self.saved.config, plain_sections(config))
        if self.weights_only:
            differ = [line for line in differ if line.startswith("model.")]
            if self.saved.tokenizer_sha256 != tokenizer:
                differ.append("another tokenizer than the weights were trained with")
            return [f"starting with the weights of {self.path}", *(f"  {d}" for d in differ)]
        return [
            f"continuing from {self.path}",
            *(f"  from step {self.saved.step + 1} on: {line}" for line in differ),
        ]


def find_start(
    loaded: LoadedConfig, out: Path, held: ExitStack, *, step: int | None = None
) -> Start:
    """Find the checkpoint that a run starts from, and read its metadata.

    Args:
        loaded: The configuration.
        out: The run's folder, which is this process's own.
        held: Holds a checkpoint of another run against removal until it closes.
        step: Step of the other run's checkpoint; None for the last one.

    Raises:
        ConfigError: `checkpoint.load` names no checkpoint.
        ResumeError: The metadata was not written by mt-train.
        CheckpointError: The checkpoint is damaged.
    """
    own = latest_checkpoint(loaded.config.checkpoint.folder(out))
    if own is not None:
        return Start(path=own, saved=read_saved(own), own=True)
    checkpoint = loaded.config.checkpoint
    if checkpoint.load is None:
        folder = loaded.config.model.from_
        return Start(pretrained=None if folder is None else Path(folder))
    root, is_step = _root_of(checkpoint.load)
    if not is_step and latest_checkpoint(root) is None:
        raise loaded.error("checkpoint.load", "there is no committed checkpoint in it")
    path = held.enter_context(hold_checkpoint(root, None if is_step else step))
    only = checkpoint.load_mode == "weights"
    imported = read_imported(path) if only else None
    saved = read_saved(path) if imported is None else None
    return Start(path=path, saved=saved, weights_only=only, imported=imported)


def _root_of(load: str) -> tuple[str | Path, bool]:
    """Return a step folder or a folder of checkpoints, and whether it is a step folder."""
    if object_url(load):
        return load, re.fullmatch(r"step_\d{8,18}", load.rstrip("/").rpartition("/")[2]) is not None
    folder = Path(load)
    is_step = (folder / "zarr.json").is_file()
    return folder if is_step else RunFolder(folder).checkpoints, is_step


def check_start(
    start: Start,
    loaded: LoadedConfig,
    *,
    model: dict[str, Any],
    tokenizer: str | None,
) -> None:
    """Check that a run can go on with this configuration where another part of it ended.

    Args:
        start: Starting point of the run.
        loaded: The configuration from here on.
        model: The model, as `ModelConfig.to_dict` gives it.
        tokenizer: The SHA-256 of the tokenizer, if there is one.

    Raises:
        ResumeError: The run can't go on; the error lists all reasons and a way to continue.
    """
    saved = start.continued
    if saved is None:
        return
    before, now = saved.config, to_plain(loaded.config)
    differences = []
    if dict(saved.model) != model:
        lines = changes({"model": before["model"]}, {"model": now["model"]})
        differences += lines or ["model: another architecture"]
    if saved.tokenizer_sha256 != tokenizer:
        digests = (
            f"sha256 {x[:12]}..." if x else "none" for x in (saved.tokenizer_sha256, tokenizer)
        )
        differences.append(f"data.tokenizer: {' -> '.join(digests)}; ids would mean other text")
    for digest in set(saved.plugins.values()) - set(loaded.plugins.values()):
        names = [path for path, each in saved.plugins.items() if each == digest]
        differences.append(f"plugins: {names[0]} has changed, or is not named")
    then, current = before["training"], now["training"]
    for name in _FIXED:
        if then.get(name) != current[name]:
            differences.append(f"training.{name}: saved with {then.get(name)}, now {current[name]}")
    if (then.get("dtype") == "fp64") != (current["dtype"] == "fp64"):
        differences.append(
            f"training.dtype: saved with {then.get('dtype')}, now {current['dtype']}; "
            "fp32, bf16 and fp16 have fp32 master weights, fp64 has fp64 ones"
        )
    if then.get("freeze", []) != current["freeze"]:
        text = f"saved with {then.get('freeze', [])}, now {current['freeze']}; the optimizer has "
        differences.append(f"training.freeze: {text}no state for other parameters")
    if _of_adapters(before.get("lora")) != _of_adapters(now["lora"]):
        differences += changes({"lora": before.get("lora")}, {"lora": now["lora"]})
    if differences:
        raise ResumeError(
            f"{start.path} can't be continued with these differences:\n  "
            + "\n  ".join(differences)
            + "\nRestore them to continue it, or take its weights alone into a new run: another "
            f"--out, checkpoint.load={start.path} and checkpoint.load_mode=weights"
        )
