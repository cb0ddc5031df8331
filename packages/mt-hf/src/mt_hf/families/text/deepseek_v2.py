"""DeepSeek-V2: latent attention, and experts chosen by softmax, optionally from the best groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mt_files import Checks
from mt_model import ModelConfig

from mt_hf.family.decoder import check_heads
from mt_hf.family.experts import experts_of
from mt_hf.family.family import Family
from mt_hf.family.latent import LatentFields, latent_config, latent_fields, latent_links

_LIMITED = "group_limited_greedy"


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Fields(LatentFields):
    """The specific fields of a DeepSeek-V2's config.json, with their defaults.

    Groups only count with the `topk_method` `group_limited_greedy`; the score of a group is its
    highest score. Weights are never divided by their sum: transformers does not read
    `norm_topk_prob`, so it is refused.
    """

    vocab_size: int = 102400
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = Checks(self)
        check_heads(checks, self.hidden_size, self.num_attention_heads)
        if self.norm_topk_prob:
            checks.add("norm_topk_prob", "true is not built; use false")
        if self.mlp_bias:
            checks.add("mlp_bias", "true is not built; use false")
        if self.topk_method == _LIMITED and None in (self.n_group, self.topk_group):
            checks.add("topk_method", f"{_LIMITED} needs n_group and topk_group; give both")
        checks.done()


def _read(given: DeepseekV2Fields) -> ModelConfig:
    moe = given.moe
    if given.topk_method == _LIMITED and given.n_group and given.topk_group and given.n_group > 1:
        groups, highest = given.n_group, given.topk_group
        moe = replace(moe, num_groups=groups, top_groups=highest, group_top=1)
    return latent_config(given, moe, interleaved=True)


def _write(config: ModelConfig) -> DeepseekV2Fields:
    moe, _ = experts_of(config)
    return latent_fields(
        DeepseekV2Fields,
        config,
        topk_method=_LIMITED if moe.num_groups > 1 else "greedy",
        n_group=moe.num_groups,
        topk_group=moe.top_groups,
    )


FAMILY = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    fields=DeepseekV2Fields,
    read=_read,
    write=_write,
    links=latent_links,
)
