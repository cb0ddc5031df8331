"""The tensors of a rank of TensorRT-LLM, made of the tensors of a folder of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from mt_model import AttentionConfig, ModelConfig, MoEConfig
from torch import Tensor

from mt_hf.family.decoder import first_mixer
from mt_hf.writing.source import NamedTensors

GEMMAS = ("gemma2", "gemma3_text")
_NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_layernorm"}
_GEMMA_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, kw_only=True)
class RankTensor:
    """A tensor of each rank of a stage.

    Attributes:
        name: Name of the tensor.
        sources: Tensors of the folder of Hugging Face.
        make: Function of their values and a rank of tp, which returns the rank's values.
        wide: Whether it is fp32 in a checkpoint of any dtype.
    """

    name: str
    sources: Sequence[str]
    make: Callable[[Sequence[Tensor], int], Tensor]
    wide: bool = False

    def shape(self, tensors: NamedTensors) -> tuple[int, ...]:
        """Return the shape of the tensor, which is the same on each rank."""
        values = [torch.empty(tensors.shapes[name], device="meta") for name in self.sources]
        return tuple(self.make(values, 0).shape)


def stage_tensors(tensors: NamedTensors, layers: range, tp: int) -> Iterator[RankTensor]:
    """Yield the tensors of a stage.

    Args:
        tensors: The model's tensors.
        layers: The stage's layers; they are numbered from 0 in each stage.
        tp: Number of ranks that share each layer.
    """
    config, is_gemma = tensors.config, tensors.family in GEMMAS
    embedding = ["model.embed_tokens.weight"]
    if layers.start == 0:
        name = "transformer.vocab_embedding.weight"
        shared = is_gemma and tp > 1
        yield RankTensor(name=name, sources=embedding, make=_rows(tp) if shared else _whole)
    for index in layers:
        yield from _layer_tensors(
            tensors, f"model.layers.{index}", f"transformer.layers.{index - layers.start}", tp
        )
    if layers.stop == config.num_layers:
        norm = _whole_plus_one if is_gemma else _whole
        yield RankTensor(name="transformer.ln_f.weight", sources=["model.norm.weight"], make=norm)
        if not is_gemma:  # whose head is the embedding
            head = embedding if config.tied else ["lm_head.weight"]
            yield RankTensor(name="lm_head.weight", sources=head, make=_padded_rows(tp))


def _layer_tensors(
    tensors: NamedTensors, source: str, target: str, tp: int
) -> Iterator[RankTensor]:
    mixer, is_gemma = first_mixer(tensors.config), tensors.family in GEMMAS
    plus = _whole_plus_one if is_gemma else _whole
    norms = _NORMS | ({name: name for name in _GEMMA_NORMS} if is_gemma else {})
    for theirs, ours in norms.items():
        name = f"{target}.{ours}.weight"
        yield RankTensor(name=name, sources=[f"{source}.{theirs}.weight"], make=plus)
    leaves = ["weight", *(["bias"] if mixer.qkv_bias else [])]
    for leaf in leaves:
        parts = [f"{source}.self_attn.{part}_proj.{leaf}" for part in "qkv"]
        yield RankTensor(name=f"{target}.attention.qkv.{leaf}", sources=parts, make=_qkv(mixer, tp))
    out = f"{source}.self_attn.o_proj"
    yield RankTensor(
        name=f"{target}.attention.dense.weight", sources=[f"{out}.weight"], make=_columns(tp)
    )
    if mixer.out_bias:
        yield RankTensor(
            name=f"{target}.attention.dense.bias", sources=[f"{out}.bias"], make=_whole
        )
    if mixer.qk_norm == "head":
        for part in "qk":
            own, theirs = f"{part}_layernorm", f"{source}.self_attn.{part}_norm.weight"
            yield RankTensor(name=f"{target}.attention.{own}.weight", sources=[theirs], make=plus)
    yield from _feed_forward_tensors(tensors.config, source, f"{target}.mlp", tp)


def _feed_forward_tensors(
    config: ModelConfig, source: str, target: str, tp: int
) -> Iterator[RankTensor]:
    """Yield an MLP, whose `fc` is activated and whose `gate` is not, or the experts of a layer."""
    moe = config.layers[0].feed_forward
    if not isinstance(moe, MoEConfig):
        names = {"fc": "gate_proj", "gate": "up_proj", "proj": "down_proj"}
        for ours, theirs in names.items():
            cut = _columns(tp) if ours == "proj" else _rows(tp)
            sources = [f"{source}.mlp.{theirs}.weight"]
            yield RankTensor(name=f"{target}.{ours}.weight", sources=sources, make=cut)
        return
    block = f"{source}.block_sparse_moe"

    def experts(*names: str) -> list[str]:
        return [
            f"{block}.experts.{n}.{name}.weight" for name in names for n in range(moe.num_experts)
        ]

    router = [f"{block}.gate.weight"]
    yield RankTensor(name=f"{target}.router.weight", sources=router, make=_whole, wide=True)
    yield RankTensor(name=f"{target}.fc.weight", sources=experts("w3", "w1"), make=_up_and_gate(tp))
    yield RankTensor(name=f"{target}.proj.weight", sources=experts("w2"), make=_stacked(tp, dim=2))


def _whole(values: Sequence[Tensor], rank: int) -> Tensor:
    del rank
    return values[0]


def _whole_plus_one(values: Sequence[Tensor], rank: int) -> Tensor:
    return _whole(values, rank) + 1


def _rows(tp: int) -> Callable[[Sequence[Tensor], int], Tensor]:
    return lambda values, rank: values[0].chunk(tp)[rank]


def _columns(tp: int) -> Callable[[Sequence[Tensor], int], Tensor]:
    return lambda values, rank: values[0].chunk(tp, dim=1)[rank]


def _padded_rows(tp: int) -> Callable[[Sequence[Tensor], int], Tensor]:
    """Cut a head whose rows are padded with zeros to a multiple of the ranks."""

    def make(values: Sequence[Tensor], rank: int) -> Tensor:
        rows = values[0].shape[0]
        padded = torch.nn.functional.pad(values[0], (0, 0, 0, -rows % tp))
        return padded.chunk(tp)[rank]

    return make


def _qkv(mixer: AttentionConfig, tp: int) -> Callable[[Sequence[Tensor], int], Tensor]:
    """Join a rank's queries, keys and values; ranks beyond the keys' heads share a head."""
    groups = mixer.num_kv_heads

    def make(values: Sequence[Tensor], rank: int) -> Tensor:
        queries, *others = values
        own = [queries.chunk(tp)[rank]]
        for each in others:
            own.append(
                each.chunk(groups)[rank * groups // tp] if tp > groups else each.chunk(tp)[rank]
            )
        return torch.cat(own)

    return make


def _stacked(tp: int, dim: int) -> Callable[[Sequence[Tensor], int], Tensor]:
    return lambda values, rank: torch.stack(list(values)).chunk(tp, dim=dim)[rank]


def _up_and_gate(tp: int) -> Callable[[Sequence[Tensor], int], Tensor]:
    """Join a rank's part of each expert's second factor, and of its activated one."""

    def make(values: Sequence[Tensor], rank: int) -> Tensor:
        half, cut = len(values) // 2, _stacked(tp, dim=1)
        return torch.cat([cut(values[:half], rank), cut(values[half:], rank)], dim=1)

    return make
