"""From block keys to dense ids, a million of them in 42 MB: open addressing over numpy arrays.

A dict of bytes keys would take about 180 bytes a block, more than all other columns of the catalog together.
Lookups and additions are vectorised over whole prefixes and batches. Blocks that were added together, as those of one
turn are, have ids in a row and their keys lie side by side, so most of a prompt is found by its first key and one
comparison of memory. Rows and places that were never used are zero
pages that take no memory, so there may be plenty of both: growing stops the control thread for a moment.
Not thread-safe: the catalog's owner thread alone calls it.
"""

import secrets
import struct

import numpy as np
import numpy.typing as npt

from kvstore.core.key import KEY_BYTES, BlockKey

_WORDS = KEY_BYTES // 8
_MAX_LOAD = 0.5
_AS_WORDS = struct.Struct(f"={_WORDS}Q")
_FOUR_TRUE = 0x01010101
_64_BITS = (1 << 64) - 1
# A prompt is looked up run by run as long as there are few, and none is shorter than pays.
_MAX_RUNS = 16
_MIN_RUN = 8
# Few keys that are not at home are looked for at so many places at once: at half load hardly one lies further away, and
# place by place a prompt of 512 took twice as long, each step being what numpy takes to begin. Many keys are looked for
# place by place, since most are found at the first one.
_WINDOW = np.arange(8)
_MAX_WINDOWS = 512
_IS_FREE = 1

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


class KeyIndex:
    """Maps keys to ids; ids are small, dense and reused after `remove`."""

    def __init__(self, capacity: int = 1024) -> None:
        """Up to `capacity` keys nothing has to grow."""
        # Clients choose the keys, so where a key lands must not be theirs to choose: a secret odd factor per word, and
        # the highest bits of the sum (multiply-shift, Dietzfelbinger et al. 1997), which every bit of the key reaches.
        self._factors = [secrets.randbits(64) | 1 for _ in range(_WORDS)]
        self._factor_row = np.array(self._factors, dtype=np.uint64)
        self._keys = np.zeros((capacity, _WORDS), dtype=np.uint64)
        self._key_bytes = self._keys.data.cast("B")
        # The key of ids that are free, one that no client can ask for.
        self._nobody = np.frombuffer(secrets.token_bytes(KEY_BYTES), dtype=np.uint64)
        # Per id whether it was given back; the next one is looked for from where the last one was found.
        self._free = bytearray(capacity)
        self._num_free = 0
        self._free_from = 0
        self._next_id = 0
        # 0: nobody; else one more than the id. A key lies at its home or after it, with no gap between.
        self._table: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._rebuild(capacity)

    def __len__(self) -> int:
        return self._next_id - self._num_free

    @property
    def num_ids(self) -> int:
        """One more than the largest id that was ever given out."""
        return self._next_id

    @property
    def capacity(self) -> int:
        """One more than the largest id there can be now; columns indexed by id need this many rows."""
        return len(self._keys)

    def find(self, key: BlockKey) -> int:
        """Return the id, or -1."""
        # In plain Python: a vectorised lookup of one key costs several times as much.
        table, key_bytes = self._table, self._key_bytes
        position = self._home_of(key)
        while entry := int(table[position]):
            if bytes(key_bytes[(entry - 1) * KEY_BYTES : entry * KEY_BYTES]) == key:
                return entry - 1
            position = (position + 1) & self._mask
        return -1

    def find_joined(self, keys: bytes) -> Ids:
        """Return the id or -1 of each of the joined keys, [num_keys] int32."""
        words = as_words(keys)
        count = len(words)
        ids: Ids = np.empty(count, dtype=np.int32)
        begin = 0
        for _ in range(_MAX_RUNS):
            length = self._run(keys, words, begin, ids) if begin < count else 0
            begin += length
            if length < _MIN_RUN:
                break
        if begin < count:
            ids[begin:] = self.find_many(words[begin:])
        return ids

    def find_many(self, words: Words) -> Ids:
        """`find` for keys given as [num_keys, KEY_BYTES / 8] uint64."""
        positions = (self.mixed(words) >> np.uint64(self._shift)).view(np.int64)
        # In few calls, since a lookup of hundreds of keys is mostly what numpy takes to begin each of them. An empty
        # place takes the row before the first, which is the last one, and then counts for nothing.
        found: Ids = self._table.take(positions)
        found -= 1
        rows = self._keys.take(found, axis=0, mode="wrap")
        if len(found) and found.min() >= 0 and (rows == words).all():
            return found
        same = _equal(rows, words)
        same &= found >= 0
        pending = np.flatnonzero(~same & (found >= 0))
        found[~same] = -1
        self._find_away(words, pending, positions[pending] + 1, found)
        return found

    def add(self, key: BlockKey) -> int:
        """Return the id of a key that is not in the index yet."""
        self._make_room(1)
        new_id = self._take_free() if self._num_free else self._next_id
        self._next_id = max(self._next_id, new_id + 1)
        self._key_bytes[new_id * KEY_BYTES : (new_id + 1) * KEY_BYTES] = key
        position = self._home_of(key)
        while self._table[position]:
            position = (position + 1) & self._mask
        self._table[position] = new_id + 1
        return new_id

    def add_many(self, words: Words) -> Ids:
        """`add` for keys, all different and none in the index yet, given as [num_keys, KEY_BYTES / 8] uint64."""
        count = len(words)
        self._make_room(count)
        reused = min(count, self._num_free)
        ids: Ids = np.empty(count, dtype=np.int32)
        ids[:reused] = [self._take_free() for _ in range(reused)]
        ids[reused:] = np.arange(self._next_id, self._next_id + count - reused)
        self._next_id += count - reused
        self._keys[ids] = words
        self._place(ids)
        return ids

    def remove(self, old_id: int) -> None:
        """Forget the key of this id; the id may be given out again."""
        table, mask = self._table, self._mask
        gap = self._home_of(self.key(old_id))
        while table[gap] != old_id + 1:
            assert table[gap], "id is not in the index"
            gap = (gap + 1) & mask
        # Those that follow move up, so that no marks of removed keys pile up, to be cleared away by a long rebuild.
        position = (gap + 1) & mask
        while entry := int(table[position]):
            home = self._home_of(self.key(entry - 1))
            if (position - home) & mask >= (position - gap) & mask:
                table[gap] = entry
                gap = position
            position = (position + 1) & mask
        table[gap] = 0
        self._keys[old_id] = self._nobody
        self._free[old_id] = _IS_FREE
        self._num_free += 1

    def key(self, known_id: int) -> BlockKey:
        return BlockKey(bytes(self._key_bytes[known_id * KEY_BYTES : (known_id + 1) * KEY_BYTES]))

    def first_words(self, known_ids: Ids) -> Words:
        """Return the first 64 bits of each id's key."""
        words: Words = self._keys[known_ids, 0]
        return words

    def is_known(self) -> npt.NDArray[np.bool_]:
        """Say of each id that was ever given out whether it is in use, by looking its key up, [num_ids] bool."""
        ids = np.arange(self._next_id)
        return np.asarray(self.find_many(self._keys[: self._next_id]) == ids)

    def mixed(self, words: Words) -> Words:
        """Return 64 bits per key, [num_keys] uint64, in which keys that differ hardly ever agree."""
        mixed: Words = np.dot(words, self._factor_row)
        return mixed

    # ------------------------------------------------------------ private

    def _run(self, keys: bytes, words: Words, begin: int, ids: Ids) -> int:
        """Write the ids of the keys from `begin` on to `ids`, as far as they go up by one; return of how many."""
        first = self.find(BlockKey(keys[begin * KEY_BYTES : (begin + 1) * KEY_BYTES]))
        if first < 0:
            return 0
        length = min(len(words) - begin, self._next_id - first)
        end = begin + length
        wanted = keys if length == len(words) else keys[begin * KEY_BYTES : end * KEY_BYTES]
        if bytes(self._key_bytes[first * KEY_BYTES : (first + length) * KEY_BYTES]) != wanted:
            length = int(np.argmin(_equal(self._keys[first : first + length], words[begin:end])))
        ids[begin : begin + length] = np.arange(first, first + length)
        return length

    def _find_away(
        self, words: Words, pending: npt.NDArray[np.intp], places: npt.NDArray[np.int64], found: Ids
    ) -> None:
        """Write to `found` the ids of the `pending` ones of the keys, each of which lies where `places` says, behind
        that, or nowhere."""
        while len(pending):
            window = _WINDOW if len(pending) <= _MAX_WINDOWS else _WINDOW[:1]
            ids = self._table.take((places[:, np.newaxis] + window) & self._mask) - 1
            first_words = self._keys.ravel().take(ids * _WORDS, mode="wrap")
            at = np.flatnonzero((first_words == words[pending, :1]) & (ids >= 0))
            candidates, rows = ids.ravel()[at], pending[at // len(window)]
            same = _equal(self._keys.take(candidates, axis=0), words[rows])
            found[rows[same]] = candidates[same]
            if np.count_nonzero(same) == len(pending):
                break
            # No key lies behind a place that is empty.
            going_on = (found[pending] < 0) & (ids.min(axis=1) >= 0)
            pending, places = pending[going_on], places[going_on] + len(window)

    def _home_of(self, key: bytes) -> int:
        mixed = sum(map(int.__mul__, _AS_WORDS.unpack(key), self._factors)) & _64_BITS
        return mixed >> self._shift

    def _make_room(self, count: int) -> None:
        wanted = len(self) + count
        if wanted > len(self._table) * _MAX_LOAD:
            self._rebuild(2 * wanted)
        rows = self._next_id + count - min(count, self._num_free)
        if rows > len(self._keys):
            grown = np.zeros((max(rows, 2 * len(self._keys)), _WORDS), dtype=np.uint64)
            grown[: len(self._keys)] = self._keys
            self._keys = grown
            self._key_bytes = grown.data.cast("B")
            self._free.extend(bytes(len(grown) - len(self._free)))

    def _take_free(self) -> int:
        """Return an id that was given back; those of neighbours one after the other, in whatever order they came, so
        that the blocks of a prompt lie side by side again. Goes through all ids where few are free: 13 us of a
        million."""
        found = self._free.find(_IS_FREE, self._free_from)
        if found < 0:
            found = self._free.find(_IS_FREE)
        self._free[found] = 0
        self._num_free -= 1
        self._free_from = found + 1
        return found

    def _rebuild(self, count: int) -> None:
        """Make a table with room for `count` keys."""
        size = 1 << max(4, int(2 * count - 1).bit_length())
        ids = self._table[self._table > 0] - 1
        self._table = np.zeros(size, dtype=np.int32)
        self._mask = size - 1
        self._shift = 64 - self._mask.bit_length()
        self._place(ids)

    def _place(self, ids: Ids) -> None:
        """Put ids that are not in the table into it, by their keys."""
        # All at once, since a million one by one would stop the control thread for a second: where several want the
        # same place, one of them gets it and the others go on to the next.
        positions = (self.mixed(self._keys[ids]) >> np.uint64(self._shift)).astype(np.int64)
        pending = ids + np.int32(1)
        while len(pending):
            is_free = self._table[positions] == 0
            self._table[positions[is_free]] = pending[is_free]
            going_on = self._table[positions] != pending
            pending = pending[going_on]
            positions = (positions[going_on] + 1) & self._mask


def as_words(keys: bytes) -> Words:
    """Return joined keys as [num_keys, KEY_BYTES / 8] uint64, without a copy."""
    return np.frombuffer(keys, dtype=np.uint64).reshape(-1, _WORDS)


def _equal(some: Words, others: Words) -> npt.NDArray[np.bool_]:
    """Return which rows are equal."""
    # A row's four answers are read as one number: `all` over so short an axis took a fifth of the whole lookup.
    rows: npt.NDArray[np.bool_] = (some == others).view(np.uint32).ravel() == _FOUR_TRUE
    return rows
