"""The folder of a run: what the program that trains writes, and others read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from mt_files import Checks, shorten

from mt_ckpt.manifest import MANIFEST

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what others read.

    Attributes:
        path: The folder.
        WEIGHTS: Prefix of the arrays of the model's parameters.
        OPTIMIZER: Prefix of all arrays of the optimizer.
        EMA: Prefix of the parameters' averages over the steps, where a run keeps them.
        SCALING: Prefix of the state of delayed scaling, where layers are quantised by it.
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
        """The tokenizer of the data."""
        return self.path / "tokenizer.json"

    @property
    def hugging_face(self) -> Path:
        """Folder of what stood beside the weights of a Hugging Face model, where they are one's."""
        return self.path / "hugging_face"

    @classmethod
    def of(cls, path: Path) -> RunFolder:
        """Return the run of a step directory; any other folder is taken as a run's."""
        is_step = (path / MANIFEST).exists()
        return cls(path.resolve().parents[1] if is_step else path)


@dataclass(frozen=True, kw_only=True)
class SavedTokenizer:
    """The tokenizer with which a model was trained.

    Attributes:
        sha256: Of its content, as `mt_data.Tokenizer.sha256` gives it.
        eod: Name of the token that ends a document; None: the one that the tokenizer is known for.
    """

    sha256: str
    eod: str | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        if not _SHA256.fullmatch(str(self.sha256)):
            checks.add("sha256", f"{shorten(self.sha256)} is no SHA-256 in hexadecimal")
        checks.done()


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """What a checkpoint of a run says of its model.

    `mt_files.to_plain` of it is part of the checkpoint's metadata; `Manifest.metadata_as` reads it.

    Attributes:
        model: The model, as `mt_model.ModelConfig.to_dict` gives it.
        tokenizer: Its tokenizer; None for weights that came without one.
        plugins: SHA-256 of each file of code that the model's own kinds of layers come from, by
            path.
    """

    model: Mapping[str, Any]
    tokenizer: SavedTokenizer | None
    plugins: Mapping[str, str] = field(default_factory=dict)
