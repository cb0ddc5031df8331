"""Fill in the middle: both forms, changes of nothing but the order, and refusals."""

import numpy as np
import pytest
from mt_data import (
    BatchSampler,
    DataError,
    Document,
    FillInMiddle,
    FillInMiddleDataset,
    GPTDataset,
    IndexedDataset,
    Rows,
    build_corpus,
)
from mt_tokenizer import Tokenizer, train_tokenizer

NAMES = ("<|eod|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
END, PRE, SUF, MID = NAMES
TEXTS = [f"def f{n}(x):\n    return x + {n * n}  # \u00e9\u65e5\u672c {n}\n" * 3 for n in range(30)]
HEAD = "  # \u00e9\u65e5\u672c 1\ndef f1(x):\n    "
GOLDEN = {
    "psm": f"{PRE}{HEAD}{SUF}urn x +{MID}return x + 1{HEAD}ret{END}{PRE}10(x):\n{SUF}{MID}   ",
    "spm": f"{PRE}{SUF}urn x +{MID}{HEAD}return x + 1{HEAD}ret{END}{PRE}{SUF}{MID}10(x):\n   ",
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300, NAMES)


@pytest.fixture(scope="module")
def indexed(tokenizer, tmp_path_factory):
    prefix = tmp_path_factory.mktemp("corpus") / "c"
    documents = [Document(text=text, path=str(n)) for n, text in enumerate(TEXTS)]
    build_corpus(documents, prefix, tokenizer)
    return IndexedDataset(prefix)


def rows_of(indexed, tokenizer, sequence_length=48, seed=3, **fill):
    fill = FillInMiddle(**{"rate": 1.0, **fill})
    how = {"sequence_length": sequence_length, "seed": seed}
    return FillInMiddleDataset(indexed, tokenizer=tokenizer, fill=fill, **how)


def texts_of(tokens, documents):
    """Return the parts of a row, one for each document."""
    return np.split(tokens, np.flatnonzero(np.diff(documents)) + 1)


@pytest.mark.parametrize("form", ["psm", "spm"])
def test_forms_are_held(indexed, tokenizer, form):
    """A change of these texts changes the rows of every run."""
    rows = rows_of(indexed, tokenizer, spm_rate=float(form == "spm"))
    assert tokenizer.decode(rows.sample(0)) == GOLDEN[form]


@pytest.mark.parametrize("length", [48, 200])
def test_pieces_are_those_of_the_text_in_another_order(indexed, tokenizer, length):
    plain = GPTDataset(indexed, sequence_length=length, seed=3)
    rows = rows_of(indexed, tokenizer, length)
    forms = []
    for index in range(2 * plain.samples_per_epoch):
        before, after = plain.sample(index), rows.sample(index)
        documents = rows.sample_documents(index)
        assert len(before) == len(after) == length + 1
        pairs = zip(texts_of(before, documents), texts_of(after, documents), strict=True)
        for old, new in pairs:
            assert (old[-1] == tokenizer.eod_id) == (new[-1] == tokenizer.eod_id)
            if (old == new).all():
                forms += ["plain"] * (len(old) > 20)  # a shorter one may have no room
                continue
            marks = [np.flatnonzero(new == tokenizer.special_tokens[name]) for name in NAMES[1:]]
            ((begin,), (gap,), (fill,)) = marks
            assert begin == 0
            prefix, suffix, middle = (
                tokenizer.decode_bytes(each) for each in np.split(new, [gap, fill])
            )
            whole = middle + suffix if gap == 1 else prefix + middle + suffix
            forms.append("spm" if gap == 1 else "psm")
            # What a row cuts of a character is left out, and a few tokens make room.
            assert whole in tokenizer.decode_bytes(old)
            assert len(tokenizer.encode(whole.decode("utf-8", "ignore"))) >= len(old) - 12
    assert {"psm", "spm"} <= set(forms)
    assert forms.count("plain") < 0.05 * len(forms)


def test_a_share_of_the_texts_is_cut(indexed, tokenizer):
    plain = GPTDataset(indexed, sequence_length=200, seed=3)
    some = rows_of(indexed, tokenizer, 200, rate=0.4, spm_rate=0.25)
    none = rows_of(indexed, tokenizer, 200, rate=1e-9)
    texts = [tokenizer.decode(some.sample(n)) for n in range(60 * plain.samples_per_epoch)]
    count = sum(len(set(plain.sample_documents(n))) for n in range(len(texts)))
    cut, spm = (sum(text.count(name) for text in texts) for name in (PRE, PRE + SUF))
    assert cut / count == pytest.approx(0.4, abs=0.03)
    assert spm / cut == pytest.approx(0.25, abs=0.04)
    for index in range(3):
        assert none.sample(index).tolist() == plain.sample(index).tolist()


def test_a_row_depends_on_its_number_alone(indexed, tokenizer):
    rows, other = rows_of(indexed, tokenizer), rows_of(indexed, tokenizer)
    count = 2 * rows.samples_per_epoch
    found = [rows.sample(n) for n in range(count)]
    for index in reversed(range(count)):
        assert other.sample(index).tolist() == found[index].tolist()
    assert rows_of(indexed, tokenizer, seed=4).sample(0).tolist() != found[0].tolist()
    # The same texts again in the next epoch, cut elsewhere.
    epochs = found[: count // 2], found[count // 2 :]
    assert len({row.tobytes() for row in found}) == count
    assert [len(each) for each in epochs] == [count // 2] * 2


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_ranks_have_their_parts_of_the_same_rows(indexed, tokenizer, packing):
    rows = rows_of(indexed, tokenizer)
    how = {"global_batch_size": 4, "micro_batch_size": 2, "vocab_size": tokenizer.vocab_size}
    (whole, second) = BatchSampler(rows, **how).with_rows(Rows(packing=packing)).step(1)
    for rank, parts in enumerate((((0, 12), (36, 48)), ((12, 36),))):
        sampler = BatchSampler(rows, **how).with_rows(Rows(packing=packing, parts=parts))
        (mine, _) = sampler.step(1)
        own = np.concatenate([np.arange(*part) for part in parts])
        for name in ("tokens", "labels", *(["positions"] if packing == "documents" else [])):
            assert mine[name].tolist() == whole[name][:, own].tolist(), (name, rank)
    (of_rank,) = (
        BatchSampler(rows, **how, dp_rank=1, dp_size=2).with_rows(Rows(packing=packing)).step(1)
    )
    assert of_rank["tokens"].tolist() == second["tokens"].tolist()
    (middle, _) = (
        BatchSampler(rows, **how).with_rows(Rows(packing=packing, stages=("middle",))).step(1)
    )
    assert ((middle["labels"] >= 0) == (whole["labels"] >= 0)).all()


def test_what_it_needs_is_named(indexed, tokenizer):
    import tokenizers

    with pytest.raises(DataError, match=r"no special token '<\|fim_hole\|>' for middle"):
        rows_of(indexed, tokenizer, middle="<|fim_hole|>")
    with pytest.raises(ValueError, match=r"rate: 1.5 is too large"):
        FillInMiddle(rate=1.5)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.add_special_tokens(list(NAMES))
    with pytest.raises(DataError, match="needs a byte-level tokenizer"):
        rows_of(indexed, Tokenizer(words))
