"""A sharded step as one local program: tracing, passes over its messages, compiling."""

from .call import compile as compile
