"""Private torch names of attention: the kernels that also return the log-sum-exp, and their backwards."""

import torch

# torch 2.11-2.15: the kernels of F.scaled_dot_product_attention, which return the log-sum-exp of each row, and their
# backwards, which take it. They go when a public function returns it (flex_attention compiles first).
_aten = torch.ops.aten

flash_cpu, flash_cpu_backward = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)

choose_attention_kernel = torch._fused_sdp_choice  # torch 2.11-2.15; returns the value of an SDPBackend

flash_cuda, flash_cuda_backward = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_backward.default,
)

cudnn_cuda, cudnn_cuda_backward = (
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_cudnn_attention_backward.default,
)

efficient_cuda, efficient_cuda_backward = (
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
)

# torch 2.11-2.15: nn.TransformerEncoder calls it before its fast path, to see if a padding mask is left-aligned.
left_aligned = torch._nested_tensor_from_mask_left_aligned
