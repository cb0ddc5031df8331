import subprocess
import sys

SCRIPT = """
import sys, torch
loaded = set(sys.modules)
import mt_fusions
added = set(sys.modules) - loaded
assert len(added) < 60, sorted(added)
x = torch.ones(2, 8, requires_grad=True)
mt_fusions.rms_norm(x, None, 1e-5).sum().backward()
assert not {"torch._dynamo", "triton"} & set(sys.modules)
"""


def test_import_is_light_and_a_step_imports_neither_dynamo_nor_triton():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
