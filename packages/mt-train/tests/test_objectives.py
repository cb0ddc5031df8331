"""What a run is to predict, and what does not go with it: each refusal names its way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from mt_data import DataError, GPTDataset, IndexedDataset, IndexedWriter, MaskedDataset
from mt_files import to_plain
from mt_tokenizer import Tokenizer, train_tokenizer
from mt_train import ConfigError, load_config
from mt_train.config.kinds.masked import MaskedData
from mt_train.config.kinds.registry import saved_data
from mt_train.config.kinds.text import TextData
from mt_train.data.corpus import Corpus, sources_of

EXAMPLES = Path(__file__).parents[1] / "examples"
BERT, T5, TINY = (EXAMPLES / f"{name}.yaml" for name in ("bert", "t5", "tiny"))
CAUSAL = "{mixer: {num_heads: 4, num_kv_heads: 4, head_dim: 16}, feed_forward: {ffn_size: 8}}"
SPECIAL = ("<|endoftext|>", "[CLS]", "[SEP]", "[MASK]", "[PAD]")


def refused(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return [f"{problem.path}: {problem.text}" for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("density=0", "0.0 must be greater than 0"),
        ("density=0.6", "0.6 is too large; use 0.5 or less"),
        ("mean_length=0.5", "0.5 is too small; use 1 or more"),
        ("mean_length=1e9", "1000000000.0 is too large; use 134217728 or less"),
        ("decoder_length=0", "0 is too small; use 1 or more"),
        ("decoder_length=134217729", "134217729 is too large; use 134217728 or less"),
        ("decoder_length=13", "13 is too small for 3 spans of 10 tokens; use 14 or more"),
        ("decoder_length=65", "65 is longer than the model's 64; use 64 or less"),
        ("sentinels=-1", "-1 is too small; use 0 or more"),
        ("sentinels=10000001", "10000001 is too large; use 10000000 or less"),
        ("sentinels=2", "2 is too small for 3 spans in a sequence; use 3 or more"),
    ],
)
def test_spans_out_of_range_are_refused(override: str, text: str) -> None:
    field = f"data.spans.{override.partition('=')[0]}"
    assert refused(T5, f"data.spans.{override}") == [f"{field}: {text}"]


@pytest.mark.parametrize(
    "override", ["decoder_length=14", "decoder_length=64", "sentinels=3", "sentinels=0"]
)
def test_the_numbers_that_are_named_do(override: str) -> None:
    load_config(T5, [f"data.spans.{override}"])


def test_a_sequence_that_no_text_becomes_is_refused() -> None:
    assert refused(T5, "training.sequence_length=2") == [
        "training.sequence_length: no text fills exactly 2 tokens of the encoder; use 3"
    ]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("fraction=0", "fraction: 0.0 must be greater than 0"),
        ("fraction=1.5", "fraction: 1.5 is too large; use 1 or less"),
        ("masked=-0.1", "masked: -0.1 is too small; use 0 or more"),
        ("random=2", "random: 2.0 is too large; use 1 or less"),
        ("longest=0", "longest: 0 is too small; use 1 or more"),
        ("random=0.3", "random: 0.3 and masked 0.8 are more than 1 together; lower one of them"),
        (
            "pad='[MASK]'",
            "mask: cls, sep, mask and pad are '[CLS]', '[SEP]', '[MASK]', '[MASK]'; give each of "
            "the four a token of its own",
        ),
    ],
)
def test_masking_out_of_range_is_refused(override: str, text: str) -> None:
    assert refused(BERT, f"data.masking.{override}") == [f"data.masking.{text}"]


@pytest.mark.parametrize(
    ("path", "overrides", "text"),
    [
        (
            BERT,
            ["data.packing=documents"],
            "data.packing: is a key of data.kind text and spans and chat and pairs and image-text, "
            "and this run's is masked; leave it out, or set data.kind: text",
        ),
        (
            TINY,
            ["data.masking={}"],
            "data.masking: is a key of data.kind masked, and this run's is text; leave it out, or "
            "set data.kind: masked",
        ),
        (
            TINY,
            ["data.objective=rlm"],
            "data.objective: unknown key. Use data.kind: text, masked",
        ),
        (TINY, ["data.kind=mask"], "data.kind: 'mask' is not known here. Did you mean masked?"),
        (BERT, ["evaluation.stride=8"], "evaluation.stride: 8: rows of data.kind masked do not "),
        (
            TINY,
            ["model.causal=false"],
            "model.causal: false lets tokens see those that they are to predict; leave it out, or "
            "use data.kind: masked",
        ),
        (
            TINY,
            ["data.objective=mlm"],
            "model.causal: true does not go with data.kind masked, where tokens on both sides "
            "tell of a hidden one; use causal: false, or a preset such as bert-base",
        ),
        (
            T5,
            ["data.kind=masked", "data.spans={}"],
            "data.spans: is a key of data.kind spans, and this run's is masked; leave it out, or "
            "set data.kind: spans",
        ),
        (
            BERT,
            ["training.sequence_length=4"],
            "training.sequence_length: 4 leaves no room for text beside the special tokens of "
            "data.kind masked; use 5 or more",
        ),
        (
            BERT,
            ["data.masking=null", "model.pooled_head=null", "training.sequence_length=2"],
            "training.sequence_length: 2 leaves no room for text beside the special tokens of "
            "data.kind masked; use 3 or more",
        ),
        (
            TINY,
            [
                "data.objective=mlm",
                "model.causal=false",
                f"model.mtp={{depths: 1, layer: {CAUSAL}}}",
            ],
            "model.mtp: predicts further tokens, which data.kind masked has none of; leave it out",
        ),
        (
            BERT,
            ["model.pooled_head.num_classes=3"],
            "data.masking.pairs: true needs model.pooled_head: {num_classes: 2} and "
            "model.token_types: 2",
        ),
        (
            BERT,
            ["model.pooled_head=null"],
            "data.masking.pairs: true needs model.pooled_head: {num_classes: 2} and "
            "model.token_types: 2",
        ),
        (
            BERT,
            ["data.masking.pairs=false"],
            "model.pooled_head: has no labels to learn from without data.kind: masked and "
            "data.masking: {pairs: true}; leave it out",
        ),
    ],
)
def test_what_does_not_go_with_an_objective_is_refused(
    path: Path, overrides: list[str], text: str
) -> None:
    (found,) = refused(path, *overrides)
    assert found.startswith(text)


@pytest.mark.parametrize(
    ("path", "older", "kind"),
    [
        (TINY, {"objective": "clm", "spans": None, "masking": None}, "text"),
        (BERT, {"objective": "mlm", "spans": None, "packing": "none", "split": None}, "masked"),
        (BERT, {"objective": "mlm", "masking": None, "order": "stable"}, "masked"),
        (T5, {"spans": {"density": 0.2}, "objective": "clm", "masking": None}, "spans"),
    ],
)
def test_files_from_before_there_were_kinds_mean_what_they_meant(tmp_path, path, older, kind):
    given = yaml.safe_load(path.read_text())
    given["data"].pop("kind", None)
    given["data"] |= older
    if older.get("masking", ...) is None and kind == "masked":
        given["model"].pop("pooled_head")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(given))
    config = load_config(file).config
    assert config.data.kind == kind
    saved = {**to_plain(config)["data"], **older}
    del saved["kind"]
    assert saved_data(saved) == to_plain(config)["data"]
    assert load_config(file, ["data.vocab_size=300"]).config.data.vocab_size == 300


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ("[1, 2]", "2 weights for 1 entries of data.train; give one for each"),
        ("[0]", "0.0: every weight must be greater than 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, weights: str, text: str) -> None:
    data = ["data.corpus=null", "data.train=[a]", "data.tokenizer=t.json"]
    assert f"data.weights: {text}" in refused(TINY, *data, f"data.weights={weights}")


@pytest.fixture
def documents(tmp_path: Path) -> IndexedDataset:
    with IndexedWriter(tmp_path / "one") as writer:
        writer.add_document(range(40))
    return IndexedDataset(tmp_path / "one")


def tokenizer_of(*special: str) -> Tokenizer:
    return train_tokenizer(["some words of text"], 300, special)


def masked_rows(documents: IndexedDataset, tokenizer: Tokenizer, *options: str) -> MaskedDataset:
    loaded = load_config(BERT, list(options))
    path = documents.prefix
    corpus = Corpus(tokenizer=None, train=(path,), weights=(), validation={})
    sources = sources_of(
        loaded.config, corpus, tokenizer, loaded.model(tokenizer.vocab_size), Path(path).parent
    )
    return loaded.config.data.dataset(path, sources)


def test_a_tokenizer_without_the_special_tokens_is_refused(documents: IndexedDataset) -> None:
    with pytest.raises(DataError, match=r"no special token '\[MASK\]' for mask; .* Name another"):
        masked_rows(documents, tokenizer_of("[CLS]", "[SEP]", "[PAD]", "<|endoftext|>"))


def test_pairs_of_one_document_are_refused(documents: IndexedDataset) -> None:
    with pytest.raises(DataError, match=r"pairs need at least two documents"):
        masked_rows(documents, tokenizer_of(*SPECIAL))


def test_rows_are_hidden_as_the_section_says(documents: IndexedDataset) -> None:
    options = ["data.masking={fraction: 1.0, masked: 0.0, random: 0.0}", "model.pooled_head=null"]
    config = load_config(BERT, options).config
    row = masked_rows(documents, tokenizer_of(*SPECIAL), *options).row(0)
    assert isinstance(config.data, MaskedData)
    assert (row["labels"] == row["tokens"])[row["labels"] >= 0].all()
    assert len(row["tokens"]) == config.training.sequence_length


def test_the_order_of_megatron_is_that_of_the_whole_run_and_its_part_of_a_split(tmp_path) -> None:
    with IndexedWriter(tmp_path / "ids") as writer:
        for number in range(20):
            writer.add_document(range(number, number + 30))
    data = [f"data.train=[{tmp_path / 'ids'}]", "data.corpus=null", "model.vocab_size=64"]
    options = ["data.order=megatron", "data.split=80,20", "training.sequence_length=16"]
    loaded = load_config(TINY, [*data, *options, "training.steps=9"])
    corpus = Corpus(tokenizer=None, train=(tmp_path / "ids",), weights=(), validation=None)
    sources = sources_of(loaded.config, corpus, None, loaded.model(64), tmp_path)
    (found,) = loaded.config.data.datasets(sources)
    expected = GPTDataset(
        IndexedDataset(tmp_path / "ids"),
        sequence_length=16,
        num_samples=9 * loaded.config.training.global_batch_size,
        seed=loaded.config.training.seed,
        order="megatron",
        sequences=range(16),
    )
    assert found.fingerprint == expected.fingerprint
    assert isinstance(loaded.config.data, TextData)
    held_out = loaded.config.data.held_out_tokens(sources)
    assert held_out is not None
    assert held_out.num_tokens == 4 * 30
    assert held_out.stream(29, 2).tolist() == [16 + 29, 17]


def test_the_file_of_the_page_for_users_of_megatron_loads(tmp_path) -> None:
    with IndexedWriter(tmp_path / "ids") as writer:
        writer.add_document(range(40))
    page = (EXAMPLES.parents[2] / "docs" / "from-megatron.md").read_text()
    path = tmp_path / "run.yaml"
    path.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    data = [f"data.train=[{tmp_path / 'ids'}]", "data.tokenizer=null", "model.vocab_size=64"]
    assert load_config(path, data).config.optimizer.warmup == 2000
