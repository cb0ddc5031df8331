"""The section `data` of a run's configuration: where tokens come from, and what rows are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mt_files import Checks, FieldError, shorten

from mt_train.config.limits import MAX_LENGTH, path_field

_MAX_TOKENIZER = 10**7


@dataclass(frozen=True, kw_only=True)
class SpanSection:
    """Span corruption for a model with an encoder, as in T5: the decoder writes the removed spans.

    Attributes:
        density: Share of a text's tokens to remove.
        mean_length: Mean length of a span, in tokens.
        decoder_length: Length of the decoder's sequences, in tokens; by default the smallest
            multiple of 8 that holds all spans of one text. With `data.packing: documents` short
            documents have more spans, and spans that do not fit are left out.
        sentinels: Number of sentinel tokens to add after the tokenizer's own; the last one marks
            the first span. With 0 the tokenizer's last tokens are the sentinels, as in T5.
    """

    density: float = 0.15
    mean_length: float = 3.0
    decoder_length: int | None = None
    sentinels: int = 100

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "density")
        checks.at_most(0.5, "density")
        checks.at_least(1, "mean_length", "decoder_length")
        checks.at_most(MAX_LENGTH, "mean_length", "decoder_length")
        checks.at_least(0, "sentinels")
        checks.at_most(_MAX_TOKENIZER, "sentinels")
        checks.done()

    def lengths(self, sequence_length: int) -> tuple[int, int]:
        """Return the spans of a sequence of the encoder, and the decoder's length.

        Raises:
            FieldError: There are too few sentinels for the one, or the other does not do.
        """
        from mt_data import DataError, SpanCorruption

        corruption = SpanCorruption(density=self.density, mean_length=self.mean_length)
        try:
            noise, spans = corruption.counts(corruption.text_length(sequence_length))
        except DataError as error:
            raise FieldError({"sequence_length": str(error)}) from error
        least, given = noise + spans + 1, self.decoder_length
        if 0 < self.sentinels < spans:
            text = f"{self.sentinels} is too small for {spans} spans in a sequence; use {spans}"
            raise FieldError({"sentinels": f"{text} or more"})
        if given is not None and given < least:
            text = f"{given} is too small for {spans} spans of {noise} tokens; use {least} or more"
            raise FieldError({"decoder_length": text})
        return spans, given or corruption.decoder_length(sequence_length)


@dataclass(frozen=True, kw_only=True)
class MaskingSection:
    """Masking for `data.objective: mlm`, and the special tokens of its rows.

    Attributes:
        fraction: Share of a row's tokens to predict; always at least one token.
        masked: Share of the predicted tokens that become the mask token.
        random: Share of the predicted tokens that become a random token; the rest stays unchanged.
        whole_words: Hide words with all their tokens.
        pairs: Rows of two texts, of which the second follows the first or is of another document;
            which of the two it is is learnt by `model.pooled_head` (next sentence prediction).
        cls: The token in front of a row.
        sep: The one behind each text.
        mask: What hidden tokens become.
        pad: What fills a row up.
    """

    fraction: float = 0.15
    masked: float = 0.8
    random: float = 0.1
    whole_words: bool = False
    pairs: bool = False
    cls: str = "[CLS]"
    sep: str = "[SEP]"
    mask: str = "[MASK]"
    pad: str = "[PAD]"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.above(0, "fraction")
        checks.at_least(0, "masked", "random")
        checks.at_most(1, "fraction", "masked", "random")
        if not checks.errors and self.masked + self.random > 1 + 1e-9:
            text = f"{self.random} and masked {self.masked} are more than 1 together"
            checks.add("random", f"{text}; lower one of them")
        if not checks.errors and len(set(self.special)) < len(self.special):
            text = f"cls, sep, mask and pad are {', '.join(map(shorten, self.special))}"
            checks.add("mask", f"{text}; give each of the four a token of its own")
        checks.done()

    @property
    def special(self) -> tuple[str, ...]:
        """The special tokens by name."""
        return self.cls, self.sep, self.mask, self.pad


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Where tokens come from: prepared `.bin/.idx` prefixes, or a corpus built on first use.

    Paths in the YAML are relative to its folder, those on the command line to the working
    directory. The tokens of a corpus are built once, in the run's `data` folder.

    Attributes:
        corpus: `standard-library` (Python's own sources), a folder of text files, a `.jsonl` file
            or a text file.
        glob: Pattern of the files to read from a corpus folder.
        max_files: Maximum number of documents to read from the corpus.
        vocab_size: Vocabulary size of the tokenizer that mt-train trains on the corpus.
        pattern: Rule by which that tokenizer splits text into words: `gpt2`, or `code`, which keeps
            runs of spaces together.
        validation_fraction: Share of the corpus's documents to hold out.
        train: Prefixes of prepared `.bin/.idx` files, instead of `corpus`.
        weights: Share of each entry of `train` in a batch; by default proportional to its number of
            tokens.
        validation: Prefix of prepared held-out tokens.
        split: Shares of the documents of `train` for training, validation and test, in their order,
            as in Megatron-LM: `969,30,1`. By default all of them are for training.
        order: Order of the rows of `train`: `stable` does not depend on the run's length; with
            `megatron` it is Megatron-LM's for the same seed, split and number of samples.
        tokenizer: File of the tokenizer for `train` or `corpus`: a tokenizer.json or a
            sentencepiece model. Without one, `train` needs `model.vocab_size`, and the run has no
            bits per byte and generates no text.
        eod: The special token of `tokenizer` that ends a document, such as `<|endoftext|>`; needed
            where the tokenizer has several that may, or none of the usual names.
        packing: Attention between the documents of a sequence. `none` lets a token attend to
            everything before it; `documents` keeps attention within a document: positions restart,
            and the first token of a document is no label. It holds for training and evaluation.
            With `spans` a row is then several pairs of one document each.
        spans: Span corruption, which a model with `model.encoder_layers` needs: the encoder reads a
            text without some spans, and the decoder writes them; `{}` uses T5's values.
            `training.sequence_length` is the encoder's.
        objective: Training objective: `clm` (causal language modelling) predicts the next token;
            `mlm` (masked language modelling, BERT) predicts hidden tokens, with a model of `causal:
            false`. An `mlm` row is `[CLS] text [SEP]` from one document, padded.
        masking: Masking for `mlm`, by default `{fraction: 0.15, masked: 0.8, random: 0.1,
            whole_words: false, pairs: false}`, and the names of the special tokens `cls`, `sep`,
            `mask` and `pad`, which `tokenizer` needs to have. With `pairs` a row is `[CLS] a [SEP]
            b [SEP]`, and `model.pooled_head` learns whether b follows a.
    """

    corpus: str | None = None
    glob: str = "**/*.py"
    max_files: int | None = None
    vocab_size: int = 4096
    pattern: Literal["gpt2", "code"] = "gpt2"
    validation_fraction: float = 0.05
    train: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    validation: str | None = path_field(".bin", ".idx")
    split: str | None = None
    order: Literal["stable", "megatron"] = "stable"
    tokenizer: str | None = path_field("")
    eod: str | None = None
    packing: Literal["none", "documents"] = "none"
    spans: SpanSection | None = None
    objective: Literal["clm", "mlm"] = "clm"
    masking: MaskingSection | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(2, "max_files")
        checks.at_least(257, "vocab_size")
        checks.at_most(_MAX_TOKENIZER, "vocab_size")
        checks.above(0, "validation_fraction")
        checks.fraction("validation_fraction")
        if not checks.errors:
            self._check_sources(checks)
        if self.objective == "mlm" and self.packing != "none":
            text = f"{self.packing} does not go with data.objective mlm, whose rows have one"
            checks.add("packing", f"{text} document each; leave it out")
        if self.objective == "clm" and self.masking is not None:
            text = "hides nothing without data.objective: mlm; set that, or leave it out"
            checks.add("masking", text)
        checks.done()

    @property
    def hidden(self) -> MaskingSection | None:
        """How tokens are hidden; None where none are."""
        return None if self.objective == "clm" else self.masking or MaskingSection()

    def _check_sources(self, checks: Checks) -> None:
        if (self.corpus is None) == (not self.train):
            checks.add("corpus", "set exactly one of data.corpus and data.train")
        if self.weights and len(self.weights) != len(self.train):
            text = f"{len(self.weights)} weights for {len(self.train)} entries of data.train"
            checks.add("weights", f"{text}; give one for each")
        self._check_split(checks)
        for weight in self.weights:
            if not 0 < weight <= 1e100:
                checks.add("weights", f"{weight}: every weight must be greater than 0")

    def _check_split(self, checks: Checks) -> None:
        plain = self.hidden is None and self.spans is None
        for name, is_set in (("split", self.split is not None), ("order", self.order != "stable")):
            if is_set and not (self.train and plain):
                text = "is for data.train with data.objective clm and no spans"
                checks.add(name, f"{text}; leave it out")
        if self.split is None or "split" in checks.errors:
            return
        from mt_data import DataError, parse_split

        try:
            train, held_out, _ = parse_split(self.split)
        except DataError as error:
            checks.add("split", str(error))
            return
        if not train:
            checks.add("split", f"{self.split} leaves nothing for training; raise its first number")
        if held_out and self.validation is not None:
            text = f"{self.split} holds documents out, and data.validation names others"
            checks.add("split", f"{text}; leave one of them out")
