"""Namespaces by number: known once, and then only as they are known."""

import pytest

from kvstore.store import namespaces as module
from kvstore.store.namespaces import Namespaces


def test_there_is_an_end_to_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_NAMESPACES", 3)
    namespaces = Namespaces()
    assert [namespaces.id_of(bytes([number]) * 32, 100) for number in range(5)] == [0, 1, 2, -1, -1]
    assert namespaces.id_of(bytes([0]) * 32, 100) == 0 and len(namespaces) == 3


def test_a_namespace_keeps_its_block_size_and_its_first_root() -> None:
    namespaces = Namespaces()
    digest = b"d" * 32
    assert namespaces.id_of(digest, 0) == -1
    assert namespaces.id_of(digest, 100) == 0 and namespaces[0].root == b""
    assert namespaces.id_of(digest, 100, b"r" * 32) == 0
    assert namespaces.id_of(digest, 100, b"x" * 32) == 0 and namespaces[0].root == b"r" * 32
    assert namespaces.id_of(digest, 101) == -1
    assert [info.payload_bytes for info in namespaces] == [100]
