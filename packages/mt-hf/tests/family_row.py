"""A family's row in the tests against transformers, and what its models are made with.

A new family is one file in `family_rows/` with a `ROW`.
"""

import copy
import importlib.util
import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from mt_hf import open_pretrained
from mt_testing import sample
from safetensors import safe_open
from safetensors.torch import load_file

SEQUENCE, TARGET = 12, 8  # tokens of a sequence, and of one behind an encoder's
_TRANSFORMERS = "transformers.models"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the tests need to know of a family.

    Attributes:
        name: Name of the family in mt-model, and of its module in transformers.
        model: Name of the class in transformers.
        draw: Function from the index of a draw and a `random.Random` to the config's arguments.
        draws: Number of draws.
        module: The module in transformers, if it is not called like the family.
        config: Name of the config's class, if it is not the family's name with `Config`.
        layouts: Layouts of the tests.
        prefixes: Prefixes of names in files, and in the model of transformers.
        norm_center: Mean of the random weights of norms: 0 if 1 is added to them.
        has_encoder: It is an encoder and a decoder; `test_encoder_decoder.py` has more tests.
        generates: Whether it generates text.
        prepare: Changes the drawn values of a model of transformers.
        own_heads: Draws with a head of their own, where transformers says that all are tied.
        has_experts: Layouts deal them, and transformers has other tensors in memory than in files.
    """

    name: str
    model: str
    draw: Callable[[int, random.Random], dict[str, Any]]
    draws: int
    module: str | None = None
    config: str | None = None
    layouts: tuple[str, ...] = ("tp2", "pp2", "tp2pp2", "cp2")
    prefixes: tuple[str, str] = ("", "")
    norm_center: float = 1.0
    has_encoder: bool = False
    generates: bool = True
    prepare: Callable[[Any], None] | None = None
    own_heads: tuple[int, ...] = ()
    has_experts: bool = False

    @property
    def placed(self) -> tuple[str, ...]:
        """The layouts on which it is tested."""
        return (*self.layouts, "ep2", "tp2ep2", "ep2etp2") if self.has_experts else self.layouts

    @property
    def home(self) -> str:
        return self.module or self.name

    def in_memory(self, stored: str) -> str:
        """The name of a stored tensor in the model of transformers."""
        first, second = self.prefixes
        return second + stored.removeprefix(first) if stored.startswith(first) else stored

    def classes(self) -> tuple[type, type]:
        """The config and the model of transformers."""
        configs = import_module(f"{_TRANSFORMERS}.{self.home}.configuration_{self.home}")
        models = import_module(f"{_TRANSFORMERS}.{self.home}.modeling_{self.home}")
        by_case = {name.lower(): name for name in vars(configs)}
        name = self.config or by_case[f"{self.home.replace('_', '')}config"]
        return getattr(configs, name), getattr(models, self.model)

    def build(self, index: int):
        """A transformers model of drawn sizes with random values in every parameter, in fp32."""
        drawn = random.Random(f"{self.name}{index}")
        config_class, model_class = self.classes()
        config = config_class(**self.draw(index, drawn))
        model = model_class(config).eval()
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            for name, param in model.named_parameters():
                values = torch.randn(param.shape, generator=generator)
                center = (
                    self.norm_center if "norm" in name.lower() and name.endswith("weight") else 0.0
                )
                param.copy_(center + 0.2 * values)
            if self.prepare is not None:
                self.prepare(model)
        if index in self.own_heads:
            shape = model.lm_head.weight.shape
            values = torch.randn(shape, generator=torch.Generator().manual_seed(7))
            model.lm_head.weight = torch.nn.Parameter(0.2 * values)
        return model

    def batch(self, config, rows=3):
        """Return the tokens; with an encoder, the tokens of encoder and decoder."""
        generator = torch.Generator().manual_seed(5)
        lengths = {"tokens": SEQUENCE}
        if self.has_encoder:
            lengths = {"encoder_tokens": SEQUENCE, "tokens": TARGET}
        return {
            name: torch.randint(0, config.vocab_size, (rows, length), generator=generator)
            for name, length in lengths.items()
        }

    def padded(self, config):
        """The same with labels and padding; a decoder behind an encoder has the labels alone."""
        batch = self.batch(config)
        tokens = batch.get("encoder_tokens", batch["tokens"])
        mask = torch.ones_like(tokens, dtype=torch.bool)
        if self.has_encoder:
            labels = batch.pop("tokens")
            mask[1, -3:] = mask[2, :5] = False  # behind and in front
            labels[0, -2:] = -100
            return {**batch, "encoder_mask": mask, "labels": labels}
        labels = tokens.roll(-1, 1)
        for sequence, length in enumerate((SEQUENCE, SEQUENCE - 3, SEQUENCE - 7)):
            mask[sequence, length:] = False
            labels[sequence, length - 1 :] = -100
        return {**batch, "mask": mask, "labels": labels}

    def logits(self, model, batch):
        """What transformers makes of a batch; a decoder behind an encoder shifts labels itself."""
        side = "encoder_" if self.has_encoder else ""
        given, mask = {"input_ids": batch[f"{side}tokens"]}, batch.get(f"{side}mask")
        if mask is not None:
            given["attention_mask"] = mask.long()
        if self.has_encoder and "tokens" in batch:
            given["decoder_input_ids"] = batch["tokens"]
        elif self.has_encoder:
            given["labels"] = batch["labels"].clone()
        return model(**given).logits

    @contextmanager
    def in_fp64(self):
        """Inside, what transformers computes in fp32 whatever the model's dtype is in fp64."""
        modules = [
            import_module(f"{_TRANSFORMERS}.{self.home}.modeling_{self.home}"),
            import_module("transformers.modeling_rope_utils"),
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            for module in modules:
                patch.setattr(module, "torch", WideTorch())
            yield


def oracle(row, model):
    """The same model of transformers with every number in fp64."""
    if row.has_encoder:  # a copy by names would tie a head of its own
        return copy.deepcopy(model).double()
    with row.in_fp64():
        wide = type(model)(copy.deepcopy(model.config)).double().eval()
    wide.load_state_dict(model.state_dict())
    if row.has_experts:
        wide.set_experts_implementation("eager")  # torch's grouped product takes no fp64
    return wide


def stored_gradients(wide, folder=None):
    """Return the gradients by the names of tensors in memory; with a folder, in files.

    The names in files come from transformers, which saves a model with gradients as weights.
    """
    grads = {name: param.grad for name, param in wide.named_parameters() if param.grad is not None}
    if folder is None:
        return grads
    of_grads = copy.deepcopy(wide)
    with torch.no_grad():
        for name, param in of_grads.named_parameters():
            param.copy_(grads[name])
    of_grads.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same_gradients(ours, wide, folder, in_memory=str, written=None):
    """Compare the gradient of each parameter with the gradients of its linked tensors."""
    links = open_pretrained(folder).links
    grads = stored_gradients(wide, written)
    # A bias of all keys moves no softmax: what is left of its gradient is rounding.
    rounding = 1e-12 * max(grad.norm() for grad in grads.values())
    for name, param in ours.named_parameters():
        for link in links[name]:
            expected = link.window(grads[in_memory(link.source)], param.shape)
            got = param.grad[tuple(slice(*ends) for ends in link.area(param.shape))]
            assert (got - expected).norm() <= max(1e-9 * expected.norm(), rounding), link.source


def bytes_of(folder):
    """Dtype, shape and bytes of each tensor, read by the safetensors library."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                raw = tensor.contiguous().reshape(-1).view(torch.uint8)
                found[name] = (tensor.dtype, tuple(tensor.shape), bytes(raw.tolist()))
    return found


class WideTorch:
    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


def decoder(drawn: random.Random, **given: Any) -> dict[str, Any]:
    """Arguments of a config of a small decoder; `given` wins."""
    heads = given.get("num_attention_heads", 4)
    sizes = {
        "vocab_size": 4 * drawn.randint(10, 16),
        "hidden_size": heads * drawn.choice([4, 8]),
        "intermediate_size": 4 * drawn.randint(5, 12),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": drawn.choice([1e-5, 1e-6]),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    return {**sizes, **given}


def _rows() -> list[Row]:
    found = []
    for path in sorted(Path(__file__).with_name("family_rows").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"family_rows_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(module.ROW)
    return found


_ALL = _rows()
ROWS = [row for row in _ALL if not row.has_encoder]
WITH_ENCODER = [row for row in _ALL if row.has_encoder]
_DRAWN = [(row, index) for row in _ALL for index in range(row.draws)]


def _name(row, part):
    return f"{row.name}-{part}"


DRAWS = sample(_DRAWN, every=2, name=_name)
PLAIN_DRAWS = sample([(row, i) for row, i in _DRAWN if not row.has_encoder], every=2, name=_name)
ENCODER_DRAWS = sample([(row, i) for row, i in _DRAWN if row.has_encoder], every=1, name=_name)
SOME_DRAWS = sample(_DRAWN, every=3, name=_name)
# Each family once in CI, on its layouts in turn.
PLACED = [
    pytest.param(
        row,
        layout,
        id=_name(row, layout),
        marks=() if number % len(row.placed) == place else pytest.mark.campaign,
    )
    for number, row in enumerate(_ALL)
    for place, layout in enumerate(row.placed)
]
FIRST = [pytest.param(row, id=row.name) for row in ROWS if row.generates]
