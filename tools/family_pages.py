"""Make the pages of the families of models from the code.

    uv run python tools/family_pages.py

writes `docs/families/` anew; `tools/tests/test_family_pages.py` says when it has to be. Fields come
from the family's dataclass, refusals from values that are tried, layers from the configuration of a
config.json that leaves all fields out, and layouts from models that are built on them.
"""

import dataclasses
import inspect
import json
import math
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from mt_context_parallel import Algorithm
from mt_files import SchemaError, describe, hints_of
from mt_hf import ExchangeError, Family, known_families
from mt_model import PRESETS, VISION_PRESETS, StackConfig, preset, validate_split, vision_preset
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import fake_world
from mt_tokenizer import Tokenizer, train_tokenizer
from mt_train import load_config

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "docs/families"
COMMAND = "uv run python tools/family_pages.py"
# What a config.json has to say, in families of which no model has only defaults.
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "llava": {
        "text_config": {"model_type": "llama", "vocab_size": 32064},
        "vision_config": {"model_type": "clip_vision_model"},
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
}
_CONFIG = Path("config.json")
_RUN = "data: {corpus: standard-library}\n" + (
    "training: {steps: 1, global_batch_size: 1, micro_batch_size: 1, sequence_length: 8}\n"
)
_RANKS, _MOST_RANKS = 4, 64  # of the layouts that are built, and those that share a width
_INDEX = f"""# Families of models

The supported families of Hugging Face models. `{COMMAND}` generates their pages from the code.
[mt-hf](../mt-hf.md) explains reading and writing; [Port your model](../port-your-model.md)
explains how to add a family.

| family | in transformers | features |
|---|---|---|
"""


def pages() -> dict[str, str]:
    """Write all pages, by their names in `docs/families`."""
    families = known_families()
    rows = []
    for name, family in families.items():
        classes = ", ".join(f"`{each}`" for each in family.architectures)
        rows.append(f"| [{name}]({name}.md) | {classes} | {_summary(family)} |\n")
    with fake_world(_RANKS):
        made = {f"{name}.md": page(family) for name, family in families.items()}
    return {"README.md": _INDEX + "".join(rows) + _homeless(), **made}


def page(family: Family) -> str:
    """Write the page of a family."""
    given = {"architectures": [family.architectures[0]], **NEEDED.get(family.name, {})}
    try:
        config = family.config_of(given, _CONFIG)
    except ExchangeError as error:
        way_out = f"add the required fields of {family.name} to NEEDED in tools/family_pages.py"
        raise SystemExit(f"{error}\n{way_out}") from error
    parts = [
        f"# {family.name}",
        _intro(family),
        "## config.json",
        _notes(family.fields),
        _fields(family, given),
        "Any other field that transformers reads is refused, unless it is known to change nothing.",
        "## Layers",
        _layers(family, config),
        "## Layouts",
        _layouts(config),
        *_presets(family.name),
        "## Commands",
        _commands(family, given, config),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _intro(family: Family) -> str:
    lines = [inspect.getdoc(sys.modules[family.fields.__module__]) or "", ""]
    lines.append(f"`architectures`: {', '.join(f'`{each}`' for each in family.architectures)}.")
    lines.append(f"`model_type`: {', '.join(f'`{each}`' for each in family.model_types)}.")
    lines.append(f"Read as a `{family.builds.__name__}`.")
    return "\n".join(lines)


def _summary(family: Family) -> str:
    text = inspect.getdoc(sys.modules[family.fields.__module__]) or ""
    return " ".join(text.partition("\n\n")[0].split()).rstrip(".")


def _notes(cls: type) -> str:
    """Return what docstrings of the fields say below their first lines."""
    texts = (inspect.cleandoc(vars(base).get("__doc__") or "") for base in cls.__mro__[:-1])
    return "\n\n".join(text.partition("\n\n")[2] for text in texts if "\n\n" in text)


def _fields(family: Family, given: Mapping[str, Any]) -> str:
    """Write the table of the fields, with the refused ones among some trial values."""
    hints = hints_of(family.fields)
    lines = ["| field | type | default | refused |", "|---|---|---|---|"]
    for item in dataclasses.fields(family.fields):
        values = list(_tries(hints[item.name], item.default))
        if {} in values and item.name.startswith("rope"):
            values.append({"rope_type": "?"})
        refused = _refusals(family, given, item.name, values)
        cells = (f"`{item.name}`", describe(hints[item.name]), _default(item), refused)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _refusals(family: Family, given: Mapping[str, Any], name: str, values: Iterable[Any]) -> str:
    """Return what the family says to values of a field, each text once."""
    found: dict[str, str] = {}
    for value in values:
        try:
            family.config_of({**given, name: value}, _CONFIG)
        except ExchangeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]]
            text = "; ".join(line.removeprefix(f"{name}: ").rstrip(".") for line in lines)
            found[text.replace(str(value), "")] = text
    return ". ".join(found.values())


def _tries(hint: Any, default: Any) -> Iterator[Any]:
    """Yield values of a type: those at the edge of what sizes are, and words that mean nothing."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    for option in options:
        origin, inner = typing.get_origin(option), typing.get_args(option)
        if option is bool:
            yield from (True, False)
        elif option is int:
            yield from (0, default + 1 if isinstance(default, int) else 7)
        elif option is float:
            yield -1.0
        elif option is type(None):
            yield None
        elif option is str:
            yield "?"
        elif origin is Literal:
            yield from inner
        elif origin is tuple:
            yield from ([], [next(_tries(inner[0], None))]) if inner[-1] is ... else ()
        else:
            yield {}


def _is_union(hint: Any) -> bool:
    return not isinstance(hint, type) and typing.get_origin(hint) not in (Literal, tuple, Mapping)


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default_factory is not dataclasses.MISSING:
        return f"`{_json(item.default_factory())}`"
    return "required" if item.default is dataclasses.MISSING else f"`{_json(item.default)}`"


def _json(value: Any) -> str:
    return json.dumps(value, default=dict)


def _layers(family: Family, config: StackConfig) -> str:
    said = NEEDED.get(family.name)
    words = "without other fields" if said is None else f"with only `{_json(said)}`"
    return f"A config.json {words} is this model:\n\n```text\n{config}\n```"


def _layouts(config: StackConfig) -> str:
    """Say on which layouts the model is built, and what refuses the others."""
    sizes = [2**power for power in range(1, _MOST_RANKS.bit_length())]
    refused = {tp: why for tp in sizes if (why := _split_obstacle(config, tp)) is not None}
    built = ", ".join(str(tp) for tp in sizes if tp not in refused) or "no"
    rest = "".join(f". {tp}: {why}" for tp, why in list(refused.items())[:1])
    rows = [("`tp`", f"{built} ranks{rest}")]
    if 2 not in refused:
        why = _obstacle(config, {"tp": 2}, sequence_parallel=True)
        rows.append(("sequence parallelism", why or "yes"))
    why = _obstacle(config, {"pp": 2})
    rows.append(("`pp`", why or "yes, cut between any two layers"))
    answers: dict[str, list[str]] = {}
    for algorithm in typing.get_args(Algorithm):
        inner = {"context_inner_size": 2} if algorithm == "hierarchical" else {}
        why = _obstacle(config, {"cp": 4}, context_algorithm=algorithm, **inner)
        answers.setdefault(why or "yes", []).append(algorithm)
    rows += [(f"`cp`: {', '.join(named)}", text) for text, named in answers.items()]
    lines = [
        "| layout | this model |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in rows),
    ]
    return "\n".join(lines)


def _split_obstacle(config: StackConfig, tp: int) -> str | None:
    """Say why `tp` ranks can't share the model, its vocabulary padded for them."""
    try:
        validate_split(_padded(config, tp), tp)
    except ValueError as error:
        return str(error)
    return None


def _padded(config: StackConfig, tp: int) -> StackConfig:
    """Pad the vocabulary, where there is one, as `from_pretrained` does."""
    if not hasattr(config, "vocab_multiple"):
        return config
    return dataclasses.replace(config, vocab_multiple=tp)


def _obstacle(config: StackConfig, sizes: Mapping[str, Any], **arguments: Any) -> str | None:
    """Say what refuses a layout of each kind of the model's layers, twice; they get no memory."""
    layout = ParallelLayout(**{"dp": _RANKS // math.prod(sizes.values()), **sizes})
    short = _shortened(_padded(config, layout.tp))
    layers = range(short.num_layers // layout.pp)
    with ParallelState(layout, device="cpu") as state:
        try:
            short.build(state, device="meta", seed=None, layers=layers, **arguments)
        except (ValueError, NotImplementedError) as error:
            return str(error)
    return None


def _shortened(config: StackConfig) -> StackConfig:
    """Keep two layers of each kind, of the encoder and of the others where there is one."""
    encoder = getattr(config, "encoder_layers", 0)
    first, kinds = (
        tuple(dict.fromkeys(layers)) * 2
        for layers in (config.layers[:encoder], config.layers[encoder:])
    )
    changes = {"encoder_layers": len(first)} if first else {}
    return dataclasses.replace(config, layers=first + kinds, **changes)


def _presets(family: str) -> list[str]:
    """Write the table of this family's published models."""
    named = {name: config for name, config in _published().items() if _home(name) == family}
    if not named:
        return []
    lines = ["| preset | parameters | layers | width |", "|---|---|---|---|"]
    for name, config in named.items():
        sizes = f"{config.num_parameters:,} | {config.num_layers} | {config.hidden_size}"
        lines.append(f"| `{name}` | {sizes} |")
    return ["## Presets", "\n".join(lines)]


@cache
def _published() -> dict[str, StackConfig]:
    languages = {name: preset(name) for name in PRESETS}
    return {**languages, **{name: vision_preset(name) for name in VISION_PRESETS}}


@cache
def _home(name: str) -> str | None:
    """Return the family that a published model is written as: of several the one named like it."""
    families = known_families().values()
    alike = {f.name: SequenceMatcher(None, f.name, name).ratio() for f in families}
    for family in sorted(families, key=lambda f: -alike[f.name]):
        with suppress(ValueError):
            family.fields_of(_published()[name])
            return family.name
    return None


def _homeless() -> str:
    """Name the published models that no family writes."""
    named = [f"`{name}`" for name in _published() if _home(name) is None]
    return f"\nPresets of no family: {', '.join(named)}.\n" if named else ""


def _commands(family: Family, given: Mapping[str, Any], config: StackConfig) -> str:
    lines = [
        ("mt-hf verify FOLDER", "against transformers"),
        ("mt-hf import FOLDER runs/it", "a run folder, with the weights as a checkpoint"),
    ]
    option = " data.spans={}" if getattr(config, "encoder_layers", 0) else ""
    if not option and not all(getattr(mixer, "causal", True) for mixer in config.mixers.values()):
        option = " data.objective=mlm"
    takes_images = getattr(config, "images", None) is not None
    if takes_images:  # which folders and tokenizers do, test_image_runs shows
        option = " data.kind=image-text"
    refused = None if takes_images else _training_obstacle(given, option.split())
    if refused is None:
        command = f"mt-train run file.yaml model.from=FOLDER{option}"
        lines.append((command, "on any of these layouts"))
    if _generates(config):
        lines.append(("mt-infer generate runs/it --prompt Hello", "with a cache"))
    lines.append(("mt-hf export runs/it NEW", "from any checkpoint, whatever layout wrote it"))
    width = max(len(command) for command, _ in lines)
    shown = "\n".join(f"$ {command.ljust(width)}  # {text}" for command, text in lines)
    after = "" if refused is None else f"\n\nmt-train does not train it: {refused}."
    return f"```console\n{shown}\n```{after}"


def _generates(config: StackConfig) -> bool:
    """Whether it is a language model whose layers keep what they have seen of a sequence."""
    try:
        for index, mixer in config.mixers.items():
            if index >= getattr(config, "encoder_layers", 0):
                mixer.cache_shapes(1, 1, 1)
    except NotImplementedError:
        return False
    return hasattr(config, "vocab_size")


def _training_obstacle(given: Mapping[str, Any], options: Iterable[str]) -> str | None:
    """Say why mt-train refuses a folder of the family, with options over the file."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(given))
        _tokenizer().save(folder / "tokenizer.json")
        (folder / "run.yaml").write_text(f"model: {{from: {folder}}}\n{_RUN}")
        try:
            load_config(folder / "run.yaml", [*options]).model(8)
        except SchemaError as error:
            return "; ".join(each.text for each in error.problems).replace(
                f"'{folder}'", "a folder"
            )
    return None


@cache
def _tokenizer() -> Tokenizer:
    return train_tokenizer(["text"], 257)


def main() -> None:
    """Write the folder anew."""
    folder = ROOT / FOLDER
    folder.mkdir(exist_ok=True)
    made = pages()
    for path in folder.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
