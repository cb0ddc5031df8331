"""fp32 products by oneDNN: chosen only where they are exact and fast, and the same numbers."""

import pytest
import torch
from mt_kernels import KernelError
from mt_model import GPT, Kernels, gpt
from mt_model.kernels import onednn
from mt_model.kernels.gemm import GEMM
from mt_model.kernels.onednn import MIN_ROWS, OneDnnGemm, Probe, onednn_obstacle
from mt_tensor_parallel import TorchGemm
from torch.backends import mkldnn

LIKE = torch.empty(0)


class RoundingGemm(OneDnnGemm):
    """What the switch means on a CPU with AMX: operands rounded to bf16."""

    def forward(self, x, weight, bias=None):
        return super().forward(x.bfloat16().float(), weight.bfloat16().float(), bias)


@pytest.fixture
def measured(monkeypatch):
    """Set what the probe finds."""

    def measure(error, gain):
        monkeypatch.setattr(onednn, "_probe", lambda: Probe(error, gain))

    return measure


@pytest.fixture
def exact():
    """Skip where oneDNN rounds to bf16."""
    if why := onednn_obstacle(LIKE):
        pytest.skip(why)


def small(kernels, dtype=torch.float32, **options):
    config = gpt(vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, max_sequence_length=64)
    return GPT(config, kernels=kernels, dtype=dtype, **options)


def batch():
    tokens = torch.randint(0, 96, (2, 33), generator=torch.Generator().manual_seed(3))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def gradients(kernels, dtype=torch.float32):
    model = small(kernels, dtype)
    model(None, batch())["lm"].backward()
    return {name: param.grad.double() for name, param in model.named_parameters()}


def test_a_route_that_rounds_to_bf16_is_refused():
    found = Probe.of(RoundingGemm())
    assert found.error > 1e-4
    assert "off by" in found.obstacle


def test_torchs_own_products_are_exact_and_not_faster_than_themselves():
    found, threads = Probe.of(TorchGemm()), torch.get_num_threads()
    assert found.obstacle is None
    assert found.drawback is not None
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("error", "gain", "name"),
    [(4e-7, 1.9, "onednn"), (4e-7, 1.1, "cpu"), (1e-3, 1.9, "cpu"), (float("nan"), 1.9, "cpu")],
)
def test_auto_follows_the_measurement_and_says_it(measured, error, gain, name):
    measured(error, gain)
    line = next(str(x) for x in small("auto").chosen_kernels() if x.operation == "gemm")
    assert line.startswith(f"gemm: {name} (")
    if name != "onednn":
        assert "onednn" in line


def test_named_and_refused_by_name(measured):
    measured(4e-7, 1.0)  # slower is no reason against a name
    named = small(Kernels(gemm="onednn"))
    assert isinstance(named.shard.gemm, OneDnnGemm)
    assert isinstance(small("reference").shard.gemm, TorchGemm)
    measured(1e-3, 2.0)
    with pytest.raises(KernelError, match="off by"):
        small(Kernels(gemm="onednn"))
    measured(4e-7, 2.0)
    with pytest.raises(KernelError, match="fp32"):
        small(Kernels(gemm="onednn"), torch.bfloat16)
    with pytest.raises(ValueError, match="gemm"):
        Kernels(gemm="onedn")


def test_several_ranks_dont_choose_apart(measured):
    measured(4e-7, 2.0)
    assert GEMM.find("auto", LIKE, 1).name == "onednn"
    assert GEMM.find("auto", LIKE, 2).name == "cpu"
    assert GEMM.find("onednn", LIKE, 2).name == "onednn"


class Sink:
    """Sums a weight's gradient, as the trainer's buffer does."""

    def __init__(self, param):
        self.total = torch.zeros_like(param)

    def begin(self):
        return self.total, True

    def end(self):
        pass


def onednn_calls(capfd, run):
    capfd.readouterr()
    with mkldnn.verbose(mkldnn.VERBOSE_ON):
        run()
    return capfd.readouterr().out.count(",exec,cpu,matmul,")


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="torch sends no fp32 product to oneDNN on a CPU without AVX-512",
)
@pytest.mark.usefixtures("exact")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
@pytest.mark.parametrize("compiled", [False, True])
def test_every_product_of_a_step_is_onednns(capfd, compiled):
    """Linear layers, head and attention, forward and backward, as the trainer runs them."""
    before = mkldnn.matmul.fp32_precision
    for gemm, calls in (("onednn", 2 * (4 * 3 + 6) + 3), ("torch", 0)):
        model = small(Kernels(gemm=gemm, attention="matmul"))
        model.sum_weight_gradients(Sink)
        if compiled:
            model.wrap_layers(lambda run: torch.compile(run, backend="aot_eager"))
        assert onednn_calls(capfd, lambda: model(None, batch())["lm"].backward()) == calls  # noqa: B023
    assert mkldnn.matmul.fp32_precision == before


def test_products_of_few_rows_stay_with_torch(capfd):
    few = torch.zeros(MIN_ROWS - 1, 8), torch.zeros(4, 8)
    assert onednn_calls(capfd, lambda: OneDnnGemm().forward(*few)) == 0


@pytest.mark.usefixtures("exact")
def test_gradient_of_a_step_agrees_with_fp64():
    exact = gradients("auto", torch.float64)
    found = gradients(Kernels(gemm="onednn", attention="matmul"))
    for name, grad in exact.items():
        assert (found[name] - grad).norm() <= 1e-6 * grad.norm(), name


@pytest.mark.usefixtures("exact")
def test_losses_of_50_steps_agree_with_torchs():
    def losses(name):
        model = small(Kernels(gemm=name))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for _ in range(50):
            optimizer.zero_grad()
            loss = model(None, batch())["lm"]
            loss.backward()
            optimizer.step()
            yield loss.item()

    own, torchs = list(losses("onednn")), list(losses("torch"))
    assert own[-1] < 0.9 * own[0]
    assert own == pytest.approx(torchs, rel=1e-4)


@pytest.mark.usefixtures("exact")
def test_generation_computes_the_same():
    tokens = batch()["tokens"]
    with torch.inference_mode():
        own, torchs = (small(Kernels(gemm=name)).logits(tokens) for name in ("onednn", "torch"))
    torch.testing.assert_close(own, torchs, rtol=1e-5, atol=1e-6)
