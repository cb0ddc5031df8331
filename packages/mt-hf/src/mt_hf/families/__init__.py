"""The families of models in Hugging Face transformers that come with this package."""

# ruff: noqa: F401 - an import adds a family
from mt_hf.families.image.clip_vision import FAMILY as CLIP_VISION
from mt_hf.families.image.siglip_vision import FAMILY as SIGLIP_VISION
from mt_hf.families.image.vit import FAMILY as VIT
from mt_hf.families.text.bert import FAMILY as BERT
from mt_hf.families.text.deepseek_v2 import FAMILY as DEEPSEEK_V2
from mt_hf.families.text.deepseek_v3 import FAMILY as DEEPSEEK_V3
from mt_hf.families.text.gemma2 import FAMILY as GEMMA2
from mt_hf.families.text.gemma3 import FAMILY as GEMMA3
from mt_hf.families.text.gpt2 import FAMILY as GPT2
from mt_hf.families.text.gpt_neox import FAMILY as GPT_NEOX
from mt_hf.families.text.gpt_oss import FAMILY as GPT_OSS
from mt_hf.families.text.llama import FAMILY as LLAMA
from mt_hf.families.text.llama4_text import FAMILY as LLAMA4_TEXT
from mt_hf.families.text.mamba2 import FAMILY as MAMBA2
from mt_hf.families.text.mistral import FAMILY as MISTRAL
from mt_hf.families.text.mixtral import FAMILY as MIXTRAL
from mt_hf.families.text.mt5 import FAMILY as MT5
from mt_hf.families.text.nemotron_h import FAMILY as NEMOTRON_H
from mt_hf.families.text.olmo2 import FAMILY as OLMO2
from mt_hf.families.text.olmoe import FAMILY as OLMOE
from mt_hf.families.text.phi3 import FAMILY as PHI3
from mt_hf.families.text.qwen2 import FAMILY as QWEN2
from mt_hf.families.text.qwen2_moe import FAMILY as QWEN2_MOE
from mt_hf.families.text.qwen3 import FAMILY as QWEN3
from mt_hf.families.text.qwen3_moe import FAMILY as QWEN3_MOE
from mt_hf.families.text.qwen3_next import FAMILY as QWEN3_NEXT
from mt_hf.families.text.t5 import FAMILY as T5
from mt_hf.family.family import Family

FAMILIES: tuple[Family, ...] = tuple(
    each for each in [*globals().values()] if isinstance(each, Family)
)
