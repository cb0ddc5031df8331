"""The section `model` of a run's configuration: a preset, a folder, or what is said of layers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from mt_files import Checks
from mt_model import (
    Activation,
    Kernels,
    KernelSet,
    LayerConfig,
    MoEConfig,
    MTPConfig,
    Norms,
    PooledHeadConfig,
    Positions,
    QKNorm,
    RopeConfig,
    ScoreBias,
    Sinks,
    TemperatureConfig,
)

# What a list of layers says layer by layer.
_UNIFORM = """
preset num_layers num_heads num_kv_heads head_dim ffn_size activation gated rope_theta rope
qk_norm bias attention_dropout window chunk temperature sinks softcap attention_scale clamp
up_offset score_bias moe norms parallel shared_norm residual_scale qkv_bias out_bias output_gate
causal
"""
UNIFORM_FIELDS = tuple(_UNIFORM.split())
_WITH_FROM = ("from_", "vocab_multiple", "dropout", "kernels")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: a preset, single fields over it, all fields without a preset, or a list of layers.

    A field left at null comes from the preset, or else has the default that is named here.

    Attributes:
        from_: A folder of Hugging Face transformers: the model that its config.json describes, with
            its weights where the run starts anew, and its tokenizer for a corpus. Only
            `vocab_multiple`, `dropout` and `kernels` go with it.
        preset: A named shape of mt-model, such as `gpt2` or `llama3.2-1b`.
        vocab_size: Tokens that the model knows; by default the tokenizer's size, rounded up to a
            multiple of 128.
        vocab_multiple: Embedding and head have rows for a multiple of it, of which those beyond
            the vocabulary are padding and take no part in anything, so that tp ranks can share
            them; 1 by default, and 128 for a model `from` a folder.
        hidden_size: Width of the residual stream.
        num_layers: Number of equal layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, which divide `num_heads`; by default as many.
        head_dim: Width of one head; by default hidden_size / num_heads.
        ffn_size: Width of the feed-forward; by default 4 x hidden_size, or 8/3 of it rounded up to
            64 when gated.
        activation: Of the feed-forward; `silu` by default. `gelu` is exact, `gelu_tanh` is
            GPT-2's, `gelu_quick` CLIP's, `relu2` the squared ReLU.
        gated: Multiply the activation by a second projection (SwiGLU with `silu`); true by default.
        clamp: Cuts the gate to at most this, and what it multiplies to its size (GPT-OSS); not by
            default.
        up_offset: Is added to what the activation is multiplied by (GPT-OSS: 1); 0 by default.
        moe: A mixture of experts in place of every feed-forward: mt-model's `MoEConfig`, such as
            `{num_experts: 8, top_k: 2, aux_loss: 0.01}`, with experts as wide as `ffn_size` where
            it names no other width; none by default.
        norm: `rms` (the default) or `layer`.
        norm_eps: Added to the mean square before the root; 1e-5 by default.
        norm_zero_centered: Weights of norms stand for 1 + w and start at 0 (Gemma); false by
            default.
        norm_rounds_first: Weights of rms norms multiply after the rounding to `precision.dtype`
            (Llama), not before it; false by default.
        norm_weight: Norms have weights; true by default.
        norm_bias: Norms of kind `layer` have biases; true by default.
        norms: Where a layer has them: in front of attention and feed-forward (`pre`, the default),
            of their `output` before it is added (OLMo-2), both (`sandwich`, Gemma 2), or after it
            is added (`post`, BERT).
        parallel: Attention and feed-forward start from the same input (GPT-NeoX); false by
            default.
        shared_norm: With `parallel`, one norm in front of both (GPT-J, Phi); false by default.
        residual_scale: Of their outputs before they are added (Granite); 1 by default.
        final_norm: A norm in front of the head; by default unless `norms` is `post`.
        positions: `rope` (the default), `learned` (a table) or `none`.
        rope_theta: Base of the rotary embedding; 10000 by default.
        rope: All of the rotary embedding, in place of `rope_theta`: mt-model's `RopeConfig`, such
            as `{theta: 1e6, fraction: 0.5, interleaved: true}`.
        qk_norm: RMSNorm on queries and keys: `head` (of each head, before the rotation), `whole`
            (of all heads together), `l2` (of each head, without a weight, after the rotation) or
            `none` (the default).
        bias: A bias on every projection of the layers; false by default.
        qkv_bias: A bias on the projection to queries, keys and values; as `bias` by default.
        out_bias: A bias on the projection behind attention; as `bias` by default.
        output_gate: What attention gives is multiplied by the sigmoid of a gate for each channel;
            false by default.
        causal: A token sees those up to its own; true by default, and false for `data.objective`
            mlm.
        tied: The head is the embedding matrix; true by default.
        embedding_scale: Of the embeddings of tokens (Gemma: the root of `hidden_size`); 1 by
            default.
        embedding_norm: A norm of the sum of all embeddings (BERT); false by default.
        token_types: Kinds of tokens with an embedding each; text is of kind 0, the second one of a
            pair (`data.masking.pairs`) of kind 1. 0 (none) by default.
        head_transform: The activation of a layer with a norm in front of the head (BERT); none by
            default.
        head_bias: A bias for each token of the vocabulary; false by default.
        pooled_head: Classes of whole sequences beside the scores of tokens (BERT): mt-model's
            `PooledHeadConfig`, such as `{num_classes: 2}`; none by default.
        logit_scale: Of what the head multiplies (Granite; muP: 1 / `optimizer.width_multiplier`);
            1 by default.
        logit_softcap: Logits become `softcap * tanh(logit / softcap)` (Gemma 2); not by default.
        z_loss: Weight of the loss `z`, the squared log-sum-exp of the logits, which keeps them from
            drifting (1e-4 in PaLM); 0 by default.
        dropout: Probability of dropping an element of embedding, attention or feed-forward outputs;
            0 by default, and with `from` what config.json says.
        attention_dropout: Probability of dropping an attention weight; 0 by default.
        window: Tokens that a query sees, the last of which is itself; all before it by default.
        chunk: Tokens of the chunks that a sequence is cut into, which do not see each other (Llama
            4); not by default.
        temperature: What multiplies queries by their positions: mt-model's `TemperatureConfig`,
            `{strength: 0.1, interval: 8192}` in Llama 4; nothing by default.
        sinks: A further logit per head in the softmax of attention: `learned`, `zero` or `none`
            (the default).
        softcap: Scores of attention become `softcap * tanh(score / softcap)`; not by default.
        attention_scale: Of the scores of attention; `head_dim ** -0.5` by default.
        score_bias: Added to the scores of attention by distance: `{type: alibi}`, or T5's
            `{type: relative}` with mt-model's `RelativeConfig`; none by default.
        init_std: Standard deviation of the initial weights; 0.02 by default.
        embedding_std: That of embeddings and head; `init_std` by default.
        encoder_layers: The first of `layers` that are an encoder's; the others are a decoder's,
            which attends to what the encoder gives (T5); 0 by default.
        decoder_start: The token that a decoder's sequence begins with; 0 by default.
        mtp: Modules that predict further tokens in training (DeepSeek-V3): mt-model's `MTPConfig`,
            such as `{depths: 1, weight: 0.3}`; none by default.
        layers: Layers that differ, in order, instead of `num_layers` equal ones: a list of `{mixer:
            {...}, feed_forward: {...}, repeat: N}` with the fields of mt-model's `AttentionConfig`,
            `MLPConfig` and `LayerConfig`, or with `type: mamba2` or `type: gateddeltanet` in the
            mixer those of `Mamba2Config` or `GatedDeltaNetConfig`. With it go `hidden_size`,
            `vocab_size`, `vocab_multiple`, `positions`, `tied`, `dropout`, `init_std`, `mtp`, and
            what is said of the form of norms, of embeddings, head and logits.
        kernels: What computes each operation: `auto` takes what was measured to be the fastest on
            the device, `fused` mt-fusions' kernels for norms, residuals, activations, rope
            and loss, `reference` the plain form of everything; or a mapping with the fields of
            mt-model's `Kernels`, such as `{attention: sdpa, norm: fused}`. What is named is used
            wherever the operation is, or the run ends and says why; the numbers stay the same but
            for rounding. It is no part of the model: a run may go on with another.
    """

    from_: str | None = None
    preset: str | None = None
    vocab_size: int | None = None
    vocab_multiple: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_size: int | None = None
    activation: Activation | None = None
    gated: bool | None = None
    clamp: float | None = None
    up_offset: float | None = None
    moe: MoEConfig | None = None
    norm: Literal["rms", "layer"] | None = None
    norm_eps: float | None = None
    norm_zero_centered: bool | None = None
    norm_rounds_first: bool | None = None
    norm_weight: bool | None = None
    norm_bias: bool | None = None
    norms: Norms | None = None
    parallel: bool | None = None
    shared_norm: bool | None = None
    residual_scale: float | None = None
    final_norm: bool | None = None
    positions: Positions | None = None
    rope_theta: float | None = None
    rope: RopeConfig | None = None
    qk_norm: QKNorm | None = None
    bias: bool | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    output_gate: bool | None = None
    causal: bool | None = None
    tied: bool | None = None
    embedding_scale: float | None = None
    embedding_norm: bool | None = None
    token_types: int | None = None
    head_transform: Activation | None = None
    head_bias: bool | None = None
    pooled_head: PooledHeadConfig | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None
    z_loss: float | None = None
    dropout: float | None = None
    attention_dropout: float | None = None
    window: int | None = None
    chunk: int | None = None
    temperature: TemperatureConfig | None = None
    sinks: Sinks | None = None
    softcap: float | None = None
    attention_scale: float | None = None
    score_bias: ScoreBias | None = None
    init_std: float | None = None
    embedding_std: float | None = None
    encoder_layers: int | None = None
    decoder_start: int | None = None
    mtp: MTPConfig | None = None
    layers: tuple[LayerConfig, ...] = ()
    kernels: KernelSet | Kernels = "auto"

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.at_least(
            1, "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"
        )
        checks.at_least(1, "ffn_size", "window", "chunk", "vocab_multiple")
        checks.at_least(0, "token_types", "z_loss", "encoder_layers", "decoder_start")
        checks.above(0, "init_std", "rope_theta", "norm_eps", "softcap", "attention_scale")
        checks.above(0, "clamp", "residual_scale", "embedding_scale", "embedding_std")
        checks.above(0, "logit_scale", "logit_softcap")
        checks.fraction("dropout", "attention_dropout")
        if self.layers and not checks.errors:
            for name in UNIFORM_FIELDS:
                if getattr(self, name) is not None:
                    checks.add(name, "does not go with model.layers; say it in the entries")
        if self.from_ is not None and not checks.errors:
            for item in fields(self):
                if item.name not in _WITH_FROM and getattr(self, item.name) != item.default:
                    checks.add(item.name, "does not go with model.from, whose config.json says it")
        elif self.preset is None:
            needed = ("hidden_size",) if self.layers else ("hidden_size", "num_layers", "num_heads")
            for name in needed:
                if getattr(self, name) is None:
                    checks.add(name, "missing; set it, or name a preset with model.preset")
        checks.done()
