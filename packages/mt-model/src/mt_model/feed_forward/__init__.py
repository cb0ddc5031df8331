"""Feed-forwards, dense and with experts, each with its config."""
