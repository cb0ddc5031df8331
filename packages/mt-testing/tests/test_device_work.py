"""Operations and bytes, counted on tensors without data."""

import pytest
import torch
from mt_testing import DeviceWork

KIB = 1024


@pytest.mark.parametrize(
    ("program", "ops", "moved"),
    [
        (lambda x, y: x + y, {"aten::add": 1}, 3),
        (lambda x, y: x + x, {"aten::add": 1}, 2),  # what is read twice is read once
        (lambda x, y: x.add_(y), {"aten::add_": 1}, 3),
        (lambda x, y: torch.mul(x, x, out=y), {"aten::mul": 1}, 2),
        (lambda x, y: x.view(-1)[:128].t().detach(), {}, 0),
        (lambda x, y: torch.empty_like(x), {}, 0),
        (lambda x, y: x.view(16, 16)[0] * 2, {"aten::mul": 1}, 2 / 16),
        (lambda x, y: torch._foreach_mul_([x, y], 2.0), {"aten::_foreach_mul_": 1}, 4),
        (lambda x, y: x.zero_(), {"aten::zero_": 1}, 2),
    ],
)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_is_read_and_written_counts_once(device, program, ops, moved):
    x, y = (torch.ones(256, device=device) for _ in range(2))
    with DeviceWork() as work:
        program(x, y)
    assert dict(work.ops) == ops
    assert work.count == sum(ops.values())
    assert work.bytes == moved * KIB


def test_a_backward_is_counted_and_several_blocks_add_up():
    x = torch.ones(256, device="meta", requires_grad=True)
    with DeviceWork() as work:
        y = x.exp()
    with work:
        y.backward(torch.empty_like(y))
    assert dict(work.ops) == {"aten::exp": 1, "aten::mul": 1}
    assert work.bytes == 5 * KIB


def test_work_of_other_devices_is_left_out():
    x = torch.ones(256)
    with DeviceWork("meta") as work:
        _ = x + x
        _ = x.to("meta")
    assert dict(work.ops) == {"aten::_to_copy": 1}
