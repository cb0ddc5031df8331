"""The Triton kernels of mt-fusions, interpreted, in whole models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_EACH_WAY = {"gemma": ("norm", "gated"), "gpt2": ("norm", "bias_gelu", "bias_dropout_add")}
# The gradient of rope is rope, and that of the loss is made with it, without an operator.
RUN = {
    form: {"rope", "cross_entropy"} | {name + way for name in names for way in ("", "_backward")}
    for form, names in _EACH_WAY.items()
}


@pytest.fixture(scope="module")
def told():
    program = Path(__file__).with_name("triton_numbers.py")
    made = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    return json.loads(made.stdout)


@pytest.mark.parametrize("form", RUN)
def test_models_train_by_triton_kernels_as_by_the_plain_forms(told, form):
    found = told[form]
    assert found["fused"] <= max(2 * found["plain"], 1e-6)
    assert {kernel for _, kernel in found["ran"]} == {"triton"}
    assert {name for name, _ in found["ran"]} == RUN[form]
