"""Triton kernels that fuse many small launches, or several passes over memory, into one.

Each module has a kernel, the function that launches it, and `supports`, which returns whether the kernel supports the
tensors of a call. For unsupported tensors, on the CPU and without Triton, the caller uses torch ops.
"""
