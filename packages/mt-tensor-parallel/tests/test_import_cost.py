import subprocess
import sys

SCRIPT = """
import sys, torch
loaded = set(sys.modules)
import mt_tensor_parallel
added = set(sys.modules) - loaded
assert len(added) < 60, sorted(added)
hidden, weight = torch.ones(2, 4, requires_grad=True), torch.ones(8, 4)
mt_tensor_parallel.linear_cross_entropy(hidden, weight, torch.tensor([1, 2])).backward()
assert not {"torch._dynamo", "triton"} & set(sys.modules)
"""


def test_import_is_light_and_a_loss_imports_neither_dynamo_nor_triton():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
