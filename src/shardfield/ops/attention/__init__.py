"""Scaled dot product attention over sharded sequences: ring, head and gathered strategies."""

from .forced_strategy import attention_strategy as attention_strategy
