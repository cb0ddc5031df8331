import subprocess
import sys

SCRIPT = """
import sys, torch
loaded = set(sys.modules)
import mt_moe
added = set(sys.modules) - loaded
assert len(added) < 60, (len(added), sorted(added))
x = torch.ones(2, 8, requires_grad=True)
mt_moe.MoELayer(8, 8, 4)(x).hidden.sum().backward()
assert not {"torch._dynamo", "triton"} & set(sys.modules)
"""


def test_import_is_light_and_a_step_imports_neither_dynamo_nor_triton():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
