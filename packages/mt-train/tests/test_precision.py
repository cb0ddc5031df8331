"""The section `precision`: refusals with a fix, printed lines, and settings without effect."""

from __future__ import annotations

import json

import pytest
from mt_train import ConfigError, load_config
from mt_train.parts.precision import LowPrecision
from mt_train.training.trainer import NonFiniteLossError

SIZES = ["model.hidden_size=64", "model.num_heads=2", "model.ffn_size=64", "model.num_layers=3"]
SIZES += ["training.sequence_length=32", "training.steps=2"]


def losses(out) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        (["recipe=fp8"], "precision.recipe", "tensorwise"),
        (["keep_first=1"], "precision.keep_first", "1 needs precision.recipe, which is null"),
        (["keep=[a]"], "precision.keep", "needs precision.recipe, which is null; name a recipe"),
        (
            ["recipe=mxfp8", "history=4"],
            "precision.history",
            "4 is for precision.recipe delayed, which is mxfp8; leave it out, or use delayed",
        ),
        (["recipe=delayed", "history=0"], "precision.history", "1"),
        (["recipe=delayed", "margin=-1"], "precision.margin", "0"),
        (["recipe=delayed", "largest=least"], "precision.largest", "most_recent"),
        (["recipe=mxfp8", "keep_last=-1"], "precision.keep_last", "0"),
        (["primary_weights=true"], "precision.primary_weights", "needs precision.recipe, which is"),
        (
            ["recipe=mxfp8", "primary_weights=true"],
            "precision.primary_weights",
            "true does not go with recipe mxfp8, whose weights are quantised along rows and "
            "columns apart, or in pairs: each needs the values; use tensorwise, delayed or "
            "blockwise",
        ),
    ],
)
def test_what_a_section_can_not_mean_is_refused(given, field, words, tiny) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tiny.config, [f"precision.{item}" for item in given])
    (problem,) = caught.value.problems
    assert f"{field}: " in str(problem)
    assert words in str(problem)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("training.compile=true", "use compile: false, or no recipe"),
        ("training.cuda_graphs=layer", "use no recipe, or cuda_graphs: none"),
    ],
)
def test_a_recipe_does_not_go_with_graphs(other, words, tiny) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(tiny.config, ["precision.recipe=mxfp8", other])
    assert "does not go with precision.recipe mxfp8" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["precision.recipe=mxfp8", "precision.keep=[layers.*.mixer.qvk]"],
            r"precision.keep\[0\]: 'layers.\*.mixer.qvk' is the name of no linear layer of a "
            "block. Did you mean",
        ),
        (
            ["precision.recipe=mxfp8", "precision.keep_first=2", "precision.keep_last=1"],
            "keep, keep_first and keep_last leave all 12 as they are; keep fewer",
        ),
        (
            ["precision.recipe=mxfp8", "training.sequence_length=48"],
            "training.sequence_length: 48 is no multiple of 32: precision.recipe mxfp8 has blocks "
            "of 32 tokens, of which each of 1 parts has whole ones; use",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_a_step(given, words, tiny, tmp_path) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny.run(tmp_path / "run", *SIZES, *given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["precision.recipe=blockwise"],
            "blockwise has blocks of 128, and layers.0.feed_forward.down has 32 inputs in a row "
            "on each tensor-parallel rank and 11 more; use other sizes or fewer ranks, another "
            r"recipe, or precision.keep \[layers.\*.feed_forward.down",
        ),
        (
            # A rank has 128 of both parts together, and a block of them would reach over two.
            ["precision.recipe=blockwise", "model.ffn_size=128"],
            r"precision.keep \[layers.\*.feed_forward.down, layers.\*.feed_forward.up",
        ),
        (
            ["precision.recipe=mxfp8", "model.ffn_size=32"],
            "layers.0.feed_forward.down has 16 inputs in a row on each tensor-parallel rank and 5 ",
        ),
    ],
)
def test_parts_of_ranks_that_are_no_whole_blocks_are_refused(given, words, tiny) -> None:
    sizes = [*SIZES, "parallel.tp=2", "training.sequence_length=256"]
    loaded = load_config(tiny.config, [*sizes, *given])
    with pytest.raises(ConfigError, match=words):
        LowPrecision.check(loaded, loaded.model(300), None)


def test_one_rank_may_have_any_sizes(tiny, tmp_path) -> None:
    sizes = ["model.hidden_size=24", "model.ffn_size=40", "training.sequence_length=128"]
    for recipe in ("blockwise", "mxfp8", "nvfp4"):
        out = tmp_path / recipe
        tiny.run(out, *sizes, "training.steps=2", f"precision.recipe={recipe}")
        assert len(losses(out)) == 2


def test_layers_are_kept_by_place_and_by_name_and_it_is_said_once(tiny, tmp_path, capsys) -> None:
    keep = ["precision.keep=[layers.*.mixer.out]", "precision.keep_first=1"]
    tiny.run(tmp_path / "run", *SIZES, "precision.recipe=mxfp8", *keep)
    said = capsys.readouterr().out
    assert said.count("precision mxfp8: 6 linear layers") == 1
    kept = "precision: as training.dtype layers.0.mixer.qkv, layers.0.mixer.out, "
    assert " ".join(said.split()).count(kept) == 1


def test_what_bf16_weights_lack_is_nothing_where_there_are_none(tiny) -> None:
    given = ["precision.recipe=blockwise", "precision.primary_weights=true", "training.dtype=bf16"]
    with pytest.raises(ConfigError, match="primary_weights has none of those; use masters full"):
        load_config(tiny.config, [*given, "optimizer.masters=remainder"])


def test_primary_weights_are_gathered_in_bytes_and_nothing_else_is_held(tiny, tmp_path) -> None:
    from mt_train.training.trainer import Trainer

    held: list[tuple[int, int]] = []
    inner = Trainer.train_step

    def step(self, **options):
        done = inner(self, **options)
        weights = [p for n, p in self.named_parameters if n.startswith("layers.") and p.dim() > 1]
        held.append((len(weights), sum(p.untyped_storage().nbytes() for p in weights)))
        codes = sum(b.params.nbytes for b in self.buffer.buckets if b.key.is_encoded)
        assert codes == sum(b.params.numel() for b in self.buffer.buckets if b.key.is_encoded)
        assert codes >= sum(p.numel() for p in weights)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        given = ["precision.recipe=tensorwise", "precision.primary_weights=true"]
        tiny.run(tmp_path / "run", *SIZES, *given, "training.dtype=bf16")
    assert held == [(12, 12 * 2)] * 2


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8", "nvfp4"])
def test_what_is_not_finite_ends_a_run_though_codes_saturate(recipe, tiny, tmp_path) -> None:
    given = [*SIZES, f"precision.recipe={recipe}", "training.dtype=fp32", "optimizer.lr=1e38"]
    with pytest.raises(NonFiniteLossError, match=r"step 2: loss nan\. The step was not applied"):
        tiny.run(tmp_path / "run", *given, "training.steps=6", "optimizer.schedule=constant")


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_evaluation_and_recomputation_change_no_bit(recipe, tiny, tmp_path) -> None:
    """Also of random rounding, whose bits depend on the step."""
    common = [*SIZES, f"precision.recipe={recipe}", "training.dtype=bf16", "training.steps=3"]
    tiny.run(tmp_path / "plain", *common)
    tiny.run(tmp_path / "evaluated", *common, "evaluation.every=1")
    tiny.run(tmp_path / "again", *common, "training.recompute=full")
    assert losses(tmp_path / "evaluated") == losses(tmp_path / "plain")
    assert losses(tmp_path / "again") == losses(tmp_path / "plain")


@pytest.mark.parametrize(
    "recipe", ["delayed", "nvfp4", pytest.param("mxfp8", marks=pytest.mark.campaign)]
)
def test_a_run_in_two_parts_has_the_bits_of_one(recipe, tiny, tmp_path) -> None:
    common = [*SIZES, f"precision.recipe={recipe}", "training.dtype=bf16"]
    common += ["optimizer.schedule=constant", "checkpoint.every=2"]
    tiny.run(tmp_path / "whole", *common, "training.steps=4")
    tiny.run(tmp_path / "parts", *common)
    tiny.run(tmp_path / "parts", *common, "training.steps=4")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_weight_is_quantised_once_a_step(tiny, tmp_path, monkeypatch) -> None:
    from mt_fp8 import Products

    made: list[str] = []
    inner = Products._made

    def counting(self, x, role):
        made.append(role)
        return inner(self, x, role)

    monkeypatch.setattr(Products, "_made", counting)
    given = ["precision.recipe=delayed", "training.dtype=bf16", "evaluation.max_windows=1"]
    tiny.run(tmp_path / "run", *SIZES, *given)
    layers, steps, micro = 12, 2, 2
    assert made.count("grad") == layers * steps * micro
    assert made.count("weight") == layers * (steps + 1)  # and for the evaluation at the end
    assert made.count("input") == layers * (steps * micro + 1)
