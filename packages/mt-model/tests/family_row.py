"""A family's row in the tests against transformers, and what its models are made with.

A new family is one file in `family_rows/` with a `ROW`.
"""

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

SEQUENCE = 12
_TRANSFORMERS = "transformers.models"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the tests need to know of a family.

    Attributes:
        name: Of the family in mt-model, and of its module in transformers.
        model: Name of the class in transformers.
        draw: From the index of a draw and a `random.Random` the arguments of its config.
        draws: How many there are.
        module: The module in transformers, where it is not called like the family.
        config: Name of the config's class, where it is not the family's name with `Config`.
        layouts: On which it is tested.
        prefixes: What names begin with in files, and in the model of transformers.
        norm_center: What weights of norms are drawn around: 0 where 1 is added to them.
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
                center = self.norm_center if "norm" in name and name.endswith("weight") else 0.0
                param.copy_(center + 0.2 * values)
        return model

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
                patch.setattr(module, "torch", _WideTorch())
            yield


class _WideTorch:
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


ROWS = _rows()
DRAWS = [pytest.param(row, i, id=f"{row.name}-{i}") for row in ROWS for i in range(row.draws)]
PLACED = [
    pytest.param(row, layout, id=f"{row.name}-{layout}") for row in ROWS for layout in row.layouts
]
FIRST = [pytest.param(row, id=row.name) for row in ROWS]
