"""Triton kernels that fuse many small launches, or several passes over memory, into one.

Each module has a kernel, the function that launches it, and `supports`, which tells for which tensors it can. On the
CPU, without Triton or for other tensors, the caller uses torch ops instead.
"""
