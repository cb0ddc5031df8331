"""Tensors with all values that are hard to quantise, in any layout."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = ("contiguous", "transposed", "sliced", "strided", "expanded")


def hard(*shape, seed=0, dtype=torch.float32, finite=True):
    """Outliers, zeros, zero rows and blocks, tiny numbers; and infinities where not `finite`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp2(torch.randint(-6, 6, (*shape[:-1], 1), generator=generator).float())
    chance = torch.rand(shape, generator=generator)
    x = torch.where(chance < 0.02, x * 1000, x)
    x = torch.where((chance > 0.1) & (chance < 0.2), 0.0, x)
    x = torch.where((chance > 0.2) & (chance < 0.22), x * 1e-40, x)
    if len(shape) > 1:
        x[..., 1, :] = 0
        x[..., 2, : min(40, shape[-1])] *= 1e-30
    if not finite:
        x = torch.where(
            (chance > 0.3) & (chance < 0.31), torch.copysign(torch.tensor(torch.inf), x), x
        )
    return x.to(dtype)


def laid_out(x, layout):
    """The same numbers with other strides; expanded has its first row everywhere."""
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "sliced":
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 5), 7.0)
        wide[..., 2:-3] = x
        return wide[..., 2:-3]
    if layout == "strided":
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 7.0)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "expanded":
        return x[..., :1, :].expand(x.shape)
    return x


def bits(q):
    """All bytes of a quantised tensor by name."""
    return {
        name: t.contiguous().view(torch.uint8) for name, t in q.tensors().items() if t.dim()
    } | {
        name: t.view(1).contiguous().view(torch.uint8)
        for name, t in q.tensors().items()
        if not t.dim()
    }


def same_bits(a, b):
    found, expected = bits(a), bits(b)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )
