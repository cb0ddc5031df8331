"""A language model from sizes and fields, each given once for all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from mt_files import FieldError, FieldProblem, bind, did_you_mean, shorten

from mt_model.attention.config import AttentionConfig
from mt_model.block.norm_config import NormConfig
from mt_model.feed_forward.mlp_config import MLPConfig
from mt_model.language.config import ModelConfig
from mt_model.rope.config import RopeConfig
from mt_model.stack.layer_config import LayerConfig

_Plain = Mapping[str, Any]


def _names(kind: type, *but: str, prefix: str = "") -> dict[str, str]:
    return {f"{prefix}{item.name}": item.name for item in fields(kind) if item.name not in but}


# Names of fields in short, each with the name that it has in its own config.
_MODEL = _names(ModelConfig, "layers", "norm")
_LAYER = _names(LayerConfig, "mixer", "feed_forward", "repeat")
_MIXER = _names(AttentionConfig, "dropout", "scale", "rope")
_MIXER |= {"attention_dropout": "dropout", "attention_scale": "scale"}
_MLP = _names(MLPConfig, "dropout", "bias")
_NORM = {"norm": "kind", **_names(NormConfig, "kind", prefix="norm_")}
# The config and the field that each name stands for.
FIELDS: Mapping[str, tuple[type, str]] = MappingProxyType(
    {
        name: (kind, field)
        for kind, names in (
            (ModelConfig, _MODEL),
            (LayerConfig, _LAYER),
            (AttentionConfig, _MIXER),
            (MLPConfig, _MLP),
            (NormConfig, _NORM),
        )
        for name, field in names.items()
    }
)
# What is said in short for a model, beside the fields.
SHORT_FORMS = ("num_layers", "layer", "layers", "rope", "rope_theta", "bias", "moe")
_KNOWN = (*FIELDS, *SHORT_FORMS)


def gpt(*, vocab_size: int, hidden_size: int, **given: Any) -> ModelConfig:
    """Build a language model of equal layers, or of a list of them.

    Every field of `ModelConfig`, `LayerConfig`, `AttentionConfig`, `MLPConfig` and `NormConfig` may
    be given by its name, and holds for all layers: `qk_norm="head"`, `gated=False`. Fields of the
    norm begin with `norm_`, as `norm_eps`, and `norm` is its kind; the dropout and the scale of
    attention are `attention_dropout` and `attention_scale`. None is as if it were left out.

    Args:
        vocab_size: Number of tokens that the model knows.
        hidden_size: Width of the residual stream.
        given: Fields, as above, and these:

            - `num_layers`: Number of equal layers.
            - `layer`: One layer as a mapping with `mixer`, `feed_forward` and the fields of
              `LayerConfig`; what it leaves out comes from the fields above.
            - `layers`: The layers in order, `LayerConfig`s or mappings like `layer`, each with a
              `repeat`, in place of `num_layers`.
            - `num_kv_heads`: `num_heads` by default; `head_dim`: `hidden_size / num_heads`.
            - `ffn_size`: By default 4 * hidden_size, or 8/3 of it rounded up to 64 when gated (the
              same number of parameters; Shazeer, 2020).
            - `bias`: Biases of all projections; `qkv_bias` and `out_bias` follow it.
            - `rope` and `rope_theta`: The rotary embedding, and its base alone; read only with
              `positions="rope"`.
            - `moe`: A mixture of experts in place of every MLP; experts are `ffn_size` wide where
              it names no width.
            - `max_sequence_length`: 2048 by default; `final_norm`: unless `norms` is `post`.

    Raises:
        FieldError: Fields are unknown, or do not fit each other; it names all of them.

    Example:
        >>> gpt(vocab_size=96, hidden_size=32, num_layers=2, num_heads=4).layers[0].mixer.head_dim
        8
    """
    return model_of({"vocab_size": vocab_size, "hidden_size": hidden_size, **given})


def model_of(given: _Plain) -> ModelConfig:
    """Build a language model from the fields that `gpt` takes, as YAML or Python have them.

    Raises:
        FieldError: Fields are missing, unknown, or do not fit each other; it names all of them.
    """
    said = {name: value for name, value in given.items() if not _is_null(value)}
    unknown = {name: f"unknown key. {did_you_mean(name, _KNOWN)}" for name in said}
    unknown = {name: text for name, text in unknown.items() if name not in _KNOWN}
    if unknown:
        raise FieldError(unknown, "gpt")
    model = {"max_sequence_length": 2048, **_part(said, _MODEL)}
    norm = said.get("norm")
    if isinstance(norm, NormConfig | Mapping):
        model["norm"] = norm
    else:
        model["norm"] = _part(said, _NORM)
    model["layers"] = list(_Layers(said))
    if "layers" not in said:
        model.setdefault("final_norm", said.get("norms") != "post")
    bound = bind(ModelConfig, model)
    if bound.value is None:
        problems = ((_path(p.path, said), p) for p in bound.problems)
        raise FieldError({path: _hint(p, path) for path, p in problems}, "gpt")
    return bound.value


class _Layers:
    """The layers of a model as `ModelConfig` takes them, with the common fields in each."""

    def __init__(self, said: _Plain) -> None:
        self._said = said
        self._mixer = _part(said, _MIXER)
        self._mlp = _part(said, _MLP)
        if "bias" in said:
            self._mlp["bias"] = said["bias"]
            self._mixer = {"qkv_bias": said["bias"], "out_bias": said["bias"], **self._mixer}
        if said.get("positions", "rope") == "rope":  # `rope: null` in a layer: it turns no heads
            self._mixer |= {"rope": {}, **_rope(said)}
        elif "rope" in said:
            self._mixer["rope"] = said["rope"]

    def __iter__(self) -> Iterator[LayerConfig | dict[str, Any]]:
        said = self._said
        if "layers" in said:
            for name in ("num_layers", "layer"):
                if name in said:
                    raise FieldError(
                        {name: "does not go with layers; leave one of them out"}, "gpt"
                    )
            layers = said["layers"]
            if not isinstance(layers, list | tuple):
                raise FieldError({"layers": f"expected a list, found {shorten(layers)}"}, "gpt")
            yield from (self._entry(layer, is_listed=True) for layer in layers)
            return
        if "num_layers" not in said:
            text = "missing; give num_layers, or a list of layers"
            raise FieldError({"num_layers": text}, "gpt")
        layer = self._entry(said.get("layer", {}), is_listed=False)
        if isinstance(layer, LayerConfig):
            yield replace(layer, repeat=said["num_layers"])
        else:
            yield {**layer, "repeat": said["num_layers"]}

    def _entry(self, given: Any, *, is_listed: bool) -> Any:
        """Return one layer with the common fields."""
        if not isinstance(given, Mapping):
            return given  # a LayerConfig, or what the binder refuses
        layer: dict[str, Any] = {**_part(self._said, _LAYER), **given}
        if "mixer" in given or not is_listed or "num_heads" in self._mixer:
            layer["mixer"] = self._kind(given, "mixer", "attention", self._mixer)
        usual = "moe" if "moe" in self._said else "mlp"
        if "feed_forward" in given or not is_listed or self._mlp or usual == "moe":
            fields = self._experts() if usual == "moe" else self._mlp
            layer["feed_forward"] = self._kind(given, "feed_forward", usual, fields)
        return layer

    def _experts(self) -> Any:
        for name in _MLP:
            if name in self._said and name != "ffn_size":
                text = f"{shorten(self._said[name])} does not go with moe; say moe.{name}"
                raise FieldError({name: text}, "gpt")
        return self._said["moe"]

    def _kind(self, layer: _Plain, part: str, usual: str, common: Any) -> Any:
        """Return a mixer or feed-forward, with the common fields where it is of their kind."""
        own = layer.get(part, {})
        if not isinstance(own, Mapping):
            return own
        kind = own.get("type", "mlp" if part == "feed_forward" and own else usual)
        if not isinstance(common, Mapping):  # a MoEConfig
            return own if own else replace(common, ffn_size=common.ffn_size or self._width({}))
        merged = {**(common if kind == usual else {}), **own, "type": kind}
        if kind == "attention" and "num_heads" in merged:
            merged.setdefault("num_kv_heads", merged["num_heads"])
            if "head_dim" not in merged:
                merged["head_dim"] = self._head_dim(merged["num_heads"])
        elif kind in ("mlp", "moe"):
            merged.setdefault("ffn_size", self._width(merged))
        return merged

    def _head_dim(self, num_heads: Any) -> int:
        hidden, heads = _integer(self._said.get("hidden_size")), _integer(num_heads)
        if hidden is None or heads is None:
            return 2  # the binder says what they have to be
        if heads < 1 or hidden % heads:
            text = f"{shorten(hidden)} does not divide by num_heads={shorten(heads)}. Choose "
            text += "num_heads that divides it, or give head_dim."
            raise FieldError({"hidden_size": text}, "gpt")
        return hidden // heads

    def _width(self, feed_forward: _Plain) -> Any:
        """Return the width of a feed-forward: `ffn_size`, or the usual one for the hidden size."""
        if "ffn_size" in self._said:
            return self._said["ffn_size"]
        hidden = _integer(self._said.get("hidden_size")) or 1
        gated = str(feed_forward.get("gated", True)).lower() == "true"
        return -(-8 * hidden // (3 * 64)) * 64 if gated else 4 * hidden


def _part(said: _Plain, names: _Plain) -> dict[str, Any]:
    """Return the fields of one config, by the names that they have there."""
    return {field: said[name] for name, field in names.items() if name in said}


def _rope(said: _Plain) -> dict[str, Any]:
    """Join the short and the long form of the rotary embedding."""
    theta, rope = said.get("rope_theta"), said.get("rope")
    if theta is None:
        return {} if rope is None else {"rope": rope}
    if rope is None:
        return {"rope": {"theta": theta}}
    if isinstance(rope, Mapping):
        rope = {"theta": theta, **rope}
    found = rope.theta if isinstance(rope, RopeConfig) else rope["theta"]
    if float(found) != float(theta):
        text = (
            f"its theta is {shorten(found)}, but rope_theta is {shorten(theta)}; say rope.theta, "
        )
        raise FieldError({"rope": text + "and leave rope_theta out"}, "gpt")
    return {"rope": rope}


def _is_null(value: object) -> bool:
    return value is None or bool(getattr(value, "is_null", False))


def _integer(value: Any) -> int | None:
    """Return a whole number, which YAML gives as text; None for anything else."""
    try:
        return None if isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError):
        return None


def _hint(problem: FieldProblem, path: str) -> str:
    """Return the text of a problem, in which a suggested key is named as the path is."""
    if path.startswith("layer."):
        return problem.text.replace("layers[0].", "layer.")
    longer = problem.path.removesuffix(path) if problem.path.endswith(path) else ""
    return problem.text.replace(longer, "") if longer else problem.text


def _path(path: str, said: _Plain) -> str:
    """Return the argument that gave the value at a path of `ModelConfig`."""
    if path.startswith("norm."):
        short = next(name for name, field in _NORM.items() if field == path.removeprefix("norm."))
        return path if isinstance(said.get("norm"), Mapping) else short
    if "layers" in said or not path.startswith("layers[0]"):
        return path
    part, _, field = path.removeprefix("layers[0].").partition(".")
    if not field:
        return "num_layers" if part == "repeat" else part
    own = said.get("layer", {})
    if isinstance(own, Mapping) and field in (own.get(part) or {}):
        return f"layer.{part}.{field}"
    if part == "feed_forward" and "moe" in said:
        return f"moe.{field}"
    if field == "rope.theta" and "rope_theta" in said:
        return "rope_theta"
    names = {"mixer": _MIXER, "feed_forward": _MLP}[part]
    return next((name for name, inner in names.items() if inner == field), field)
