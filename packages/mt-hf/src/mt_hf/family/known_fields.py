"""Fields of config.json that mt does not know: refused, ignored, or ignored with a word.

transformers ignores a field that neither its configuration class nor its model reads, and published
files have many. `known_fields.json` says what the class of each `model_type` knows;
`tools/known_fields.py` of this package makes it from transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from mt_files import shorten

# Fields that change no logit, except those for generation. `dtype` and the names of files are read
# elsewhere; token ids belong to the tokenizer; the rest changes the outputs of transformers.
_HARMLESS = """
architectures model_type transformers_version torch_dtype dtype auto_map tokenizer_class
_name_or_path name_or_path sep_token_id cls_token_id mask_token_id unk_token_id output_attentions
output_hidden_states return_dict id2label label2id num_labels problem_type task_specific_params
finetuning_task prefix torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward
attn_implementation _attn_implementation _attn_implementation_autoset experts_implementation
pretraining_tp unsloth_fixed unsloth_version keys_to_ignore_at_inference _sliding_window_pattern
ignore_index _commit_hash
"""
# Fields that change nothing at these values; other values are refused.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "is_decoder": (False, True, None),
        "is_causal": (True, None),
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


@dataclass(frozen=True, kw_only=True)
class SortedFields:
    """The fields of a config.json.

    Attributes:
        given: Fields for the family: those that it knows, and those that it has to refuse.
        unread: Names of fields that transformers does not know either, and whose values may mean
            something.
    """

    given: Mapping[str, Any]
    unread: Sequence[str]


def sort_fields(
    given: Mapping[str, Any], own: Collection[str], model_types: Sequence[str]
) -> SortedFields:
    """Sort the fields of a config.json by who knows them.

    Args:
        given: Content of the config.json.
        own: Names of the family's fields.
        model_types: Values of `model_type` of the family.

    Raises:
        ValueError: A field and its second name have different values.
    """
    known = _known(given.get("model_type"), model_types)
    rest: dict[str, Any] = {}
    unread: list[str] = []
    for name, value in given.items():
        if name in own:
            rest[name] = value
        elif (first := known.names.get(name, "")) in own:
            if given.get(first, value) != value:
                text = f"{shorten(value)} is not {first}={shorten(given[first])}"
                raise ValueError(f"{name}: {text}, and is a second name of it; remove one of them")
            rest[first] = value
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                rest[name] = value
        elif known.changes_numbers(name, value):
            rest[name] = value
        elif not known.knows(name) and not _is_idle(value):
            unread.append(name)
    return SortedFields(given=rest, unread=unread)


@dataclass(frozen=True, kw_only=True)
class _Known:
    """The names that transformers knows in a config.json of one model_type.

    Attributes:
        fields: Fields of the configuration class, with their defaults.
        names: Second names of fields.
        reads: Further names that the code reads.
        everything: Whether all names count as known, because the class is not in the table.
    """

    fields: Mapping[str, Any]
    names: Mapping[str, str]
    reads: Collection[str]
    everything: bool = False

    def knows(self, name: str) -> bool:
        """Return whether transformers knows a field, or mt knows that it changes no logit."""
        return self.everything or name in self.fields or name in self.reads or _is_harmless(name)

    def changes_numbers(self, name: str, value: Any) -> bool:
        """Return whether a field may change what transformers computes."""
        if not self.knows(name) or _is_harmless(name):
            return False
        return bool(value != self.fields.get(name))


def _is_harmless(name: str) -> bool:
    return name in _HARMLESS.split() or name in _table()["generation"]


def _is_idle(value: Any) -> bool:
    """Return whether a value switches nothing on, as `false`, `null` or a factor of 1."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value in (0, 1)
    return value is None or value is False or value in ("", [], {})


@cache
def _table() -> Any:
    return json.loads(files("mt_hf.family").joinpath("known_fields.json").read_text())


def _known(named: Any, model_types: Sequence[str]) -> _Known:
    """Return the names for a config.json's model_type, or else for the family's first."""
    base, kinds = _table()["base"], _table()["model_types"]
    named = named if isinstance(named, str) else ""
    kind = next((each for each in (named, *model_types) if each in kinds), None)
    own = {"fields": {}, "names": {}, "reads": []} if kind is None else kinds[kind]
    return _Known(
        fields={**base["fields"], **own["fields"]},
        names=own["names"],
        reads={*base["reads"], *own["reads"], *own["names"]},
        everything=kind is None,
    )
