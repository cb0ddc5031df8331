import subprocess
import sys

SCRIPT = """
import sys, torch
loaded = set(sys.modules)
import mt_kernels
added = set(sys.modules) - loaded
assert len(added) < 60, sorted(added)
assert not {"torch._dynamo", "triton"} & set(sys.modules)
"""


def test_import_is_light_and_imports_neither_dynamo_nor_triton():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
