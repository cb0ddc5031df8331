import subprocess
import sys

SCRIPT = """
import sys, torch
loaded = set(sys.modules)
import mt_fp8
added = set(sys.modules) - loaded
assert len(added) < 60, sorted(added)
mt_fp8.quantize(torch.ones(2, 32), "mxfp8").dequantize()
assert not {"torch._dynamo", "triton", "torchao"} & set(sys.modules)
"""


def test_import_is_light_and_quantising_imports_neither_dynamo_nor_triton():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
