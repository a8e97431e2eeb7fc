"""From block keys to dense ids, a million of them in 50 MB: open addressing over numpy arrays.

A dict of bytes keys would take about 180 bytes a block, more than all other columns of the catalog together.
Lookups are vectorised over a whole prefix. Not thread-safe: the catalog's owner thread alone calls it.
"""

import secrets
import struct

import numpy as np
import numpy.typing as npt

from kvstore.core.key import KEY_BYTES, BlockKey

_EMPTY = -1
_GONE = -2  # a removed entry: probing goes on past it
_WORDS = KEY_BYTES // 8
_MAX_LOAD = 0.5
_AS_WORDS = struct.Struct(f"={_WORDS}Q")
_64_BITS = (1 << 64) - 1

Ids = npt.NDArray[np.int32]


class KeyIndex:
    """Maps keys to ids; ids are small, dense and reused after `remove`."""

    def __init__(self, capacity: int = 1024) -> None:
        # Clients choose the keys, so where a key lands must not be theirs to choose: a secret odd factor per word, and
        # the highest bits of the sum (multiply-shift, Dietzfelbinger et al. 1997), which every bit of the key reaches.
        self._factors = [secrets.randbits(64) | 1 for _ in range(_WORDS)]
        self._factor_row = np.array(self._factors, dtype=np.uint64)
        self._keys = np.zeros((capacity, _WORDS), dtype=np.uint64)
        self._key_bytes = self._keys.data.cast("B")
        self._free: list[int] = []
        self._next_id = 0
        self._count = 0
        self._table: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._rebuild(capacity)

    def __len__(self) -> int:
        return self._count

    @property
    def capacity(self) -> int:
        """One more than the largest id there can be now; columns indexed by id need this many rows."""
        return len(self._keys)

    def find(self, key: BlockKey) -> int:
        """Return the id, or -1."""
        # In plain Python: a vectorised lookup of one key costs several times as much.
        table, key_bytes = self._table, self._key_bytes
        position = self._home_of(key)
        while (entry := int(table[position])) != _EMPTY:
            if entry >= 0 and bytes(key_bytes[entry * KEY_BYTES : (entry + 1) * KEY_BYTES]) == key:
                return entry
            position = (position + 1) & self._mask
        return -1

    def find_joined(self, keys: bytes) -> Ids:
        """Return the id or -1 of each of the joined keys, [num_keys] int32."""
        return self.find_many(np.frombuffer(keys, dtype=np.uint64).reshape(-1, _WORDS))

    def find_many(self, words: npt.NDArray[np.uint64]) -> Ids:
        """`find` for keys given as [num_keys, KEY_BYTES / 8] uint64."""
        found = np.full(len(words), -1, dtype=np.int32)
        pending = np.arange(len(words))
        positions = self._homes(words)
        while len(pending):
            entries = self._table[positions]
            same = (entries >= 0) & (self._keys[np.maximum(entries, 0)] == words[pending]).all(axis=1)
            found[pending[same]] = entries[same]
            going_on = ~same & (entries != _EMPTY)
            pending = pending[going_on]
            positions = (positions[going_on] + 1) & self._mask
        return found

    def add(self, key: BlockKey) -> int:
        """Return the id of a key that is not in the index yet."""
        if (self._used + 1) > len(self._table) * _MAX_LOAD:
            self._rebuild(max(self._count + 1, 1024))
        if self._free:
            new_id = self._free.pop()
        else:
            if self._next_id == len(self._keys):
                grown = np.zeros((2 * len(self._keys), _WORDS), dtype=np.uint64)
                grown[: len(self._keys)] = self._keys
                self._keys = grown
                self._key_bytes = grown.data.cast("B")
            new_id = self._next_id
            self._next_id += 1
        self._key_bytes[new_id * KEY_BYTES : (new_id + 1) * KEY_BYTES] = key
        position = self._home_of(key)
        while self._table[position] >= 0:
            position = (position + 1) & self._mask
        self._used += int(self._table[position] == _EMPTY)
        self._table[position] = new_id
        self._count += 1
        return new_id

    def remove(self, old_id: int) -> None:
        """Forget the key of this id; the id may be given out again."""
        position = self._home_of(self.key(old_id))
        while self._table[position] != old_id:
            assert self._table[position] != _EMPTY, "id is not in the index"
            position = (position + 1) & self._mask
        self._table[position] = _GONE
        self._keys[old_id] = 0
        self._free.append(old_id)
        self._count -= 1

    def key(self, known_id: int) -> BlockKey:
        return BlockKey(bytes(self._key_bytes[known_id * KEY_BYTES : (known_id + 1) * KEY_BYTES]))

    def _home_of(self, key: bytes) -> int:
        mixed = sum(map(int.__mul__, _AS_WORDS.unpack(key), self._factors)) & _64_BITS
        return mixed >> self._shift

    def _homes(self, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """`_home_of` for many."""
        mixed: npt.NDArray[np.uint64] = (words * self._factor_row).sum(axis=1, dtype=np.uint64)
        return (mixed >> np.uint64(self._shift)).astype(np.int64)

    def _rebuild(self, count: int) -> None:
        """Make a table with room for twice `count` at half load, without the removed entries."""
        size = 1 << max(4, int(4 * count - 1).bit_length())
        pending = self._table[self._table >= 0]
        self._used = len(pending)
        self._table = np.full(size, _EMPTY, dtype=np.int32)
        self._mask = size - 1
        self._shift = 64 - self._mask.bit_length()
        positions = self._homes(self._keys[pending])
        # All at once, since a million one by one would stop the control thread for a second: where several want the
        # same place, one of them gets it and the others go on to the next.
        while len(pending):
            is_free = self._table[positions] == _EMPTY
            self._table[positions[is_free]] = pending[is_free]
            going_on = self._table[positions] != pending
            pending = pending[going_on]
            positions = (positions[going_on] + 1) & self._mask
