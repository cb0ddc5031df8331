import subprocess
import sys

SCRIPT = """
import sys, torch
loaded = set(sys.modules)
import mt_optim
added = set(sys.modules) - loaded
assert len(added) < 60, sorted(added)
param = torch.nn.Parameter(torch.ones(2, 2))
optimizer = mt_optim.AdamW([("w", param)], lr=1e-3)
param.grad = torch.ones(2, 2)
optimizer.step()
assert "torch._dynamo" not in sys.modules
"""


def test_import_is_light_and_a_step_does_not_import_dynamo():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
