"""Exempt the objects of all imported libraries from garbage collection, once for all forks of the server.

vLLM and DeepSpeed collect garbage during their start, which visits a million objects of the libraries and
copies their pages into each fork.
"""

import gc

gc.collect()
gc.freeze()
