"""A whole step of mt-train on every rank of a layout, without a device and without other ranks.

The trainer itself runs on `meta` tensors as each rank of a fake world in turn. Two things are held:
the host waits for the device once, at the end of a step; and what the ranks ask of NCCL, replayed
by its rules, ends.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from mt_data import BatchSampler
from mt_parallel_state import ParallelLayout, ParallelState
from mt_testing import CommunicationError, HostSyncs, fake_world, recorded_ranks, replay
from mt_train.config.kinds.text import TextData
from mt_train.config.loading import build_model
from mt_train.config.model_section import ModelSection
from mt_train.config.optimizer_section import OptimizerSection
from mt_train.config.parallel_section import DataParallelSection, ParallelSection, PipelineSection
from mt_train.config.run_config import RunConfig, TrainingSection
from mt_train.training.trainer import Trainer

LENGTH, VOCABULARY = 16, 96
# Loss, norm and what ranks stop and save for come in one message, which is waited for.
THE_WAIT = ["guard.py"]


class RandomSamples:
    def __len__(self):
        return 1 << 10

    def __getitem__(self, index):
        return self.sample(index)

    def sample(self, index, begin=0, end=None):
        return np.random.default_rng(index).integers(VOCABULARY, size=LENGTH + 1)[begin:end]

    def sample_documents(self, index):
        return np.arange(LENGTH + 1) // 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: axes, and what else changes who talks to whom."""

    axes: dict[str, int] = field(default_factory=dict)
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    chunks: int | None = None
    strategy: str = "none"
    tied: bool = True
    layers: int = 2
    batch: int = 4
    clip: float = 1.0

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(**self.axes)

    def config(self) -> RunConfig:
        return RunConfig(
            model=ModelSection(
                num_layers=self.layers,
                fields={"hidden_size": 16, "num_heads": 4, "ffn_size": 32, "tied": self.tied},
            ),
            data=TextData(corpus="standard-library"),  # not read: tokens are random
            training=TrainingSection(
                steps=4,
                global_batch_size=self.batch,
                micro_batch_size=1,
                sequence_length=LENGTH,
                dtype="bf16",
            ),
            optimizer=OptimizerSection(lr=1e-4),
            parallel=ParallelSection(**self.axes, sequence_parallel=self.sequence_parallel),
            pipeline=PipelineSection(schedule=self.schedule, chunks=self.chunks),
            data_parallel=DataParallelSection(strategy=self.strategy),
        )

    def trainer(self, state: ParallelState) -> Trainer:
        config = self.config()
        sampler = BatchSampler(
            RandomSamples(),
            global_batch_size=self.batch,
            micro_batch_size=1,
            dp_rank=state.index("dp"),
            dp_size=state.size("dp"),
        )
        model = build_model(config.model, VOCABULARY, LENGTH)
        return Trainer(config, model, state, sampler=sampler)

    def run(self, *, steps: int = 1, change=lambda trainer: None) -> list[HostSyncs]:
        """Take steps; return the waits of each."""
        found = [HostSyncs("meta") for _ in range(steps)]
        with ParallelState(self.layout, device="meta") as state:
            trainer = self.trainer(state)
            change(trainer)
            for syncs in found:
                with syncs:
                    trainer.train_step()
            trainer.close()
        return found


def waits(syncs: HostSyncs) -> list[str]:
    return [sync.file.rpartition("/")[2] for sync in syncs]


def check(case: Case) -> list[list]:
    """Hold both for a case; return what each rank asked."""

    def program(rank: int) -> None:
        (syncs,) = case.run()
        assert waits(syncs) == THE_WAIT, f"rank {rank} of {case} waits at\n{syncs}"

    ranks = recorded_ranks(case.layout.world_size, program)
    try:
        replay(ranks)
    except CommunicationError as error:
        raise AssertionError(str(case)) from error
    return ranks


def test_a_step_on_one_device_waits_once():
    for syncs in Case().run(steps=2):  # the first makes masters and moments
        assert waits(syncs) == THE_WAIT, f"\n{syncs}"


@pytest.mark.parametrize(
    "case",
    [
        Case(axes={"tp": 2, "pp": 2}, sequence_parallel=True),
        Case(axes={"cp": 2}, batch=2),
        Case(axes={"dp": 3}, batch=3, strategy="optimizer"),
        Case(axes={"dp": 2}, strategy="full"),
    ],
    ids=lambda case: "-".join(f"{axis}{size}" for axis, size in case.axes.items()),
)
def test_the_ranks_of_a_layout_wait_once_and_none_for_ever(case):
    ranks = check(case)
    # Of all devices at once, one message: loss, norm and flags.
    world = tuple(range(case.layout.world_size))
    common = [call for call in ranks[0] if call.ranks == world and call.kind == "all_reduce"]
    on_device = [call for call in common if call.lane.endswith("/meta") and "float64" in call.what]
    assert len(on_device) == 1
    assert on_device[0].what.startswith("5 float64")  # the loss, three flags, the norm's square


OPTIONS = (
    {},
    {"sequence_parallel": True},
    {"schedule": "zb-v"},
    {"schedule": "dualpipe"},
    {"schedule": "interleaved", "chunks": 2},
    {"strategy": "optimizer"},
    {"strategy": "optimizer_gradients"},
    {"strategy": "full"},
)
SIZES = ((1, 1, 1, 4), (2, 1, 2, 2), (1, 2, 1, 2), (2, 2, 2, 1), (1, 1, 4, 1), (1, 1, 2, 4))


def campaign():
    """Every option on every layout with the option's axis."""
    for sizes, tied, options in itertools.product(SIZES, (True, False), OPTIONS):
        axes = dict(zip(("tp", "cp", "dp", "pp"), sizes, strict=True))
        needs = {"sequence_parallel": "tp", "schedule": "pp", "strategy": "dp"}
        if all(axes[axis] > 1 for option, axis in needs.items() if option in options):
            yield Case(axes=axes, tied=tied, layers=8, batch=16, **options)


@pytest.mark.campaign
@pytest.mark.parametrize("case", list(campaign()), ids=str)
def test_every_layout_schedule_and_strategy_waits_once_and_none_for_ever(case):
    check(case)


def test_a_last_stage_that_leaves_out_the_tied_embedding_is_found():
    case = Case(axes={"pp": 2})

    def forgets(trainer: Trainer) -> None:
        if trainer.state.index("pp") == 1:
            trainer.optimizer.shards = [
                piece for piece in trainer.optimizer.shards if "embedding" not in piece.name
            ]

    ranks = recorded_ranks(2, lambda rank: case.run(change=forgets))
    with pytest.raises(CommunicationError):
        replay(ranks)


def test_a_loss_that_somebody_prints_is_found():
    def prints(trainer: Trainer) -> None:
        run = trainer.executor.run

        def printed(batches, objective):
            outputs = run(batches, objective=objective)
            assert [float(output["lm"]) for output in outputs]
            return outputs

        trainer.executor.run = printed

    (syncs,) = Case(batch=1).run(change=prints)
    assert waits(syncs) == ["test_step_without_a_device.py", *THE_WAIT]


def test_ranks_agree_on_numbers_of_their_hosts_without_their_devices():
    from mt_train.agreement import summed

    with fake_world(2), ParallelState(ParallelLayout(dp=2), device="meta") as state:
        assert state.group("dp") is not None
        with HostSyncs("meta") as syncs:
            assert summed(state, 3, torch.pi) == [3.0, torch.pi]
    assert not list(syncs), f"\n{syncs}"
