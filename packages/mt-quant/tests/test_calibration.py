"""Statistics of inputs, the walk through a model, and the folder of finished layers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from mt_files import FileError
from mt_quant import (
    CalibrationError,
    LinearShape,
    Progress,
    QuantizationConfig,
    QuantizationError,
    QuantizedLinear,
    Rule,
    quantize,
)
from mt_quant.calibration.statistics import Collector
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

STATIC = QuantizationConfig(rules=(Rule(weight="int8", input="int8-static"),))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, *, shift: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(torch.tanh(self.up(x + shift)))
        return x.add_(y), y  # changes its input, as kernels do


class Model(nn.Module):
    """Blocks whose second output goes around the next one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 8)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x, around = self.inner(x), torch.zeros(16)
        for block in self.blocks:
            x, y = block(x, shift=around)
            around = y * 0.5
        return self.head(x + around)


def _batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 5, 16, generator=generator) for _ in range(count)]


def _linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def test_static_scales_are_those_of_inputs_that_low_bit_layers_before_make() -> None:
    model = quantize(Model(), STATIC, _batches())
    seen: dict[str, Tensor] = {}

    def look(name: str):
        def hook(module: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
            largest = args[0].abs().amax()
            seen[name] = torch.maximum(seen.get(name, largest), largest)

        return hook

    for name, layer in _linears(model).items():
        layer.register_forward_hook(look(name))
    with torch.no_grad():
        for batch in _batches():
            model(batch)
    for name, layer in _linears(model).items():
        # within a block the scale was found before the layer in front of it was rounded
        tolerance = 0.05 if name.endswith("down") else 1e-5
        torch.testing.assert_close(
            layer.input_step.squeeze() * 127, seen[name], rtol=tolerance, atol=0
        )


def test_a_rule_without_static_scales_needs_no_batch() -> None:
    config = QuantizationConfig(rules=(Rule(weight="int8", input="int8"),))
    assert len(_linears(quantize(Model(), config))) == 8


def test_statistics_are_those_of_all_tokens_of_all_batches() -> None:
    layer = nn.Linear(16, 8)
    shape = LinearShape.of(layer)
    collector = Collector("x", shape, {"abs_max", "hessian"})
    batches = [batch * (i + 1) for i, batch in enumerate(_batches())]
    for batch in batches:
        collector.add(batch)
    rows = torch.cat([batch.flatten(0, 1) for batch in batches]).double()
    found = collector.result()
    assert found.tokens == 30
    torch.testing.assert_close(found.hessian.double(), rows.T @ rows / 30, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.abs_max.double(), rows.abs().amax(0))


def test_the_model_is_left_as_it_was_but_for_its_layers() -> None:
    model = Model().train()
    before = threading.active_count()
    quantize(model, STATIC, [(batch,) for batch in _batches()])
    assert threading.active_count() == before
    assert all(module.training for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    batch = _batches()[0]
    assert model(batch).requires_grad is False


@pytest.mark.parametrize("batches", [None, [], [torch.full((1, 16), float("nan"))]])
def test_calibration_without_data_or_with_nan_changes_nothing(batches: list[Tensor] | None) -> None:
    model = Model()
    with pytest.raises(CalibrationError, match="calibration data"):
        quantize(model, STATIC, batches)
    assert not _linears(model)
    assert model(_batches()[0]).shape == (2, 5, 8)


def test_a_layer_that_no_batch_reaches_is_named() -> None:
    model = Model()
    model.unused = nn.Linear(4, 4)
    with pytest.raises(CalibrationError, match=r"^unused was not called"):
        quantize(model, STATIC, _batches())


def test_batches_that_take_different_ways_are_refused() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.shape[0] == 1 else self.b(x)

    with pytest.raises(CalibrationError, match="different orders"):
        quantize(Branch(), STATIC, [torch.ones(1, 16), torch.ones(2, 16)])


def test_an_error_of_the_model_comes_through_and_ends_every_thread() -> None:
    model, before = Model(), threading.active_count()
    with pytest.raises(RuntimeError, match="shape"):
        quantize(model, STATIC, [*_batches(), torch.ones(3, 4)])
    assert threading.active_count() == before
    assert not any("forward" in vars(module) for module in model.modules())


class StoppedError(Exception):
    pass


def _interrupted(folder: Path, after: int) -> None:
    def stop(progress: Progress) -> None:
        if progress.done == after:
            raise StoppedError

    with pytest.raises(StoppedError):
        quantize(Model(), STATIC, _batches(), folder=folder, progress=stop)


@pytest.mark.parametrize("after", [1, 2, 3, 8])
def test_a_run_that_was_interrupted_goes_on_to_the_same_bits(tmp_path: Path, after: int) -> None:
    expected = quantize(Model(), STATIC, _batches()).state_dict()
    _interrupted(tmp_path, after)
    assert len(list(tmp_path.iterdir())) == after
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    found = quantize(Model(), STATIC, _batches(), folder=tmp_path).state_dict()
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_folder_of_another_recipe_or_another_model_is_refused(tmp_path: Path) -> None:
    _interrupted(tmp_path, 2)
    other = QuantizationConfig(rules=(Rule(weight="int8-tensor"),))
    with pytest.raises(QuantizationError, match="made with another decision"):
        quantize(Model(), other, folder=tmp_path)
    model = Model()
    model.inner.weight.data.mul_(2)
    with pytest.raises(QuantizationError, match="made with another weight"):
        quantize(model, STATIC, _batches(), folder=tmp_path)


def test_a_finished_layer_without_its_scale_is_refused(tmp_path: Path) -> None:
    _interrupted(tmp_path, 1)
    (path,) = tmp_path.iterdir()
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del tensors["weight_scale"]
    save_file(tensors, path, metadata)
    with pytest.raises(QuantizationError, match=r"inner: int8-channel .* missing: weight_scale"):
        quantize(Model(), STATIC, _batches(), folder=tmp_path)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x02" + b"\0" * 7 + b"{}"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    _interrupted(tmp_path, 1)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"inner.safetensors: .* remove it"):
        quantize(Model(), STATIC, _batches(), folder=tmp_path)
