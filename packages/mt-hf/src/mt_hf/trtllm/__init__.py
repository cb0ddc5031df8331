"""Writing of checkpoints of TensorRT-LLM, from which it builds its engines."""
