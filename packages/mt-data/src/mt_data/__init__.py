"""Token datasets: Megatron-compatible files, GPT samples, blending, tokenizers."""

__all__: list[str] = []
