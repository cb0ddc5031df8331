"""Whatever weights an engine gets while it lives, it answers as a fresh engine of them."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mt_ckpt import RunFolder
from mt_infer import Engine, EngineOptions, RunError, Sampling
from mt_infer.loading import fill_weights
from mt_model import GPT, Kernels, MoEConfig, gpt, packing_obstacle, saved_buffers
from mt_parallel_state import ParallelLayout, ParallelState
from mt_quant import QuantizationConfig, QuantizationError, quantize

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_sequence_length": 64,
    "init_std": 0.4,
}
MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=32, score="sigmoid", bias_rate=0.01)
ASKED = [[5, 9, 3, 7, 1, 2, 8], [4, 6]], Sampling(temperature=0, max_tokens=10, seed=0, logprobs=0)


def model(seed: int, **more: Any) -> GPT:
    kernels = Kernels(attention="invariant")
    return GPT(gpt(**SIZES | more), seed=seed, kernels=kernels).eval()


def engine(of: GPT, **how: Any) -> Engine:
    return Engine(of, options=EngineOptions(**{"blocks": 32, "block_size": 4} | how))


@pytest.mark.parametrize("recipe", ["int8", "fp8", "int4-rtn"])
def test_quantised_layers_round_a_trainers_weights_anew(recipe) -> None:
    live, trained, fresh = model(1), model(2), model(2)
    for each in (live, fresh):
        quantize(each, QuantizationConfig.named(recipe))
    made = engine(live)
    before = made.generate(*ASKED)
    made.update_weights(dict(trained.named_parameters()))
    found = made.generate(*ASKED)
    assert found == engine(fresh).generate(*ASKED)
    assert found != before
    made.update_weights(dict(live.named_parameters()))  # codes and scales themselves
    assert made.generate(*ASKED) == found


def test_layers_that_were_calibrated_are_refused_by_name() -> None:
    live = model(1)
    batches = [torch.arange(16)[None]]
    quantize(live, QuantizationConfig.named("int8-smoothquant"), batches)
    with pytest.raises(QuantizationError, match=r"layers\.0.*input_scale"):
        engine(live).update_weights(dict(model(2).named_parameters()))


def test_biases_that_balance_experts_come_with_the_weights() -> None:
    live, trained = model(1, moe=MOE), model(2, moe=MOE)
    for bias in saved_buffers([trained]).values():
        bias.copy_(torch.tensor([0.9, -0.9, 0.3, -0.3]))
    made = engine(live)
    made.update_weights(dict(trained.named_parameters()))
    without = made.generate(*ASKED)
    made.update_weights(saved_buffers([trained]))
    assert made.generate(*ASKED) == engine(trained).generate(*ASKED) != without


def test_a_step_that_cannot_be_read_leaves_an_engine_that_answers_nothing(run) -> None:
    made = Engine.from_folder(run, step=1, blocks=32)
    before = made.generate("to be", Sampling(seed=0, max_tokens=4))
    stream = made.stream("to be", Sampling(seed=0, max_tokens=4))
    begun = next(stream)
    folder = RunFolder(run).checkpoints / "step_00000002"
    chunk = max(folder.rglob("c.*"), key=lambda path: path.stat().st_size)
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(Exception, match=r"step_00000002") as caught:
        made.load_step(2, finish=False)
    assert "wake" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="wake"):
        made.generate("to be", Sampling(seed=0, max_tokens=4))
    made.load_step(1)
    made.wake()
    assert [begun, *stream][-1].completion == before[0]
    assert made.generate("to be", Sampling(seed=0, max_tokens=4)) == before


@pytest.mark.parametrize("invariant", [True, False])
def test_packed_weights_are_those_of_the_last_change(run, *, invariant: bool) -> None:
    how: dict[str, Any] = {"step": 1, "blocks": 32, "batch_invariant": invariant}
    asked = "to be", Sampling(temperature=0, max_tokens=8, seed=0, logprobs=0)
    made = Engine.from_folder(run, **how)
    model: Any = made.model
    gemm = model.shard.gemm
    if packing_obstacle(torch.float32, torch.device("cpu")) is not None:
        pytest.skip("oneDNN packs no weights here")
    weights = {name: 0.5 * x for name, x in made.model.named_parameters()}
    made.update_weights(weights)
    size = gemm.packed_bytes
    assert gemm.layout_of(model.layers["0"].mixer.out.matrix()) is not None
    other = Engine.from_folder(run, **how, pack_weights=False)
    other.update_weights(weights)
    assert [x.tokens for x in made.generate(*asked)] == [x.tokens for x in other.generate(*asked)]
    if invariant:
        assert made.generate(*asked) == other.generate(*asked)
    made.sleep(level=2)
    assert gemm.packed_bytes == 0
    made.wake()
    assert gemm.packed_bytes == size > 0


def test_a_run_whose_model_was_replaced_is_refused(run, tmp_path, write_run) -> None:
    made = Engine.from_folder(run, blocks=32)
    other = write_run(tmp_path / "other", gpt(**SIZES | {"vocab_size": 264}))
    run.rename(tmp_path / "away")
    other.rename(run)
    with pytest.raises(RunError, match="new engine"):
        made.load_step()


def swapped(folder: Path) -> bool:
    with ParallelState(ParallelLayout(tp=2)) as state:
        how = {"state": state, "blocks": 32, "block_size": 4}
        made = Engine.from_folder(folder, step=1, **how)
        fresh = Engine.from_folder(folder, step=2, **how)
        if state.rank > 0:
            made.serve()
            fresh.serve()
            return True
        with made:
            sampling = Sampling(seed=3, max_tokens=8)
            stream = made.stream("to be", sampling)
            begun = [next(stream) for _ in range(3)]
            made.load_step(2, finish=False)
            ended = [*begun, *stream][-1].completion
            live = made.generate("to be", sampling)
        with fresh:
            expected = fresh.generate("to be", sampling)
        return live == expected and (ended.step, live[0].step) == (2, 2)


def test_ranks_that_share_a_model_swap_together(saved_run, ranks) -> None:
    assert ranks(2, partial(swapped, saved_run)) == [True, True]


def failed_swap(folder: Path) -> list[Any] | None:
    """Read a step that one rank can't, then one that both can."""
    with ParallelState(ParallelLayout(tp=2)) as state:
        made = Engine.from_folder(folder, state=state, step=1, blocks=32, block_size=4)
        fill = "mt_infer.engine.weights.fill_weights"
        if state.rank > 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fill, partial(failing_once, patch))
                made.serve()
            return None
        with made:
            expected = made.generate("to be", Sampling(seed=3, max_tokens=4))
            with pytest.raises(RunError, match="no more memory"):
                made.load_step(2)
            with pytest.raises(RuntimeError, match="wake"):
                made.generate("to be", Sampling(seed=3, max_tokens=4))
            made.load_step(1)
            made.wake()
            return [expected, made.generate("to be", Sampling(seed=3, max_tokens=4))]


def failing_once(patch: pytest.MonkeyPatch, *given: Any, **how: Any) -> None:
    fill_weights(*given, **how)
    patch.undo()
    raise OSError("no more memory")


def test_ranks_sleep_together_when_one_cannot_read_a_step(saved_run, ranks) -> None:
    (before, after), _ = ranks(2, partial(failed_swap, saved_run))
    assert before == after


def test_a_paused_engine_makes_no_pass_and_goes_on_where_it_was() -> None:
    made, results = engine(model(1)), []
    expected = made.generate(*ASKED)
    stream = made.stream(ASKED[0][0], ASKED[1])
    begun = [next(stream) for _ in range(3)]
    made.pause()
    passes = made.stats()["passes"]
    thread = threading.Thread(target=lambda: results.append(made.generate(*ASKED)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert made.stats()["passes"] == passes
    assert made.stats()["running"] == 1
    made.resume()
    assert [*begun, *stream][-1].completion == expected[0]
    thread.join(20)
    assert results == [expected]
    assert made.stats()["evictions"] == 0


@pytest.mark.parametrize("host_blocks", [0, 16])
def test_requests_of_an_engine_that_slept_go_on_from_host_memory_if_there_is_any(
    host_blocks,
) -> None:
    made = engine(model(1), host_blocks=host_blocks)
    (expected, _) = made.generate(*ASKED)
    stream = made.stream(ASKED[0][0], ASKED[1])
    begun = [next(stream) for _ in range(3)]
    pages = [weakref.ref(x) for x in made._loop.runner._pages.tensors(states=False)]
    made.sleep(level=2)
    gc.collect()
    assert [each() for each in pages] == [None] * 4
    for call in (lambda: made.generate(*ASKED), lambda: made.embed([[1]])):
        with pytest.raises(RuntimeError, match="wake"):
            call()
    made.wake()
    assert [*begun, *stream][-1].completion == expected
    assert made.stats()["restored_tokens"] == (len(ASKED[0][0]) + 2 if host_blocks else 0)
    assert made.stats()["free_host_blocks"] == host_blocks
    with pytest.raises(ValueError, match="level=3"):
        made.sleep(3)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_of_the_models_own_features(pooling) -> None:
    alone, prompts = model(1), ASKED[0]
    found = engine(alone).embed(prompts, pooling=pooling)
    assert (found.shape, found.dtype) == ((2, 64), torch.float32)
    for row, tokens in zip(found, prompts, strict=True):
        x = alone.final_features({"tokens": torch.tensor([tokens])})[0]
        assert torch.equal(row, x[-1] if pooling == "last" else x.mean(0))
        logits = alone.logits(torch.tensor([tokens]))[0]
        torch.testing.assert_close(x @ alone.embedding.weight.T, logits)
