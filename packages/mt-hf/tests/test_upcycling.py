"""A mixture made from a dense run: its logits, its folder, and refusals."""

import pytest
import torch
from mt_ckpt import (
    RunFolder,
    SavedModel,
    load_checkpoint,
    open_arrays,
    param_shards,
    save_checkpoint,
)
from mt_files import to_plain
from mt_hf import (
    ExchangeError,
    Upcycling,
    export_checkpoint,
    from_pretrained,
    import_pretrained,
    upcycle_checkpoint,
)
from mt_hf.commands.cli import main
from mt_model import GPT, StackConfig, gpt
from mt_parallel_state import ParallelLayout
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

F64 = torch.float64
SHAPE = {"vocab_size": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 24}


def tokens():
    return torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))


def saved(run, config, *, dtype=F64, tokenizer=None):
    """A run folder of a drawn model, which is returned too."""
    model = GPT(config, seed=1, dtype=dtype).eval()
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(param)
    shards = param_shards(model.named_parameters(), ParallelLayout(), 0, prefix=RunFolder.WEIGHTS)
    metadata = to_plain(SavedModel(model=config.to_dict(), tokenizer=tokenizer))
    save_checkpoint(RunFolder(run).checkpoints, 3, shards, metadata)
    return model


def loaded(run, *, dtype=F64):
    root = RunFolder(run).checkpoints
    with open_arrays(root) as arrays:
        config = StackConfig.from_dict(arrays.manifest.metadata_as(SavedModel).model)
    model = GPT(config, seed=7, dtype=dtype)
    prefix = RunFolder.WEIGHTS
    load_checkpoint(
        root, param_shards(model.named_parameters(), ParallelLayout(), 0, prefix=prefix)
    )
    return model.eval()


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ({"num_experts": 4}, {}),
        ({"num_experts": 8, "top_k": 4, "granularity": 2}, {}),
        ({"num_experts": 6, "top_k": 3, "granularity": 3, "every": 2}, {}),
        ({"num_experts": 4, "top_k": 2, "granularity": 2}, {"gated": False, "bias": True}),
        ({"num_experts": 4, "top_k": 2, "granularity": 2}, {"bias": True, "tied": False}),
    ],
    ids=str,
)
def test_logits_are_those_of_the_dense_model(tmp_path, how, form):
    dense = saved(tmp_path / "dense", gpt(**SHAPE, max_sequence_length=16, **form))
    config = upcycle_checkpoint(tmp_path / "dense", tmp_path / "out", Upcycling(**how))
    mixture = loaded(tmp_path / "out")
    assert sum(p.numel() for p in mixture.parameters()) == config.num_parameters
    assert config.num_parameters > dense.config.num_parameters
    torch.testing.assert_close(mixture(tokens()), dense(tokens()), rtol=0, atol=1e-12)


def test_tokens_choose_different_experts_and_seeds_give_other_routers(tmp_path):
    saved(tmp_path / "dense", gpt(**SHAPE, max_sequence_length=16))
    models = []
    for seed in (0, 1):
        how = Upcycling(num_experts=8, top_k=2, seed=seed)
        upcycle_checkpoint(tmp_path / "dense", tmp_path / str(seed), how)
        models.append(loaded(tmp_path / str(seed)))
    first, second = (model.layers["0"].feed_forward for model in models)
    assert not torch.equal(first.router.weight, second.router.weight)
    assert torch.equal(first.experts.up.weight, second.experts.up.weight)
    models[0].train()
    models[0](tokens())
    assert (first.load > 0).sum() > 2


def test_a_llama_becomes_a_mixtral_that_transformers_computes_alike(tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(F64).eval()
    llama.save_pretrained(tmp_path / "llama")
    import_pretrained(tmp_path / "llama", tmp_path / "run", vocab_multiple=1)
    words = ["upcycle", tmp_path / "run", tmp_path / "mixture", "--num-experts", 4]
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    assert end.value.code == 0
    assert "2 layers" in capsys.readouterr().out
    export_checkpoint(tmp_path / "mixture", tmp_path / "mixtral", family="mixtral")
    mixtral, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "mixtral",
        dtype=F64,
        output_loading_info=True,
        experts_implementation="eager",
    )
    assert type(mixtral).__name__ == "MixtralForCausalLM"
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    expected = llama(tokens()).logits
    torch.testing.assert_close(mixtral.eval()(tokens()).logits, expected, rtol=0, atol=1e-6)
    ours = from_pretrained(tmp_path / "mixtral")
    torch.testing.assert_close(ours(tokens()), expected, rtol=0, atol=1e-6)


def test_what_can_not_be_is_refused_and_nothing_is_written(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="top_k: 3 is no multiple of granularity=2"):
        Upcycling(num_experts=4, top_k=3, granularity=2)
    saved(tmp_path / "dense", gpt(**SHAPE, max_sequence_length=16))
    for how, text in (
        (Upcycling(num_experts=5, top_k=5, granularity=5), "layer 0: granularity=5 does not"),
        (Upcycling(num_experts=4, every=3), "every=3 chooses none of the 2 layers"),
    ):
        with pytest.raises(ExchangeError, match=text):
            upcycle_checkpoint(tmp_path / "dense", out, how)
    upcycle_checkpoint(tmp_path / "dense", tmp_path / "once", Upcycling(num_experts=4))
    with pytest.raises(ExchangeError, match="layer 0: experts are made of a feed-forward"):
        upcycle_checkpoint(tmp_path / "once", out, Upcycling(num_experts=4))
    with pytest.raises(ExchangeError, match="has no ema"):
        upcycle_checkpoint(tmp_path / "dense", out, Upcycling(num_experts=4), ema=True)
    with pytest.raises(ExchangeError, match="exists"):
        upcycle_checkpoint(tmp_path / "dense", tmp_path / "once", Upcycling(num_experts=4))
    assert not out.exists()
