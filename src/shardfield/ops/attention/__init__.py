"""Scaled dot product attention over sharded sequences: ring, head and gathered strategies."""
