"""What the index says of many blocks at once, in columns: a million objects would take seconds and a gigabyte."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.core.key import KEY_BYTES
from tiers.base import RecoveredBatch

_RECOVERED_BLOCKS: Final = 8192
# As `tiers/index.py` packs a value; digests as words, since numpy compares those faster than bytes.
ENTRY: Final = np.dtype(
    [
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("depth", "<u4"),
        ("payload_bytes", "<u8"),
        ("checksum", "<u8"),
        ("namespace", "<u8", (4,)),
        ("parent", "<u8", (4,)),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """`keys` are joined; `entries` is [num_blocks] of ENTRY, `entries[i]` being that of the i-th key."""

    keys: bytes
    entries: npt.NDArray[np.void]

    def __len__(self) -> int:
        return len(self.entries)

    def keys_at(self, chosen: npt.NDArray[np.bool_]) -> bytes:
        """Return the joined keys of those where `chosen`, [num_blocks], is True."""
        rows = np.frombuffer(self.keys, dtype=np.uint8).reshape(-1, KEY_BYTES)
        return rows[chosen].tobytes()

    def recovered(self) -> Iterator[RecoveredBatch]:
        """Yield the blocks in batches of one namespace and payload size."""
        sizes, namespaces = self.entries["payload_bytes"], self.entries["namespace"]
        left = np.ones(len(self), dtype=np.bool_)
        while left.any():
            first = int(left.argmax())
            alike = left & (sizes == sizes[first]) & (namespaces == namespaces[first]).all(axis=1)
            left &= ~alike
            found = Columns(self.keys_at(alike), self.entries[alike])
            for start in range(0, len(found), _RECOVERED_BLOCKS):
                entries = found.entries[start : start + _RECOVERED_BLOCKS]
                yield RecoveredBatch(
                    namespaces[first].tobytes(),
                    int(sizes[first]),
                    found.keys[start * KEY_BYTES : (start + len(entries)) * KEY_BYTES],
                    entries["parent"].tobytes(),
                    entries["depth"].astype(np.int32),
                )


def joined(parts: list[Columns]) -> Columns:
    """Return one behind the other."""
    return Columns(b"".join(part.keys for part in parts), np.concatenate([part.entries for part in parts]))
