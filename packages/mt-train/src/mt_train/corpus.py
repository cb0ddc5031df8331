"""Prepare a run's tokens: train a tokenizer, encode a corpus, open datasets.

Everything a corpus needs is built once into a folder that appears complete or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from mt_data import (
    BlendedDataset,
    Document,
    GPTDataset,
    IndexedDataset,
    Tokenizer,
    build_corpus,
    load_tokenizer,
    read_documents,
    split_files,
    standard_library_sources,
    train_tokenizer,
)

from mt_train.loading import STANDARD_LIBRARY, LoadedConfig

_DESCRIPTION = "corpus.json"


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
            tokenizer=loaded.resolve(data.tokenizer or ""),
            train=tuple(loaded.resolve(prefix) for prefix in data.train),
            weights=data.weights,
            validation=None if data.validation is None else loaded.resolve(data.validation),
        )
    folder = out / "data"
    description = {"seed": loaded.config.training.seed, **asdict(data)}
    description = json.loads(json.dumps(description))  # tuples become lists, as when read back
    if not _is_built(folder, description):
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
    data = loaded.config.data
    assert data.corpus is not None
    if data.corpus == STANDARD_LIBRARY:
        paths = standard_library_sources()[: data.max_files]
        documents = [document for path in paths for document in read_documents(path)]
    else:
        source = loaded.resolve(data.corpus)
        documents = list(read_documents(source, glob=data.glob))[: data.max_files]
    names = [document.path for document in documents]
    train_names, held_out_names = split_files(
        names, fraction=data.validation_fraction, seed=loaded.config.training.seed
    )
    if not train_names or not held_out_names:
        raise loaded.error(
            "data.validation_fraction",
            f"{data.validation_fraction} of {len(documents)} documents leaves one side empty; "
            "use more documents or another fraction",
        )
    held_out = set(held_out_names)
    return (
        [document for document in documents if document.path not in held_out],
        [document for document in documents if document.path in held_out],
    )


def _is_built(folder: Path, description: dict[str, object]) -> bool:
    try:
        return json.loads((folder / _DESCRIPTION).read_text()) == description
    except (OSError, json.JSONDecodeError):
        return False


def _build(loaded: LoadedConfig, folder: Path, description: dict[str, object]) -> None:
    data = loaded.config.data
    train, held_out = split_corpus(loaded)
    scratch = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if data.tokenizer is not None:
        tokenizer = load_tokenizer(loaded.resolve(data.tokenizer))
    else:
        tokenizer = train_tokenizer((document.text for document in train), data.vocab_size)
    tokenizer.save(scratch / "tokenizer.json")
    build_corpus(train, scratch / "train", tokenizer)
    build_corpus(held_out, scratch / "validation", tokenizer)
    (scratch / _DESCRIPTION).write_text(json.dumps(description))
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def open_training_data(
    corpus: Corpus, *, sequence_length: int, num_samples: int, seed: int
) -> GPTDataset | BlendedDataset:
    """Open the training tokens as samples of `sequence_length + 1` tokens, blended if several."""
    indexed = [IndexedDataset(prefix) for prefix in corpus.train]
    weights = corpus.weights or tuple(float(dataset.num_tokens) for dataset in indexed)
    total = sum(weights)
    datasets = [
        GPTDataset(
            dataset,
            sequence_length=sequence_length,
            num_samples=-(-num_samples * weight // total),
            seed=seed,
        )
        for dataset, weight in zip(indexed, weights, strict=True)
    ]
    if len(datasets) == 1:
        return datasets[0]
    return BlendedDataset(datasets, weights=weights, num_samples=num_samples)


def validation_bytes(corpus: Corpus, tokenizer: Tokenizer) -> int:
    """Count the UTF-8 bytes of the held-out text, from its stats file or from its tokens."""
    assert corpus.validation is not None
    stats = corpus.validation.with_name(corpus.validation.name + ".json")
    if stats.exists():
        return int(json.loads(stats.read_text())["bytes"])
    indexed = IndexedDataset(corpus.validation)
    lengths = tokenizer.token_bytes
    return int(sum(lengths[indexed[i]].sum() for i in range(len(indexed))))
