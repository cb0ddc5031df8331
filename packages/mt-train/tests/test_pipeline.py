"""What can't be planned is refused before anything is built."""

from __future__ import annotations

import pytest
from mt_files import FieldError
from mt_train.config.parallel_section import PipelineSection
from mt_train.config.pipeline_plan import plan_pipeline


@pytest.mark.parametrize(
    ("section", "microbatches", "field"),
    [
        (PipelineSection(), 5 * 10**11, "training.global_batch_size"),
        (PipelineSection(schedule="interleaved", chunks=10**6), 4, "pipeline.chunks"),
    ],
)
def test_an_absurd_number_of_actions_is_refused_at_once(section, microbatches, field) -> None:
    with pytest.raises(FieldError) as caught:
        plan_pipeline(section, ranks=2, microbatches=microbatches, num_layers=8)
    assert caught.value.field == field
