import pkgutil
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import mt_moe

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


def test_no_module_hides_a_public_name_once_it_is_imported():
    modules = {each.name for each in pkgutil.iter_modules(mt_moe.__path__)}
    for name in modules - {"gpu"}:
        import_module(f"mt_moe.{name}")
    assert not modules & set(mt_moe.__all__)
    assert not [n for n in mt_moe.__all__ if isinstance(getattr(mt_moe, n), ModuleType)]
