"""What an encoder and a decoder have beside other families: pairs, two streams, two lengths."""

import copy
import json
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from itertools import combinations, pairwise

import pytest
import torch
from family_row import ENCODER_DRAWS, WITH_ENCODER, assert_same_gradients, bytes_of
from mt_hf import (
    ExchangeError,
    export_checkpoint,
    from_pretrained,
    import_pretrained,
    save_pretrained,
)
from mt_hf.commands.cli import main
from mt_model import GPT, ModelConfig
from packed_pairs import TARGETS, packed, pairs_of
from safetensors.torch import load_file, save_file

NEW_TOKENS = 64
FIRST = [pytest.param(row, id=row.name) for row in WITH_ENCODER]
T5 = next(row for row in WITH_ENCODER if row.name == "t5")


@pytest.mark.parametrize(("row", "index"), ENCODER_DRAWS)
def test_packed_pairs_are_those_of_transformers_one_by_one(saved, row, index):
    folder, model = saved(row, index)
    batch = packed(row, model.config, rows=2)
    given = {name: x for name, x in batch.items() if name != "labels"}
    arguments = {"ignore_index": -100, "reduction": "sum"}
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        one = copy.deepcopy(model).to(dtype)
        with row.in_fp64() if dtype == torch.float64 else nullcontext():
            logits = [row.logits(one, pair) for pair in pairs_of(batch)]
        expected = torch.cat(logits, 1)
        ours = from_pretrained(folder, dtype=dtype)
        tokens = ours._with_tokens(batch)["tokens"]
        found = ours(None, {**given, "tokens": tokens})
        assert torch.isfinite(found).all()
        assert (found[:, : sum(TARGETS)] - expected).abs().max() < bound
    labels = batch["labels"][:, : sum(TARGETS)]
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), **arguments)
    loss.backward()
    losses = ours(None, batch)
    losses["lm"].backward()
    assert losses["tokens"] == 2 * sum(TARGETS)
    assert torch.allclose(losses["lm"], loss, rtol=1e-10, atol=0)
    assert_same_gradients(ours, one, folder)


def greedy(model, tokens, mask, *, cached):
    """The decoder's tokens from the start on, of several prompts at once."""
    cache = model.new_cache(batch_size=len(tokens), max_length=NEW_TOKENS + 1)
    found = tokens.new_full((len(tokens), 1), model.config.decoder_start)
    memory = {"encoder_tokens": tokens, "encoder_mask": mask}
    for step in range(NEW_TOKENS):
        if cached:
            logits = model.logits(found[:, -1:], cache=cache, **({} if step else memory))
        else:
            logits = model.logits(found, **memory)
        found = torch.cat((found, logits[:, -1:].argmax(-1)), 1)
    return found


@pytest.mark.parametrize("row", FIRST)
def test_greedy_generation_is_that_of_transformers(saved, row):
    folder, model = saved(row, 1)
    batch = row.padded(model.config)
    tokens, mask = batch["encoder_tokens"], batch["encoder_mask"]
    wide = copy.deepcopy(model).double()
    with row.in_fp64():
        expected = wide.generate(
            tokens,
            attention_mask=mask.long(),
            decoder_start_token_id=model.config.decoder_start_token_id,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
    ours = from_pretrained(folder, dtype=torch.float64)
    assert ours.config.decoder_start == model.config.decoder_start_token_id
    assert torch.equal(greedy(ours, tokens, mask, cached=True), expected)
    assert torch.equal(greedy(ours, tokens, mask, cached=False), expected)


def test_a_run_folder_rebuilds_it_and_the_command_verifies_it(saved, tmp_path, monkeypatch, capsys):
    folder, _ = saved(T5, 1)
    config = import_pretrained(folder, tmp_path / "run")
    assert config.vocab_rows > config.vocab_size
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(folder)
    assert (tmp_path / "out/config.json").read_bytes() == (folder / "config.json").read_bytes()
    monkeypatch.setattr(sys, "argv", ["mt-hf", "verify", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert "they agree" in capsys.readouterr().out


def stored_with(folder, out, *, config=None, **tensors):
    """A copy of a folder with further tensors, and other fields of its config.json."""
    shutil.copytree(folder, out)
    path = out / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    fields = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**fields, **(config or {})}))
    return out


def test_copies_of_the_embedding_may_be_stored(saved, tmp_path):
    folder, model = saved(T5, 0)
    tokens, others = T5.batch(model.config).values()
    expected = from_pretrained(folder)(tokens, others)
    shared = model.shared.weight.detach()
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    copies = {name: shared.clone() for name in names}
    found = from_pretrained(stored_with(folder, tmp_path / "copies", **copies))
    assert found.config.tied
    assert torch.equal(found(tokens, others), expected)
    copies["encoder.embed_tokens.weight"][3] += 1
    with pytest.raises(ExchangeError, match=r"encoder.embed_tokens.weight differs from shared.wei"):
        from_pretrained(stored_with(folder, tmp_path / "differs", **copies))


@pytest.mark.parametrize("names_scale", [False, True])
def test_a_head_of_its_own_is_known_by_its_tensor(saved, tmp_path, names_scale):
    """Before transformers 5 `tie_word_embeddings` said it, and since then it is always true."""
    folder, model = saved(T5, 1)
    fields = {"tie_word_embeddings": names_scale, "scale_decoder_outputs": False}
    given = stored_with(folder, tmp_path / "given", config=fields)
    if not names_scale:
        plain = json.loads((given / "config.json").read_text())
        del plain["scale_decoder_outputs"]
        (given / "config.json").write_text(json.dumps(plain))
    tokens, others = T5.batch(model.config).values()
    found = from_pretrained(given)
    assert not found.config.tied
    expected = model(input_ids=tokens, decoder_input_ids=others).logits
    assert (found(tokens, others) - expected).abs().max() < 1e-5


def test_what_two_families_have_is_written_as_a_t5_unless_one_is_named(saved, tmp_path):
    folder, _ = saved(next(row for row in WITH_ENCODER if row.name == "mt5"), 1)
    model = from_pretrained(folder)
    model.origin = None
    for named, expected in ((None, "T5"), ("mt5", "MT5")):
        save_pretrained(model, tmp_path / expected, family=named)
        fields = json.loads((tmp_path / expected / "config.json").read_text())
        assert fields["architectures"] == [f"{expected}ForConditionalGeneration"]
        assert bytes_of(tmp_path / expected) == bytes_of(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj: 'gated-tanh' is not known"),
        ({"feed_forward_proj": "twice-relu"}, "feed_forward_proj: 'twice-relu' is not known"),
        ({"dense_act_fn": "silu"}, "dense_act_fn: 'silu', but feed_forward_proj says relu"),
        ({"is_gated_act": True}, "is_gated_act: True, but feed_forward_proj is relu"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder: false: an encoder alone is not built"),
        ({"num_decoder_layers": 0}, "num_decoder_layers: 0 is too small"),
        ({"rope_theta": 1.0}, "rope_theta: 1.0: transformers reads this field"),
        (
            {"architectures": ["T5EncoderModel"]},
            "T5EncoderModel of the family t5 is not built: it has neither a decoder nor a head; "
            "read the T5ForConditionalGeneration that it was made of",
        ),
    ],
)
def test_what_is_not_built_is_refused(saved, tmp_path, fields, message):
    folder, _ = saved(T5, 0)
    given = stored_with(folder, tmp_path / "given", config=fields)
    with pytest.raises(ExchangeError, match=message):
        from_pretrained(given)


def small(**changes):
    folder_of = {"type": "relative", "buckets": 8, "max_distance": 20}
    own = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 4}
    encoder = {**own, "causal": False, "score_bias": {**folder_of, "bidirectional": True}}
    encoder["score_bias"]["table"] = "encoder"
    layers = [
        {"mixer": encoder, "feed_forward": {"ffn_size": 12}, "repeat": 2},
        {"mixer": {**own, "score_bias": folder_of}},
        {"mixer": {"type": "crossattention", **own}, "feed_forward": {"ffn_size": 12}},
    ]
    whole = {"vocab_size": 24, "hidden_size": 8, "max_sequence_length": 16, "positions": "none"}
    return ModelConfig.from_dict({**whole, "layers": layers, "encoder_layers": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_layers": 4}, "encoder_layers: 4 of 4 layers; the decoder has the others"),
        ({"encoder_layers": 3, "layers": None}, "encoder_layers: 3, but no layer behind them att"),
        ({"decoder_start": 24}, "decoder_start: 24 is no token; there are 24"),
        ({"encoder_layers": -1}, "encoder_layers: -1 is too small"),
    ],
)
def test_a_config_whose_parts_do_not_fit_is_refused(changes, message):
    if "layers" in changes:
        changes = {**changes, "layers": small().to_dict()["layers"][:1] * 2}
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_an_encoder_that_would_attend_to_itself_is_refused():
    layers = small().to_dict()["layers"]
    layers = [layers[2], *layers[:2], layers[2]]
    message = "encoder_layers: 2, but layer 0 attends to what the encoder gives; use 0 or less"
    with pytest.raises(ValueError, match=message):
        small(layers=layers)


def through(stages, batch):
    """Return the loss and gradients of stages run in turn, in parts or at once."""
    sent, received = [], [None]
    for number, (stage, parted) in enumerate(stages):
        y = received[-1]
        if parted:
            for part in stage.parts(batch):
                y = part(y)
        else:
            y = stage(y, batch)
        sent.append(y)
        if number < len(stages) - 1:
            received.append(y.detach().requires_grad_())
    sent[-1]["lm"].backward()
    for y, x in zip(sent[-2::-1], received[:0:-1], strict=True):
        y.backward(x.grad)
    grads = {}
    for stage, _ in stages:
        for name, param in stage.named_parameters():
            grads[name] = grads.get(name, 0) + param.grad
    return sent[-1]["lm"].detach(), grads


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("cuts", [(0, 1, 4), (0, 2, 4), (0, 3, 4), (0, 1, 2, 3, 4)])
def test_a_cut_anywhere_changes_no_number(cuts, parted):
    """Within the encoder, at its end and within the decoder; with packed pairs in a row."""
    config = small(dropout=0.2)
    tokens = torch.randint(0, 24, (2, 14), generator=torch.Generator().manual_seed(0))
    batch = {"encoder_tokens": tokens[:, :9], "labels": tokens[:, 9:]}
    batch["encoder_documents"] = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    batch["documents"] = torch.tensor([[0] * 2 + [1] * 3, [0] * 5])
    batch["sample_ids"] = torch.tensor([4, 9])
    whole = config.build(dtype=torch.float64)
    expected, grads = through([(whole, False)], batch)
    stages = [config.build(dtype=torch.float64, layers=range(*pair)) for pair in pairwise(cuts)]
    found, own = through([(stage, parted) for stage in stages], batch)
    assert torch.allclose(found, expected, rtol=1e-12, atol=0)
    assert own.keys() == grads.keys()
    for name, grad in grads.items():
        assert (own[name] - grad).norm() <= 1e-10 * grad.norm(), name


@pytest.mark.parametrize("positions", ["none", "learned"])
def test_no_number_of_a_packed_pair_depends_on_the_others(positions):
    """Not its losses nor its gradients: of the whole row they are the sums over its pairs."""
    generator = torch.Generator().manual_seed(1)
    sources, targets = torch.tensor([3, 1, 6]), torch.tensor([1, 4, 2])
    numbers = torch.arange(3)
    draw = partial(torch.randint, 0, 24, generator=generator)
    given = {"encoder_tokens": draw((1, 10)), "labels": draw((1, 7))}
    places = {
        "encoder_documents": torch.repeat_interleave(numbers, sources)[None],
        "documents": torch.repeat_interleave(numbers, targets)[None],
        "encoder_positions": torch.cat([torch.arange(n) for n in sources])[None],
        "positions": torch.cat([torch.arange(n) for n in targets])[None],
    }
    models = [small(positions=positions).build(dtype=torch.float64) for _ in range(2)]
    models[0](None, {**given, **places})["lm"].backward()
    split = (
        given["encoder_tokens"].split(sources.tolist(), 1),
        given["labels"].split((1, 4, 2), 1),
    )
    for source, target in zip(*split, strict=True):
        models[1](None, {"encoder_tokens": source, "labels": target})["lm"].backward()
    for (name, found), expected in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert expected.grad.norm() > 0
        assert (found.grad - expected.grad).norm() <= 1e-11 * expected.grad.norm(), name


def test_a_target_without_an_input_learns_of_no_other_pair():
    model = small().build(dtype=torch.float64)
    numbers = {"encoder_documents": torch.tensor([[0, 0, 0]]), "documents": torch.tensor([[0, 1]])}
    found = []
    for tokens in (TOKENS[:1], TOKENS[1:]):
        given = {"encoder_tokens": tokens, "tokens": TOKENS[:1, :2]}
        found.append(model(None, {**given, **numbers}))
    assert not torch.equal(found[0][:, 0], found[1][:, 0])
    assert torch.equal(found[0][:, 1], found[1][:, 1])


def test_the_two_sequences_of_a_sample_are_dropped_apart():
    """Also where they are equal; and another sample is dropped differently."""
    model = small(dropout=0.5).build(layers=range(1))
    tokens = torch.full((2, 6), 3)
    batch = {"encoder_tokens": tokens, "tokens": tokens, "sample_ids": torch.tensor([0, 1])}
    x, _ = model.begin(None, batch)
    parts = [part == 0 for row in x for part in row.split(6)]
    assert all(not torch.equal(a, b) for a, b in combinations(parts, 2))


def test_generation_is_refused_what_it_can_not_serve():
    model = small().build()
    cache = model.new_cache(batch_size=2, max_length=6)
    with pytest.raises(ValueError, match=r"every stage needs batch\['encoder_tokens'\]"):
        model.logits(TOKENS, cache=cache)
    model.logits(TOKENS, cache=cache, encoder_tokens=TOKENS)
    with pytest.raises(ValueError, match="the cache holds what the encoder gave; leave encoder_t"):
        model.logits(TOKENS, cache=cache, encoder_tokens=TOKENS)
    with pytest.raises(ValueError, match="encoder_layers=2 is no model of GPT; build it by config"):
        GPT(small())


TOKENS = torch.arange(6).view(2, 3)
BOTH = {"documents": TOKENS, "encoder_documents": TOKENS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_tokens": None}, r"every stage needs batch\['encoder_tokens'\]"),
        ({"encoder_tokens": TOKENS[:1]}, r"encoder_tokens must be \[2, E\]"),
        ({"encoder_mask": TOKENS[:1] > 0}, r"encoder_mask must be \[2, E\]"),
        ({"encoder_mask": TOKENS[:, :2] > 0}, r"encoder_mask must be \[B, 3\]"),
        ({"encoder_mask": TOKENS}, "encoder_mask must be a tensor of bool"),
        ({"encoder_tokens": TOKENS / 2}, "encoder_tokens must be a tensor of integers"),
        ({"documents": TOKENS}, "documents and encoder_documents go together"),
        ({**BOTH, "encoder_documents": TOKENS[:, :2]}, r"encoder_documents must be \[B, 3\]"),
        ({**BOTH, "documents": TOKENS[:, :2]}, r"documents must be \[B, 3\]"),
        ({"encoder_positions": TOKENS[:, :2]}, r"encoder_positions must be \(2, 3\) here"),
        ({"encoder_positions": TOKENS > 0}, "encoder_positions must be a tensor of integers"),
        ({"tokens": None}, r"needs batch\['tokens'\]"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(changes, message):
    model = small().build()
    with pytest.raises((TypeError, ValueError), match=message):
        model(None, {"tokens": TOKENS, "encoder_tokens": TOKENS, **changes})
