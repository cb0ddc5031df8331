"""The choice of a kernel for each operation, and single-kernel operations."""
