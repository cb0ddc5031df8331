"""Compiles Triton kernels for sm_90, and prints what each takes of a processor as JSON.

Run by `test_compiled.py`, in a process of its own: there kernels are not interpreted.
"""

import json
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def dtype(value):
    """A constant of a kernel, of which JSON has dtypes by name, such as "tl.bfloat16"."""
    named = isinstance(value, str) and value.startswith("tl.")
    return getattr(tl, value.removeprefix("tl.")) if named else value


def resources(module: str, name: str, signature: dict[str, str], constants: dict, warps: int):
    kernel = getattr(import_module(f"mt_fusions.{module}"), name)
    constants = {name: dtype(value) for name, value in constants.items()}
    types = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel, signature={arg: types[arg] for arg in kernel.arg_names}, constexprs=constants
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = subprocess.run(
            [TOOL, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump)}
    return {**found, "shared": compiled.metadata.shared}


if __name__ == "__main__":
    print(json.dumps([resources(**job) for job in json.load(sys.stdin)]))
