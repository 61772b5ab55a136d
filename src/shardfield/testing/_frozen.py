"""Imported last by the server that ranks are forked from: what it holds by then is never looked through for garbage.

To look is to write a mark into every object, and a forked process that writes has to copy what it shared.
"""

import gc

gc.collect()
gc.freeze()
