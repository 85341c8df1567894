"""As much of CuPy as an allocator needs."""

from . import cuda as cuda
