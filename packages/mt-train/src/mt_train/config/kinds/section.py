"""The section `data` of a run's configuration, and the interface of a kind of rows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from mt_files import Checks, RowField, shorten

from mt_train.config.kinds.phases import PhaseSection, phase_problems, share_problems
from mt_train.config.limits import path_field

if TYPE_CHECKING:  # checking a file takes no torch, and no numpy for rows
    from mt_data import GPTDataset, InOrder, RowDataset, Rows, Shards
    from mt_model import ModelConfig
    from mt_tokenizer import Tokenizer

    from mt_train.config.run_config import RunConfig

MAX_TOKENIZER = 10**7
TOKEN_FILES = (".bin", ".idx")
_SET_NAME = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources of a run's rows.

    Attributes:
        train: Paths of `data.train`, or of the tokens of `data.corpus`.
        weights: Share of each path; empty if no shares are given.
        validation: Paths of one set of held-out data; none without one.
        tokenizer: Tokenizer of the run; None for token files without one.
        model: The model.
        sequence_length: `training.sequence_length`.
        seed: `training.seed`.
        num_samples: Number of samples of the whole run.
        stride: `evaluation.stride`.
        orders: Folder for files with the orders of large data sets, which ranks share.
        shards: The training tokens of a corpus in shards; `train` has the first shard.
    """

    train: tuple[Path, ...]
    weights: tuple[float, ...] = ()
    validation: tuple[Path, ...] = ()
    tokenizer: Tokenizer | None
    model: ModelConfig
    sequence_length: int
    seed: int
    num_samples: int
    stride: int | None = None
    orders: Path | None = None
    shards: Shards | None = None


@dataclass(frozen=True, kw_only=True)
class HeldOutRows:
    """Held-out rows, which an evaluation reads in order.

    Attributes:
        rows: The rows.
        num_bytes: UTF-8 bytes of the whole held-out text; None if not all of the text is labels.
        num_labels: Number of labels in all rows, the tokens of these bytes.
        variants: The same rows with a change, such as a part of them masked, by the change's name;
            their loss is reported as `val_<name>_loss`.
    """

    rows: InOrder
    num_bytes: int | None = None
    num_labels: int = 0
    variants: Mapping[str, InOrder] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Sources of the tokens, and the kind of rows made from them (`data.kind`).

    A kind is a subclass with a `type_name`. Its fields are keys of `data` besides the ones here,
    and its methods give a run everything that it needs of its rows.

    Paths in the YAML are relative to its folder, paths on the command line to the working
    directory. The tokens of a corpus are built once, in the run's `data` folder.

    Attributes:
        corpus: `standard-library` (Python's own sources), a file (`.jsonl`, `.json`, `.parquet`,
            `.arrow` or text), a folder of files, or the URL of either in an object store.
        glob: Pattern of the files to read from a corpus folder.
        max_files: Maximum number of documents to read from the corpus.
        vocab_size: Vocabulary size of the tokenizer that mt-train trains on the corpus.
        pattern: Rule by which that tokenizer splits text into words: `gpt2`, or `code`, which keeps
            runs of spaces together.
        validation_fraction: Share of the corpus's documents to hold out. For a corpus in shards,
            the held-out documents of the first shard are evaluated.
        shard_bytes: Size from which a corpus is built in shards, and the size of a shard in bytes
            of the source. Each shard is a sample of the whole corpus, and an epoch reads them one
            after the other, each in its own order; a tokenizer is trained on the first. With
            `max_files` there is one.
        build: When the shards are built: `before` the first step, or `ahead`: training begins when
            the first shard is ready, and waits for a shard that is not ready. The numbers are the
            same, and a killed run goes on with the missing shards.
        train: Prefixes of prepared `.bin/.idx` files, or the files that the kind of rows reads,
            instead of `corpus`: paths, or URLs of an object store such as `s3://bucket/corpus`.
        weights: Share of each entry of `train` in a batch; by default proportional to its number of
            tokens. With `phases` a share of 0 leaves a source out until a phase gives it one.
        phases: Other shares from given samples on, in order: `{from: N, weights: [...]}` after N
            samples of the run, or `{from_tokens: N, weights: [...]}`. A weight of 0 leaves a source
            out; a source that stays, or comes back, continues at its next sample.
        validation: Prefix of prepared held-out tokens; or several sets by name, such as `{web:
            PREFIX, code: [PREFIX, PREFIX]}`: each is evaluated alone, and all of them together.
        tokenizer: File of the tokenizer for `train` or `corpus`: a tokenizer.json or a
            sentencepiece model. Without one, `train` needs `model.vocab_size`, and the run has no
            bits per byte and generates no text.
        eod: The special token of `tokenizer` that ends a document, such as `<|endoftext|>`; needed
            if the tokenizer has several candidates, or none of the usual names.
    """

    kind_key: ClassVar[str] = "kind"
    default_kind: ClassVar[str] = "text"
    type_name: ClassVar[str] = ""  # the value of `data.kind`
    # Endings of the files of one entry of `train`; `.bin` and `.idx` are tokens.
    endings: ClassVar[tuple[str, ...]] = TOKEN_FILES
    needs_tokenizer: ClassVar[bool] = True
    is_causal: ClassVar[bool] = True  # a token predicts the next one, or sees both sides
    feeds_encoder: ClassVar[bool] = False  # rows have `encoder_tokens`
    has_few_labels: ClassVar[bool] = False  # the speed counts all tokens
    overlaps: ClassVar[bool] = False  # held-out rows overlap by `evaluation.stride`
    reads_shards: ClassVar[bool] = False  # rows of a corpus in shards need only the first ones

    corpus: str | None = None
    glob: str = "**/*.py"
    max_files: int | None = None
    vocab_size: int = 4096
    pattern: Literal["gpt2", "code"] = "gpt2"
    validation_fraction: float = 0.05
    shard_bytes: int = 1 << 25
    build: Literal["before", "ahead"] = "before"
    train: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    phases: tuple[PhaseSection, ...] = ()
    validation: str | Mapping[str, str | tuple[str, ...]] | None = None
    tokenizer: str | None = path_field("")
    eod: str | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(2, "max_files")
        checks.at_least(257, "vocab_size")
        checks.at_most(MAX_TOKENIZER, "vocab_size")
        checks.at_least(1024, "shard_bytes")
        checks.above(0, "validation_fraction")
        checks.fraction("validation_fraction")
        if not checks.errors:
            self._check_sources(checks)
            self.check(checks)
        checks.done()

    def _check_sources(self, checks: Checks) -> None:
        if (self.corpus is None) == (not self.train):
            checks.add("corpus", "set exactly one of data.corpus and data.train")
        if self.validation is not None and self.corpus is not None:
            text = (
                "is for data.train; of data.corpus a share is held out (data.validation_fraction)"
            )
            checks.add("validation", f"{text}. Leave it out")
        if self.build == "ahead" and self.corpus is None:
            checks.add("build", "ahead is for texts that data.corpus names; leave it out")
        elif self.build == "ahead" and not self.reads_shards:
            text = f"ahead is not for data.kind {self.kind}, whose rows need the whole corpus; "
            checks.add("build", text + "leave it out")
        for name in self.validation if isinstance(self.validation, Mapping) else ():
            if not _SET_NAME.fullmatch(name):
                text = f"{shorten(name)} is no name of a set; use letters, digits, '.', '_' and '-'"
                checks.add("validation", text)
            elif not self.validation_sets[name]:
                checks.add("validation", f"{name} has no paths; name a prefix, or leave it out")
        for text in share_problems(self.weights, self.train, may_rest=bool(self.phases)):
            checks.add("weights", text)
        for key, text in phase_problems(self.phases, self.train, self.weights):
            checks.add(key, text)

    # The interface of a kind. Each method has a default, except `fields` and `dataset`.

    def check(self, checks: Checks) -> None:
        """Check the kind's own keys; the types of all fields are right."""

    def fields(self) -> tuple[RowField, ...]:
        """Return the arrays of a row, without a `fill` that depends on a tokenizer."""
        raise NotImplementedError(f"{type(self).__name__} needs a method fields()")

    def sizes(self, sequence_length: int) -> Mapping[str, int]:
        """Return the size of each dim of `fields`."""
        return {"tokens": sequence_length}

    def lengths(self, sequence_length: int) -> Mapping[str, int]:
        """Return the lengths of sequences that ranks share, by the keys that decide them."""
        return {"training.sequence_length": sequence_length}

    def unit(self) -> int:
        """Return the number of tokens that stay together when ranks share a row."""
        return 1

    @property
    def validation_sets(self) -> dict[str, tuple[str, ...]]:
        """The paths of each set of held-out data, by name; a single set has no name."""
        given = self.validation
        if given is None or isinstance(given, str):
            return {} if given is None else {"": (given,)}
        return {n: (paths,) if isinstance(paths, str) else paths for n, paths in given.items()}

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens of a tokenizer trained on `corpus`, besides the usual ones."""
        return ()

    @property
    def extra_tokens(self) -> Mapping[str, int]:
        """Number of tokens of the model after the tokenizer's own, by the key that adds them."""
        return {}

    def misfits(self, config: RunConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
        """Yield (key, text) of settings of the model and the run that do not fit these rows."""
        yield from encoder_misfits(self, model)
        yield from causality_misfits(self, config, model)
        if model.pooled_head is not None and "sequences" not in _counts(self.fields()):
            text = "has no labels to learn from without data.kind: masked and data.masking: "
            yield "model.pooled_head", text + "{pairs: true}; leave it out"
        if model.retro is not None and "neighbours" not in {each.name for each in self.fields()}:
            text = "attends to neighbours, which these rows lack; use data.kind: retro, or leave "
            yield "model.retro", text + "it out"

    def files(self) -> Mapping[str, bytes]:
        """Return files that a run keeps in its folder for inference, by name."""
        return {}

    def corpus_misfits(self, train: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
        """Yield (key, text) of each setting that does not go with the files of a run."""
        del train
        yield from ()

    def rows(self) -> Rows:
        """Return the `Rows` for samples of running text; data sets that make rows ignore it."""
        from mt_data import Rows

        return Rows()

    def dataset(self, path: Path, sources: Sources) -> RowDataset:
        """Open one path of `train`, or the held-out data.

        Raises:
            DataError: The path makes no rows.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method dataset()")

    def datasets(self, sources: Sources) -> list[GPTDataset | RowDataset]:
        """Open all paths of `train`, or the shards of a corpus."""
        if sources.shards is not None:
            return [self._sharded(sources, sources.shards)]
        return [self.dataset(path, sources) for path in sources.train]

    def most_items(self, sources: Sources, rows: int) -> Mapping[str, int]:
        """Return the largest number of items in any `rows` rows of `train` together, by their dim.

        Rows may have any number of items, in `joined` fields. By default there are none.

        Args:
            sources: Sources of the rows, which are made for the count.
            rows: Number of rows.
        """
        del sources, rows
        return {}

    def _sharded(self, sources: Sources, shards: Shards) -> RowDataset:
        """Open a corpus in shards, whose first shard is finished."""
        from mt_data import ShardedRows

        def rows(shard: int) -> RowDataset:
            with shards.open(shard) as tokens:  # waits for the shard, and checks it
                return self.dataset(Path(tokens.prefix), sources)

        return ShardedRows(
            rows,
            count=shards.plan.count,
            seed=sources.seed,
            identity=shards.identity,
            num_tokens=shards.plan.size,
        )

    def held_out(self, sources: Sources) -> HeldOutRows | None:
        """Open the rows of one set of held-out data; None if there are none."""
        if not sources.validation:
            return None
        from mt_data import JoinedRows

        whole = replace(sources, train=sources.validation, weights=(), shards=None)
        found = self.datasets(whole)
        rows = cast("list[RowDataset]", found)
        return HeldOutRows(rows=rows[0] if len(rows) == 1 else JoinedRows(rows))

    def shares(self, sequence_length: int) -> list[tuple[int, tuple[float, ...]]]:
        """Return the shares of the sources, each with the samples before they hold; (0, ...) first.

        Empty shares follow the sources' numbers of tokens.
        """
        found = [(phase.start(sequence_length), phase.weights) for phase in self.phases]
        return found if found and found[0][0] == 0 else [(0, self.weights), *found]

    @property
    def blend_order(self) -> Literal["split", "shortfall"]:
        """Order of the samples of several data sets, in new runs."""
        return "split"

    # Properties that follow from a kind's fields.

    @property
    def kind(self) -> str:
        """The value of `data.kind`."""
        return type(self).type_name

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """Return the keys that only this kind has: they decide rows, and not tokens."""
        common = {item.name for item in dataclasses.fields(DataSection)}
        return tuple(item.name for item in dataclasses.fields(cls) if item.name not in common)


def _counts(fields: tuple[RowField, ...]) -> set[Any]:
    return {field.counts for field in fields}


def encoder_misfits(data: DataSection, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the problem unless exactly models with an encoder have rows with an encoder's input."""
    if data.feeds_encoder and not model.encoder_layers:
        text = f"{data.kind}, but the model has no encoder that would read (model.encoder_layers)"
        yield "data.kind", text
    if model.encoder_layers and not data.feeds_encoder:
        text = f"{data.kind} has nothing for the model's encoder; use spans, or a model without "
        yield "data.kind", text + "model.encoder_layers"


def causality_misfits(
    data: DataSection, config: RunConfig, model: ModelConfig
) -> Iterator[tuple[str, str]]:
    """Yield the problem if a model sees the tokens to predict, or can't see tokens that it may."""
    where = "model.causal" if config.model.layers is None else "model.layers"
    layers = model.layers[model.encoder_layers :]
    causal = [layer.mixer is None or layer.mixer.is_causal for layer in layers]
    if data.is_causal and not all(causal):
        text = "false lets tokens see those that they are to predict; leave it out, or use "
        yield where, text + "data.kind: masked"
    if not data.is_causal and any(causal):
        text = f"true does not go with data.kind {data.kind}, where tokens on both sides tell of a "
        yield where, text + "hidden one; use causal: false, or a preset such as bert-base"


def packing_misfits(packing: str, train: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Yield the problem if documents must be kept apart and their ends are not known."""
    from mt_data import IndexedDataset

    if packing == "documents" and all(len(IndexedDataset(prefix)) == 1 for prefix in train):
        text = f"{packing}, but {train[0]}.idx has all its tokens in one document, so there is "
        text += "nothing to keep apart; build the data with its documents, as mt-data build does, "
        yield "data.packing", text + "or use none"
