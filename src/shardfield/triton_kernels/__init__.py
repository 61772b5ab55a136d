"""Kernels of our own, in Triton: what would be many small calls on a device, or several passes over its memory, as one.

Each module has the kernel, the call around it, and says which tensors it `takes`. What it does not take, where Triton
is not installed or on a CPU, is done in torch's own calls by whoever asked.
"""
