"""BERT's two heads compute what they do in transformers, and what is not built is refused."""

import json
import random

import pytest
import torch
import torch.distributed as dist
from family_row import ROWS, assert_same_gradients, bytes_of, oracle
from mt_context_parallel import shard
from mt_hf import ExchangeError, from_pretrained, open_pretrained, save_pretrained
from mt_model import PooledHeadConfig, gpt, preset
from mt_parallel_state import ParallelLayout, ParallelState, sharding_of
from safetensors.torch import load_file, save_file

ROW = next(row for row in ROWS if row.name == "bert")
LENGTHS = (9, 6, 12, 4)


@pytest.fixture(scope="module", params=[1, 2], ids=["tied", "untied"])
def saved(request, tmp_path_factory):
    """The folder of a model with both heads, and the model."""
    from transformers.models.bert import modeling_bert

    config_class, _ = ROW.classes()
    config = config_class(**ROW.draw(request.param, random.Random("both")))
    model = modeling_bert.BertForPreTraining(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=generator))
        ROW.prepare(model)
    folder = tmp_path_factory.mktemp("bert") / "model"
    model.save_pretrained(folder)
    return folder, model


def pairs(config):
    """Pairs of texts with padding behind them: one of each four has no label."""
    generator = torch.Generator().manual_seed(7)
    shape = len(LENGTHS), max(LENGTHS)
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    places = torch.arange(max(LENGTHS)).expand(shape)
    lengths = torch.tensor(LENGTHS)[:, None]
    mask, types = places < lengths, (places >= lengths // 2).long() % config.type_vocab_size
    labels = tokens.roll(1, 0).where(mask & (places % 3 == 1), -100)
    sequence_labels = torch.tensor([1, 0, -100, 1])
    batch = {"tokens": tokens, "token_types": types, "mask": mask, "labels": labels}
    return {**batch, "sequence_labels": sequence_labels}


def test_both_losses_and_their_gradients_are_those_of_transformers(saved):
    folder, model = saved
    batch = pairs(model.config)
    wide = oracle(ROW, model)
    with ROW.in_fp64():
        given = {"attention_mask": batch["mask"].long(), "token_type_ids": batch["token_types"]}
        found = wide(batch["tokens"], **given)
    args = {"ignore_index": -100, "reduction": "sum"}
    loss = torch.nn.functional.cross_entropy
    tokens = loss(found.prediction_logits.flatten(0, 1), batch["labels"].flatten(), **args)
    classes = loss(found.seq_relationship_logits, batch["sequence_labels"], **args)
    (tokens + 3 * classes).backward()
    ours = from_pretrained(folder, dtype=torch.float64)
    scores = ours.pooled_logits({name: batch[name] for name in ("tokens", "token_types", "mask")})
    assert (scores - found.seq_relationship_logits).abs().max() < 1e-10
    losses = ours(None, batch)
    assert losses["sequences"] == 3
    assert losses["tokens"] == (batch["labels"] != -100).sum()
    assert torch.allclose(losses["lm"], tokens, rtol=1e-10, atol=0)
    assert torch.allclose(losses["nsp"], classes, rtol=1e-10, atol=0)
    (losses["lm"] + 3 * losses["nsp"]).backward()
    assert_same_gradients(ours, wide, folder)


def test_a_folder_with_both_heads_is_written_byte_for_byte(saved, tmp_path):
    folder, model = saved
    bare = from_pretrained(folder)
    bare.origin = None
    save_pretrained(bare, tmp_path / "out", family="bert")
    assert bytes_of(tmp_path / "out") == bytes_of(folder)
    given = json.loads((tmp_path / "out/config.json").read_text())
    assert given["architectures"] == ["BertForPreTraining"]
    _, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_a_padded_vocabulary_has_a_padded_bias(saved):
    folder, model = saved
    found = open_pretrained(folder).padded(128)
    bias = torch.ones(found.shapes["head.bias"])
    found.fill("head.bias", bias)
    assert bias.shape == (128,)
    assert torch.equal(bias[: model.config.vocab_size], model.cls.predictions.decoder.bias)
    assert not bias[model.config.vocab_size :].any()


def test_a_folder_is_verified_against_transformers(saved):
    from mt_hf.commands.verification import compare

    found = compare(saved[0], length=9)
    assert found.relative < 1e-5
    assert found.same == found.positions == 9


def test_padding_in_front_moves_no_score(saved):
    """The first token of a row is pooled wherever it is."""
    folder, model = saved
    tokens = torch.arange(8).view(2, 4) % model.config.vocab_size
    ours = from_pretrained(folder, dtype=torch.float64)
    expected = ours.pooled_logits({"tokens": tokens})
    padded = torch.cat([torch.full((2, 3), 1), tokens], 1)
    mask = torch.arange(7).expand(2, 7) >= 3
    got = ours.pooled_logits({"tokens": padded, "mask": mask})
    assert (got - expected).abs().max() < 1e-12


def on_layout(folder, sizes, cut, batch, sequence_parallel):
    """This rank's losses, and the gradients that no other rank has a part of, by name."""
    state = ParallelState(ParallelLayout(**sizes))
    stage = state.index("pp")
    arguments = {"dtype": torch.float64, "state": state, "layers": cut[stage]}
    model = from_pretrained(folder, sequence_parallel=sequence_parallel, **arguments)
    for name in ("tokens", "token_types", "labels"):
        batch[name] = shard(batch[name], state.group("cp"))
    x, group = None, state.group("pp")
    if stage:
        width = model.get_parameter("head.transform.bias").numel()
        x = torch.empty(*batch["tokens"].shape, width, dtype=torch.float64)
        dist.recv(x, group=group, group_src=stage - 1)
        x.requires_grad_()
    y = model(x, batch)
    if isinstance(y, torch.Tensor):
        dist.send(y.detach().contiguous(), group=group, group_dst=stage + 1)
        grad = torch.empty_like(y)
        dist.recv(grad, group=group, group_src=stage + 1)
        y.backward(grad)
        found = {}
    else:
        (y["lm"] + 3 * y["nsp"]).backward()
        if x is not None:
            dist.send(x.grad, group=group, group_dst=stage - 1)
        found = {name: value.detach() for name, value in y.items()}
    kept = ("pooled_head.dense.weight", "pooled_head.classifier.bias", "embedding.types.weight")
    grads = {name: p.grad for name, p in model.named_parameters() if name in kept}
    for name, param in model.named_parameters():
        if name in grads and "tp" in sharding_of(param).partial_grad and state.size("tp") > 1:
            dist.all_reduce(grads[name], group=state.group("tp"))
    for value in (*found.values(), *grads.values()) if state.size("cp") > 1 else ():
        dist.all_reduce(value, group=state.group("cp"))
    return found, grads


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"),
    [({"tp": 2}, True), ({"cp": 2}, False), ({"tp": 2, "pp": 2}, False)],
    ids=["tp2", "cp2", "tp2pp2"],
)
def test_both_losses_are_the_same_on_every_layout(ranks, saved, sizes, sequence_parallel):
    """With padding in front of one row, whose first token another rank has."""
    folder, model = saved
    if model.config.num_attention_heads % 2:
        pytest.skip("three heads are not shared by two ranks")
    batch = pairs(model.config)
    batch["mask"][1] = batch["mask"][1].flip(0)
    cut = [range(1), range(1, 2)] if "pp" in sizes else [range(2)]
    world = ParallelLayout(**sizes).world_size
    expected, grads = on_layout(folder, {}, [range(2)], dict(batch), False)
    found = ranks(world, on_layout, folder, sizes, cut, batch, sequence_parallel)
    assert {name for _, each in found for name in each} == set(grads)
    for losses, each in found:
        for name, value in losses.items():
            assert torch.allclose(value, expected[name], rtol=1e-10, atol=0), name
        for name, grad in each.items():
            assert (grad - grads[name]).norm() <= 1e-9 * grads[name].norm(), name


def change(folder, out, *, architecture=None, rename=(), **fields):
    """Copy a folder with other fields, and tensors under other names."""
    given = json.loads((folder / "config.json").read_text()) | fields
    if architecture is not None:
        given["architectures"] = [architecture]
    out.mkdir()
    (out / "config.json").write_text(json.dumps(given))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for now, then in rename:
            name = name.replace(now, then)
        tensors[name] = tensor
    save_file(tensors, out / "model.safetensors")
    return out


def test_names_of_the_first_release_are_read(saved, tmp_path):
    folder, _ = saved
    rename = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    fields = {"position_embedding_type": "absolute", "gradient_checkpointing": False}
    old = change(folder, tmp_path / "old", rename=rename, **fields)
    first, second = from_pretrained(folder), from_pretrained(old)
    for name, param in first.named_parameters():
        assert torch.equal(param, second.get_parameter(name)), name


def test_published_folders_have_both_heads_whatever_they_are_named(saved, tmp_path):
    folder, _ = saved
    named = change(folder, tmp_path / "named", architecture="BertForMaskedLM")
    first, second = from_pretrained(folder), from_pretrained(named)
    assert torch.equal(*(x.get_parameter("pooled_head.dense.weight") for x in (first, second)))
    assert first.config == second.config


@pytest.mark.parametrize("pooled", [False, True])
def test_a_bert_without_heads_has_the_features_of_transformers(saved, tmp_path, pooled):
    """Sentence encoders are published so."""
    _, model = saved
    bare = type(model.bert)(model.config, add_pooling_layer=pooled).eval()
    bare.load_state_dict(model.bert.state_dict(), strict=False)
    bare.save_pretrained(tmp_path / "bare")
    batch = pairs(model.config)
    given = {"attention_mask": batch["mask"].long(), "token_type_ids": batch["token_types"]}
    with torch.no_grad():
        expected = bare(batch["tokens"], **given).last_hidden_state
    ours = from_pretrained(tmp_path / "bare")
    found = ours.final_features({name: batch[name] for name in ("tokens", "token_types", "mask")})
    assert (found - expected)[batch["mask"]].abs().max() <= 1e-5 * expected.abs().max()
    save_pretrained(ours, tmp_path / "out")
    written, stored = (load_file(tmp_path / x / "model.safetensors") for x in ("out", "bare"))
    assert written.keys() == {name for name in stored if not name.startswith("pooler.")}
    assert all(torch.equal(written[name], stored[name]) for name in written)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoder": True}, "is_decoder"),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type: 'relative_key' is not built",
        ),
        ({"num_attention_heads": 7}, "hidden_size: .* not a multiple of num_attention_heads=7"),
    ],
)
def test_what_is_not_built_is_refused_with_a_way_out(saved, tmp_path, changes, message):
    folder, _ = saved
    with pytest.raises(ExchangeError, match=message):
        from_pretrained(change(folder, tmp_path / "other", **changes))


def small(**rest):
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "causal": False}
    return gpt(**sizes, **rest).build()


def test_labels_of_sequences_need_a_head_and_whole_rows():
    tokens = torch.arange(8).view(2, 4)
    batch = {"tokens": tokens, "labels": tokens, "sequence_labels": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match="without a pooled_head"):
        small()(None, batch)
    with pytest.raises(ValueError, match="no pooled_head"):
        small().pooled_logits({"tokens": tokens})
    model = small(pooled_head={"num_classes": 2})
    with pytest.raises(ValueError, match="documents packs several"):
        model(None, {**batch, "documents": tokens // 4})
    with pytest.raises(ValueError, match=r"sequence_labels must be \(2,\)"):
        model(None, {**batch, "sequence_labels": tokens})
    del batch["sequence_labels"]
    losses = model(None, batch)
    assert losses["nsp"] == losses["sequences"] == 0
    losses["nsp"].backward()
    assert not model.get_parameter("pooled_head.dense.weight").grad.any()


def test_attention_both_ways_generates_nothing():
    with pytest.raises(NotImplementedError, match="can't generate"):
        small().new_cache(batch_size=1, max_length=4)


def test_a_pooled_head_is_in_the_config_and_its_counts():
    config = preset("bert-base", pooled_head={"num_classes": 2})
    assert config == preset("bert-base", pooled_head=PooledHeadConfig())
    assert config.from_dict(config.to_dict()) == config
    assert config.num_parameters == 110_106_428
    assert config.loss_weights == {"lm": 1.0, "nsp": 1.0}
    assert config.loss_counts == {"lm": "tokens", "nsp": "sequences"}
    assert "pooled classes [2]" in str(config)
    whole = config.flops_per_token(512) - preset("bert-base").flops_per_token(512)
    assert whole == 6 * 768 * 770 // 512
