"""Save a tiny GPT with Megatron-core's dist_checkpointing on a CPU, and its weights beside it.

Run once, in an environment of its own, with megatron-core 0.16.1, einops, psutil, safetensors and
torch 2.15:

    python make_megatron.py FOLDER
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777", "RANK": "0", "WORLD_SIZE": "1"}


def main(folder: Path) -> None:
    os.environ.update(ALONE)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from safetensors.torch import save_file

    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    torch.manual_seed(3)
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
    config = TransformerConfig(
        **sizes,
        num_query_groups=2,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=32,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    args = argparse.Namespace(**sizes, params_dtype=torch.float32, swiglu=True)
    state = {"model": model.sharded_state_dict(), "args": args, "iteration": 7}
    (folder / "iter_0000007").mkdir(parents=True)
    dist_checkpointing.save(state, str(folder / "iter_0000007"))
    weights = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    save_file(weights, folder / "weights.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
