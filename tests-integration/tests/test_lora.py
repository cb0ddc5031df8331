"""Adapters made here and read by Hugging Face PEFT, on transformers' Llama with equal weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mt_hf import export_lora
from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState, initialize_
from mt_tensor_parallel import LoraLinear, add_lora, save_lora
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
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLinear):  # B starts at zero
                place = {"layout": state.layout, "rank": state.rank}
                initialize_(layer.b, seed=1, name=name, std=0.2, **place)
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
