"""The namespaces that blocks are of, by small numbers, and what is known of each.

One owner thread. A namespace that was seen once stays until the daemon ends, so there is a limit to how many.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore import wire
from kvstore.core.errors import ProtocolError
from kvstore.core.key import KEY_BYTES
from kvstore.wire import ErrorCode

_MAX_NAMESPACES = 4096  # each engine that attaches may bring one


@dataclass(slots=True)
class NamespaceInfo:
    """What is known of a namespace; `label` and `block_tokens` only since an engine attached with it."""

    digest: bytes
    root: bytes
    payload_bytes: int
    label: str = ""
    block_tokens: int = 0


class Namespaces:
    """See the module."""

    def __init__(self) -> None:
        self._infos: list[NamespaceInfo] = []
        self._ids: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[NamespaceInfo]:
        return iter(self._infos)

    def __getitem__(self, number: int) -> NamespaceInfo:
        return self._infos[number]

    def id_of(self, digest: bytes, payload_bytes: int, root: bytes = b"") -> int:
        """Return the number of the namespace, adding it if new; -1 if it is known with another block size, or if there
        are too many."""
        known = self._ids.get(digest)
        if known is None:
            if payload_bytes <= 0 or len(self._infos) >= _MAX_NAMESPACES:
                return -1
            known = len(self._infos)
            self._ids[digest] = known
            self._infos.append(NamespaceInfo(digest, root, payload_bytes))
        info = self._infos[known]
        info.root = info.root or root
        return known if info.payload_bytes == payload_bytes else -1

    def attach(self, spec: wire.NamespaceSpec, max_block_bytes: int) -> int:
        """Return the number of what an engine says of its namespace. Raises ProtocolError where that cannot be."""
        if len(spec.digest) != KEY_BYTES or len(spec.root) != KEY_BYTES:
            raise ProtocolError(ErrorCode.BAD_REQUEST, f"a namespace's digest and root have {KEY_BYTES} bytes")
        if not 0 < spec.block_bytes <= max_block_bytes or spec.block_tokens <= 0:
            raise ProtocolError(
                ErrorCode.BAD_REQUEST,
                f"blocks of {spec.block_bytes} bytes do not fit: a block has at most {max_block_bytes} bytes "
                "with this ram.size; raise it, or lower the block tokens",
            )
        number = self.id_of(spec.digest, spec.block_bytes, spec.root)
        if number < 0:
            raise ProtocolError(ErrorCode.BAD_REQUEST, "this namespace has another block size, or there are too many")
        info = self._infos[number]
        if info.root != spec.root or info.block_tokens not in (0, spec.block_tokens):
            raise ProtocolError(ErrorCode.BAD_REQUEST, "this namespace is known with another root or block tokens")
        info.label, info.block_tokens = spec.label[:200], spec.block_tokens
        return number
