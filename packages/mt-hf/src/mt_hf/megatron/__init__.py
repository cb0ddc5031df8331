"""Reading of checkpoints that Megatron-core wrote."""
