"""`mt-infer quantize`: a run or a folder in, a folder in low precision out, which is read again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mt_ckpt import RunFolder, SavedModel, SavedTokenizer, param_shards, save_checkpoint
from mt_files import to_plain
from mt_hf import from_pretrained, import_pretrained, save_pretrained
from mt_infer import Sampling, load_run
from mt_infer.cli import main
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import QuantizationConfig, QuantizedLinear, fold_input_scales, quantize
from mt_tokenizer import load_tokenizer, train_tokenizer

GREEDY = Sampling(temperature=0.0)
TEXT = "to be or not to be that is the question " * 20
TOKENS = torch.arange(24).view(2, 12) * 7 % 260
RULES = """
rules:
  - name: "*.mixer.*"
    weight: int4-g32-asym
    method: gptq
    options: {damping: 0.02}
  - name: "*.feed_forward.up"
    weight: int8
"""


def config_of():
    return gpt(
        vocab_size=264,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_sequence_length=32,
        tied=False,
        init_std=0.3,
    )


def save_run(path: Path, change: Callable[[GPT], None]) -> Path:
    folder = RunFolder(path)
    tokenizer = train_tokenizer(["to be or not to be"], 260)
    path.mkdir()
    tokenizer.save(folder.tokenizer)
    digest = SavedTokenizer(sha256=tokenizer.sha256, eod=tokenizer.eod_token)
    with ParallelState(ParallelLayout(), device="cpu") as state, torch.no_grad():
        model = GPT(config_of(), state)
        change(model)
        shards = param_shards(model.named_parameters(), state.layout, state.rank, prefix="model")
        metadata = to_plain(SavedModel(model=model.config.to_dict(), tokenizer=digest))
        save_checkpoint(folder.checkpoints, 1, shards, metadata)
    return path


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("small") / "run", lambda model: None)


@pytest.fixture
def folder(small_run: Path, tmp_path: Path) -> Path:
    """The run's model as a folder of Hugging Face in bf16."""
    save_pretrained(model_of(small_run), tmp_path / "plain", dtype=torch.bfloat16)
    shutil.copy(small_run / "tokenizer.json", tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str, str]]:
    """Exit code, stdout and stderr of `mt-infer quantize`."""

    def call(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["quantize", *map(str, arguments)])
        return stop.value.code, *capsys.readouterr()

    return call


def model_of(folder: Path) -> GPT:
    with ParallelState(ParallelLayout(), device="cpu") as state:
        return load_run(folder, state, dtype="fp32").model


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    return model_of(folder).logits(TOKENS)


def test_a_run_becomes_the_folder_of_the_quantised_model(small_run, command, tmp_path) -> None:
    code, out, err = command(small_run, tmp_path / "low", "--recipe", "int8")
    assert code == 0, err
    expected = quantize(model_of(small_run), QuantizationConfig.named("int8"))
    with torch.no_grad():
        torch.testing.assert_close(
            logits_of(tmp_path / "low"), expected.logits(TOKENS), rtol=1e-5, atol=1e-5
        )
    low = [m for m in model_of(tmp_path / "low").modules() if isinstance(m, QuantizedLinear)]
    assert len(low) == 8
    assert err.count("\n") == 8
    assert "mt-infer: 8 of 8 layers: layers.1.feed_forward.down\n" in err
    size = sum(path.stat().st_size for path in (tmp_path / "low").glob("*.safetensors"))
    assert f"-> {size} bytes in {tmp_path / 'low'}" in out
    names = {path.name for path in (tmp_path / "low").iterdir()}
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == files | {"generation_config.json"}


def test_a_folder_in_the_layout_of_modelopt_computes_as_that_of_compressed_tensors(
    small_run, command, text, tmp_path
) -> None:
    given = ("--recipe", "fp8-static", "--calibration", text, "--length", 8)
    for layout in ("modelopt", "compressed-tensors"):
        code, _, err = command(small_run, tmp_path / layout, *given, "--layout", layout)
        assert code == 0, err
    assert (tmp_path / "modelopt" / "hf_quant_config.json").exists()
    found, expected = (logits_of(tmp_path / n) for n in ("modelopt", "compressed-tensors"))
    assert torch.equal(found, expected)


def test_the_sizes_that_are_told_are_those_of_the_tensors(small_run, command, tmp_path) -> None:
    _, out, _ = command(small_run, tmp_path / "low", "--recipe", "int8", "--dtype", "bf16")
    rows = [re.split(r"\s{2,}", line) for line in out.splitlines()[1:-1]]
    weights = {row[0].split(",")[0]: int(row[2]) for row in rows}
    model = model_of(small_run)
    assert weights["all"] == sum(param.numel() for param in model.parameters())
    in_layers = 2 * (128 * 64 + 64 * 64 + 3 * 64 * 192)
    assert weights["1: name='*'"] == in_layers
    after = dict(zip(weights, (float(row[4]) for row in rows), strict=True))
    scales = 2 * (128 + 64 + 2 * 192 + 64) * 16  # one of bf16 for each output
    assert after["1: name='*'"] == pytest.approx(8 + scales / in_layers, abs=0.006)


def test_rules_of_a_file_and_a_text_make_what_mt_quant_makes(
    folder, command, text, tmp_path
) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    given = ("--config", tmp_path / "rules.yaml", "--calibration", text)
    code, out, err = command(folder, tmp_path / "low", *given, "--samples", 3, "--length", 8)
    assert code == 0, err
    tokens = load_tokenizer(folder / "tokenizer.json").encode(TEXT)
    whole = len(tokens) // 8
    starts = [0, whole // 3 * 8, 2 * whole // 3 * 8]
    batches = [torch.tensor([tokens[start : start + 8]]) for start in starts]
    config = QuantizationConfig.from_yaml(tmp_path / "rules.yaml")
    expected = quantize(from_pretrained(folder), config, batches)
    found = from_pretrained(tmp_path / "low")
    for name, layer in expected.named_modules():
        if isinstance(layer, QuantizedLinear):
            values = layer.quantized_weight.dequantize()
            own = found.get_submodule(name).quantized_weight.dequantize()
            assert torch.equal(own, values), name
    assert not isinstance(found.get_submodule("layers.0.feed_forward.down"), QuantizedLinear)
    assert "0: name='*.mixer.*', gptq, weight int4-g32-asym" in out
    assert "no rule" in out


def test_a_folder_is_generated_from_as_its_import_is(folder, generate, tmp_path) -> None:
    import_pretrained(folder, tmp_path / "imported")
    expected = generate(tmp_path / "imported", "--greedy", "--max-tokens", 8)
    assert expected[0] == 0
    assert generate(folder, "--greedy", "--max-tokens", 8) == expected


def test_the_text_of_low_bits_is_that_of_their_values(
    small_run, command, generate, tmp_path
) -> None:
    assert command(small_run, tmp_path / "low", "--recipe", "int8")[0] == 0
    plain = from_pretrained(tmp_path / "low", dtype=torch.float32, dequantize=True)
    save_pretrained(plain, tmp_path / "values", dtype=torch.float32)
    expected = generate(tmp_path / "values", "--greedy", "--max-tokens", 8)
    assert expected[0] == 0
    assert generate(tmp_path / "low", "--greedy", "--max-tokens", 8) == expected


def logits_on_ranks(folder, expected, layout) -> None:
    with ParallelState(layout, device="cpu") as state, torch.no_grad():
        generator = load_run(folder, state, dtype="fp32")
        assert any(isinstance(m, QuantizedLinear) for m in generator.model.modules())
        text = list(generator.tokens([1, 2, 3], 6, GREEDY))
        assert text == expected


@pytest.mark.parametrize("layout", [ParallelLayout(tp=2), ParallelLayout(pp=2)], ids=["tp", "pp"])
def test_ranks_share_a_folder_in_low_precision(small_run, command, ranks, tmp_path, layout) -> None:
    assert command(small_run, tmp_path / "low", "--recipe", "int8")[0] == 0
    with ParallelState(ParallelLayout(), device="cpu") as state:
        expected = list(load_run(tmp_path / "low", state).tokens([1, 2, 3], 6, GREEDY))
    ranks(2, logits_on_ranks, tmp_path / "low", expected, layout)


SCALED = {
    "awq": "rules: [{name: '*head*', optional: true}, {weight: int4-g32-asym, method: awq}]",
    "smoothquant": """rules:
  - {name: '*head*', optional: true}
  - {weight: int8, input: int8, method: smoothquant, options: {alpha: 0.6}}
""",
}


@pytest.mark.parametrize("method", SCALED)
def test_scales_of_inputs_go_into_what_makes_them(method, command, text, tmp_path) -> None:
    def uneven(model: GPT) -> None:
        for layer in model.layers.values():  # large features, as trained models have
            layer.mixer_norm.weight.copy_(torch.linspace(-2, 2, 64).exp())

    run = save_run(tmp_path / "run", uneven)
    rules = tmp_path / "rules.yaml"
    rules.write_text(SCALED[method])
    config = QuantizationConfig.from_yaml(rules)
    options = ("--config", rules, "--calibration", text, "--length", 16)
    code, _, err = command(run, tmp_path / "low", *options)
    assert code == 0, err
    tokenizer = load_tokenizer(run / "tokenizer.json")
    ids = torch.tensor(tokenizer.encode(TEXT)).long()
    batches = list(ids[: len(ids) // 16 * 16].view(-1, 1, 16))
    model, before = model_of(run), model_of(run)
    left = fold_input_scales(model, model.shared_inputs(), config, batches)
    exact = before.logits(TOKENS)
    torch.testing.assert_close(model.logits(TOKENS), exact, rtol=1e-4, atol=1e-3)
    norm, was = (m.layers["0"].mixer_norm.weight for m in (model, before))
    assert (norm / was).std() > 0.1  # and not by nothing
    low = quantize(model, left, batches)
    assert all(m.input_scale is None for m in low.modules() if isinstance(m, QuantizedLinear))
    torch.testing.assert_close(logits_of(tmp_path / "low"), low.logits(TOKENS), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "give one of --recipe NAME and --config FILE"),
        (("--recipe", "int8", "--config", "RULES"), 2, "give one of --recipe NAME and --config"),
        (("--recipe", "int9"), 2, "--recipe: unknown recipe 'int9'. Did you mean int8?"),
        (("--recipes", "int8"), 2, "'--recipes' is no option. Did you mean --recipe?"),
        (("--recipe", "int8", "--samples", 0), 2, "--samples 0: use 1 or more"),
        (("--recipe", "int8", "--calibration", "TEXT", "--length", 99), 1, "context is 32 tokens"),
        (("--recipe", "int8", "--step", 9), 1, "has no checkpoint of step 9 (there: 1)"),
        (("--recipe", "int8", "--ema"), 1, "has no average of the weights"),
        (("--recipe", "int4-rtn", "--group-size", 48), 1, "groups of 48 inputs (int4-g48) do not"),
        (("--recipe", "int8", "--group-size", 64), 2, "group_size 64: the recipe int8 has no"),
        (("--config", "RULES", "--group-size", 64), 2, "--group-size is for --recipe"),
        (("--recipe", "nvfp4"), 1, "no layout of nvfp4 weights with nvfp4 inputs"),
        (("--recipe", "int8", "--layout", "modelopt"), 1, "layout of ModelOpt has no int8-channel"),
        (("--recipe", "int8-smoothquant"), 1, "need calibration data"),
        (("--recipe", "int8-smoothquant", "--calibration", "EMPTY"), 1, "text is empty"),
        (("--recipe", "int8-smoothquant", "--calibration", "NOWHERE"), 1, "No such file"),
        (("--config", "NOTHING"), 1, "rules[0] (name='*.attention') matches nothing; correct it"),
        (("--config", "NOWHERE"), 1, "No such file"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_written(
    small_run, command, tmp_path, text, options, code, message
) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "nothing.yaml").write_text("rules: [{name: '*.attention', weight: int8}]")
    (tmp_path / "empty").touch()
    paths = {
        "RULES": tmp_path / "rules.yaml",
        "NOTHING": tmp_path / "nothing.yaml",
        "TEXT": text,
        "EMPTY": tmp_path / "empty",
        "NOWHERE": tmp_path / "nowhere",
    }
    before = sorted(tmp_path.iterdir())
    found, out, err = command(small_run, tmp_path / "low", *(paths.get(w, w) for w in options))
    assert (found, out) == (code, "")
    assert message in err.replace("empty is empty", "text is empty")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("options", "group"), [((), 64), (("--group-size", 32), 32)])
def test_a_recipe_of_int4_takes_groups_that_divide_and_says_so(
    small_run, command, tmp_path, options, group
) -> None:
    code, _, err = command(small_run, tmp_path / "low", "--recipe", "int4-rtn", *options)
    assert code == 0, err
    assert ("64 inputs in 8 layers; --group-size" in err) == (not options)
    layers = [m for m in from_pretrained(tmp_path / "low").modules() if type(m) is QuantizedLinear]
    # One group for all of a layer's inputs is read as a scale for each channel.
    assert {layer.format.group for layer in layers} - {"channel"} == {group}
    eod = load_tokenizer(tmp_path / "low/tokenizer.json").eod_id
    told = json.loads((tmp_path / "low/generation_config.json").read_text())
    assert told == {"eos_token_id": eod}  # transformers ends texts there too


def test_weights_that_are_no_numbers_are_named_by_array(command, text, tmp_path) -> None:
    run = save_run(tmp_path / "run", lambda model: model.embedding.weight.fill_(torch.nan))
    (tmp_path / "rules.yaml").write_text(RULES)
    options = ("--config", tmp_path / "rules.yaml", "--calibration", text)
    code, out, err = command(run, tmp_path / "low", *options)
    assert (code, out) == (1, "")
    assert "step_" in err
    assert "model/embedding.weight" in err
    assert "finite" in err
    assert not (tmp_path / "low").exists()


def test_what_is_there_is_never_replaced(small_run, command, tmp_path) -> None:
    (tmp_path / "low").mkdir()
    (tmp_path / "low/kept").touch()
    code, out, err = command(small_run, tmp_path / "low", "--recipe", "int8")
    assert (code, out) == (2, "")
    assert err.endswith("low exists; name a folder that does not, or is empty\n")
    assert [path.name for path in (tmp_path / "low").iterdir()] == ["kept"]


def test_a_folder_in_low_precision_is_not_rounded_again(small_run, command, tmp_path) -> None:
    assert command(small_run, tmp_path / "low", "--recipe", "int8")[0] == 0
    code, _, err = command(tmp_path / "low", tmp_path / "lower", "--recipe", "fp8")
    assert code == 1
    assert "is in low precision already; pass the folder that it was made from" in err


def test_a_text_that_no_rule_needs_is_said(small_run, command, text, tmp_path) -> None:
    options = ("--recipe", "int8", "--calibration", text)
    code, _, err = command(small_run, tmp_path / "low", *options)
    assert code == 0
    assert err.endswith("text.txt was not needed: no rule reads activations\n")


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def small_vocabulary(folder: Path) -> None:
    train_tokenizer([TEXT], 300).save(folder / "tokenizer.json")


def unknown_end(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_tokenizer, "has no tokenizer; put its tokenizer.json or tokenizer.model there"),
        (small_vocabulary, "tokens, and the model's vocabulary 264; use the tokenizer with which"),
        (unknown_end, "or name the token as eos_token in "),
    ],
)
def test_a_folder_without_its_tokenizer_is_one_message(
    folder, command, generate, tmp_path, spoil, message
) -> None:
    spoil(folder)
    for code, out, err in (
        generate(folder),
        command(folder, tmp_path / "low", "--recipe", "int8"),
    ):
        assert (code, out) == (1, "")
        assert message in err
        assert err.count("\n") == 1
    assert not (tmp_path / "low").exists()


def test_a_step_of_a_folder_is_refused(folder, generate) -> None:
    code, _, err = generate(folder, "--step", 1)
    assert code == 1
    assert "is a folder of Hugging Face and has no steps; leave --step out" in err
