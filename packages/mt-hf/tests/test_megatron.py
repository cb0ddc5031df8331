"""Steps that Megatron-core wrote become runs with the same logits."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from mt_ckpt import RunFolder, SavedModel, load_checkpoint, open_arrays, param_shards
from mt_hf.commands.cli import main
from mt_hf.family.error import ExchangeError
from mt_hf.megatron.arguments import read_arguments
from mt_hf.megatron.importing import import_megatron
from mt_model import GPT, StackConfig
from mt_parallel_state import ParallelLayout
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "golden/megatron"
NAMES = ("gpt", "llama", "mixtral", "mixtral_tp", "mixtral_grouped")
PLAIN = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


def loaded(run):
    root = RunFolder(run).checkpoints
    with open_arrays(root) as arrays:
        assert arrays.manifest.step == 7
        config = StackConfig.from_dict(arrays.manifest.metadata_as(SavedModel).model)
    model = GPT(config, seed=7)
    shards = param_shards(model.named_parameters(), ParallelLayout(), 0, prefix=RunFolder.WEIGHTS)
    load_checkpoint(root, shards)
    return model.eval()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_has_the_logits_of_megatron_core(tmp_path, name, capsys):
    with pytest.raises(SystemExit) as end:
        main(["import", str(GOLDEN / name / "iter_0000007"), str(tmp_path / "run")])
    assert end.value.code == 0
    assert "3 layers" in capsys.readouterr().out
    expected = load_file(GOLDEN / name / "logits.safetensors")
    with torch.no_grad():
        logits = loaded(tmp_path / "run")(expected["tokens"])
    assert logits.std() > 0.05
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-5, atol=1e-5)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something is unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    import_megatron(GOLDEN / "llama/iter_0000007", tmp_path / "run")


def test_a_tensor_that_is_missing_or_left_over_is_named(tmp_path, monkeypatch):
    import mt_ckpt

    opened = mt_ckpt.open_megatron
    for change, text in (
        (lambda names: names.pop("output_layer.weight"), "lacks output_layer.weight"),
        (
            lambda names: names.update(extra=names["output_layer.weight"]),
            "has extra, which no GPTModel has",
        ),
        (
            lambda names: names.update(
                {"decoder.final_layernorm.weight": names["output_layer.weight"]}
            ),
            r"decoder.final_layernorm.weight has the shape .64, 16., and .16,. is expected",
        ),
    ):

        def changed(folder, change=change):
            found = opened(folder)
            change(found.tensors)
            return found

        monkeypatch.setattr(mt_ckpt, "open_megatron", changed)
        with pytest.raises(ExchangeError, match=text):
            import_megatron(GOLDEN / "llama/iter_0000007", tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"multi_latent_attention": True}, "multi_latent_attention=True is a model that is not"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function='sigmoid' is"),
        ({"position_embedding_type": "mrope"}, "position_embedding_type"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": 10**9}, "num_layers"),
        ({"hidden_size": "8"}, "hidden_size"),
        ({"moe_layer_freq": [1]}, "moe_layer_freq"),
    ],
)
def test_arguments_of_other_models_are_refused(change, text):
    read_arguments(PLAIN, "here").config(64)
    with pytest.raises(ExchangeError, match=text):
        read_arguments(PLAIN | change, "here")


def test_a_checkpoint_without_arguments_is_refused():
    with pytest.raises(ExchangeError, match="holds no arguments of Megatron-LM"):
        read_arguments(None, "here")


def test_the_folder_of_all_steps_says_which_to_name(tmp_path, capsys):
    root = shutil.copytree(GOLDEN / "llama", tmp_path / "run")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(SystemExit) as end:
        main(["import", str(root), str(tmp_path / "out")])
    assert end.value.code == 2
    assert "name one of its steps, such as" in capsys.readouterr().err
