"""Adapters from here to Hugging Face PEFT and back, on transformers' Llama with equal weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mt_hf import export_lora
from mt_infer import Engine, EngineOptions
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState, initialize_
from mt_tensor_parallel import adapters, add_lora, save_lora
from torch import Tensor, nn

CONFIG = gpt(
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=24,
    max_sequence_length=16,
    tied=False,
    init_std=0.2,
)
TOKENS = torch.arange(20).view(2, 10) * 7 % 48


def save(folder: Path, tp: int, part: str) -> Tensor:
    """Writes the adapters of a GPT split over tp ranks, and returns its logits with them."""
    with ParallelState(ParallelLayout(tp=tp)) as state:
        model = GPT(CONFIG, state, dtype=torch.float64)
        add_lora(model, 3, alpha=6, dropout=0.1, matches=lambda name: part in name)
        for name, adapter in adapters(model):  # B starts at zero
            place = {"layout": state.layout, "rank": state.rank}
            initialize_(adapter.b, seed=1, name=name, std=0.2, **place)
        save_lora(model, folder, base_model="", export=export_lora, write=state.rank == 0)
        return model.eval().logits(TOKENS)


@torch.no_grad()
def llama() -> nn.Module:
    """A Llama with the weights of the GPT."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layer = CONFIG.layers[0]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=CONFIG.vocab_size,
            hidden_size=CONFIG.hidden_size,
            intermediate_size=layer.feed_forward.ffn_size,
            num_hidden_layers=CONFIG.num_layers,
            num_attention_heads=layer.mixer.num_heads,
            num_key_value_heads=layer.mixer.num_kv_heads,
            head_dim=layer.mixer.head_dim,
            max_position_embeddings=CONFIG.max_sequence_length,
            rope_theta=layer.mixer.rope.theta,
            rms_norm_eps=CONFIG.norm.eps,
            tie_word_embeddings=False,
        )
    ).double()
    ours, theirs = dict(GPT(CONFIG, dtype=torch.float64).named_parameters()), {}
    for i in range(CONFIG.num_layers):
        own, other = f"layers.{i}", f"model.layers.{i}"
        qkv = ours[f"{own}.mixer.qkv.weight"]
        gate, up = ours[f"{own}.feed_forward.up.weight"]
        theirs |= {
            f"{other}.self_attn.q_proj.weight": qkv[:, :-2].flatten(0, 2),
            f"{other}.self_attn.k_proj.weight": qkv[:, -2].flatten(0, 1),
            f"{other}.self_attn.v_proj.weight": qkv[:, -1].flatten(0, 1),
            f"{other}.self_attn.o_proj.weight": ours[f"{own}.mixer.out.weight"].flatten(1),
            f"{other}.mlp.gate_proj.weight": gate,
            f"{other}.mlp.up_proj.weight": up,
            f"{other}.mlp.down_proj.weight": ours[f"{own}.feed_forward.down.weight"],
            f"{other}.input_layernorm.weight": ours[f"{own}.mixer_norm.weight"],
            f"{other}.post_attention_layernorm.weight": ours[f"{own}.feed_forward_norm.weight"],
        }
    theirs["model.embed_tokens.weight"] = ours["embedding.weight"]
    theirs["model.norm.weight"] = ours["final_norm.weight"]
    theirs["lm_head.weight"] = ours["head.weight"]
    model.load_state_dict(theirs)
    return model.eval()


# peft asks transformers for a name that is on its way out.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("tp", "part"), [(2, ""), (1, "layers.1.")], ids=["split", "one layer of two"]
)
def test_peft_reads_the_adapters_and_gives_our_logits(tmp_path, ranks, tp, part) -> None:
    from peft import PeftModel

    expected = ranks(tp, save, tmp_path, tp, part)[0]
    base = llama()
    plain = base(TOKENS).logits
    model = PeftModel.from_pretrained(base, tmp_path, autocast_adapter_dtype=False).eval()
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == (14 if tp == 2 else 7)
    logits = model(TOKENS).logits
    assert (logits - plain).abs().max() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    engine = Engine(GPT(CONFIG, dtype=torch.float64).eval(), options=EngineOptions(blocks=4))
    engine.load_adapter("ours", tmp_path)
    check_scores(engine, "ours", logits)


def check_scores(engine: Engine, adapter: str, logits: Tensor) -> None:
    for tokens, own in zip(TOKENS, logits, strict=True):
        expected = own[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found = engine.score(tokens, adapter=adapter)
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@torch.no_grad()
def test_the_engine_serves_an_adapter_that_peft_made(tmp_path) -> None:
    from peft import LoraConfig, get_peft_model

    base = llama()
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
        rank_pattern={"v_proj": 2},
        alpha_pattern={"layers.1.mlp.up_proj": 9},
        init_lora_weights=False,
    )
    torch.manual_seed(3)
    model = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    model.save_pretrained(tmp_path / "adapter")
    adapters = {"theirs": tmp_path / "adapter"}
    engine = Engine.from_folder(tmp_path / "base", dtype="fp64", blocks=4, adapters=adapters)
    check_scores(engine, "theirs", model(TOKENS).logits)
