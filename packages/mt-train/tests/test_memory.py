"""What `mt-train memory` counts, against what runs hold."""

import pytest
from mt_train.cli import main
from mt_train.config.loading import load_config
from mt_train.memory import PlanMemory, RankMemory, count, verdict


def counted(tiny, *overrides):
    return count(load_config(tiny.config, list(overrides)))


PLAN = "training.recompute={rules: [{first: 1}, {modules: [attention]}]}"


def test_the_layers_of_a_run_keep_what_was_counted(tiny, tmp_path, rows):
    options = "model.num_layers=3", "training.dtype=bf16", PLAN
    tiny.run(tmp_path, *options, "training.steps=1")
    (row,) = (row for row in rows(tmp_path) if "activation_bytes" in row)
    (rank,) = counted(tiny, *options)
    layers = {n: b for n, b in rank.plans["run"].modules.items() if n.startswith("layers.")}
    assert sum(layers.values()) == row["activation_bytes"]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_optimizer_has_what_its_rule_keeps(tiny, name):
    (rank,) = counted(tiny, f"optimizer.name={name}", "training.dtype=bf16")
    numbers = rank.weights // 2
    moments = {"adamw": 2, "sgd": 1}[name]
    assert rank.gradients == pytest.approx(4 * numbers, rel=0.05)
    assert rank.optimizer == pytest.approx(4 * (1 + moments) * numbers, rel=0.05)


def test_a_frozen_base_has_the_bytes_of_its_format(tiny, tmp_path):
    options = [f"checkpoint.load={tmp_path}", "checkpoint.load_mode=weights", "lora={rank: 1}"]
    (plain,), (codes,) = (
        counted(tiny, *options, f"lora.base_format={format}", "training.dtype=bf16")
        for format in ("null", "int4-g8")
    )
    numbers = 16 * (3 * 16 + 16 + 2 * 16 + 16)  # of qkv, out, up and down
    assert plain.weights - codes.weights == 2 * numbers - (numbers // 2 + 2 * numbers // 8)
    assert (plain.gradients, plain.optimizer) == (codes.gradients, codes.optimizer)


def test_ranks_share_what_the_layout_says(tiny):
    options = ["model.num_layers=2", "model.hidden_size=64", "model.ffn_size=256"]
    options += ["training.global_batch_size=16"]
    (one,) = counted(tiny, *options)
    axes = ["parallel.tp=2", "parallel.sequence_parallel=true", "parallel.dp=2", "parallel.pp=2"]
    first, last = counted(tiny, *options, *axes, "data_parallel.strategy=optimizer")
    assert (first.layers, last.layers) == ((range(1),), (range(1, 2),))
    norm = "layers.1.mixer_norm"
    assert 2 * last.plans["run"].modules[norm] == one.plans["run"].modules[norm]
    assert first.optimizer + last.optimizer < 0.3 * one.optimizer
    kept = [sum(rank.plans["run"].modules.values()) for rank in (first, last)]
    assert [rank.plans["run"].peak for rank in (first, last)] == [2 * kept[0], kept[1]]


def test_what_is_kept_less_is_made_again(tiny):
    (rank,) = counted(tiny, "model.num_layers=2", "training.recompute=full")
    plans = rank.plans
    assert list(plans) == ["run", "none", "selective", "attention"]
    assert plans["run"].peak < plans["selective"].peak < plans["none"].peak
    assert plans["none"].flops == 0
    per_layer = 2 * 2 * 16 * (16 * 16 * 4 + 3 * 16 * 16)  # of the products with weights
    assert plans["run"].flops >= 2 * per_layer


def test_the_command_prints_a_table(tiny, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["memory", str(tiny.config), "training.recompute={offload: {min_bytes: 0}}"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for words in ("mixer.qkv", "head", "activations in flight", "in the host", "made again"):
        assert words in out
    assert "fits in 24, 40, 80, 141 and 192 GB" in out


@pytest.mark.parametrize(
    ("gib", "words"),
    [
        (
            30,
            ["fits in 40, 80, 141 and 192 GB, not in 24 GB", "For 24 GB: training.recompute=full"],
        ),
        (300, ["fits in no single device", "For 192 GB: raise parallel.tp"]),
        (1 / 64, ["needs 16.00 MiB: fits in 24, 40, 80, 141 and 192 GB"]),
    ],
)
def test_the_verdict_names_devices_and_a_change(tiny, gib, words):
    plans = {
        name: PlanMemory(modules={}, peak=int(share * gib * 2**30 / 10), host=0, flops=0)
        for name, share in (("run", 5), ("selective", 4), ("full", 1))
    }
    held = {"weights": int(gib * 2**29), "gradients": 0, "optimizer": 0}
    rank = RankMemory(layers=(range(1),), plans=plans, **held)
    lines = verdict(load_config(tiny.config).config, [rank])
    for line, word in zip(lines, words, strict=True):
        assert word in line


@pytest.mark.parametrize("override", ["training.compile=true", "parallel.ep=2"])
def test_what_is_not_counted_is_said(tiny, override, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["memory", str(tiny.config), override, "parallel.dp=2"])
    assert ended.value.code == 2
    assert "count" in capsys.readouterr().err
