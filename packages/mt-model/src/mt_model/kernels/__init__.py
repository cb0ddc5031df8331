"""Which kernel computes each operation, and the operations that are one kernel."""
