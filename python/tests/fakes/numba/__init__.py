"""As much of Numba as a memory manager needs."""
