"""Exclude all objects of the fork server from garbage collection; imported last by the server that ranks fork from.

The collector writes to the header of every object that it inspects. In a forked process each such write copies a memory
page that was shared with the server.
"""

import gc

gc.collect()
gc.freeze()
