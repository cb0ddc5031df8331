"""DeepSeek-V3: with and without a latent of queries, groups, YaRN, biases, all layers sparse."""

import torch
from family_row import Row, decoder

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}
SIZES = [
    {"num_attention_heads": 6, "hidden_size": 20, "q_lora_rank": 10, "rope_parameters": YARN},
    {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "rope_interleave": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 2,
        "n_group": 4,
        "n_routed_experts": 12,
        "num_experts_per_tok": 5,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "rope_parameters": {**YARN, "mscale": 0.5, "factor": 3.0},
    },
]


def draw(index, random):
    sizes = {
        "kv_lora_rank": 12,
        "q_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 2 if index == 2 else 1,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
    }
    given = decoder(random, **{**sizes, **SIZES[index]})
    return {**given, "num_key_value_heads": given["num_attention_heads"]}


def prepare(model):
    generator = torch.Generator().manual_seed(11)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


ROW = Row(
    name="deepseek_v3",
    model="DeepseekV3ForCausalLM",
    draw=draw,
    draws=len(SIZES),
    prepare=prepare,
    has_experts=True,
)
