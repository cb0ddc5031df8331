from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from mt_testing import HostSyncs
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

# What a counter must see, and how often, of x (floats), m (a mask) and i (integers) of 3 elements.
WAITS = {
    "item": lambda x, m, i: x.sum().item(),
    "float": lambda x, m, i: float(x[0]),
    "if": lambda x, m, i: 1 if m.any() else 0,
    "tolist": lambda x, m, i: x[:1].tolist(),
    "equal": lambda x, m, i: torch.equal(x, x),
    "allclose": lambda x, m, i: torch.allclose(x, x),
    "nonzero": lambda x, m, i: i.nonzero(),
    "mask": lambda x, m, i: x[m],
    "masked select": lambda x, m, i: x.masked_select(m),
    "masked write": lambda x, m, i: x.index_put_((m,), x),
    "unique": lambda x, m, i: i.unique(),
    "repeat": lambda x, m, i: x.repeat_interleave(i),
    "to the host": lambda x, m, i: x.cpu(),
    "from the host": lambda x, m, i: torch.ones(2).to(x.device),
    "copy_": lambda x, m, i: x.copy_(torch.ones(3)),
}
NONE = {
    "arithmetic": lambda x, m, i: (x * 2 + torch.tensor(3.0)).softmax(0).sum(),
    "index": lambda x, m, i: x[i % 3],
    "fill": lambda x, m, i: x.masked_fill(m, 0),
    "one value": lambda x, m, i: x.index_put_((m,), torch.zeros((), device=x.device)),
    "dtype": lambda x, m, i: x.double(),
    "copy on the device": lambda x, m, i: x.copy_(x.double()),
    "queued copy": lambda x, m, i: torch.ones(2).pin_memory().to(x.device, non_blocking=True),
    "repeat, told": lambda x, m, i: x.repeat_interleave(i, output_size=3),
    "a tensor of the host": lambda x, m, i: torch.ones(2).sum().item() if x.is_meta else None,
}


def waits(device, call):
    mode = FakeTensorMode() if device == "cuda" else nullcontext()
    with mode:
        x, i = torch.ones(3, device=device), torch.ones(3, dtype=torch.int64, device=device)
        m = i > 0
        with HostSyncs(device) as syncs:
            # torch's answer where a shape is unknown, after the wait
            try:
                call(x, m, i)
            except (NotImplementedError, DynamicOutputShapeException):
                pass
            except RuntimeError as error:
                if "repeat_interleave" not in str(error):
                    raise
    return list(syncs)


@pytest.mark.parametrize("device", ["meta", "cuda"])
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_found_with_its_line(name, device):
    (found,) = waits(device, WAITS[name])
    assert found.file == __file__
    assert Path(__file__).read_text().splitlines()[found.line - 1].strip().startswith(f'"{name}":')
    assert str(found) == f"{__file__}:{found.line} {found.op}"


@pytest.mark.parametrize("device", ["meta", "cuda"])
@pytest.mark.parametrize("name", NONE)
def test_what_runs_on_the_device_is_no_wait(name, device):
    assert waits(device, NONE[name]) == []


def test_many_numbers_in_one_list_are_one_wait_on_meta():
    (found,) = waits("meta", lambda x, m, i: x.tolist())
    assert found.op == "aten::_to_copy"


class Peeks(torch.autograd.Function):
    """The identity, which looks at its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float(grad.amax().item() > 0)


class Layer(nn.Module):
    def __init__(self, *, peeks: bool) -> None:
        super().__init__()
        self.linear, self.peeks = nn.Linear(4, 4, device="meta"), peeks

    def forward(self, x):
        x = self.linear(x)
        if self.peeks:
            x = Peeks.apply(x / x.detach().abs().amax().item())
        return x


@pytest.mark.parametrize("peeks", [False, True])
def test_a_layer_that_asks_for_a_number_is_found_forward_and_backward(peeks):
    x = torch.ones(2, 4, device="meta", requires_grad=True)
    with HostSyncs("meta") as forward:
        y = Layer(peeks=peeks)(x).sum()
    with HostSyncs("meta") as backward:
        y.backward()
    assert x.grad is not None
    lines = Path(__file__).read_text().splitlines()
    for syncs, line in ((forward, "abs().amax().item()"), (backward, "grad.amax().item()")):
        assert [line in lines[sync.line - 1] for sync in syncs] == [True] * peeks
    assert (str(forward) == "no wait for the device") is not peeks


def test_numbers_have_the_type_of_their_tensor():
    with HostSyncs("meta"):
        for dtype, kind in ((torch.bool, bool), (torch.int64, int), (torch.bfloat16, float)):
            number = torch.ones((), dtype=dtype, device="meta").item()
            assert number == 1
            assert type(number) is kind
