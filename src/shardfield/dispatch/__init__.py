"""Dispatch a torch call on ShardTensors to its rule: registry, arguments, call cache, executor, fallback."""
