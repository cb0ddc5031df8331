"""Compiles the kernels that quantise for sm_90, and prints what each takes of a processor as JSON.

Run by `test_kernels.py`, in a process of its own: there kernels are not interpreted.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from mt_fp8 import recipe
from mt_fp8.gpu import cast
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NUMBERS = ("batch_stride", "row_stride", "rows", "columns", "blocks")


def resources(recipe_name: str, role: str, *, casts: bool) -> dict[str, int]:
    scaling = recipe(recipe_name).scaling(role, column=True)
    constants = cast.constants(scaling, casts=casts)
    scales = "*fp32" if scaling.scale in ("fp32", "pow2") else "*u8"
    types = {"X": "*bf16", "Y": "*u8", "SCALES": scales, "FACTOR": "*fp32", "WORDS": "*i64"}
    types |= dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(constants, "constexpr")
    names = cast._kernel.arg_names
    divisible = {  # as launches are, of tensors whose sides are multiples of 16
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if types[name] != "constexpr"
    }
    source = ASTSource(
        fn=cast._kernel,
        signature={name: types[name] for name in names},
        constexprs=constants,
        attrs=divisible,
    )
    options = {"num_warps": cast.warps(constants["TILE"])}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOL, "--dump-resource-usage", file.name]
        dump = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump)}
    return {**found, "shared": compiled.metadata.shared}


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    print(json.dumps([resources(j["recipe"], j["role"], casts=j["casts"]) for j in jobs]))
