"""Callables as CUDA graphs, and what stands in for one on a CPU."""

import pytest
import torch
from mt_fusions import Graph, GraphError, GraphPool
from mt_fusions.residual.dropout import kept
from torch import nn


def make_model(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def batches(number, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator).to(device) for _ in range(number)]


def accumulate(model, loss_scale=None):
    def micro_batch(x):
        loss = model(x).square().sum()
        (loss if loss_scale is None else loss * loss_scale()).backward()
        return loss.detach()

    return micro_batch


def zero(model):
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def warmed(function, state, *inputs, **options):
    graph = Graph(function, state=state, **options)
    for x in inputs:
        graph(x)
    assert graph.replays == len(inputs) - 2
    return graph


def grads_of(model):
    return [param.grad for param in model.parameters()]


def test_accumulated_gradients_have_the_bits_of_eager():
    ours, theirs = make_model(), make_model()
    zero(ours), zero(theirs)
    graph, plain = Graph(accumulate(ours), state=ours), accumulate(theirs)
    for x in batches(6):
        assert torch.equal(graph(x), plain(x))
    assert graph.replays == 4
    for own, other in zip(grads_of(ours), grads_of(theirs), strict=True):
        assert torch.equal(own, other)


def test_a_step_with_its_optimizer_has_the_bits_of_eager():
    ours, theirs = make_model(), make_model()

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            loss = accumulate(model)(x)
            norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
            factor = (0.5 / norm).clamp(max=1)  # clipped without a wait
            for param in model.parameters():
                param.grad.mul_(factor)
            optimizer.step()
            return {"loss": loss, "norm": norm}

        return step

    graph, plain = Graph(step_of(ours), state=ours), step_of(theirs)
    for x in batches(6):
        own, other = graph(x), plain(x)
        assert torch.equal(own["loss"], other["loss"])
        assert torch.equal(own["norm"], other["norm"])
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)


def test_outputs_are_where_they_were_and_gradients_too():
    model, inputs = make_model(), batches(5)
    graph = Graph(accumulate(model), state=model)
    first = []
    for x in inputs:
        model.zero_grad()  # None, as at capture
        first += [graph(x)]
    assert len({y.data_ptr() for y in first[2:]}) == 1
    held = grads_of(model)
    model.zero_grad()
    graph(inputs[0])
    assert all(a is b for a, b in zip(held, grads_of(model), strict=True))
    plain = make_model()
    accumulate(plain)(inputs[0])
    for own, other in zip(held, grads_of(plain), strict=True):
        assert torch.equal(own, other)


def test_another_shape_runs_eagerly_and_says_so_once():
    model, said = make_model(), []
    graph = warmed(model, model, *batches(3), on_eager=said.append, name="the model")
    for _ in range(2):
        assert torch.equal(graph(torch.ones(2, 6)), model(torch.ones(2, 6)))
    assert graph.replays == 1
    (reason,) = said
    assert reason.startswith("the model runs eagerly: argument 0 has shape")
    assert "((2, 6), torch.float32, False), and had ((4, 6), torch.float32, False)" in reason
    with pytest.raises(GraphError, match="argument 0 has shape"):
        warmed(model, model, *batches(3))(torch.ones(2, 6))


def test_a_parameter_elsewhere_is_named():
    model = make_model()
    graph = warmed(model, model, *batches(3))
    model[2].weight.data = model[2].weight.data.clone()
    with pytest.raises(GraphError, match=r"2\.weight is not where it was at capture"):
        graph(batches(1)[0])


def test_a_gradient_set_to_none_is_named():
    model = make_model()
    zero(model)
    graph = warmed(accumulate(model), model, *batches(3))
    model.zero_grad()
    with pytest.raises(GraphError, match=r"gradient of 0\.weight is None.*set_to_none=False"):
        graph(batches(1)[0])


def test_a_gradient_that_a_replay_would_overwrite_is_named():
    model, inputs = make_model(), batches(3)
    graph = Graph(accumulate(model), state=model)
    for x in inputs:
        model.zero_grad()
        graph(x)
    with pytest.raises(GraphError, match=r"gradient of 0\.weight was None at capture"):
        graph(inputs[0])


def test_memory_that_nobody_named_is_seen():
    scales = {"now": torch.ones(4, 6)}
    graph = warmed(lambda x: x * scales["now"], None, *batches(3))
    scales["now"] = torch.full((4, 6), 2.0)
    with pytest.raises(GraphError, match=r"argument 1 of operation 0, aten::mul.*memory at 0x"):
        graph(batches(1)[0])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * float(x.sum()),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x.sum(0).tolist()[0],
        lambda x: x * float(x.sum().numpy()),
        lambda x: x[x > 0].sum(),
        lambda x: x.nonzero().sum(),
    ],
)
def test_a_read_of_the_host_is_found(read):
    said = []
    graph = Graph(read, warmup=1, on_eager=said.append)
    for x in batches(3):
        assert torch.equal(graph(x), read(x))
    assert graph.replays == 0
    assert len(said) == 1
    assert "has the host read a" in graph.reason
    assert "test_graph.py:" in graph.reason
    with pytest.raises(GraphError, match="the host read"):
        Graph(read, warmup=1)(batches(1)[0])


def test_an_integer_index_and_a_masked_fill_are_no_reads():
    def function(x):
        x = x.clone()
        x[x > 0] = 0.0
        return x[:, torch.arange(2)]

    warmed(function, None, *batches(4))


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: nn.functional.scaled_dot_product_attention(
            *[x.view(1, 1, 4, 6)] * 3, dropout_p=0.5
        ),
    ],
)
def test_a_generator_is_refused(draw):
    said = []
    graph = Graph(draw, warmup=1, on_eager=said.append)
    graph(batches(1)[0])
    assert len(said) == 1
    assert "draws from a generator; use counters" in said[0]


def test_attention_that_drops_nothing_is_captured():
    x = torch.randn(1, 1, 4, 6)
    graph = warmed(lambda x: nn.functional.scaled_dot_product_attention(x, x, x), None, x, x, x)
    assert graph.reason is None


def test_random_numbers_from_counters_follow_the_counter():
    graph = Graph(lambda x, index: x * kept(index, 0.5, key=3), warmup=1)
    x = torch.ones(64)
    found = [graph(x, torch.arange(64) + 64 * step).clone() for step in range(4)]
    for step, y in enumerate(found):
        assert torch.equal(y, x * kept(torch.arange(64) + 64 * step, 0.5, key=3))
    assert not torch.equal(found[2], found[3])


def test_a_key_of_python_that_changes_is_found():
    step, index = [0], torch.arange(8)
    graph = Graph(lambda x: x * kept(index, 0.5, key=step[0]), state={"index": index}, warmup=1)
    graph(torch.ones(8))
    step[0] = 1
    with pytest.raises(GraphError, match="a value of Python is baked into a CUDA graph"):
        graph(torch.ones(8))


def test_a_number_of_python_that_changes_is_found():
    scale = [1.0]
    model = make_model()
    zero(model)
    graph = warmed(accumulate(model, lambda: scale[0]), model, *batches(3))
    scale[0] = 0.5
    with pytest.raises(GraphError, match=r"the callable: argument 1 of operation .*is 0\.5, and w"):
        graph(batches(1)[0])


def test_a_scale_in_a_tensor_is_followed():
    scale = torch.ones(())
    ours, theirs = make_model(), make_model()
    zero(ours), zero(theirs)
    function = accumulate(ours, lambda: scale)
    graph = warmed(function, {"scale": scale, **dict(ours.named_parameters())}, *batches(3))
    zero_in_place = [param.grad.zero_() for param in ours.parameters()]
    scale.fill_(0.5)
    graph(batches(1)[0])
    accumulate(theirs, lambda: 0.5)(batches(1)[0])
    for own, other in zip(zero_in_place, grads_of(theirs), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.exp().exp(), "goes on with aten::exp"),
        (lambda x: x, r"ended after 0 operations, and aten::exp"),
        (lambda x: x.sin(), r"operation 0 is aten::sin.*and was aten::exp"),
    ],
)
def test_another_way_through_python_is_found(change, message):
    ways = [lambda x: x.exp()]
    graph = warmed(lambda x: ways[-1](x), None, *batches(3))
    ways.append(change)
    with pytest.raises(GraphError, match=message):
        graph(batches(1)[0])


def test_a_tensor_made_of_values_of_python_is_found():
    with pytest.raises(GraphError, match="makes a tensor of Python's values"):
        Graph(lambda x: x * torch.tensor([2.0] * 6), warmup=1)(batches(1)[0])


def test_a_changed_argument_that_is_no_tensor_is_found():
    graph = Graph(lambda x, by: x * by, warmup=1)
    graph(torch.ones(2), 2)
    with pytest.raises(GraphError, match="argument 1 is 3, and was 2 at first"):
        graph(torch.ones(2), 3)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="warmup=0"):
        Graph(torch.exp, warmup=0)
    with pytest.raises(TypeError, match="warmup"):
        Graph(torch.exp, warmup="1")  # pyright: ignore[reportArgumentType]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_graphs_of_one_pool_replay_what_eager_gives():
    ours, theirs, pool = make_model("cuda"), make_model("cuda"), GraphPool()
    zero(ours), zero(theirs)
    first = Graph(accumulate(ours), state=ours, pool=pool)
    second = Graph(lambda x: ours(x).softmax(-1), state=ours, pool=pool)
    plain = accumulate(theirs)
    for x in batches(8, "cuda"):
        torch.testing.assert_close(first(x), plain(x))
        torch.testing.assert_close(second(x), theirs(x).softmax(-1))
    assert first.replays == second.replays == 6
    for own, other in zip(grads_of(ours), grads_of(theirs), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.gpu
@needs_gpu
def test_a_replay_does_not_wait_and_follows_counters():
    index = torch.arange(64, device="cuda")
    graph = Graph(lambda x, index: x * kept(index, 0.5, key=3))
    x = torch.ones(64, device="cuda")
    found = []
    torch.cuda.synchronize()
    for step in range(6):
        if step == 4:
            torch.cuda.set_sync_debug_mode("error")
        try:
            found.append(graph(x, index + 64 * step).clone())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for step, y in enumerate(found):
        assert torch.equal(y, x * kept(index + 64 * step, 0.5, key=3))


@pytest.mark.gpu
@needs_gpu
def test_a_read_of_the_host_on_a_device_is_found():
    graph = Graph(lambda x: x * x.sum().item(), on_eager=lambda _: None)
    for x in batches(4, "cuda"):
        graph(x)
    assert graph.replays == 0
    assert "has the host read a tensor" in graph.reason
