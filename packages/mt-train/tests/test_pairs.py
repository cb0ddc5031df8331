"""Two settings that can't work together: the message names both, and says what would."""

from __future__ import annotations

import dataclasses

import pytest
from mt_train import ConfigError, load_config
from mt_train.config.optimizer_section import _ONLY_FOR, OptimizerSection
from mt_train.config.parallel_section import DataParallelSection

UNSHARED = (
    "is about what is shared out, and data_parallel.strategy is none; leave it out, or use "
    "strategy optimizer, optimizer_gradients or full"
)

# By the field that is blamed: the overrides, and the words of the message.
PAIRS = {
    "training.cuda_graphs": [
        *(
            (
                ["training.cuda_graphs=layer", *others],
                f"layer does not go with {words}, or cuda_graphs: none",
            )
            for others, words in (
                (
                    ["training.compile=true"],
                    "training.compile, whose code launches few kernels; use false",
                ),
                (
                    ["data_parallel.strategy=optimizer_gradients"],
                    "data_parallel.strategy optimizer_gradients, where gradients have no memory "
                    "that stays; use none or optimizer",
                ),
                (
                    ["data_parallel.strategy=optimizer", "data_parallel.prefetch=1"],
                    "data_parallel.prefetch 1, which forwards wait for; use 0",
                ),
                (
                    ["data_parallel.strategy=optimizer", "data_parallel.offload=true"],
                    "data_parallel.offload, where the host waits for gradients; use false",
                ),
                (
                    ["pipeline.schedule=zb-h1", "parallel.pp=2"],
                    "pipeline.schedule zb-h1, whose backwards go in parts; use gpipe, 1f1b, "
                    "interleaved or bfs",
                ),
                (
                    ["parallel.cp=2"],
                    "parallel.cp 2, whose exchanges the host waits for; use cp 1",
                ),
                (
                    ["training.recompute=selective"],
                    "training.recompute, which saves no memory inside of a graph; use none",
                ),
            )
        ),
    ],
    "data_parallel.replicas": [
        (
            ["data_parallel.replicas=2"],
            "2 groups have nothing to share out with data_parallel.strategy none; leave it out, or "
            "use strategy optimizer, optimizer_gradients or full",
        ),
        (
            ["data_parallel.replicas=3", "data_parallel.strategy=full", "parallel.cp=2"],
            "3 does not divide parallel.dp 2 x parallel.cp 2 = 4; use one of 1, 2, 4",
        ),
    ],
    "data_parallel.strategy": [
        *(
            (
                ["data_parallel.strategy=full", f"pipeline.schedule={name}", "parallel.pp=2"],
                f"full does not go with pipeline.schedule {name}, which runs parts of two layers "
                "in turn, as its parameters are whole only while a layer runs; use strategy "
                "optimizer_gradients, or schedule zb-v",
            )
            for name in ("dualpipe", "dualpipe-v")
        ),
    ],
    "data_parallel.prefetch": [
        (["data_parallel.prefetch=2"], f"2 {UNSHARED}"),
        (
            [
                "data_parallel.prefetch=1",
                "data_parallel.strategy=optimizer",
                "training.compile=true",
                "pipeline.schedule=dualpipe-v",
                "parallel.pp=2",
            ],
            "1 has modules wait for their parameters, which the compiled parts of layers in "
            "pipeline.schedule dualpipe-v do not; use prefetch 0, or compile: false",
        ),
    ],
    "data_parallel.shard_dtype": [
        (["data_parallel.shard_dtype=fp32"], f"fp32 {UNSHARED}"),
        (
            [
                "data_parallel.shard_dtype=bf16",
                "data_parallel.strategy=full",
                "training.dtype=fp32",
            ],
            "bf16 does not hold all that training.dtype fp32 does; use fp32, more bits, or leave "
            "it out",
        ),
        (
            [
                "data_parallel.shard_dtype=fp32",
                "data_parallel.strategy=full",
                "training.dtype=bf16",
                "optimizer.masters=remainder",
            ],
            "fp32 leaves nothing for optimizer.masters remainder to keep; leave it out, or use "
            "masters full",
        ),
    ],
    "data_parallel.offload": [
        (["data_parallel.offload=true"], f"true {UNSHARED}"),
        (
            [
                "data_parallel.offload=true",
                "data_parallel.strategy=full",
                "optimizer.offload=0.5",
            ],
            "true has all that is stepped in the host's memory, of which optimizer.offload 0.5 "
            "would move a share there; leave one of them out",
        ),
    ],
    "optimizer.betas": [
        (
            ["optimizer.betas=[0.8, 0.9]", "optimizer.name=sgd"],
            "[0.8, 0.9] does not go with optimizer.name sgd; leave it out, or use adamw or adam or "
            "lion or soap or muon or adaptive_muon",
        ),
    ],
    "optimizer.eps": [
        (
            ["optimizer.eps=1e-6", f"optimizer.name={name}"],
            f"1e-06 does not go with optimizer.name {name}; leave it out, or use adamw or adam or "
            "soap or muon or adaptive_muon",
        )
        for name in ("sgd", "lion")
    ],
    "optimizer.momentum": [
        (
            ["optimizer.momentum=0.8", f"optimizer.name={name}"],
            f"0.8 does not go with optimizer.name {name}; leave it out, or use sgd or muon or "
            "adaptive_muon",
        )
        for name in ("adamw", "adam", "lion")
    ],
    "optimizer.nesterov": [
        (
            ["optimizer.nesterov=true"],
            "true does not go with optimizer.name adamw; leave it out, or use sgd or muon or "
            "adaptive_muon",
        ),
        (
            ["optimizer.nesterov=true", "optimizer.name=sgd", "optimizer.momentum=0.0"],
            "true needs an optimizer.momentum above 0",
        ),
    ],
    "optimizer.moments_dtype": [
        (
            ["optimizer.moments_dtype=fp8", "optimizer.name=sgd", "optimizer.momentum=0.0"],
            "fp8 has nothing to keep with optimizer.momentum 0; leave it out, or use a momentum "
            "above 0",
        ),
    ],
    "optimizer.masters": [
        (
            ["optimizer.masters=remainder", "training.dtype=fp32"],
            "remainder is what bf16 weights lack, and training.dtype is fp32; use masters full, or "
            "dtype bf16",
        ),
    ],
    "optimizer.offload_dir": [
        (
            ["optimizer.offload_dir=.", "optimizer.offload=0.0"],
            "'.' stays empty with optimizer.offload 0; set offload to a share above 0, or leave "
            "offload_dir out",
        ),
    ],
    "optimizer.weight_decay_end": [
        (
            ["optimizer.weight_decay_end=0.5"],
            "0.5 is not optimizer.weight_decay 0.1, and optimizer.weight_decay_schedule is "
            "constant; use linear or cosine",
        ),
        (
            ["optimizer.weight_decay_schedule=linear"],
            "missing; optimizer.weight_decay_schedule goes there, or leave that out",
        ),
    ],
    **{
        f"optimizer.{key}": [
            (
                [f"optimizer.{key}=3", "optimizer.name=muon"],
                f"{shown} does not go with optimizer.name muon; leave it out, or use {others}",
            )
        ]
        for key, shown, others in (
            ("soap_frequency", 3, "soap"),
            ("soap_max_dim", 3, "soap"),
            ("width_multiplier", 3.0, "adamw or adam or sgd or lion"),
        )
    },
    "training.dtype": [
        (
            ["training.dtype=fp16"],
            "fp16 needs optimizer.loss_scale, as small gradients are zero without: dynamic, or a "
            "number such as 65536; or use dtype bf16",
        ),
    ],
    "optimizer.loss_scale": [
        (
            ["optimizer.loss_scale=dynamic", "training.dtype=bf16"],
            "dynamic does not go with training.dtype bf16, which holds gradients as small as fp32 "
            "does; leave it out, or use dtype fp16",
        ),
    ],
    "optimizer.muon_coefficients": [
        (
            ["optimizer.muon_coefficients=quintic"],
            "quintic does not go with optimizer.name adamw; leave it out, or use muon or "
            "adaptive_muon",
        ),
    ],
    "optimizer.muon_scale": [
        (
            ["optimizer.muon_scale=shape_scaling", "optimizer.name=adaptive_muon"],
            "shape_scaling does not go with optimizer.name adaptive_muon; leave it out, or use "
            "muon",
        ),
    ],
    "optimizer.muon_tp": [
        (
            ["optimizer.muon_tp=distributed", "optimizer.name=sgd"],
            "distributed does not go with optimizer.name sgd; leave it out, or use muon or "
            "adaptive_muon",
        ),
    ],
    "optimizer.min_lr": [
        (
            ["optimizer.min_lr=1e-5", "optimizer.schedule=constant"],
            "1e-05 does not go with optimizer.schedule constant; leave it out, or use linear or "
            "cosine or inverse-sqrt or wsd",
        ),
        (["optimizer.min_lr=0.5"], "0.5 is above optimizer.lr 0.01; use that or less"),
    ],
    "optimizer.anneal": [
        (
            ["optimizer.anneal=0.5"],
            "0.5 does not go with optimizer.schedule cosine; leave it out, or use wsd",
        ),
    ],
    "optimizer.anneal_shape": [
        (
            ["optimizer.anneal_shape=cosine"],
            "cosine does not go with optimizer.schedule cosine; leave it out, or use wsd",
        ),
    ],
}
# Keys that go with all others: each says why.
ALONE = {
    "data_parallel.overlap": "every strategy reduces during backward or after it",
    "data_parallel.grad_dtype": "every strategy adds up in any dtype",
    "data_parallel.reduce_dtype": "every strategy reduces in any dtype",
    "data_parallel.local_sum": "every strategy can add in either place",
    "data_parallel.pad_for_bandwidth": "every strategy has buckets",
    "data_parallel.unused": "every strategy can do both",
    "optimizer.name": "what does not go with it is blamed instead",
    "optimizer.lr": "every optimizer and schedule has one; min_lr is blamed",
    "optimizer.weight_decay": "every optimizer has it",
    "optimizer.offload": "every optimizer can; offload_dir is blamed",
    "optimizer.schedule": "what does not go with it is blamed instead",
    "optimizer.weight_decay_schedule": "every optimizer decays; weight_decay_end is blamed",
    "optimizer.overrides": "contradictions need the model's parameters",
    "optimizer.skip_above": "every optimizer can",
    "optimizer.max_value": "every optimizer can",
    "optimizer.ema": "every optimizer can",
    "optimizer.qk_clip": "what does not go with it are the model's layers",
    "optimizer.norm_groups": "every optimizer can be clipped so; contradictions need the model",
    "optimizer.warmup": "a run shorter than its warm-up ends below lr",
}


def refused(tiny, given):
    with pytest.raises(ConfigError) as caught:
        load_config(tiny.config, ["training.micro_batch_size=1", *given]).check_world(4)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("field", "given", "words"),
    [(field, *case) for field, cases in PAIRS.items() for case in cases],
    ids=[f"{field}-{case[0]}" for field, cases in PAIRS.items() for case in cases],
)
def test_a_pair_that_can_not_work_is_refused_by_both_names(field, given, words, tiny) -> None:
    (problem,) = refused(tiny, given)
    assert problem.endswith(f"{field}: {words}")
    others = {key.split("=")[0] for key in given} - {field}
    assert not others or any(key.split(".")[1] in words for key in others)


def test_every_key_has_its_pairs_or_goes_with_all() -> None:
    keys = {
        f"{section}.{item.name}"
        for section, cls in (
            ("data_parallel", DataParallelSection),
            ("optimizer", OptimizerSection),
        )
        for item in dataclasses.fields(cls)
    }
    assert keys == {key for key in PAIRS if not key.startswith("training.")} | ALONE.keys()
    assert not PAIRS.keys() & ALONE.keys()


def test_every_rule_of_the_table_is_tried() -> None:
    assert {f"optimizer.{key}" for key in _ONLY_FOR} <= PAIRS.keys()


def test_what_is_left_at_its_default_never_complains(tiny) -> None:
    for name in ("adamw", "adam", "sgd", "lion", "muon", "adaptive_muon"):
        for schedule in ("constant", "linear", "cosine", "inverse-sqrt", "wsd"):
            load_config(tiny.config, [f"optimizer.name={name}", f"optimizer.schedule={schedule}"])
