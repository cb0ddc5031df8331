"""A linear layer's products, what it keeps for them, and the state that its scales need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mt_fp8 import (
    Products,
    QuantizedLinear,
    convert_linears,
    quantize,
    recipe,
    update_scales,
)
from mt_fp8.products import products_of
from mt_kernels import Registry
from torch import Tensor, nn

RECIPES = ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8", "nvfp4")
IN, OUT, TOKENS = 128, 256, 64


def _tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, TOKENS, IN), (OUT, IN), (2, TOKENS, OUT))
    x, weight, grad = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
    return x.to(dtype), weight.to(dtype), (grad / 1000).to(dtype)


def _exact(name: str):
    """A recipe without random rounding, so that the same numbers have the same bits."""
    how = recipe(name)
    return replace(how, grad=replace(how.grad, stochastic=False))


def _layer(how, weight: Tensor) -> QuantizedLinear:
    linear = nn.Linear(IN, OUT, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(torch.arange(OUT) / OUT)
    return QuantizedLinear.of(linear, Products(how))


@pytest.mark.parametrize("name", RECIPES)
def test_each_product_is_of_operands_scaled_along_what_it_sums_over(name) -> None:
    how, (x, weight, grad) = _exact(name), _tensors()
    layer = _layer(how, weight)
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    flat, flat_grad = x.detach().flatten(0, 1), grad.flatten(0, 1)

    def of(matrix: Tensor, role: str, *, column: bool = False) -> Tensor:
        return quantize(matrix, how.scaling(role, column=column)).dequantize(torch.float64)

    expected = of(flat, "input") @ of(weight, "weight").t() + layer.bias
    torch.testing.assert_close(y.flatten(0, 1), expected, rtol=0, atol=1e-9)
    # A transposed weight has scales along the outputs.
    grad_x = of(flat_grad, "grad") @ of(weight.t(), "weight", column=True).t()
    torch.testing.assert_close(x.grad.flatten(0, 1), grad_x, rtol=0, atol=1e-9)
    columns = of(flat_grad.t(), "grad", column=True), of(flat.t(), "input", column=True)
    tolerance = 1e-6 if how.hadamard else 1e-9  # the reference undoes the rotation in fp32
    torch.testing.assert_close(
        layer.weight.grad, columns[0] @ columns[1].t(), rtol=0, atol=tolerance
    )
    torch.testing.assert_close(layer.bias.grad, flat_grad.sum(0))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("tensorwise", 0.51),
        ("delayed", 0.51),
        ("rowwise", 0.52),
        ("blockwise", 0.53),
        ("mxfp8", 0.53),
        ("nvfp4", 0.29),
    ],
)
def test_what_is_kept_is_quantised_once_and_not_the_input(name, most) -> None:
    x, weight, _ = _tensors(torch.bfloat16)
    layer, kept = _layer(recipe(name), weight), []

    def pack(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        layer(x.requires_grad_())
    addresses = {x.data_ptr(), layer.weight.data_ptr()}
    assert not addresses & {saved.data_ptr() for saved in kept if saved.numel()}
    whole = x.nbytes + weight.nbytes
    assert sum(saved.nbytes for saved in kept) <= most * whole


def test_what_a_recipe_leaves_as_it_is_is_multiplied_as_it_is() -> None:
    x, weight, grad = _tensors()
    how = replace(recipe("mxfp8"), grad=None, input=None)
    layer = _layer(how, weight)
    x.requires_grad_()
    layer(x).backward(grad)
    transposed = quantize(weight.t(), how.weight).dequantize(torch.float64)
    torch.testing.assert_close(x.grad, grad @ transposed.t())
    expected = grad.flatten(0, 1).t() @ x.detach().flatten(0, 1)
    torch.testing.assert_close(layer.weight.grad, expected)


def _counted(layer: QuantizedLinear, monkeypatch) -> list[str]:
    made: list[str] = []
    inner = layer.products._made

    def counting(x: Tensor, role: str):
        made.append(role)
        return inner(x, role)

    monkeypatch.setattr(layer.products, "_made", counting)
    return made


def test_a_weight_is_quantised_once_for_all_micro_batches_and_anew_when_it_changed(
    monkeypatch,
) -> None:
    x, weight, grad = _tensors(torch.float32)
    layer = _layer(recipe("mxfp8"), weight)
    made = _counted(layer, monkeypatch)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for step in range(3):
        for _ in range(4):
            layer(x).backward(grad)
        assert made.count("weight") == step + 1
        before = layer(x).detach()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(layer(x), before)
    assert made.count("input") == 3 * 6
    assert made.count("grad") == 3 * 4


def test_a_write_past_the_version_counter_is_seen_once_it_is_said() -> None:
    x, weight, _ = _tensors(torch.float32)
    layer = _layer(recipe("tensorwise"), weight)
    before = layer(x)
    layer.weight.data.mul_(2)
    torch.testing.assert_close(layer(x), before, rtol=0, atol=0)  # as it is documented
    update_scales(layer)
    expected = 2 * (before - layer.bias) + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-5)


def test_a_weight_that_comes_and_goes_is_never_taken_for_another_one() -> None:
    """As under autocast: a copy of every forward, maybe at the address of the last one."""
    x, weight, _ = _tensors(torch.float32)
    products = Products(recipe("tensorwise"))
    for factor in range(1, 6):
        copy = weight * factor
        operand = products.operand(copy, "weight")
        own = quantize(weight * factor, "tensorwise")
        torch.testing.assert_close(operand.rows.scales, own.scales, rtol=0, atol=0)
        del copy, operand
    kept = Products(recipe("tensorwise"), keeps_weight=False)
    assert kept.operand(weight, "weight") is not kept.operand(weight, "weight")
    assert x.shape


def test_gradients_are_rounded_with_bits_of_their_own_that_a_step_repeats() -> None:
    _, weight, grad = _tensors(torch.float32)
    products = Products(recipe("nvfp4"), seed=3)

    def codes(step: int) -> list[Tensor]:
        products.begin_step(step)
        return [products.operand(grad, "grad").rows.data for _ in range(2)]

    first, again, other = codes(1), codes(1), codes(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    assert weight.shape


def test_random_bits_belong_to_the_micro_batch_and_not_to_its_rank() -> None:
    *_, grad = _tensors(torch.float32)
    products = Products(recipe("nvfp4"), seed=3)

    def codes(count: int, **place: int) -> list[list[Tensor]]:
        products.begin_step(1, **place)
        made = [products.operand(grad, "grad") for _ in range(count)]
        return [[each.rows.data, each.columns.data] for each in made]

    whole = codes(4)
    for part in range(2):
        for own, expected in zip(codes(2, part=part, parts=2), whole[part::2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
    products.begin_step(1)
    products.operand(grad, "input")  # an evaluation, or a recomputation
    assert torch.equal(products.operand(grad, "grad").rows.data, whole[0][0])


def test_tokens_that_can_not_be_rotated_are_refused_where_they_are_to_be() -> None:
    model = nn.Sequential(nn.Linear(IN, OUT))
    convert_linears(model, "nvfp4")
    x = torch.randn(20, IN)
    with pytest.raises(ValueError, match=r"16 tokens at a time .* there are 20; use 16 or 32, or"):
        model(x)
    with torch.no_grad():  # no gradient, no rotation
        assert model(x).isfinite().all()


class _Reference:
    """Delayed scaling of one tensor written down once more, with numbers."""

    def __init__(self, length: int, *, most_recent: bool, margin: int) -> None:
        self.past, self.most_recent = [0.0] * length, most_recent
        self.scale, self.margin = 1.0, margin

    def end_step(self, found: list[float], largest: float) -> None:
        self.past = [max(found), *self.past[:-1]]
        amax = self.past[0] if self.most_recent else max(self.past)
        self.scale = amax * 2**self.margin / largest if amax else self.scale


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("margin", [0, 1])
def test_delayed_scales_are_those_of_past_steps(most_recent, margin) -> None:
    x, weight, grad = _tensors(torch.float32)
    largest = "most_recent" if most_recent else "max"
    how = recipe("delayed", history=3, largest=largest, margin=margin)
    layer = _layer(how, weight)
    reference = {
        role: _Reference(3, most_recent=most_recent, margin=margin) for role in ("input", "grad")
    }
    sizes = (4.0, 1.0, 8.0, 0.5, 0.25, 0.125, 16.0, 0.0, 0.0, 0.0, 0.0, 2.0)
    for step, size in enumerate(sizes):
        found: dict[str, list[float]] = {"input": [], "grad": []}
        for share in (0.5, 1.0):  # micro-batches
            x.requires_grad_()
            scaled = x * (size * share)
            own = scaled.abs().max().item()
            scale = reference["input"].scale if step else own * 2**margin / 448
            rows = layer.products.operand(scaled, "input").rows
            assert rows.scales.item() == pytest.approx(scale, rel=1e-6)
            values = (scaled.detach().flatten(0, 1) / rows.scales).clamp(-448, 448)
            torch.testing.assert_close(rows.codes(), values.to(rows.data.dtype).float())
            layer(scaled).backward(grad * share)
            found["input"].append(own)
            found["grad"].append((grad * share).abs().max().item())
        update_scales(layer)
        reference["input"].end_step(found["input"], 448)
        reference["grad"].end_step(found["grad"], 57344)
        for role, index in (("input", 0), ("grad", 2)):
            factor = layer.products.delayed.factor[index].item()
            assert factor == pytest.approx(1 / reference[role].scale, rel=1e-6)


def test_recomputation_evaluation_and_a_layer_that_did_not_run_leave_the_history() -> None:
    x, weight, grad = _tensors(torch.float32)
    plain, again = (_layer(recipe("delayed", history=4), weight) for _ in range(2))
    for layer in (plain, again):
        for step in range(3):
            given = (x * (step + 1)).requires_grad_()
            if layer is again:
                layer.eval()
                with torch.no_grad():
                    layer(given * 1000)
                layer.train()
                y = torch.utils.checkpoint.checkpoint(layer, given, use_reentrant=False)
            else:
                y = layer(given)
            y.backward(grad)
            update_scales(layer)
        before = [buffer.clone() for buffer in layer.buffers()]
        update_scales(layer)  # a step in which it did not run
        for buffer, same in zip(layer.buffers(), before, strict=True):
            assert torch.equal(buffer, same)
    for one, other in zip(plain.buffers(), again.buffers(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain.weight.grad, again.weight.grad)


def test_a_step_that_is_not_finite_keeps_the_scales() -> None:
    x, weight, _ = _tensors(torch.float32)
    layer = _layer(recipe("delayed"), weight)
    layer(x)
    update_scales(layer)
    factor = layer.products.delayed.factor.clone()
    assert factor[0] != 1
    layer(torch.full_like(x, torch.inf))
    update_scales(layer)
    assert torch.equal(layer.products.delayed.factor, factor)


def test_the_state_of_delayed_scaling_is_loaded_and_goes_on_bit_for_bit() -> None:
    x, weight, _ = _tensors(torch.float32)
    layer, other = (_layer(recipe("delayed", history=2), weight) for _ in range(2))
    for step in range(3):
        layer(x * (step + 1))
        update_scales(layer)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x * 5), other(x * 5))
    fresh = _layer(recipe("delayed", history=2), weight)
    assert not torch.equal(layer(x * 5), fresh(x * 5))
    names = {name for name in layer.state_dict() if "products" in name}
    assert names == {"products.delayed.history", "products.delayed.factor"}
    half = layer.to(torch.bfloat16)
    assert {buffer.dtype for buffer in half.buffers()} == {torch.float32}
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_linear_layers_of_a_model_are_converted_but_for_those_that_are_kept() -> None:
    model = nn.Sequential(
        nn.Linear(IN, IN), nn.ReLU(), nn.Sequential(nn.Linear(IN, OUT)), nn.Linear(OUT, 8)
    )
    before = dict(model.named_parameters())
    assert convert_linears(model, "mxfp8", keep=["3"]) == ["0", "2.0"]
    assert dict(model.named_parameters()) == before
    assert [type(m) for m in (model[0], model[3])] == [QuantizedLinear, nn.Linear]
    assert len(products_of(model)) == 2
    for bad, words in (
        ({"keep": ["lm_head"]}, "keep: 'lm_head' is the name of no linear layer"),
        ({"keep": ["*"]}, "Sequential has no torch.nn.Linear to convert: keep leaves all as they"),
        ({"recipe": "fp9"}, "recipe 'fp9' is unknown"),
    ):
        with pytest.raises(ValueError, match=words):
            convert_linears(model, **({"recipe": "mxfp8"} | bad))
    with pytest.raises(TypeError, match=r"each of keep must be a str, got 3 \(int\)"):
        convert_linears(model, "mxfp8", keep=[3])
    with pytest.raises(ValueError, match="Linear to convert: there is none inside it"):
        convert_linears(nn.Sequential(nn.ReLU()), "mxfp8")
    with pytest.raises(ValueError, match="is a linear layer itself"):
        convert_linears(nn.Linear(2, 2), "mxfp8")
    with pytest.raises(TypeError, match="module must be"):
        convert_linears(3, "mxfp8")


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_learns_as_without_quantising(name) -> None:
    """A regression on a random teacher: the final loss is near the final loss in fp32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 32, generator=generator)
    teacher = torch.randn(32, 16, generator=generator)
    labels = (x @ teacher).tanh()

    def train(convert: bool) -> float:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16)
        )
        if convert:
            convert_linears(model, name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(30):
            loss = (model(x) - labels).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            update_scales(model)
        return (model(x) - labels).square().mean().item()

    start = labels.square().mean().item()
    plain, quantised = train(convert=False), train(convert=True)
    assert plain < 0.1 * start
    assert quantised < plain + (0.2 if name == "nvfp4" else 0.05) * start


def test_inputs_of_any_dims_under_autocast_and_without_a_gradient() -> None:
    layer = convert_linears(model := nn.Sequential(nn.Linear(IN, OUT)), "tensorwise") and model[0]
    assert layer(torch.randn(IN)).shape == (OUT,)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(2, 3, IN))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    with torch.inference_mode():
        assert layer(torch.randn(2, IN)).shape == (2, OUT)
    with pytest.raises(TypeError, match=r"input is torch.float64 and the weight torch.float32"):
        layer(torch.randn(2, IN, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"input \(2, 3\) must end with 128"):
        layer(torch.randn(2, 3))


def test_a_layer_chooses_its_kernels_once(monkeypatch):
    products, searches = Products(recipe("tensorwise")), []
    find = Registry.find
    monkeypatch.setattr(Registry, "find", lambda *a: searches.append(a[0].operation) or find(*a))
    for _ in range(4):
        x, weight, grad = (torch.randn(16, 16) for _ in range(3))
        operands = [products.operand(x, "input"), products.operand(weight, "weight")]
        products.forward(*operands)
        grad_y = products.operand(grad, "grad")
        products.dgrad(grad_y, operands[1])
        products.wgrad(grad_y, operands[0])
    assert searches.count("fp8_cast") == 3  # input, weight, grad: one scale serves both ways
    assert searches.count("fp8_matmul") == 3  # forward, dgrad, wgrad
