"""Parameters that are held and gathered as one-byte codes: exact under every strategy."""

import pytest
import torch
import torch.distributed as dist
from mt_data_parallel import Reduction, shard
from torch import nn

WIDTH, STEPS, MICROBATCHES = 24, 4, 2
STRATEGIES = ("none", "optimizer", "optimizer_gradients", "full")


class EighthBits:
    """Codes of eighths from -16 to 15.875, which all ranks make alike."""

    def __init__(self):
        self.codes = {}

    def encodes(self, name, param):
        return name.endswith("1.weight")

    def place(self, name, codes):
        self.codes[name] = codes

    def encode(self, parts):
        assert [part.name for part in parts] == sorted(self.codes, reverse=True)
        for part in parts:
            assert part.source.isnan().all()
            code = (part.values * 8).round().clamp(-128, 127) + 128
            part.codes.copy_(code)

    def values(self, name):
        return (self.codes[name].double() - 128) / 8


class Layer(nn.Module):
    """A layer that multiplies by codes where there are some."""

    def __init__(self, name, encoding, **kwargs):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, **kwargs)
        self.add_module("1", nn.Linear(WIDTH, WIDTH, **kwargs))
        self.name, self.encoding = f"{name}.1.weight", encoding

    def forward(self, x):
        linear = self.get_submodule("1")
        if self.encoding is None:
            return x + torch.tanh(linear(self.norm(x)))
        return x + torch.tanh(
            ByCodes.apply(self.norm(x), linear.weight, self.encoding, self.name) + linear.bias
        )


class ByCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, encoding, name):
        assert weight.isnan().all()
        ctx.save_for_backward(x)
        ctx.how = encoding, name
        return x @ encoding.values(name).t()

    @staticmethod
    def backward(ctx, grad):
        (x,), (encoding, name) = ctx.saved_tensors, ctx.how
        rows = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad @ encoding.values(name), rows, None, None


def net(encoding, **kwargs):
    made = nn.Sequential(
        nn.ModuleList(Layer(f"0.{n}", encoding, dtype=torch.float64, **kwargs) for n in range(3))
    )
    made.forward = lambda x: made[0][2](made[0][1](made[0][0](x))).square().sum()
    return made


def fill(name, param):
    with torch.no_grad():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))


def batch(step, number):
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)


def expected():
    """One process, whose weights are rounded as codes are before each step."""
    model = net(None)
    for name, param in model.named_parameters():
        fill(name, param)
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    for step in range(STEPS):
        for name, param in model.named_parameters():
            encoded = name.endswith("1.weight")
            value = masters[name]
            param.data = (value * 8).round().clamp(-128, 127) / 8 if encoded else value.clone()
            param.grad = None
        for number in range(MICROBATCHES * 4):
            model(batch(step, number)).backward()
        for name, param in model.named_parameters():
            masters[name] -= 0.001 * param.grad
    return masters


def group_of(hybrid):
    if not hybrid:
        return dist.group.WORLD
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    own = [group for ranks, group in groups.items() if dist.get_rank() in ranks]
    return Reduction(shards=own[0], replicas=own[1])


def train(strategy, world, how):
    how = dict(how)
    hybrid, meta = how.pop("hybrid", False), how.pop("meta", False)
    encoding = EighthBits()
    model = net(encoding, device="meta" if meta else "cpu")
    if not meta:
        for name, param in model.named_parameters():
            fill(name, param)
    group = None if world == 1 else group_of(hybrid)
    options = {"group": group, "init": fill if meta else None, "bucket_size": 500, **how}
    with shard(model, strategy, encoding=encoding, **options) as buffer:
        optimizer = torch.optim.SGD([piece.param for piece in buffer.shards()], lr=0.001)
        buffer.gather_params()
        for step in range(STEPS):
            own = 4 // world
            buffer.start(MICROBATCHES * own)
            for number in range(MICROBATCHES * own):
                rank = 0 if world == 1 else dist.get_rank()
                model(batch(step, rank * MICROBATCHES * own + number)).backward()
            buffer.finish()
            optimizer.step()
            buffer.gather_params()
        whole = buffer.assemble({piece.name: piece.param.detach() for piece in buffer.shards()})
        return {name: value.clone() for name, value in whole.items()}


WAYS = {
    "one": (1, {}),
    "two": (2, {}),
    "meta": (2, {"meta": True}),
    "offload": (2, {"offload": True}),
    "hybrid": (4, {"hybrid": True}),
}
GRID = [(strategy, way) for strategy in STRATEGIES for way in WAYS]


@pytest.mark.parametrize(
    ("strategy", "way"),
    [each for each in GRID if each not in (("none", "offload"), ("none", "hybrid"))],
)
def test_training_is_that_of_one_process_with_rounded_weights(strategy, way, ranks):
    world, how = WAYS[way]
    found = [train(strategy, 1, how)] if world == 1 else ranks(world, train, strategy, world, how)
    masters, seen = expected(), set()
    for own in found:
        for name, value in own.items():
            torch.testing.assert_close(
                value.view_as(masters[name]), masters[name], rtol=1e-12, atol=1e-13
            )
            seen.add(name)
    assert seen == set(masters)


def bytes_of_a_gather(encodes):
    """Return the bytes that this rank sends to gather 16-bit parameters, or 8-bit codes."""
    sent = []
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    encoding = EighthBits()
    encoding.encodes = lambda name, param: encodes
    with shard(model, "optimizer", group=dist.group.WORLD, encoding=encoding) as buffer:
        isend = dist.isend
        dist.isend = lambda tensor, **kwargs: (sent.append(tensor.nbytes), isend(tensor, **kwargs))[
            1
        ]
        try:
            buffer.gather_params()
            buffer.wait_params()
        finally:
            dist.isend = isend
        return sum(sent), model.weight.untyped_storage().nbytes()


def test_a_gather_sends_one_byte_for_an_element_and_nothing_else_is_held(ranks):
    assert ranks(2, bytes_of_a_gather, False) == [(64 * 64, 2 * 64 * 64)] * 2
    assert ranks(2, bytes_of_a_gather, True) == [(64 * 64 // 2, 2)] * 2


def test_who_reads_the_parameter_reads_nan_and_nobody_can_write_to_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with shard(model, "optimizer", group=None, encoding=EighthBits()) as buffer:
        assert {piece.name: piece.param.dtype for piece in buffer.shards()} == dict.fromkeys(
            ("0.weight", "0.bias", "1.weight", "1.bias"), torch.float32
        )
        assert model[1].weight.isnan().all()
        assert not model[0].weight.isnan().any()
        with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
            model[1].weight.add_(1)
