"""The operators of torch that are called by name exist, with CUDA kernels."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import mt_tensor_parallel
import pytest
import torch

OPERATORS = {
    # name: (devices, the arguments that the calls here rely on, in order)
    "addmm.dtype_out": (["CUDA"], "self mat1 mat2 out_dtype beta alpha out"),
    "embedding_dense_backward": (
        ["CPU", "CUDA"],
        "grad_output indices num_weights padding_idx scale_grad_by_freq",
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_this_torch_has_the_operators_that_are_called(name: str) -> None:
    devices, arguments = OPERATORS[name]
    operator, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, operator), overload or "default")._schema
    assert [argument.name for argument in schema.arguments] == arguments.split()
    for device in devices:
        if device == "CPU" or torch.version.cuda is not None:
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device)


def test_the_products_over_symmetric_memory_take_what_they_are_given() -> None:
    from mt_tensor_parallel.overlap import _fused

    gathered, scattered = (each.default._schema for each in _fused())
    names = [argument.name for argument in gathered.arguments]
    assert names[:4] == ["A", "Bs", "gather_dim", "group_name"]
    assert "return_A" in names
    names = [argument.name for argument in scattered.arguments]
    assert names == ["A", "B", "reduce_op", "scatter_dim", "group_name"]


def test_every_operator_that_is_called_is_in_the_table() -> None:
    source = Path(inspect.getfile(mt_tensor_parallel)).parent
    text = "".join(path.read_text() for path in source.glob("*.py"))
    assert set(re.findall(r"torch\.ops\.aten\.([\w.]+\w)", text)) == {*OPERATORS}
