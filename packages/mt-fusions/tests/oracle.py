"""What the tests compare with: fp64, and tensors of every layout."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}


def drawn(*shape, dtype=torch.float32, seed=0, layout="contiguous", device="cpu", scale=1.0):
    """Normal numbers; "sliced" has gaps between rows, "transposed" strides in the other order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    x = x.to(dtype).to(device)
    if layout == "sliced":
        wide = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=dtype, device=device)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


def difference(found, expected):
    """Largest difference, relative to the largest element expected."""
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    expected = expected.double()
    size = expected.abs().max().clamp_min(1e-300)
    return ((found.double() - expected).abs().max() / size).item()


def assert_close(found, expected, dtype, factor=1.0):
    assert difference(found, expected) <= LIMITS[dtype] * factor, (found, expected)


def gradients(function, tensors, seed=7):
    """The output and the gradients of the tensors, for one drawn gradient of each output."""
    leaves = [x.detach().requires_grad_() if x is not None else None for x in tensors]
    out = function(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    grads = [  # few digits, so that every dtype has the same
        drawn(*o.shape, dtype=torch.bfloat16, seed=seed + i).to(o) for i, o in enumerate(outs)
    ]
    torch.autograd.backward(outs, grads)
    return [o.detach() for o in outs], [None if x is None else x.grad for x in leaves]


def as_fp64(*tensors):
    return [None if x is None else x.detach().double() for x in tensors]


class Graph:
    """A backend of torch.compile that runs nothing but aot_eager, and counts nodes by name."""

    def __init__(self):
        self.counts = {}

    def __call__(self, module, inputs):
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=self._count, bw_compiler=self._count)(module, inputs)

    def _count(self, module, _):
        from functorch.compile import make_boxed_func

        for node in module.graph.nodes:
            if node.op == "call_function":
                name = str(node.target).removesuffix(".default")
                self.counts[name] = self.counts.get(name, 0) + 1
        return make_boxed_func(module.forward)
