"""Batch, instance, layer and group norm with statistics over sharded dims."""
