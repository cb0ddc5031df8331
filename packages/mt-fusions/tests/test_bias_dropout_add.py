"""A bias, dropout and a residual: the mask's bits, every kernel against fp64, and its manners."""

import mt_fusions
import pytest
import torch
from mt_fusions.residual.bias_dropout_add import _backward, _forward
from mt_fusions.residual.dropout import kept
from oracle import DEVICE, Graph, as_fp64, assert_close, drawn, gradients

KEY = 0x123456789ABCDEF
SHAPES = [(3, 8), (5, 1, 33), (7, 600), (0, 16), (70, 40), (16,)]


def mix(key, index):
    """24 bits of a counter under a key, in Python's integers."""
    word = 2**64
    z = (index * 0x9E3779B97F4A7C15 + key) % word
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % word
    z ^= (key ^ 0x5851F42D4C957F2D) * 0xD6E8FEB86659FD93 % word
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % word
    return z >> 40


def first_of(shape, device="cpu"):
    """Rows far from each other, some beyond 32 bits."""
    rows = torch.arange(torch.Size(shape[:-1]).numel()).view(shape[:-1])
    return (rows * 1_000_000_007 + 5).to(device)


def plain(x, bias, residual, mask, probability):
    y = x if bias is None else x + bias
    return residual + y * mask.double() / (1 - probability)


def compare(tensors, probability, dtype, kernel="auto", key=KEY):
    x = tensors[0]
    first = first_of(x.shape, x.device)
    index = first[..., None] + torch.arange(x.shape[-1], device=x.device)
    mask = kept(index, probability, key) if probability else torch.ones_like(index)
    found, grads = gradients(
        lambda a, b, r: mt_fusions.bias_dropout_add(
            a, b, r, probability, key=key, first=first, kernel=kernel
        ),
        tensors,
    )
    exact, grads64 = gradients(lambda a, b, r: plain(a, b, r, mask, probability), as_fp64(*tensors))
    assert found[0].is_contiguous()
    for own, one in zip([*found, *grads], [*exact, *grads64], strict=True):
        assert (own is None) == (one is None)
        if own is not None:
            assert own.dtype == dtype
            assert_close(own, one, dtype)
    assert torch.equal(grads[0] == 0, (mask == 0) | (grads[2] == 0))


def drawn_all(*shape, biased=True, layout="contiguous", **how):
    bias = drawn(shape[-1], seed=1, **how) if biased else None
    return drawn(*shape, layout=layout, **how), bias, drawn(*shape, seed=2, layout=layout, **how)


@pytest.mark.parametrize("key", [0, 1, KEY, 2**63 - 1])
def test_the_mask_is_that_of_exact_integers(key):
    index = [0, 1, 2, 1000, 2**31, 2**40 + 3, 2**62]
    for probability in (0.1, 0.5, 0.9):
        found = kept(torch.tensor(index), probability, key)
        share = torch.tensor(probability).item()  # in fp32
        assert found.tolist() == [mix(key, i) / 2**24 >= share for i in index]


def test_as_many_elements_are_dropped_as_should_be():
    dropped = 1 - kept(torch.arange(100_000), 0.3, KEY).double().mean()
    assert abs(dropped - 0.3) < 5 * (0.3 * 0.7 / 100_000) ** 0.5


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_matches_fp64_forward_and_backward(kernel, shape):
    device = DEVICE if kernel == "triton" else "cpu"
    for number, probability in enumerate((0.3, 0.0, 0.9)):
        layout = ("contiguous", "sliced", "transposed")[number]
        dtype = torch.float16 if number == 2 else torch.float32
        key = (KEY, 1, 2**63 - 1)[number]
        for biased in (True, False):
            tensors = drawn_all(*shape, biased=biased, layout=layout, dtype=dtype, device=device)
            compare(tensors, probability, dtype, kernel, key)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_match_fp64(kernel, dtype):
    compare(drawn_all(40, 130, dtype=dtype), 0.25, dtype, kernel)


def test_a_block_boundary_is_no_seam():
    compare(drawn_all(700, 300), 0.1, torch.float32)


def test_a_part_of_the_rows_drops_what_the_whole_drops():
    x, bias, residual = drawn_all(12, 20)
    first = first_of(x.shape)
    whole = mt_fusions.bias_dropout_add(x, bias, residual, 0.5, key=KEY, first=first)
    part = mt_fusions.bias_dropout_add(x[5:9], bias, residual[5:9], 0.5, key=KEY, first=first[5:9])
    assert torch.equal(part, whole[5:9])


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
def test_indices_of_rows_may_have_any_strides(kernel):
    x, rest = drawn(3, 5, 8), drawn(3, 5, 8, seed=2)
    first = first_of(x.shape)
    column = torch.stack((first, first + 7), -1)[..., 0]
    assert not column.is_contiguous()
    found = []
    for index in (first, column):
        own = x.clone().requires_grad_()
        y = mt_fusions.bias_dropout_add(own, None, rest, 0.5, key=KEY, first=index, kernel=kernel)
        y.sum().backward()
        found.append((y, own.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("probability", [0.0, 0.4])
def test_gradcheck(kernel, probability):
    for biased in (True, False):
        tensors = drawn_all(2, 3, 5, biased=biased, dtype=torch.float64)
        tensors = [None if x is None else x.requires_grad_() for x in tensors]
        assert torch.autograd.gradcheck(
            lambda x, b, r: mt_fusions.bias_dropout_add(
                x, b, r, probability, key=KEY, first=first_of((2, 3, 5)), kernel=kernel
            ),
            tensors,
        )


# opcheck itself asks leaves that it has copied for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("biased", "probability"), [(True, 0.5), (False, 0.0)])
def test_opcheck(biased, probability):
    tensors = drawn_all(4, 6, biased=biased, layout="sliced")
    leaves = [None if x is None else x.clone().requires_grad_() for x in tensors]
    first = first_of((4, 6)) if probability else None
    torch.library.opcheck(_forward, (*leaves, first, probability, KEY, "auto"))
    torch.library.opcheck(_backward, (tensors[0], first_of((4, 6)), 0.5, KEY, "auto"))


def test_a_compiled_function_keeps_it_as_one_node_each_way():
    graph = Graph()
    tensors = [x.requires_grad_() for x in drawn_all(4, 6)]
    first = first_of((4, 6))
    compiled = torch.compile(
        lambda x, b, r: mt_fusions.bias_dropout_add(x * 2, b, r, 0.5, key=KEY, first=first),
        backend=graph,
        fullgraph=True,
    )
    compiled(*tensors).sum().backward()
    assert graph.counts["mt_fusions.bias_dropout_add"] == 1
    assert graph.counts["mt_fusions.bias_dropout_add_backward"] == 1


def test_under_autocast_the_result_has_the_dtype_of_the_input():
    bias = drawn(6).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = drawn(4, 6, dtype=dtype).requires_grad_()
            y = mt_fusions.bias_dropout_add(x, bias, drawn(4, 6, dtype=dtype), 0.0)
            y.float().sum().backward()
            assert y.dtype == x.grad.dtype == dtype
    assert bias.grad.dtype == torch.float32


X, ROWS = torch.ones(2, 3), torch.arange(2)


@pytest.mark.parametrize(
    ("args", "options", "kind", "words"),
    [
        ((X.long(), None, X), {}, TypeError, "floating"),
        ((X, X[0], None), {}, TypeError, "residual"),
        ((X, X[0], X.double()), {}, TypeError, "convert one"),
        ((X, X, X), {}, ValueError, "3 elements"),
        ((X, None, X, 1.0), {"first": ROWS}, ValueError, "below 1"),
        ((X, None, X, "0"), {"first": ROWS}, TypeError, "probability"),
        ((X, None, X, 0.5), {}, TypeError, "first"),
        ((X, None, X, 0.5), {"first": ROWS.int()}, TypeError, "int64"),
        ((X, None, X, 0.5), {"first": ROWS[:1]}, ValueError, "each row"),
        ((X, None, X, 0.5), {"first": ROWS, "key": -1}, ValueError, "63 bits"),
        ((X, None, X, 0.5), {"first": ROWS, "key": 1.0}, TypeError, "key"),
        ((X, None, X), {"kernel": "fast"}, ValueError, "auto, cpu"),
        ((X[:, :0], None, X[:, :0]), {}, ValueError, "last dim"),
    ],
)
def test_errors_say_what_is_wrong(args, options, kind, words):
    with pytest.raises(kind, match=words):
        mt_fusions.bias_dropout_add(*args, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_kernel_matches_fp64(dtype):
    for key in (1, KEY):
        tensors = drawn_all(515, 5000, dtype=dtype, device="cuda")
        compare(tensors, 0.1, dtype, "triton", key)
