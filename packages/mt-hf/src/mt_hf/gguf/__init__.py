"""Writing of GGUF files, which llama.cpp and engines built on it read."""
