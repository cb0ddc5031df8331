"""A language model as frozen values: embeddings, a typed list of layers, and a head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mt_files import Checks

from mt_model.block.sizes import MAX_VOCAB, indivisible
from mt_model.kernels.words import Activation, Positions
from mt_model.language.mtp_config import MTPConfig
from mt_model.language.pooled_head_config import PooledHeadConfig
from mt_model.stack.config import StackConfig
from mt_model.stack.layer_config import LayerConfig
from mt_model.stack.retro_config import RetroConfig
from mt_model.stack.table import span_name
from mt_model.vision.image_input_config import ImageInputConfig

if TYPE_CHECKING:
    from mt_parallel_state import ParallelState
    from torch import nn

MAX_TYPES = 1 << 16
# Parameters with a row for each token, and rows of padding behind them.
VOCABULARY = ("embedding.weight", "head.weight", "head.bias")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(StackConfig):
    """A language model: embeddings of tokens, layers in order, final norm and head.

    Attributes:
        vocab_size: Number of tokens that the model knows.
        positions: `rope` (at least one layer has a rotary embedding), `learned` (a table added to
            the embedding) or `none`.
        tied: The head is the embedding matrix.
        embedding_scale: Factor of the embeddings of tokens, rounded to the model's dtype (Gemma:
            `sqrt(hidden_size)`); positions, token types and given embeddings are not scaled.
        embedding_norm: Norm of the sum of all embeddings, before its dropout (BERT).
        token_types: Number of token types with an embedding each, `batch["token_types"]` (BERT:
            2).
        head_transform: Activation of a layer between the final norm and the head,
            `norm(act(W x + b))` (BERT); None for no such layer.
        head_bias: A bias for each token of the vocabulary.
        pooled_head: Classes of whole sequences beside the scores of tokens (BERT); None for none.
        logit_scale: Factor of the head's input (Cohere, Granite, muP: 1 / width multiplier).
        logit_softcap: Logits become `softcap * tanh(logit / softcap)` (Gemma 2), with the bias.
        z_loss: Weight of the loss `z`, the squared log-sum-exp of the logits (Chowdhery et al.,
            2022); 0 for none.
        vocab_multiple: Multiple that the rows of the embedding and the head are padded to, so that
            ranks can share a vocabulary that does not divide. Rows beyond `vocab_size` are zeros,
            no part of the softmax, and have no logits.
        images: Images among the tokens, `batch["pixel_values"]`; None for a model of text alone.
        mtp: Modules that predict further tokens in training; None for none.
        retro: Attention to retrieved neighbours, `batch["neighbours"]`, such as `{chunk: 64,
            neighbours: 2, encoder_layers: 2, first: 6, every: 3}`; None for none.
        encoder_layers: Number of first layers that form an encoder, with a norm and dropout of its
            own; the other layers are the decoder, which attends to the encoder's output
            (`CrossAttentionConfig`). 0 for no encoder.
        decoder_start: Token that a decoder's sequence begins with, where only labels are given.
    """

    vocab_size: int
    positions: Positions = "rope"
    tied: bool = True
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    token_types: int = 0
    head_transform: Activation | None = None
    head_bias: bool = False
    pooled_head: PooledHeadConfig | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    z_loss: float = 0.0
    vocab_multiple: int = 1
    images: ImageInputConfig | None = None
    mtp: MTPConfig | None = None
    retro: RetroConfig | None = None
    encoder_layers: int = 0
    decoder_start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        if any(layer.mixer and not layer.mixer.is_causal for layer in self.mtp_layers):
            text = "its layer has causal=False and sees the tokens that it is to predict; give it "
            checks.add("mtp", f"{text}a layer that is causal")
        if self.mtp is not None and self.images is not None:
            text = (
                "does not go with images, whose places have no embedding to look up; leave one out"
            )
            checks.add("mtp", text)
        rotating = [i for i, mixer in self.mixers.items() if mixer.rotary is not None]
        if self.positions == "rope" and not rotating:
            checks.add(
                "positions",
                "'rope', but no layer has a rope. Set rope on the layers that turn their heads, "
                "or use positions='learned' or 'none'.",
            )
        if self.positions != "rope" and rotating:
            checks.add(
                "positions",
                f"{self.positions!r}, but layer {rotating[0]} has a rope. Set it to None, or use "
                "positions='rope'.",
            )
        self._check_encoder(checks)
        self._check_retro(checks)
        checks.done()

    def _check_retro(self, checks: Checks) -> None:
        """Check that layers can attend to neighbours, and that they have no other memory."""
        if self.retro is None:
            return
        why = self.retro.obstacle(self.layers)
        if any(mixer.needs_memory for mixer in self.mixers.values()):
            why = "does not go with layers that attend to a memory; leave one of them out"
        if not all(mixer.is_causal for mixer in self.mixers.values()):
            why = "a layer has causal=False and sees later tokens; give it causal layers"
        if why is not None:
            checks.add("retro", why)

    def _check_encoder(self, checks: Checks) -> None:
        """Check that the decoder attends to a memory, and that no layer of the encoder does."""
        count, layers = self.encoder_layers, self.num_layers
        for name in ("images", "mtp"):
            if count and getattr(self, name) is not None:
                checks.add(name, f"does not go with encoder_layers={count}; leave one of them out")
        if count >= layers:
            text = f"{count} of {layers} layers; the decoder has the others, at least one"
            checks.add("encoder_layers", text)
        elif count:
            reads = [i for i, mixer in self.mixers.items() if mixer.needs_memory]
            early = [i for i in reads if i < count]
            if early:
                text = f"{count}, but layer {early[0]} attends to what the encoder gives; use "
                checks.add("encoder_layers", f"{text}{early[0]} or less")
            elif not reads:
                text = f"{count}, but no layer behind them attends to what the encoder gives. Give "
                checks.add("encoder_layers", f"{text}one a CrossAttentionConfig, or use 0")
        if self.decoder_start >= self.vocab_size:
            text = f"{self.decoder_start} is no token; there are {self.vocab_size}"
            checks.add("decoder_start", text)

    def _check_own(self, checks: Checks) -> None:
        checks.at_least(1, "vocab_size", "vocab_multiple")
        checks.at_most(MAX_VOCAB, "vocab_size", "vocab_multiple")
        checks.at_least(0, "token_types", "z_loss", "encoder_layers", "decoder_start")
        checks.at_most(MAX_TYPES, "token_types")
        checks.above(0, "embedding_scale", "logit_scale", "logit_softcap")
        checks.done()
        if self.images is not None and self.images.token_id >= self.vocab_size:
            text = f"its token_id={self.images.token_id} is not below vocab_size={self.vocab_size}"
            checks.add("images", f"{text}; use a token of the vocabulary")

    def build(self, state: ParallelState | None = None, **arguments: Any) -> nn.Module:
        """Build a `GPT`, or an `EncoderDecoder`."""
        if self.encoder_layers:
            from mt_model.language.encoder_decoder import EncoderDecoder

            return EncoderDecoder(self, state, **arguments)
        from mt_model.language.decoder import GPT

        return GPT(self, state, **arguments)

    @property
    def own_losses(self) -> dict[str, float]:
        """Weights of the losses outside of the layers: `lm`, `z`, `mtp_1` and on, and `nsp`."""
        weights = {"lm": 1.0, "z": self.z_loss} if self.z_loss else {"lm": 1.0}
        if self.mtp is not None:
            each = self.mtp.weight / self.mtp.depths
            weights |= {f"mtp_{depth}": each for depth in range(1, self.mtp.depths + 1)}
        if self.pooled_head is not None:
            weights["nsp"] = self.pooled_head.loss_weight
        return weights

    @property
    def loss_counts(self) -> dict[str, str]:
        """Count that divides each loss: `tokens`, `tokens_1` for `mtp_1`, `sequences` for `nsp`."""
        counts = super().loss_counts
        if self.pooled_head is not None:
            counts["nsp"] = "sequences"
        depths = 0 if self.mtp is None else self.mtp.depths
        return counts | {f"mtp_{depth}": f"tokens_{depth}" for depth in range(1, depths + 1)}

    @property
    def mtp_layers(self) -> tuple[LayerConfig, ...]:
        """The layer of each MTP module."""
        if self.mtp is None:
            return ()
        return (self.mtp.layer or self.layers[-1],) * self.mtp.depths

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """The layers, then the layers of the MTP modules."""
        return self.layers + self.mtp_layers

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage needs the embedding too."""
        return self.tied or self.mtp is not None

    @property
    def drops(self) -> bool:
        """Whether anything is dropped in training, in the image encoder too."""
        return super().drops or (self.images is not None and self.images.tower.drops)

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the embedding and of the head: the vocabulary with its padding."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def usual_vocab_multiple(self) -> int:
        """A `vocab_multiple` with which most layouts can share the vocabulary."""
        return 128 if self.vocab_size >= 1024 else 8

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model with padding; a tied head counts once."""
        hidden = self.hidden_size
        norm = self.norm.num_parameters(hidden)
        total = super().num_parameters
        total += self.vocab_rows * (hidden * (1 if self.tied else 2) + self.head_bias)
        total += norm * self.embedding_norm + self.token_types * hidden
        total += norm * (self.final_norm and self.encoder_layers > 0)
        if self.head_transform is not None:
            total += hidden * (hidden + 1) + norm
        if self.pooled_head is not None:
            total += self.pooled_head.num_parameters(hidden)
        if self.positions == "learned":
            total += self.max_sequence_length * hidden
        if self.images is not None:
            total += self.images.num_parameters(hidden)
        if self.retro is not None:
            total += self.retro.num_parameters(self.layers, hidden, norm)
        if self.mtp is not None:
            total += self.mtp.depths * ((2 + self.final_norm) * norm + 2 * hidden**2)
        return total

    def flops_per_token(self, sequence_length: int) -> int:
        """Count the operations of forward and backward for one token of a full sequence.

        The rules are `StackConfig`'s: for attention and an MLP
        `6 h e ffn + 6 h (q + 2 kv) + 6 q h + 6 q s` per layer, with `e = 3` gated, else 2, and
        `6 h V` for the head. Embedding look-up is not counted, nor are images
        (`ImageInputConfig.flops_per_image`). A module that predicts a further token has its layer,
        `12 h h` in front of it, and the head once more.

        Args:
            sequence_length: Tokens per sequence (`s`).
        """
        head = 6 * self.hidden_size * self.vocab_size
        if self.head_transform is not None:
            head += 6 * self.hidden_size**2
        module = 0 if self.mtp is None else self.mtp.depths * (12 * self.hidden_size**2 + head)
        if self.pooled_head is not None:
            head += self.pooled_head.flops(self.hidden_size) // sequence_length
        if self.retro is not None:
            module += self.retro.flops_per_token(self.layers, self.hidden_size)
        return head + module + super().flops_per_token(sequence_length)

    def handed_tokens(self, batch: Mapping[str, Any]) -> int:
        """Return the number of tokens of each row that one stage hands to the next.

        The tokens of the text come first, then the tokens of an encoder or of neighbours.

        Args:
            batch: A batch of training.
        """
        length = batch["tokens"].shape[1]
        if self.encoder_layers:
            length += batch["encoder_tokens"].shape[1]
        if self.retro is not None and batch.get("neighbours") is not None:
            length += batch["neighbours"][0].numel()
        return length

    def rows_of(self, name: str) -> int | None:
        """Return the size of the vocabulary for its matrices, which may be padded."""
        return self.vocab_size if name in VOCABULARY else None

    def rows_behind(self) -> Iterable[tuple[str, int, int, LayerConfig]]:
        """Yield one row for the MTP modules, with their heads."""
        if self.mtp is not None:
            without, length = replace(self, mtp=None), self.max_sequence_length
            parameters = self.num_parameters - without.num_parameters
            flops = self.flops_per_token(length) - without.flops_per_token(length)
            names = f"mtp {span_name(1, self.mtp.depths)}"
            yield names, parameters, flops, self.mtp_layers[0]

    def outside(self) -> tuple[str, str, str]:
        """Describe the norms, the embeddings and the head."""
        norms = [name for name in ("embedding_norm", "final_norm") if getattr(self, name)]
        embeddings = [f"embedding [{self.vocab_size}, {self.hidden_size}]"]
        if self.positions == "learned":
            embeddings.append(f"positions [{self.max_sequence_length}]")
        if self.images is not None:
            tower, tokens = self.images.tower, self.images.num_tokens
            embeddings.append(f"images [{tower.num_layers} layers, {tokens} tokens each]")
        if self.retro is not None:
            first, every = self.retro.places(self.num_layers)[0], self.retro.every
            embeddings.append(f"neighbours [from layer {first}, every {every}]")
        if self.token_types:
            embeddings.append(f"token types [{self.token_types}]")
        head = "head = embedding" if self.tied else f"head [{self.vocab_size}]"
        if self.head_transform is not None:
            head = f"{self.head_transform} layer, {head}"
        head += " + bias" * self.head_bias
        if self.pooled_head is not None:
            head += f", pooled classes [{self.pooled_head.num_classes}]"
        return ", ".join(norms) or "-", ", ".join(embeddings), head

    def check_split(self, tp: int) -> None:
        """Check that `tp` ranks can share the vocabulary and the layers."""
        if self.vocab_rows % tp:
            text = indivisible("vocab_size", self.vocab_rows, tp)
            raise ValueError(f"{text}; or pad it with vocab_multiple={tp}")
        if self.mtp is not None and self.hidden_size % tp:
            text = indivisible("hidden_size", self.hidden_size, tp)
            raise ValueError(f"{text} (projections of the modules of mtp)")
        super().check_split(tp)
        if self.images is not None:
            self.images.check_split(self.hidden_size, tp)

    def part_of(self, name: str) -> StackConfig:
        """Return the image encoder's config for its parameters, else the model's own."""
        if self.images is not None and name.startswith("images.tower."):
            return self.images.tower
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; the image encoder's values come from its own `to_dict`."""
        plain = super().to_dict()
        if self.images is not None:
            plain["images"] = {**plain["images"], "tower": self.images.tower.to_dict()}
        return plain
