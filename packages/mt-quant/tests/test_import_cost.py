import subprocess
import sys

SCRIPT = """
import sys, torch
loaded = set(sys.modules)
import mt_quant
added = set(sys.modules) - loaded
assert len(added) < 60, sorted(added)
layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
mt_quant.quantize(layer, mt_quant.QuantizationConfig.named("int8"))(torch.ones(1, 8))
assert not {"torch._dynamo", "triton", "yaml", "safetensors", "mt_fp8"} & set(sys.modules)
"""


def test_import_is_light_and_a_layer_imports_neither_triton_nor_yaml():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
