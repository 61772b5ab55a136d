"""Compile a step on ShardTensors: trace it into local graphs with collectives, optimize and compile the graphs.

`api` is the entry point and holds the cache of programs. `program` traces one program, `lowering` and `passes` rewrite
its graphs, and `backends` compiles them. `closures`, `module_state` and `guards` decide when a program may be reused.
`rendezvous` and `trace_consensus` keep the ranks together while they trace.
"""

from .api import compile as compile
