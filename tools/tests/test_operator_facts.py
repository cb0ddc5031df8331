"""Operators and private names of torch that packages use, on the oldest torch and on this one."""

import copy
import json

import operator_facts
import pytest
from operator_facts import ROOT, facts, names_used, problems, sources


@pytest.fixture(scope="module")
def used():
    return names_used(sources())


@pytest.fixture(scope="module")
def oldest():
    return json.loads((ROOT / "tools/operators.json").read_text())


@pytest.fixture(scope="module")
def here(used):
    return facts(used)


def test_all_that_is_used_is_in_the_oldest_torch_and_in_this_one(used, oldest, here):
    assert oldest["torch"].startswith("2.11.")
    assert {"aten::addmm.dtype_out", "symm_mem::fused_all_gather_matmul"} <= set(used)
    assert len(used) > 30
    assert problems(used, oldest, here) == []


def test_a_name_that_comes_or_goes_asks_for_a_new_table(used, oldest, here):
    more = {**used, "aten::new": ["file.py"]}
    (problem,) = problems(more, oldest, here)
    assert problem == "the table does not fit the sources: aten::new; nox -s operators"


def test_what_is_missing_changed_or_has_no_kernel_is_told(used, oldest, here):
    spoiled = copy.deepcopy(here)
    own = spoiled["names"]
    own["torch.distributed.distributed_c10d._world"] = None
    own["aten::addmm.dtype_out"]["dtype_out"]["on"] = ["CPU"]
    schema = own["aten::gelu.out"]["out"]["schema"]
    own["aten::gelu.out"]["out"]["schema"] = schema.replace("Tensor self,", "Tensor self, int n,")
    told = "\n".join(problems(used, oldest, spoiled))
    assert told.count("\n") == 2
    assert "aten::addmm.dtype_out has no CUDA kernel in torch" in told
    assert "aten::gelu.out: aten::gelu.out(Tensor self, *," in told
    assert "torch.distributed.distributed_c10d._world is missing in torch" in told


def test_names_are_read_from_the_sources_themselves(tmp_path):
    source = tmp_path / "file.py"
    source.write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "from torch.distributed import distributed_c10d as c10d\n"
        "from torch._subclasses.fake_tensor import FakeTensor\n"
        "from torch import nn\n"
        "products = torch.ops.symm_mem\n"
        "def f(x):\n"
        "    products.matmul(x)\n"
        "    torch.ops.aten.addmm.dtype_out(x, out=x)\n"
        "    torch.ops.aten.relu.default(x)\n"
        "    torch.ops.mt_fusions.ours(x)\n"
        "    torch._foreach_add_(x)\n"
        "    c10d._world.pg_map[x]\n"
        "    dist.all_reduce(x._private)\n"
        "    return nn.__doc__\n"
    )
    assert list(names_used([source])) == [
        "aten::addmm.dtype_out",
        "aten::relu",
        "symm_mem::matmul",
        "torch._foreach_add_",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch.distributed.distributed_c10d._world",
    ]


def test_an_operator_that_nobody_has_is_missing():
    assert facts(["aten::nothing_of_the_kind"])["names"] == {"aten::nothing_of_the_kind": None}
    assert operator_facts._is_there("torch._nothing.of_the_kind") is None
