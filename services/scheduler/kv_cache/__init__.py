"""KV cache accounting: which block of a worker group holds what, and which blocks are free.

Owns block ids, the order in which cached blocks are evicted, block hashes, the prefix cache, the host tier and the
sliding window. Holds no KV data: a worker does. Called by `workers`, by the plan builder and when results arrive. Start
with `BlockPool`, `PrefixIndex` and `PrefixCache`.

Imports go to `sequences` and shared code.
"""
