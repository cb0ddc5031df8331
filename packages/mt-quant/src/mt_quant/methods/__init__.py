"""Methods that round the weight of one linear layer."""
