"""The models of all tables, built where few elements count as many: their fields are tiny.

A Partial value is reduce-scattered, and a result that has lost its sharding counts, from `ELEMENTS` on a rank on, where
fields that are trained on have thousands.
"""

from __future__ import annotations

from collections.abc import Callable

from shardfield import runtime
from tests.zoo import larger, science, vision, zoo

ELEMENTS = 64
TABLES = (zoo, vision, science, larger)
MODELS = {name: entry for table in TABLES for name, entry in table.MODELS.items()}


def __getattr__(name: str) -> Callable:
    """Return the factory of a model."""
    factory = next((getattr(table, name) for table in TABLES if name in table.MODELS), None)
    if factory is None:
        raise AttributeError(name)

    def make():
        runtime.active.min_scattered = ELEMENTS
        return factory()

    return make
