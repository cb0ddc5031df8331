"""An encoder and a decoder that restore spans cut out of texts: the same on every layout."""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
import pytest
from mt_hf import export_checkpoint
from mt_hf.commands.verification import compare

HEADS = "num_heads: 4, num_kv_heads: 4, head_dim: 6, scale: 1.0, dropout: 0.1"
BOTH = "score_bias: {type: relative, bidirectional: true, table: encoder}, causal: false"
MLP = "feed_forward: {ffn_size: 48, activation: relu, gated: false, dropout: 0.1}"
PAIR = (
    f"{{mixer: {{{HEADS}, score_bias: {{type: relative, table: decoder}}}}}}, "
    f"{{mixer: {{type: crossattention, {HEADS}}}, {MLP}}}"
)
MODEL = [
    *(f"model.{name}=null" for name in ("num_layers", "num_heads", "num_kv_heads", "ffn_size")),
    "model.qk_norm=null",
    f"model.layers=[{{repeat: 2, mixer: {{{HEADS}, {BOTH}}}, {MLP}}}, {PAIR}, {PAIR}]",
    "model.encoder_layers=2",
    "model.positions=none",
    "model.logit_scale=0.1767766952966369",
    "model.dropout=0.1",
    "data.spans={}",
    "training.steps=4",
    "optimizer.warmup=2",
]
SP = "parallel.sequence_parallel=true"
ROWS = {
    "tp2-pp2-sp": (4, ["parallel.tp=2", "parallel.pp=2", SP, "training.micro_batch_size=4"]),
    "cp2": (2, ["parallel.cp=2", "training.recompute=full"]),
    "full-dp2": (2, ["data_parallel.strategy=full", "training.micro_batch_size=2"]),
    "pp2-zero-bubble": (
        2,
        ["parallel.pp=2", "pipeline.schedule=zb-h1", "training.micro_batch_size=2"],
    ),
    "pp3": (3, ["parallel.pp=3", "training.micro_batch_size=2"]),
    "tp4": (4, ["parallel.tp=4"]),
    "tp2-cp2-sp": (4, ["parallel.tp=2", "parallel.cp=2", SP]),
    "cp2-pp2": (4, ["parallel.cp=2", "parallel.pp=2", "training.micro_batch_size=4"]),
}
IN_CI = {("tp2-pp2-sp", "documents"), ("cp2", "none")}


@pytest.fixture(scope="module")
def whole(tiny, short, tmp_path_factory):
    """One process, by the packing, and what the others take of the data."""
    sources = [f"data.train=[{short}/a]", f"data.validation={short}/held"]
    data = {"none": [], "documents": ["data.packing=documents", *sources]}

    @cache
    def run(packing):
        options = ["training.dtype=fp64", *data[packing]]
        return tiny.train(tmp_path_factory.mktemp("whole"), *MODEL, *options), options

    return run


@pytest.mark.parametrize(
    ("row", "packing"),
    [
        pytest.param(row, packing, marks=() if (row, packing) in IN_CI else pytest.mark.campaign)
        for row in ROWS
        for packing in ("none", "documents")
    ],
)
def test_it_trains_like_one_process(
    row, packing, whole, tiny, tmp_path, losses, held_out, arrays
) -> None:
    (nproc, options), (expected, data) = ROWS[row], whole(packing)
    run = tiny.train(tmp_path, *MODEL, *data, *options, nproc=nproc)
    ours, theirs = losses(run), losses(expected)
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-10)
    np.testing.assert_allclose(held_out(run), held_out(expected), rtol=1e-9)
    parameters, wanted = arrays(run, step=4), arrays(expected, step=4)
    assert parameters.keys() == wanted.keys()
    assert {"model/encoder_norm.weight", "model/score_tables.encoder.weight"} < wanted.keys()
    for name, value in parameters.items():
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row == "cp2-pp2" else pytest.mark.campaign) for row in ROWS],
)
def test_a_packed_pair_has_the_loss_it_has_alone(row, tiny, short, tmp_path, losses) -> None:
    """The loss of a step on a layout, with learned positions, is the mean over unpacked pairs."""
    import torch
    from mt_data import IndexedDataset, SpanDataset, SpanVocabulary
    from mt_tokenizer import load_tokenizer
    from mt_train import load_config

    model = [option.replace("dropout: 0.1", "dropout: 0.0") for option in MODEL]
    still = ["optimizer.lr=1e-30", "optimizer.warmup=0", "training.dtype=fp64"]
    options = [*model, "model.dropout=0.0", "model.positions=learned", *still]
    options += ["data.packing=documents", f"data.train=[{short}/a]", "data.validation=null"]
    nproc, layout = ROWS[row]
    run = tiny.train(tmp_path, *options, "training.steps=1", *layout, nproc=nproc)
    tokenizer = load_tokenizer(tiny.config.parent / "data" / "tokenizer.json")
    config = load_config(tiny.config, options).model(tokenizer.vocab_size)
    alone = config.build(dtype=torch.float64, seed=1234).eval()
    vocabulary = SpanVocabulary(sentinel=tokenizer.vocab_size + 99, eod=tokenizer.eod_id)
    source = IndexedDataset(short / "a")
    data = SpanDataset(
        source, sequence_length=32, vocabulary=vocabulary, packing="documents", seed=1234
    )
    total = tokens = pairs = 0
    for number in range(8):
        found = {name: torch.from_numpy(x) for name, x in data.row(number).items()}
        for pair in range(int(found["documents"].max()) + 1):
            read = found["encoder_tokens"][found["encoder_documents"] == pair]
            written = found["labels"][found["documents"] == pair]
            total += alone(read[None], labels=written[None])["lm"].item()
            tokens, pairs = tokens + len(written), pairs + 1
    assert pairs > 12
    assert losses(run)[1] == pytest.approx(total / tokens, rel=1e-10)


def test_what_it_learnt_is_generated_from_and_exported(whole, tiny, tmp_path, cli) -> None:
    whole, _ = whole("none")
    infer = [sys.executable, "-m", "mt_infer", "generate", whole, "--prompt", "def "]
    done = cli(*infer, "--greedy", "--max-tokens", 4)
    assert done.returncode == 0, done.stderr
    export_checkpoint(whole, tmp_path / "t5", family="t5")
    found = compare(tmp_path / "t5", length=12)
    assert found.relative < 1e-5
    assert found.same == found.positions
