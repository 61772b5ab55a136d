"""Private torch names of functions on lists of tensors."""

import torch

# torch 2.11-2.15: functions of lists of tensors, fused steps of optimizers, and what a gradient scaler does to all
# gradients. No public names.
FOREACH = [f for name, f in vars(torch).items() if name.startswith("_foreach_")]
FUSED_STEPS = [
    f for name, f in vars(torch).items() if name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
]
unscale_all_ = torch._amp_foreach_non_finite_check_and_unscale_
