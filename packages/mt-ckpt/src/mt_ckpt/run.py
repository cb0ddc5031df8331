"""The folder of a run, which the training program writes and others read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from mt_files import Checks, shorten

from mt_ckpt.manifest import MANIFEST
from mt_ckpt.path import StoredPath, disk_of

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RunFolder:
    """Names of the files and arrays of a run.

    Attributes:
        path: The folder.
        WEIGHTS: Prefix of the model's parameters.
        OPTIMIZER: Prefix of the optimizer's arrays.
        EMA: Prefix of the parameters' moving averages, if the run keeps them.
        SCALING: Prefix of the state of delayed scaling, for layers that use it.
    """

    WEIGHTS: ClassVar[str] = "model"
    OPTIMIZER: ClassVar[str] = "optimizer"
    EMA: ClassVar[str] = "ema"
    SCALING: ClassVar[str] = "scaling"

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints; see `save_checkpoint`."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """File of the data's tokenizer."""
        return self.path / "tokenizer.json"

    @property
    def hugging_face(self) -> Path:
        """Folder of the other files of the Hugging Face model that the run started from, if any."""
        return self.path / "hugging_face"

    @classmethod
    def of(cls, path: Path) -> RunFolder:
        """Return the run that a step directory belongs to; any other folder is a run itself."""
        is_step = disk_of(path).exists(path / MANIFEST)
        if not is_step:
            return cls(path)
        return cls((path if isinstance(path, StoredPath) else path.resolve()).parent.parent)


@dataclass(frozen=True, kw_only=True)
class SavedTokenizer:
    """The tokenizer with which a model was trained.

    Attributes:
        sha256: Hash of its content; `mt_tokenizer.Tokenizer.sha256`.
        eod: Name of the token that ends a document; None for the tokenizer's usual one.
    """

    sha256: str
    eod: str | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        if not _SHA256.fullmatch(str(self.sha256)):
            checks.add("sha256", f"{shorten(self.sha256)} is no SHA-256 in hexadecimal")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """Low-rank adapters, for a checkpoint with the adapters alone, without the adapted weights.

    Attributes:
        rank: Rank of the adapters.
        alpha: Their products are scaled by `alpha / rank`; None for `rank`.
        layers: Globs of the adapted layers; None for the model's usual ones.
        base: Folder with the adapted weights: a step directory, or a folder of Hugging Face.
        sha256: Digest of its weights; `mt_hf.base_digest`.
        base_format: Format of mt-quant to which the weights of linear layers were rounded while the
            adapters were trained; None for unrounded weights.
    """

    rank: int
    alpha: float | None
    layers: tuple[str, ...] | None
    base: str
    sha256: str
    base_format: str | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(1, "rank")
        checks.above(0, "alpha")
        if not _SHA256.fullmatch(str(self.sha256)):
            checks.add("sha256", f"{shorten(self.sha256)} is no SHA-256 in hexadecimal")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """Description of the model in a checkpoint's metadata.

    `mt_files.to_plain` makes metadata of it, and `Manifest.metadata_as` reads it.

    Attributes:
        model: The model's config, as `mt_model.ModelConfig.to_dict` returns it.
        tokenizer: The tokenizer; None for weights without one.
        plugins: SHA-256 of each code file that defines the model's own layer kinds, by path.
        adapters: Adapters, if the checkpoint holds them alone.
    """

    model: Mapping[str, Any]
    tokenizer: SavedTokenizer | None
    plugins: Mapping[str, str] = field(default_factory=dict)
    adapters: SavedAdapters | None = None
