"""Save tiny GPTModels with Megatron-core's dist_checkpointing on a CPU, with their logits.

Run once, in an environment of its own, with megatron-core 0.16.1, einops, psutil, safetensors and
torch 2.15:

    torchrun --nproc-per-node 1 make_megatron.py FOLDER gpt
    torchrun --nproc-per-node 2 make_megatron.py FOLDER llama
    torchrun --nproc-per-node 2 make_megatron.py FOLDER mixtral
    torchrun --nproc-per-node 2 make_megatron.py FOLDER mixtral_tp
    torchrun --nproc-per-node 2 make_megatron.py FOLDER mixtral_grouped
"""

import argparse
import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = {
    "num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "max_position_embeddings": 32,
}
LLAMA = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
MIXTRAL = {**LLAMA, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
MODELS = {
    "gpt": {},
    "llama": {**LLAMA, "tensor_model_parallel_size": 2},
    "mixtral": {**MIXTRAL, "expert_model_parallel_size": 2},
    "mixtral_tp": {
        **MIXTRAL,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    },
    "mixtral_grouped": {
        **MIXTRAL,
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "moe_grouped_gemm": True,
    },
}
DEFAULTS = {
    "group_query_attention": False,
    "num_query_groups": None,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "swiglu": False,
    "bias_gelu_fusion": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "num_experts": None,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "moe_grouped_gemm": False,
}
AXES = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
VOCABULARY = 64


class Nothing:
    """Stands for streams and events of a GPU."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: Nothing()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None


def without_a_gpu():
    """Replace the calls that need a GPU."""
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    cuda.Stream = cuda.Event = lambda *_, **__: Nothing()
    cuda.current_stream = lambda *_: Nothing()
    cuda.stream = lambda *_: Nothing()
    torch.Tensor.cuda = lambda self, *_, **__: self
    real = torch.empty
    torch.empty = lambda *a, **k: real(
        *a, **({**k, "device": "cpu"} if str(k.get("device")) == "cuda" else k)
    )


def without_kernels():
    """Replace what Megatron-core does on a GPU alone: random states, and copies of MoE counts."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils, token_dispatcher

    type(get_cuda_rng_tracker()).fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    grouped_gemm_util.ops = Products
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


class Products:
    """Stands for the kernels of grouped_gemm."""

    @staticmethod
    def gmm(rows, weights, counts, trans_b):
        """Return the product of each expert's rows and weights."""
        parts = rows.split(list(map(int, counts)))
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def make(args):
    """Return the model of these arguments."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe = {}
    if args.num_experts:
        moe = {
            "num_moe_experts": args.num_experts,
            "moe_router_topk": args.moe_router_topk,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": args.moe_grouped_gemm,
        }
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size,
        num_query_groups=args.num_query_groups,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=args.add_bias_linear,
        **{axis: getattr(args, axis) for axis in AXES},
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        **moe,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts,
        moe_grouped_gemm=args.moe_grouped_gemm,
        normalization=args.normalization,
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )
    config.bf16 = args.moe_grouped_gemm  # grouped experts ask for it, and Products needs it not
    return model.eval()


def main(folder: Path, name: str) -> None:
    without_a_gpu()
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from safetensors.torch import save_file

    args = argparse.Namespace(**SIZES | DEFAULTS | MODELS[name])
    parallel_state.initialize_model_parallel(
        **{axis: getattr(args, axis) for axis in AXES},
        create_gloo_process_groups=True,
    )
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    without_kernels()
    torch.manual_seed(3)
    model = make(args)
    with torch.no_grad():
        for key, param in model.named_parameters():  # norms and biases that differ from 1 and 0
            if param.dim() == 1:
                generator = torch.Generator().manual_seed(len(key))
                param += 0.1 * torch.randn(param.shape, generator=generator)
    place = folder / name / "iter_0000007"
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
    dist.barrier()
    state = {"model": model.sharded_state_dict(), "args": args, "iteration": 7}
    dist_checkpointing.save(state, str(place))
    tokens = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
    positions = torch.arange(12).expand(2, 12)
    mask = torch.triu(torch.ones(1, 1, 12, 12, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model(tokens, positions, mask)
    if dist.get_rank() == 0:
        save_file(
            {"tokens": tokens, "logits": logits.float().contiguous()},
            folder / name / "logits.safetensors",
        )
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
