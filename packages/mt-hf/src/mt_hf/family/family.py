"""A family of models: everything needed to read and write its folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mt_files import FieldProblem, bind, build, shorten, to_plain
from mt_model import ModelConfig, StackConfig

from mt_hf.family.error import ExchangeError
from mt_hf.family.link import Link

_SHOWN = 5  # differences in a message

# Fields of every config.json that change no logit. `dtype` and the names of files are read
# elsewhere; token ids belong to the tokenizer; the rest changes the outputs of transformers.
_HARMLESS = """
architectures model_type transformers_version torch_dtype dtype auto_map tokenizer_class
_name_or_path name_or_path use_cache bos_token_id eos_token_id pad_token_id sep_token_id
cls_token_id mask_token_id unk_token_id decoder_start_token_id output_attentions
output_hidden_states return_dict return_dict_in_generate id2label label2id num_labels problem_type
task_specific_params finetuning_task prefix torchscript use_bfloat16 tf_legacy_loss
chunk_size_feed_forward attn_implementation _attn_implementation _attn_implementation_autoset
pretraining_tp unsloth_fixed unsloth_version keys_to_ignore_at_inference temperature top_k top_p
typical_p do_sample num_beams num_beam_groups diversity_penalty max_length min_length
max_new_tokens early_stopping num_return_sequences length_penalty repetition_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id
forced_eos_token_id suppress_tokens begin_suppress_tokens remove_invalid_values
exponential_decay_length_penalty output_scores cache_implementation _sliding_window_pattern
ignore_index
"""
# Fields that change nothing at these values; other values are refused.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "is_decoder": (False, True, None),
        "is_encoder_decoder": (False, None),
        "add_cross_attention": (False, None),
        "cross_attention_hidden_size": (None,),
        "tie_encoder_decoder": (False, None),
        "pruned_heads": ({}, None),
        "per_layer_config": ({}, None),
        "tie_last_hidden_states": (False, True, None),
        "quantization_config": (None,),
    }
)


def _no_repeats(config: Any) -> Mapping[str, str]:
    del config
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models of Hugging Face transformers.

    Attributes:
        name: Name of the family, in lower case.
        architectures: Names in `architectures` of config.json.
        model_types: Values of `model_type`; the name by default.
        fields: A frozen dataclass of the fields of config.json that change numbers, with the
            defaults of transformers. Other fields are refused, except fields known to change
            nothing. Its `__post_init__` refuses unsupported values. No class may derive from it, as
            the binder would take the subclass for a kind of it.
        read: Function from the fields to the model.
        write: The inverse function; raises ValueError with the reason if a model is not of the
            family. An omission is noticed, because the result is read again and compared.
        links: Function from a model to its links between tensors and parameters.
        ignored: Suffixes, or prefixes such as `mtp.`, of tensors in a folder that are not read.
        copies: Tied tensors that a folder may store, each with the tensor that it equals.
        settle: Function from the model of config.json and the names of the folder's tensors to the
            model, if config.json leaves parts of it open.
        builds: Class of the config that `read` returns.
        wrapper: Optional prefix of all tensors' names.
        renames: Prefixes in folders of other versions, each with our prefix, applied in order.
        repeats: Function from a model to the `copies` to write, as transformers does not tie them.
        endings: Suffixes in folders of other versions, each with our suffix.
        refused: Unsupported architectures, each with the reason and a way out.
        hint: Advice for tensors that do not match config.json.
        like: Name of another family with the same models, which is the default for writing them.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    fields: type[Any]
    read: Callable[[Any], StackConfig]
    write: Callable[[Any], Any]
    links: Callable[[Any], Iterable[Link]]
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    copies: tuple[tuple[str, str], ...] = (("lm_head.weight", "model.embed_tokens.weight"),)
    settle: Callable[[StackConfig, Collection[str]], StackConfig] | None = None
    builds: type[StackConfig] = ModelConfig
    wrapper: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    repeats: Callable[[Any], Mapping[str, str]] = _no_repeats
    endings: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    hint: str = ""
    like: str = ""

    def __post_init__(self) -> None:
        if not self.model_types:
            object.__setattr__(self, "model_types", (self.name,))

    def ignores(self, name: str) -> bool:
        """Return whether a folder may contain a tensor that is not read."""
        beginnings = tuple(part for part in self.ignored if part.endswith("."))
        return name.endswith(self.ignored) or name.startswith(beginnings)

    def config_of(
        self, given: Mapping[str, Any], path: Path, names: Collection[str] | None = None
    ) -> StackConfig:
        """Return the model that a config.json describes.

        Args:
            given: Content of the config.json.
            path: The file, for messages.
            names: Names of the folder's tensors; None if they are unknown.

        Raises:
            ExchangeError: A field is unknown, or has a wrong type or an unsupported value; the
                message lists all problems.
        """
        known = {item.name for item in dataclasses.fields(self.fields)}
        harmless = set(_HARMLESS.split())
        rest = {}
        for name, value in given.items():
            allowed = _NEUTRAL.get(name, ())
            if name in known or not (name in harmless or value in allowed):
                rest[name] = value
        bound = bind(self.fields, rest)
        problems = [_refusal(found, rest) for found in bound.problems]
        if bound.value is not None:
            try:
                config = self.read(bound.value)
                if self.settle is None or names is None:
                    return config
                return self.settle(config, names)
            except ValueError as error:
                problems = [str(error)]
        lines = "\n  ".join(problems)
        raise ExchangeError(f"{path}: is no {self.name} model that mt builds:\n  {lines}")

    def fields_of(self, config: StackConfig) -> dict[str, Any]:
        """Return the fields of config.json for a model.

        Raises:
            ValueError: The model is not of the family; the message lists the differences.
        """
        if not isinstance(config, self.builds):
            found, wanted = type(config).__name__, self.builds.__name__
            raise ValueError(f"it has a {wanted}, and not a {found}")  # noqa: TRY004
        plain = to_plain(self.write(config))
        again = self.read(build(self.fields, plain))
        lines = list(_differences(to_plain(comparable(config)), to_plain(comparable(again))))
        if lines:
            more = f", and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            raise ValueError("; ".join(lines[:_SHOWN]) + more)
        return plain


def comparable(config: StackConfig) -> StackConfig:
    """Return a model without parts that change no logit, for a comparison.

    These are dropout, initial values, padding, the rounding of norms in bf16, weights of losses,
    routers' options for training, and modules that predict further tokens in training.
    """
    layers = tuple(
        replace(
            layer,
            mixer=layer.mixer and layer.mixer.evaluated,
            feed_forward=layer.feed_forward and layer.feed_forward.evaluated,
        )
        for layer in config.layers
    )
    same: dict[str, Any] = {"dropout": 0.0, "init_std": StackConfig.init_std, "embedding_std": None}
    if isinstance(config, ModelConfig):
        same |= {"vocab_multiple": 1, "z_loss": 0.0, "mtp": None}
        if config.images is not None:
            tower = comparable(config.images.tower)
            same["images"] = replace(config.images, tower=tower)
        if config.pooled_head is not None:
            same["pooled_head"] = replace(config.pooled_head, loss_weight=1.0)
    norm = replace(config.norm, rounds_first=False)
    return replace(config, layers=layers, norm=norm, **same)


def _refusal(problem: FieldProblem, given: Mapping[str, Any]) -> str:
    name = problem.path
    if problem.text.startswith("unknown key") and name in given:
        return (
            f"{name}: {shorten(given[name])}: the field is not known, and may change what the "
            "model computes; remove it if it does not"
        )
    return str(problem)


def _differences(first: Any, second: Any, path: str = "") -> Iterator[str]:
    """Yield the differences of two plain values."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in {**first, **second}:
            inner = f"{path}.{name}" if path else name
            yield from _differences(first.get(name), second.get(name), inner)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, pair in enumerate(zip(first, second, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif first != second:
        yield f"{path} is {shorten(first)} and would be read as {shorten(second)}"
