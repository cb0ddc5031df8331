import pytest
import torch
from mt_data_parallel import GradBuffer
from mt_optim import AdamW, NamedOptimizer, default_decay_filter
from mt_optim.rules.adamw import AdamWRule, fused_obstacle
from mt_optim.state import update as updating
from torch import nn

SHAPES = {
    "embedding.weight": (33, 8),
    "layers.0.norm.weight": (8,),
    "layers.0.qkv.weight": (2, 4, 3, 8),
    "layers.0.qkv.bias": (2, 4, 3),
    "layers.0.mlp.weight": (40, 8),
}
DECAYING = {"embedding.weight", "layers.0.qkv.weight", "layers.0.mlp.weight"}
SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8}
LRS = [1e-2, 2e-2, 5e-3, 1e-3]


def make_params(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def set_grads(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def torch_adamw(params, **mode):
    decay = [p for name, p in params.items() if name in DECAYING]
    plain = [p for name, p in params.items() if name not in DECAYING]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LRS[0], **SETTINGS, **mode)


def torch_step(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def test_default_filter_spares_biases_of_any_shape_and_vectors():
    params = make_params(torch.float32)
    assert {name for name, p in params.items() if default_decay_filter(name, p)} == DECAYING


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_bit_equal_to_torchs_fused_adamw(dtype):
    ours, theirs = make_params(dtype), make_params(dtype)
    optimizer = AdamW(
        ours.items(),
        lr=LRS[0],
        weight_decay=0.1,
        decay_filter=default_decay_filter,
        **SETTINGS,
    )
    reference = torch_adamw(theirs, fused=True, foreach=False)
    for step, lr in enumerate(LRS):
        set_grads(ours, step)
        set_grads(theirs, step)
        optimizer.step(lr=lr)
        torch_step(reference, lr)
    for name, param in ours.items():
        assert torch.equal(param, theirs[name]), name
        assert torch.equal(
            optimizer.moment(name, "exp_avg"), reference.state[theirs[name]]["exp_avg"]
        )
        assert torch.equal(
            optimizer.moment(name, "exp_avg_sq"), reference.state[theirs[name]]["exp_avg_sq"]
        )
    assert optimizer.step_count == len(LRS)


def test_the_update_is_the_formula_of_the_paper():
    param = nn.Parameter(torch.tensor([[3.0, -2.0]], dtype=torch.float64))
    optimizer = AdamW([("w", param)], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    w, m, v = torch.tensor([[3.0, -2.0]], dtype=torch.float64), 0.0, 0.0
    for t in range(1, 4):
        grad = torch.tensor([[0.5, -4.0]], dtype=torch.float64) * t
        param.grad = grad
        optimizer.step()
        m, v = 0.8 * m + 0.2 * grad, 0.9 * v + 0.1 * grad**2
        update = (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
        w = w - 0.1 * 0.5 * w - 0.1 * update
    torch.testing.assert_close(param.detach(), w, rtol=1e-12, atol=0)


def test_bf16_parameters_are_the_rounded_fp32_masters():
    ours = make_params(torch.bfloat16)
    theirs = {n: nn.Parameter(p.detach().float()) for n, p in make_params(torch.bfloat16).items()}
    buffer = GradBuffer(ours.items(), group=None, unused="zero")
    optimizer = AdamW(
        ours.items(),
        lr=LRS[0],
        weight_decay=0.1,
        decay_filter=default_decay_filter,
        **SETTINGS,
    )
    reference = torch_adamw(theirs, fused=True, foreach=False)
    for step, lr in enumerate(LRS):
        generator = torch.Generator().manual_seed(step)
        buffer.start(1)
        buffer.finish()
        for name, param in ours.items():
            grad = torch.randn(param.shape, generator=generator)
            param.main_grad.copy_(grad)  # the fp32 gradient is used, not one rounded to bf16
            theirs[name].grad = grad
        optimizer.step(lr=lr)
        torch_step(reference, lr)
    for name, param in ours.items():
        assert torch.equal(optimizer.master(name), theirs[name])
        assert torch.equal(param, theirs[name].bfloat16())
        assert optimizer.moment(name, "exp_avg").dtype == torch.float32


def test_small_updates_survive_in_the_master_of_a_bf16_parameter():
    param = nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
    optimizer = AdamW([("w", param)], lr=0.125, weight_decay=0.0)
    for _ in range(16):
        param.grad = torch.ones_like(param)
        optimizer.step()
    # Each update is an eighth, the spacing of bf16 below 256 is one: alone none would be seen.
    assert torch.allclose(optimizer.master("w"), torch.full((4, 4), 254.0), atol=1e-3)
    assert torch.equal(param, torch.full_like(param, 254.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loading_the_state_then_stepping_equals_the_uninterrupted_run(dtype):
    straight = make_params(dtype)
    optimizer = AdamW(straight.items(), lr=1e-2)
    for step in range(2):
        set_grads(straight, step)
        optimizer.step(lr=LRS[step])
    saved = {
        name: [
            t.clone()
            for t in (
                optimizer.master(name),
                optimizer.moment(name, "exp_avg"),
                optimizer.moment(name, "exp_avg_sq"),
            )
        ]
        for name in optimizer.names
    }
    resumed = make_params(dtype, seed=7)
    restored = AdamW(resumed.items(), lr=1e-2)
    for name, (master, exp_avg, exp_avg_sq) in saved.items():
        restored.master(name).copy_(master)
        restored.moment(name, "exp_avg").copy_(exp_avg)
        restored.moment(name, "exp_avg_sq").copy_(exp_avg_sq)
    restored.step_count = optimizer.step_count
    restored.sync_params()
    assert all(torch.equal(resumed[name], straight[name]) for name in SHAPES)
    for params, which in ((straight, optimizer), (resumed, restored)):
        set_grads(params, 2)
        which.step(lr=LRS[2])
    for name in SHAPES:
        assert torch.equal(resumed[name], straight[name])
        assert torch.equal(
            restored.moment(name, "exp_avg_sq"), optimizer.moment(name, "exp_avg_sq")
        )
    assert restored.step_count == 3


def test_fp32_parameters_are_their_own_master():
    params = make_params(torch.float32)
    optimizer = AdamW(params.items(), lr=1e-2)
    assert all(optimizer.master(n).data_ptr() == p.data_ptr() for n, p in params.items())
    assert not optimizer.master("layers.0.mlp.weight").requires_grad


def test_a_missing_gradient_counts_as_zero():
    params, twin = make_params(torch.float32), make_params(torch.float32)
    optimizer, other = AdamW(params.items(), lr=1e-2), AdamW(twin.items(), lr=1e-2)
    set_grads(params, 0)
    set_grads(twin, 0)
    params["embedding.weight"].grad = None
    twin["embedding.weight"].grad = torch.zeros(33, 8)
    optimizer.step()
    other.step()
    assert all(torch.equal(params[name], twin[name]) for name in SHAPES)


def test_decay_filter_and_frozen_parameters():
    params = make_params(torch.float64)
    params["layers.0.mlp.weight"].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer = AdamW(
        params.items(), lr=0.1, weight_decay=0.5, decay_filter=lambda name, _: "norm" in name
    )
    optimizer.step()  # no gradient: only the decay moves anything
    assert "layers.0.mlp.weight" not in optimizer.names
    for name, param in params.items():
        factor = 0.95 if name == "layers.0.norm.weight" else 1.0
        torch.testing.assert_close(param.detach(), before[name] * factor)


def test_lr_persists_until_another_is_given():
    param = nn.Parameter(torch.zeros(2, 2))
    optimizer = AdamW([("w", param)], lr=0.5, weight_decay=0.0)
    optimizer.step(lr=0.25)
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]


def test_fused_support_is_answered_with_a_reason():
    assert fused_obstacle(torch.zeros(2)) is None
    assert "no fused AdamW kernel for meta" in str(fused_obstacle(torch.zeros(2, device="meta")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more and finite, got -1.0"),
        ({"lr": float("nan")}, "lr must be 0 or more and finite, got nan"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps must be 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more and finite, got -0.1"),
        ({"lr": float("inf")}, "lr must be 0 or more and finite, got inf"),
        ({"lr": 1e39}, "lr is 1e[+]39, which fp32 weights cannot hold"),
        ({"weight_decay": float("inf")}, "weight_decay must be 0 or more and finite, got inf"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        AdamW(make_params(torch.float32).items(), **{"lr": 1e-3, **fields})


def test_bad_parameters_are_named():
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"'b' is listed twice \(first as 'a'\)"):
        AdamW([("a", weight), ("b", weight)], lr=1e-3)
    with pytest.raises(TypeError, match=r"'h' is torch.complex64; an optimizer takes torch.f"):
        AdamW([("h", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))], lr=1e-3)
    optimizer = AdamW([("a", weight)], lr=1e-3)
    with pytest.raises(KeyError, match="no parameter 'z' in this optimizer; it has a"):
        optimizer.moment("z", "exp_avg")
    with pytest.raises(ValueError, match="step_count must be 0 or more, got -1"):
        optimizer.step_count = -1


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_parameters_are_updated_in_their_own_places(dtype, buffered):
    def train(*, strided):
        torch.manual_seed(0)
        whole = torch.randn(4, 6).to(dtype)
        values = {
            "half": whole.chunk(2, dim=1)[0],
            "transposed": torch.randn(3, 5).to(dtype).t(),
        }
        params = {
            name: nn.Parameter(value if strided else value.contiguous())
            for name, value in values.items()
        }
        optimizer = AdamW(params.items(), lr=0.1)
        buffer = GradBuffer(params.items(), group=None) if buffered else None
        for _ in range(3):
            if buffer:
                buffer.start(1)
            sum((p.float() * torch.randn(p.shape)).sum() for p in params.values()).backward()
            if buffer:
                buffer.finish()
            optimizer.step()
        if strided:
            assert torch.equal(whole.chunk(2, dim=1)[0], params["half"])
        return [param.detach() for param in params.values()]

    for ours, theirs in zip(train(strided=True), train(strided=False), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_torch_takes_the_buffered_gradient_of_a_strided_parameter():
    def train(fused):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=fused, foreach=False)
        buffer = GradBuffer([("w", param)], group=None)
        for _ in range(2):
            buffer.start(1)
            (param * torch.randn(2, 3, 4, 4)).sum().backward()
            buffer.finish()
            optimizer.step()
        return param.detach()

    torch.testing.assert_close(train(fused=True), train(fused=False))


def test_weights_loaded_into_the_model_stay_once_the_masters_take_them():
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = AdamW([("w", param)], lr=0.0)
    with torch.no_grad():
        param.fill_(7)
    optimizer.sync_masters()
    optimizer.step()
    assert torch.equal(param, torch.full((4,), 7, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_gradients_are_widened_a_few_at_a_time_and_bits_stay(monkeypatch, dtype) -> None:
    class Recorded(AdamWRule):
        def update(self, batch, group) -> None:
            sizes.append(sum(grad.numel() for grad in batch.grads))
            super().update(batch, group)

    def weights(portion):
        monkeypatch.setattr(updating, "_PORTION", portion)
        draw = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(n, generator=draw).to(dtype)) for n in (5, 3, 9, 2, 1)]
        for param in params:
            param.grad = torch.randn(param.shape, generator=draw).to(dtype)
        optimizer = NamedOptimizer(params, Recorded(), lr=1e-2, weight_decay=0.1)
        optimizer.step()
        optimizer.step()
        return torch.cat([param.detach() for param in params])

    sizes: list[int] = []
    assert torch.equal(weights(8), weights(100))
    cut = [8, 9, 3] if dtype == torch.bfloat16 else [20]
    assert sizes == [*cut, *cut, 20, 20]
