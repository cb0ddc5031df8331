"""Folders of Hugging Face become run folders and come back; the command does the same."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from family_row import ROWS
from mt_ckpt import RunFolder, inspect_checkpoint, param_shards, save_checkpoint
from mt_files import to_plain
from mt_hf import (
    ExchangeError,
    export_checkpoint,
    find_family,
    from_pretrained,
    import_pretrained,
    known_families,
    open_pretrained,
    save_pretrained,
)
from mt_hf.commands.cli import main
from mt_model import GPT, gpt, preset, saved_buffers
from mt_parallel_state import ParallelLayout, ParallelState
from mt_tokenizer import load_tokenizer, train_tokenizer
from safetensors.torch import load_file, save_file

EXAMPLES = Path(__file__).parents[1] / "examples"
LLAMA = next(row for row in ROWS if row.name == "llama")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder in bf16, with one tensor in fp32, and a tokenizer."""
    folder = tmp_path_factory.mktemp("original") / "model"
    LLAMA.build(0).to(torch.bfloat16).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, path, metadata={"format": "pt"})
    train_tokenizer(["some text", "and more of it"], 257).save(folder / "tokenizer.json")
    return folder


def tensors_of(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(first, second):
    first, second = tensors_of(first), tensors_of(second)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


def exit_code(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    return caught.value.code


def test_import_and_export_give_the_bytes_back(original, tmp_path, capsys):
    assert exit_code("import", original, tmp_path / "run") == 0
    run = RunFolder(tmp_path / "run")
    assert run.tokenizer.exists()
    for number, source in enumerate((run.path, run.checkpoints, run.checkpoints / "step_00000000")):
        out = tmp_path / f"out{number}"
        assert exit_code("export", source, out, "--file-size", 5000) == 0
        assert_same(out, original)
        assert len(list(out.glob("*.safetensors"))) > 2
        for name in ("config.json", "tokenizer.json"):
            assert (out / name).read_bytes() == (original / name).read_bytes()
    assert "layers" in capsys.readouterr().out


def test_an_export_ends_texts_where_the_run_does(original, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    folder = Path(shutil.copytree(original, tmp_path / "folder"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 3, "max_length": 5}')
    import_pretrained(folder, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    eod = load_tokenizer(run.tokenizer).eod_id
    export_checkpoint(run.path, tmp_path / "out")
    told = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (told.eos_token_id, told.max_length) == ([eod, 3], 5)
    shutil.rmtree(run.hugging_face)  # as in a run that began with no folder
    export_checkpoint(run.path, tmp_path / "bare")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "bare" / name).read_text())["eos_token_id"] == eod
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bare")
    assert tokenizer.eos_token_id == eod
    assert tokenizer("some text").input_ids == load_tokenizer(run.tokenizer).encode("some text")
    train_tokenizer(["another text, another"], 259).save(run.tokenizer)
    with pytest.raises(ExchangeError, match="not the tokenizer"):
        export_checkpoint(run.path, tmp_path / "other")


def test_biases_of_experts_stay_wide_and_are_in_no_average(tmp_path):
    row = next(row for row in ROWS if row.name == "deepseek_v3")
    folder, out = tmp_path / "model", tmp_path / "out"
    row.build(0).to(torch.bfloat16).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    tensors |= {name: torch.rand(tensors[name].shape) for name in biases}
    save_file(tensors, path, metadata={"format": "pt"})
    import_pretrained(folder, tmp_path / "run")
    export_checkpoint(tmp_path / "run", out)
    assert biases
    assert_same(out, folder)
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    model = from_pretrained(folder)
    model.origin = None
    save_pretrained(model, tmp_path / "bare")
    assert_same(tmp_path / "bare", folder)
    run = RunFolder(tmp_path / "averaged")
    shards, params = [], dict(model.named_parameters())
    for prefix, values in ((run.WEIGHTS, 0.0), (run.EMA, 1.0)):
        named = [(name, torch.full_like(p, values)) for name, p in params.items()]
        shards += param_shards(named, ParallelLayout(), 0, prefix=prefix, params=params)
    buffers = saved_buffers([model])
    how = {"prefix": run.WEIGHTS, "params": buffers}
    shards += param_shards(buffers.items(), ParallelLayout(), 0, **how)
    saved = {"model": model.config.to_dict(), "tokenizer": None}
    save_checkpoint(run.checkpoints, 1, shards, saved)
    export_checkpoint(run.path, tmp_path / "average", ema=True)
    for name, tensor in tensors_of(tmp_path / "average").items():
        assert torch.equal(tensor, tensors[name] if name in biases else torch.ones_like(tensor))


def save_part(root, config, tp):
    state = ParallelState(ParallelLayout(tp=tp))
    model = GPT(config, state, seed=4)
    shards = param_shards(model.named_parameters(), state.layout, state.rank, prefix="model")
    saved = {"model": config.to_dict(), "tokenizer": None}
    save_checkpoint(root, 3, shards, to_plain(saved), group=state.group("tp"))


def test_a_checkpoint_of_ranks_is_exported_as_the_model_of_one(ranks, tmp_path):
    config = gpt(vocab_size=33, hidden_size=16, num_layers=2, num_heads=4, vocab_multiple=4)
    ranks(2, save_part, tmp_path / "run/checkpoints", config, 2)
    export_checkpoint(tmp_path / "run", tmp_path / "out", dtype=torch.float64)
    found = from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert tensors_of(tmp_path / "out")["model.embed_tokens.weight"].shape == (33, 16)
    tokens = torch.arange(33)[None]
    assert torch.equal(found(tokens), GPT(config, seed=4)(tokens))


def test_training_checkpoints_come_out_in_the_dtype_of_what_they_started_from(original, tmp_path):
    import_pretrained(original, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    config = open_pretrained(original).padded(8).config
    model = GPT(config, seed=1)
    layout = ParallelLayout()
    shards = param_shards(model.named_parameters(), layout, 0, prefix="model")
    save_checkpoint(run.checkpoints, 5, shards, {"model": config.to_dict(), "tokenizer": None})
    export_checkpoint(run.path, tmp_path / "out")
    assert {each.dtype for each in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}
    export_checkpoint(run.path, tmp_path / "wide", dtype=torch.float32)
    assert {each.dtype for each in tensors_of(tmp_path / "wide").values()} == {torch.float32}


def test_verify_compares_with_transformers(tmp_path, capsys):
    LLAMA.build(1).save_pretrained(tmp_path / "model")
    assert exit_code("verify", tmp_path / "model", "--tokens", 9) == 0
    assert "they agree" in capsys.readouterr().out
    assert exit_code("verify", tmp_path / "model", "--tolerance", 1e-12) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["imprt", "a", "b"], "Did you mean"),
        (["import", "nowhere", "out"], "nowhere is not a folder"),
        (["export", "nowhere", "out"], "nowhere"),
        (["verify", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(*arguments) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_an_import_that_fails(original, tmp_path):
    copy = shutil.copytree(original, tmp_path / "copy")
    path = copy / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ExchangeError, match=r"lm_head\.weight is missing"):
        import_pretrained(copy, tmp_path / "run")
    shutil.copy(original / "model.safetensors", path)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ExchangeError, match=r"tokenizer\.json"):
        import_pretrained(copy, tmp_path / "run")
    assert list(tmp_path.iterdir()) == [copy]


def test_a_folder_without_a_tokenizer_is_imported(tmp_path):
    LLAMA.build(0).save_pretrained(tmp_path / "model")
    import_pretrained(tmp_path / "model", tmp_path / "run")
    manifest = inspect_checkpoint(tmp_path / "run/checkpoints")
    assert manifest.metadata["tokenizer"] is None
    given = json.loads((tmp_path / "run/hugging_face/config.json").read_text())
    assert given["model_type"] == "llama"


def test_a_family_of_another_package_is_an_entry_point(tmp_path, monkeypatch):
    example = runpy.run_path(str(EXAMPLES / "port_family.py"))
    example["install"](tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mt_phi", raising=False)
    assert example["compare"](example["random_model"](1), tmp_path) < 1e-5
    family = known_families()["phi"]
    assert family.fields_of(preset("phi2"))["num_hidden_layers"] == 32
    with pytest.raises(ExchangeError, match=r"phi: its layers differ"):
        find_family(preset("mamba2-130m", head_bias=True))
    with pytest.raises(ExchangeError, match=r"rope_parameters: .* is not built"):
        family.config_of({"rope_parameters": {"rope_type": "linear"}}, Path("config.json"))


def test_the_example_of_a_family_is_short():
    assert len((EXAMPLES / "family.py").read_text().splitlines()) < 105
