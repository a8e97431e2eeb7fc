"""Least recently used, leaf first.

The coldest leaf goes first, then its parent if that is a leaf now and no hotter than the next, and so on up. So a cold
prefix goes from its tail to its head, however its blocks came in, and a hot one keeps its head. Measured on the public
Mooncake traces this order is worth up to 20 points of token hit ratio against touching head first.
"""

from policies.eviction.leafwise import Leafwise


class Lru(Leafwise):
    """A block's moment is that of its last use, which is what `Leafwise` does by itself."""
