"""A sharded step as one local program: tracing, passes over its messages, compiling."""

from .api import compile as compile
