"""Prepare a run's tokens: train a tokenizer, encode a corpus, open datasets.

Everything a corpus needs is built once into a folder that appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from mt_ckpt import latest_checkpoint
from mt_data import (
    Document,
    HeldOut,
    IndexedDataset,
    Shards,
    build_corpus,
    cut_document,
    read_documents,
    shard_prefix,
)
from mt_files import sync, write_file
from mt_model import ModelConfig
from mt_tokenizer import DEFAULT_SPECIAL, Tokenizer, load_tokenizer, train_tokenizer

from mt_train.config.kinds.section import TOKEN_FILES, Sources
from mt_train.config.loading import LoadedConfig
from mt_train.config.run_config import RunConfig
from mt_train.data.shards import (
    DESCRIPTION,
    SHARD_BYTES,
    corpus_files,
    described,
    described_shards,
    is_made,
    plan_of,
    shards_of,
)

_Documents: TypeAlias = Callable[[], Iterator[Document]]
# Keys that do not affect a corpus, or are in its description under `shards`.
_OTHER_KEYS = ("phases", "shard_bytes", "build")
_DECIDE_TOKENIZER = ("seed", "vocab_size", "pattern", "tokenizer")


class OtherRankError(Exception):
    """Another rank failed to prepare the data, and reports the reason.

    Attributes:
        is_config: Whether its error is a configuration error.
    """

    def __init__(self, *, is_config: bool) -> None:
        self.is_config = is_config
        super().__init__("another rank could not prepare the data; its message says why")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Prepared token files of a run.

    Attributes:
        tokenizer: Path of the tokenizer.json of the tokens, if known.
        train: Prefixes of `.bin/.idx` files.
        weights: Blend weights, empty when prefixes count by their size.
        validation: Prefixes of each set of held-out tokens, by name; a single set has no name.
        shards: All training tokens, while `train` has the first shard; None for tokens that are not
            in shards.
    """

    tokenizer: Path | None
    train: tuple[Path, ...]
    weights: tuple[float, ...]
    validation: Mapping[str, tuple[Path, ...]]
    shards: Shards | None = None

    @property
    def prefixes(self) -> list[Path]:
        """All prefixes."""
        return [*self.train, *chain.from_iterable(self.validation.values())]


def prepare_corpus(loaded: LoadedConfig, out: Path, *, tokenizer: Path | None = None) -> Corpus:
    """Find the run's tokens, building them in the run folder when the config names a corpus.

    Call it on one rank and let the others wait; a second call finds what the first one built. A run
    with checkpoints keeps its tokenizer and its first corpus when the configuration changes.

    Args:
        loaded: The configuration.
        out: The run folder.
        tokenizer: Tokenizer to use instead of training one, if the configuration names none.

    Raises:
        ConfigError: The run has checkpoints, and its tokens can't be made with these settings.
    """
    data = loaded.config.data
    if data.corpus is None:
        return Corpus(
            tokenizer=None if data.tokenizer is None else Path(data.tokenizer),
            train=tuple(Path(prefix) for prefix in data.train),
            weights=data.weights,
            validation={n: tuple(map(Path, each)) for n, each in data.validation_sets.items()},
        )
    given = tokenizer if data.tokenizer is None else Path(data.tokenizer)
    others = (*data.own_keys(), *_OTHER_KEYS)  # keys of the rows, not of the tokens
    of_tokens = {name: value for name, value in asdict(data).items() if name not in others}
    description = {"seed": loaded.config.training.seed, **of_tokens}
    if data.special_tokens and given is None:
        description["special"] = data.special_tokens
    description = json.loads(json.dumps(description))  # tuples become lists, as when read back
    folder = out / "data"
    if not is_made(data, folder, description):
        if folder.exists() and latest_checkpoint(loaded.config.checkpoint.folder(out)) is not None:
            given = _kept_tokenizer(loaded, folder, description)
            other = {} if data.shard_bytes == SHARD_BYTES else {"shard_bytes": data.shard_bytes}
            digest = hashlib.sha256(json.dumps(description | other).encode()).hexdigest()
            folder = out / f"data-{digest[:8]}"
        if not is_made(data, folder, description):
            _build(loaded, folder, description, given)
    shards = shards_of(folder)
    if shards is not None:
        if data.build == "before":
            shards.build(folder / "tokenizer.json", eod=data.eod)
        return Corpus(
            tokenizer=folder / "tokenizer.json",
            train=(shard_prefix(folder, 0),),
            weights=(),
            validation={"": (Path(f"{shard_prefix(folder, 0)}-validation"),)},
            shards=shards,
        )
    return Corpus(
        tokenizer=folder / "tokenizer.json",
        train=(folder / "train",),
        weights=(),
        validation={"": (folder / "validation",)},
    )


@contextmanager
def building(loaded: LoadedConfig, corpus: Corpus) -> Iterator[None]:
    """Build a corpus's missing shards beside the block, on one rank of a node."""
    if corpus.shards is None or corpus.tokenizer is None:
        yield
        return
    with corpus.shards.building(corpus.tokenizer, eod=loaded.config.data.eod):
        yield


def _kept_tokenizer(loaded: LoadedConfig, folder: Path, description: dict[str, Any]) -> Path:
    """Return the tokenizer of the run's first corpus, if another corpus can be made with it."""
    built = described(folder)
    if built is None:
        text = f"{folder / DESCRIPTION} is missing or damaged, so it is not known what the tokens "
        text += f"beside it are; restore it, or remove {folder} to build them again"
        raise loaded.error("data.corpus", text)
    for name in _DECIDE_TOKENIZER:
        if built.get(name) != description[name]:
            text = f"{folder} belongs to a run with other data settings: {name} was "
            text += f"{built.get(name)!r} and is {description[name]!r}; restore it to continue the "
            field = "training.seed" if name == "seed" else f"data.{name}"
            raise loaded.error(field, f"{text}run, or use another --out")
    return folder / "tokenizer.json"


def split_corpus(loaded: LoadedConfig) -> tuple[_Documents, _Documents]:
    """Hold out a share of the documents of a corpus without shards, by a hash of each one's name.

    For a single document, the last lines are held out.

    Returns:
        Two functions that read the training documents and the held-out ones, one by one.
    """
    data, seed = loaded.config.data, loaded.config.training.seed
    read = partial(read_documents, corpus_files(loaded), glob=data.glob)
    first = list(islice(read(), 2))
    if not first:
        raise loaded.error("data.corpus", f"no document matches data.glob {data.glob!r}")
    if len(first) == 1:
        parts = cut_document(first[0], fraction=data.validation_fraction)
        train, held_out = ([part] for part in parts)
        return lambda: iter(train), lambda: iter(held_out)
    folders = [PurePath(file.name).parent for file in read().files]
    rule = HeldOut(
        fraction=data.validation_fraction, seed=seed, by="name", root=os.path.commonpath(folders)
    ).fitted(islice(read(), data.max_files))

    def documents(*, held_out: bool) -> Iterator[Document]:
        found = islice(read(), data.max_files)
        return (document for document in found if rule.holds_out(document) == held_out)

    return partial(documents, held_out=False), partial(documents, held_out=True)


def _build(
    loaded: LoadedConfig, folder: Path, description: dict[str, Any], given: Path | None
) -> None:
    data = loaded.config.data
    plan = plan_of(loaded)
    train, held_out = split_corpus(loaded) if plan is None else plan.split(0)
    for stale in folder.parent.glob(".data*.tmp-*"):  # of a build that was killed
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale, ignore_errors=True)
    scratch = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(16)}")
    scratch.mkdir(parents=True)
    try:
        if given is not None:
            tokenizer = load_tokenizer(given, eod=data.eod)
        else:
            texts = (document.text for document in train())
            special = (*DEFAULT_SPECIAL, *data.special_tokens)
            tokenizer = train_tokenizer(texts, data.vocab_size, special, pattern=data.pattern)
        tokenizer.save(scratch / "tokenizer.json")
        if plan is None:
            build_corpus(train(), scratch / "train", tokenizer)
            build_corpus(held_out(), scratch / "validation", tokenizer)
        else:
            plan.build(0, scratch, tokenizer)
        description = description | described_shards(loaded, plan)
        write_file(scratch / DESCRIPTION, json.dumps(description))
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sync(folder.parent)


def verify_corpus(loaded: LoadedConfig, corpus: Corpus) -> None:
    """Compare the tokens with the digests recorded beside them.

    Data sets of other tools have no digests, and are not checked; neither are files without tokens,
    which their kind reads.

    Raises:
        DataFileError: A file has changed; the error names it.
    """
    for prefix in _token_files(loaded, corpus):
        with IndexedDataset(prefix) as dataset:
            if dataset.metadata() is not None:
                dataset.verify(remember=True)


def check_tokenizer(loaded: LoadedConfig, corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Refuse the tokens of another tokenizer.

    Raises:
        ConfigError: The `.json` beside a token file records another tokenizer's sha256.
    """
    for prefix in _token_files(loaded, corpus):
        recorded = (IndexedDataset(prefix).metadata() or {}).get("tokenizer_sha256")
        if recorded not in (None, tokenizer.sha256):
            text = f"{prefix}.bin was made with another tokenizer: its sha256 is "
            text += f"{str(recorded)[:12]}..., that of this one {tokenizer.sha256[:12]}...; name "
            raise loaded.error("data.tokenizer", f"{text}the one it was made with")


def check_rows(loaded: LoadedConfig, corpus: Corpus) -> None:
    """Refuse files from which the run's kind of rows can't be made.

    Raises:
        ConfigError: The kind refuses a file.
    """
    for field, text in loaded.config.data.corpus_misfits(corpus.train):
        raise loaded.error(field, text)


def sources_of(
    config: RunConfig, corpus: Corpus, tokenizer: Tokenizer | None, model: ModelConfig, out: Path
) -> Sources:
    """Return the sources of the rows of a run in the folder `out`."""
    training = config.training
    return Sources(
        train=corpus.train,
        weights=corpus.weights,
        tokenizer=tokenizer,
        model=model,
        sequence_length=training.sequence_length,
        seed=training.seed,
        num_samples=training.steps * training.global_batch_size,
        stride=config.evaluation.stride,
        orders=out / "orders",
        shards=corpus.shards,
    )


def _token_files(loaded: LoadedConfig, corpus: Corpus) -> list[Path]:
    """Return the prefixes of a run's tokens; empty if `data.train` names other files."""
    data = loaded.config.data
    return corpus.prefixes if data.corpus is not None or data.endings == TOKEN_FILES else []
