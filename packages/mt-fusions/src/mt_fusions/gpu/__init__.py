"""The operations as Triton kernels. Importing a module of it imports triton."""
