"""Prepare a run's tokens: train a tokenizer, encode a corpus, open datasets.

Everything a corpus needs is built once into a folder that appears complete or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mt_ckpt import latest_checkpoint
from mt_data import (
    BlendedDataset,
    Document,
    GPTDataset,
    IndexedDataset,
    Tokenizer,
    build_corpus,
    count_text_bytes,
    load_tokenizer,
    read_documents,
    split_files,
    standard_library_sources,
    train_tokenizer,
)

from mt_train.loading import STANDARD_LIBRARY, LoadedConfig

_DESCRIPTION = "corpus.json"


class OtherRankError(Exception):
    """Another rank failed to prepare the data, and says why.

    Attributes:
        is_config: Its error is one of the configuration.
    """

    def __init__(self, *, is_config: bool) -> None:
        self.is_config = is_config
        super().__init__("another rank could not prepare the data; its message says why")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Prepared token files of a run.

    Attributes:
        tokenizer: Path of the tokenizer.json the tokens were made with.
        train: Prefixes of `.bin/.idx` files.
        weights: Blend weights, empty when prefixes count by their size.
        validation: Prefix of the held-out tokens, if any.
    """

    tokenizer: Path
    train: tuple[Path, ...]
    weights: tuple[float, ...]
    validation: Path | None


def prepare_corpus(loaded: LoadedConfig, out: Path) -> Corpus:
    """Find the run's tokens, building them under `out/data` when the config names a corpus.

    Call it on one rank and let the others wait; a second call finds what the first one built.
    """
    data = loaded.config.data
    if data.corpus is None:
        return Corpus(
            tokenizer=Path(data.tokenizer or ""),
            train=tuple(Path(prefix) for prefix in data.train),
            weights=data.weights,
            validation=None if data.validation is None else Path(data.validation),
        )
    folder = out / "data"
    description = {"seed": loaded.config.training.seed, **asdict(data)}
    description = json.loads(json.dumps(description))  # tuples become lists, as when read back
    if not _is_built(folder, description):
        if folder.exists() and latest_checkpoint(out / "checkpoints") is not None:
            raise loaded.error(
                "data",
                f"{folder} belongs to a run with other data settings or another seed; restore "
                "them to continue it, or use another --out",
            )
        _build(loaded, folder, description)
    return Corpus(
        tokenizer=folder / "tokenizer.json",
        train=(folder / "train",),
        weights=(),
        validation=folder / "validation",
    )


def split_corpus(loaded: LoadedConfig) -> tuple[list[Document], list[Document]]:
    """Read the corpus and hold out a share of its documents.

    Returns:
        Training documents and held-out documents.
    """
    data, seed = loaded.config.data, loaded.config.training.seed
    if data.corpus is None:
        raise loaded.error("data.corpus", "missing; there are no documents to split")
    if data.corpus == STANDARD_LIBRARY:
        source = standard_library_sources()[: data.max_files]
        documents = list(read_documents(source))
    else:
        documents = list(read_documents(Path(data.corpus), glob=data.glob))
        documents = documents[: data.max_files]
    if not documents:
        raise loaded.error("data.corpus", f"no document matches data.glob {data.glob!r}")
    if len(documents) == 1:
        return _cut(documents[0], data.validation_fraction)
    # Documents of one .jsonl file share a path, so the line belongs to the name.
    names = [f"{document.path}:{document.line or 0}" for document in documents]
    _, held_out_names = split_files(names, fraction=data.validation_fraction, seed=seed)
    held_out = {str(name) for name in held_out_names}
    train, validation = [], []
    for name, document in zip(names, documents, strict=True):
        (validation if name in held_out else train).append(document)
    return train, validation


def _cut(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    """Hold out the end of a single text, from a line start on."""
    text = document.text
    cut = text.rfind("\n", 0, round(len(text) * (1 - fraction))) + 1
    cut = cut or round(len(text) * (1 - fraction))
    return [replace(document, text=text[:cut])], [replace(document, text=text[cut:])]


def _is_built(folder: Path, description: dict[str, object]) -> bool:
    try:
        return json.loads((folder / _DESCRIPTION).read_text()) == description
    except (OSError, json.JSONDecodeError):
        return False


def _build(loaded: LoadedConfig, folder: Path, description: dict[str, object]) -> None:
    data = loaded.config.data
    train, held_out = split_corpus(loaded)
    for stale in folder.parent.glob(f".{folder.name}.tmp-*"):  # of a build that was killed
        shutil.rmtree(stale, ignore_errors=True)
    scratch = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    scratch.mkdir(parents=True)
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(Path(data.tokenizer), eod=data.eod)
    else:
        texts = (document.text for document in train)
        tokenizer = train_tokenizer(texts, data.vocab_size, pattern=data.pattern)
    tokenizer.save(scratch / "tokenizer.json")
    build_corpus(train, scratch / "train", tokenizer)
    build_corpus(held_out, scratch / "validation", tokenizer)
    (scratch / _DESCRIPTION).write_text(json.dumps(description))
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def check_tokenizer(loaded: LoadedConfig, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Refuse tokens that are known to come from another tokenizer.

    Raises:
        ConfigError: The `.json` beside a token file records another tokenizer's sha256.
    """
    prefixes = [*corpus.train, *([] if corpus.validation is None else [corpus.validation])]
    for prefix in prefixes:
        recorded = (IndexedDataset(prefix).metadata() or {}).get("tokenizer_sha256")
        if recorded not in (None, tokenizer.sha256):
            raise loaded.error(
                "data.tokenizer",
                f"{prefix}.bin was made with another tokenizer: its sha256 is "
                f"{str(recorded)[:12]}..., that of this one {tokenizer.sha256[:12]}...; name the "
                "one it was made with",
            )


def open_training_data(
    corpus: Corpus, *, sequence_length: int, num_samples: int, seed: int
) -> GPTDataset | BlendedDataset:
    """Open the training tokens as samples of `sequence_length + 1` tokens, blended if several."""
    indexed = [IndexedDataset(prefix) for prefix in corpus.train]
    weights = corpus.weights or tuple(float(dataset.num_tokens) for dataset in indexed)
    datasets = [
        GPTDataset(
            dataset,
            sequence_length=sequence_length,
            num_samples=num_samples,
            seed=seed,
        )
        for dataset in indexed
    ]
    if len(datasets) == 1:
        return datasets[0]
    return BlendedDataset(datasets, weights=weights, num_samples=num_samples)


def count_bytes(indexed: IndexedDataset, tokenizer: Tokenizer) -> int:
    """Count the UTF-8 bytes of the text that a dataset was made of."""
    return count_text_bytes(indexed, tokenizer)
