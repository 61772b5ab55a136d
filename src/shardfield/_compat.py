"""Every private torch name we touch: which versions have it, why we need it, when it can go.

Nothing else in the package may name a private torch attribute (a test holds this).
"""

from __future__ import annotations

import torch

# torch 2.11-2.15: `Function.apply` as torch has it (a classmethod in 2.13, a C method descriptor in 2.15), before
# `bridge` replaces it. Reached through the class's __dict__ because an attribute access would bind it.
function_apply = torch.autograd.Function.__dict__["apply"]
