"""From a corpus to micro-batches on a device."""
