"""Adapters train on every layout as on one rank, and the run is read, served and exported."""

from __future__ import annotations

import dataclasses
import shutil
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from mt_ckpt import RunFolder, SavedModel, TensorShard, inspect_checkpoint, save_checkpoint
from mt_files import UserError, to_plain
from mt_hf import (
    export_adapter,
    export_checkpoint,
    from_pretrained,
    open_pretrained,
    quantize_for_folder,
    read_adapter,
    save_pretrained,
)
from mt_infer import Engine, load_run
from mt_model import (
    GPT,
    LoraConfig,
    ModelConfig,
    MoEConfig,
    block_linears,
    gpt,
    grouped_layers,
    matrix_shape,
    weight_codes,
)
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import QuantizationConfig, Rule, quantize_weight
from safetensors.torch import load_file

SIZES = {
    "vocab_size": 391,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_sequence_length": 64,
    "init_std": 0.1,
}
MODELS = {
    "llama": (gpt(**SIZES, ffn_size=64), "lora={rank: 3, alpha: 6, dropout: 0.1}"),
    "qwen3": (gpt(**SIZES, ffn_size=64, qk_norm="head"), "lora={rank: 3, alpha: 6}"),
    "mixtral": (
        gpt(**SIZES, moe=MoEConfig(num_experts=4, ffn_size=32, top_k=2), tied=False),
        "lora={rank: 3, alpha: 6, layers: ['*.mixer.*', '*.experts.*']}",
    ),
}
# The same models with frozen weights as codes, whose groups fit the parts of two ranks.
FORMATS = {"llama-codes": "int4-g16", "qwen3-codes": "int8", "mixtral-codes": "int4-g16-asym"}
for name, format in FORMATS.items():
    config, lora = MODELS[name.removesuffix("-codes")]
    MODELS[name] = config, f"{lora[:-1]}, base_format: {format}}}"
LAYOUTS = {
    "tp2": (2, "parallel.tp=2"),
    "sequence": (2, "parallel.tp=2", "parallel.sequence_parallel=true"),
    "tp2pp2": (4, "parallel.tp=2", "parallel.pp=2", "training.micro_batch_size=4"),
    "cp2": (2, "parallel.cp=2"),
    "zero1": (2, "data_parallel.strategy=optimizer", "training.micro_batch_size=4"),
    "zero3": (2, "data_parallel.strategy=full", "training.micro_batch_size=4"),
    "zb": (2, "parallel.pp=2", "pipeline.schedule=zb-h1", "training.micro_batch_size=2"),
    "recompute": (1, "training.recompute=full"),
}
OF_EXPERTS = {
    "ep2": (2, "parallel.ep=2", "training.micro_batch_size=4"),
    "etp2": (2, "parallel.tp=2", "parallel.etp=2"),
    "ep2tp2": (4, "parallel.ep=2", "parallel.tp=2", "training.micro_batch_size=4"),
}
GRID = [
    *((model, layout) for model in MODELS for layout in LAYOUTS),
    *((model, layout) for model in ("mixtral", "mixtral-codes") for layout in OF_EXPERTS),
]
SAMPLE = {("llama", "tp2pp2"), ("mixtral", "etp2"), ("mixtral-codes", "etp2")}
READ = {("llama", False), ("mixtral", True)}


class WideTorch:
    """torch for modules of transformers that name fp32: it is fp64 there."""

    def __getattr__(self, name):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@pytest.fixture(scope="module")
def started(tiny, tmp_path_factory):
    """Runs of adapters on a folder of each model, by its name."""
    folder = tmp_path_factory.mktemp("bases")
    found = {}
    for name, (config, lora) in MODELS.items():
        family = name.removesuffix("-codes")
        save_pretrained(GPT(config, seed=5, dtype=torch.float64), folder / name, family=family)
        given = yaml.safe_load(tiny.config.read_text())
        shutil.copy(given["data"].pop("tokenizer"), folder / name / "tokenizer.json")
        given["model"] = {"from": str(folder / name)}
        given["training"] |= {"dtype": "fp64", "steps": 4}
        given["optimizer"] = {"lr": 0.02, "warmup": 1, "ema": 0.9}
        given |= yaml.safe_load(lora.replace("lora=", "lora: ", 1))
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(given))
        found[name] = dataclasses.replace(tiny, config=path)
    return found


@pytest.fixture(scope="module")
def one_rank(started, tmp_path_factory):
    """The run of a model on one rank, once."""
    known: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in known:
            known[name] = started[name].train(tmp_path_factory.mktemp(name) / "run")
        return known[name]

    return run


@pytest.mark.parametrize(("model", "layout"), [
    pytest.param(*each, marks=() if each in SAMPLE else pytest.mark.campaign, id="-".join(each))
    for each in GRID
])  # fmt: skip
def test_every_layout_trains_the_same_adapters(
    started, one_rank, losses, arrays, tmp_path, model, layout
) -> None:
    nproc, *overrides = (LAYOUTS | OF_EXPERTS)[layout]
    run = started[model].train(tmp_path / "run", *overrides, nproc=nproc)
    expected = losses(one_rank(model))
    assert losses(run) == pytest.approx(expected, rel=1e-10)
    assert len(set(expected.values())) == 4
    found, wanted = arrays(run, 4), arrays(one_rank(model), 4)
    assert found.keys() == wanted.keys()
    assert all(".lora." in name for name in found)
    for name, array in wanted.items():
        assert found[name] == pytest.approx(array, rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize(("model", "ema"), [
    pytest.param(*each, marks=() if each in READ else pytest.mark.campaign)
    for each in product(MODELS, (False, True))
])  # fmt: skip
def test_a_run_of_adapters_is_read_and_exported_merged(one_rank, tmp_path, model, ema) -> None:
    run = one_rank(model)
    state = ParallelState(ParallelLayout())
    loaded = load_run(run, state, dtype="fp64", ema=ema).model
    base = from_pretrained(Path(yaml.safe_load((run / "config.yaml").read_text())["model"]["from"]))
    export_checkpoint(run, tmp_path / "out", dtype=torch.float64, ema=ema)
    tokens = torch.arange(32)[None] * 7 % 384
    with torch.no_grad():
        expected = from_pretrained(tmp_path / "out")(tokens)
        found = loaded(tokens)[..., : expected.shape[-1]]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert (base.double()(tokens) - expected).abs().max() > 1e-3


def fill_base(model: GPT, folder: str) -> None:
    """Fill everything except the adapters of a model from a folder, and round weights to codes."""
    base = open_pretrained(folder).padded(model.config.vocab_multiple)
    codes = weight_codes(model)
    for layer, own in codes.items():
        whole = torch.empty(own.full_shape)
        base.fill(f"{layer}.weight", whole)
        own.store(whole)
    for name, param in model.named_parameters():
        is_code = name.removesuffix(".weight") in codes or ".codes." in name
        if not (param.requires_grad or is_code):
            base.fill(name, param.data)


def rounded_folder(base: str, format: str | None, folder: Path, family: str) -> Path:
    """Write the base with the values of its codes, for a program that knows no codes."""
    if format is None:
        return Path(base)
    model = from_pretrained(base)
    for layer in {**block_linears(model), **grouped_layers(model)}.values():
        matrices = layer.weight.data.view(*layer.weight.shape[: layer.lead_dims], -1)
        shape = (-1, matrix_shape(layer).columns)
        for matrix in matrices if layer.lead_dims else [matrices]:
            codes = quantize_weight(matrix.view(shape), format)
            matrix.copy_(codes.dequantize(torch.float64).view_as(matrix))
    save_pretrained(model, folder, family=family)
    return folder


def codes_folder(base: str, format: str | None, folder: Path) -> Path:
    """Write the base in its format, as `mt-infer quantize` does."""
    if format is None:
        return Path(base)
    model = from_pretrained(base)
    rule = Rule(name="layers.*", weight=format)
    quantize_for_folder(model, QuantizationConfig(rules=(rule,)))
    save_pretrained(model, folder)
    shutil.copy(Path(base) / "tokenizer.json", folder)
    return folder


PEFT_ROWS = [
    pytest.param(model, dtype, marks=() if is_short else pytest.mark.campaign)
    for model, dtype, is_short in (
        ("llama", torch.float64, True),
        ("qwen3", torch.float64, False),
        ("mixtral", torch.float64, True),
        ("llama-codes", torch.float64, True),
        ("qwen3-codes", torch.float64, False),
        ("mixtral-codes", torch.float64, True),
        ("llama-codes", torch.float32, False),
        ("qwen3-codes", torch.float32, True),
        ("mixtral-codes", torch.float32, False),
    )
]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:target_modules=:UserWarning")
@pytest.mark.parametrize(("model", "dtype"), PEFT_ROWS)
def test_losses_gradients_and_logits_are_those_of_peft(
    one_rank, arrays, tmp_path, monkeypatch, model, dtype
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, family = one_rank(model), model.removesuffix("-codes")
    step = run / "checkpoints/step_00000004"
    saved = inspect_checkpoint(step).metadata_as(SavedModel)
    told, config = saved.adapters, ModelConfig.from_dict(saved.model)
    assert told.base_format == FORMATS.get(model)
    how = {"alpha": told.alpha, "layers": told.layers, "base_format": told.base_format}
    ours = GPT(config, lora=LoraConfig(rank=told.rank, **how), dtype=dtype, seed=None)
    stored = arrays(run, 4)
    fill_base(ours, told.base)
    for name, param in ours.named_parameters():
        if param.requires_grad:
            param.data.copy_(torch.from_numpy(stored[f"model/{name}"]))
    tokens, labels = torch.arange(66).view(2, 33).mul(7).remainder(384).split((32, 1), 1)
    labels = torch.cat((tokens[:, 1:], labels), 1)
    loss = ours(tokens, labels=labels)["lm"]
    loss.backward()

    export_adapter(run, tmp_path / "adapter")
    base = rounded_folder(told.base, told.base_format, tmp_path / "rounded", family)
    homes = f"transformers.models.{family}.modeling_{family}", "transformers.modeling_rope_utils"
    is_wide, close = dtype == torch.float64, 1e-10 if dtype == torch.float64 else 1e-5
    if is_wide:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for home in homes if is_wide else ():
        monkeypatch.setattr(import_module(home), "torch", WideTorch())
    narrow = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    plain = type(narrow)(narrow.config).to(dtype)  # whose angles are fp64 too
    plain.load_state_dict(narrow.state_dict())
    if family == "mixtral":
        plain.set_experts_implementation("eager")  # torch's grouped product takes no fp64
    how = {"autocast_adapter_dtype": False, "is_trainable": True}
    theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter", **how)
    logits = theirs(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=close, atol=0)

    # Gradients by their names in PEFT: as if they were the adapters of a run.
    made = RunFolder(tmp_path / "gradients")
    shards = [
        TensorShard(f"model/{name}", param.grad)
        for name, param in ours.named_parameters()
        if param.requires_grad
    ]
    save_checkpoint(made.checkpoints, 1, shards, to_plain(saved))
    export_adapter(made.path, tmp_path / "found", family=family)
    found = load_file(tmp_path / "found/adapter_model.safetensors")
    wanted = {
        n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if "lora" in n
    }
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (found[name] - grad).norm() <= close * grad.norm(), name
    if not is_wide:
        return

    export_checkpoint(run, tmp_path / "merged", dtype=torch.float64)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    if family == "mixtral":
        merged.set_experts_implementation("eager")
    torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-5, atol=1e-5)
    monkeypatch.undo()
    if family != "mixtral":  # experts take no adapters for each request
        adapters = {"ours": tmp_path / "adapter"}
        folder = codes_folder(told.base, told.base_format, tmp_path / "codes")
        with Engine.from_folder(folder, dtype="fp64", blocks=8, adapters=adapters) as engine:
            scores = engine.score(tokens[0], adapter="ours")
        # The tokenizer has 384 tokens.
        own = logits[0, :-1, :384].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(scores, own.float(), rtol=1e-5, atol=1e-5)


FROM_PEFT = [*product(("llama", "qwen3", "mixtral"), ("tp2", "tp2pp2", "zero3"))]
FROM_PEFT += [("mixtral", layout) for layout in OF_EXPERTS]  # with adapters of experts
FROM_SAMPLE = {("llama", "tp2"), ("mixtral", "ep2")}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(("model", "layout"), [
    pytest.param(*each, marks=() if each in FROM_SAMPLE else pytest.mark.campaign)
    for each in FROM_PEFT
])  # fmt: skip
def test_a_run_goes_on_from_an_adapter_of_peft(started, tmp_path, model, layout) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = yaml.safe_load(started[model].config.read_text())["model"]["from"]
    modules = {"q_proj": "qkv.query", "v_proj": "qkv.value", "o_proj": "mixer.out"}
    modules |= {} if model == "mixtral" else {"down_proj": "feed_forward.down"}
    how = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, "target_modules": [*modules]}
    if layout in OF_EXPERTS:
        modules["experts"] = "experts.*"
        how["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    theirs = get_peft_model(plain, PeftConfig(**how), autocast_adapter_dtype=False)
    theirs.save_pretrained(tmp_path / "given")
    names = ", ".join(f"'*.{name}'" for name in modules.values())
    settings = f"lora={{from: {tmp_path}/given, rank: 3, alpha: 10, layers: [{names}]}}"
    nproc, *overrides = (LAYOUTS | OF_EXPERTS)[layout]
    still = ("training.steps=1", "optimizer={lr: 1e-300}", settings)
    run = started[model].train(tmp_path / "run", *overrides, *still, nproc=nproc)
    export_adapter(run, tmp_path / "out")
    found, wanted = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "given")
    )
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        half = 0.5 if "lora_B" in name else 1.0  # the run's alpha is twice that of the folder
        torch.testing.assert_close(found[name], array * half, rtol=1e-12, atol=0)
    config, layers = MODELS[model][0], tuple(f"*.{name}" for name in modules.values())
    for rank, some, words in (
        (2, layers, "has rank 3, and lora.rank is 2; use the same"),
        (3, layers[1:], "has adapters of .*q_proj"),
        (3, (*layers, "*.qkv.key"), "has no adapter of layers.0.mixer.qkv"),
    ):
        with pytest.raises(UserError, match=words):
            read_adapter(tmp_path / "given", config, LoraConfig(rank=rank, layers=some))


def test_frozen_runs_are_read_with_their_average(started, tmp_path) -> None:
    settings = ("lora=null", "training.freeze=['layers.0.*', embedding.*]")
    run = started["llama"].train(tmp_path / "run", *settings)
    state = ParallelState(ParallelLayout())
    loaded = load_run(run, state, dtype="fp64", ema=True).model
    export_checkpoint(run, tmp_path / "out", dtype=torch.float64, ema=True)
    tokens = torch.arange(32)[None] * 7 % 384
    with torch.no_grad():
        expected = from_pretrained(tmp_path / "out")(tokens)
        found = loaded(tokens)[..., : expected.shape[-1]]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
