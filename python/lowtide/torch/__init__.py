"""lowtide in the place of PyTorch's CUDA allocator: the shim, how it is built and how it is installed."""
