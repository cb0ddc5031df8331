"""The run names the kernel of every operation, on any rank."""

from __future__ import annotations

from mt_model import GPT, gpt
from mt_parallel_state import ParallelLayout, ParallelState
from mt_train.training.chosen_kernels import kernel_lines


def lines(pp: int, *, compiled: bool = False) -> list[str]:
    state = ParallelState(ParallelLayout(pp=pp))
    config = gpt(vocab_size=16, hidden_size=8, num_layers=2, num_heads=2)
    per_stage = 2 // pp
    first = state.index("pp") * per_stage
    model = GPT(config, state, layers=range(first, first + per_stage), kernels="auto")
    return list(kernel_lines([model], state, compiled=compiled))


def test_every_stage_of_a_pipeline_tells_the_kernels_of_all(ranks) -> None:
    told = lines(1)
    assert [line.split()[1] for line in told] == [
        *(
            "gemm",
            "residual",
            "rms_norm",
            "attention",
            "rope",
            "gated",
            "loss",
        )  # the last is behind the last layer
    ]
    assert told[2].startswith("kernel rms_norm   cpu (")
    assert "not fused: slower on a CPU" in told[2]
    for found in ranks(2, lambda: lines(2)):
        assert sorted(found[1:]) == sorted(told[1:])  # ranks don't measure products
        assert "has to be named" in found[0]


def test_a_compiled_run_tells_the_plain_forms() -> None:
    told = {line.split()[1]: line.split(maxsplit=2)[2] for line in lines(1, compiled=True)}
    for name in ("rms_norm", "residual", "rope", "gated"):
        assert told[name] == "reference (torch.compile fuses the plain form)"
    assert told["loss"].startswith("torch ")
