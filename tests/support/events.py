"""A router's end of KV events: it subscribes as vLLM's own example does, and keeps what it was told.

The structs say again what vllm/distributed/kv_events.py says, so that a change of ours that vLLM's readers would not
understand fails here; tests_vllm/ reads the same with vLLM's own classes.
"""

import time
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


decoder = msgspec.msgpack.Decoder(KVEventBatch)


class Index:
    """Which block is where, as a router that counts announcements has it: by hash, the owners of a copy."""

    def __init__(self) -> None:
        self.copies: dict[int | bytes, list[str]] = {}
        self.num_cleared = 0

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.copies.clear()
                    self.num_cleared += 1
                case BlockStored():
                    for name in event.block_hashes:
                        self.copies.setdefault(name, []).append(str(event.ownership))
                case BlockRemoved():
                    for name in event.block_hashes:
                        self.copies[name].remove(str(event.ownership))
                        if not self.copies[name]:
                            del self.copies[name]

    def where(self, name: int) -> set[str]:
        owners = self.copies.get(name, [])
        assert len(owners) == len(set(owners)), "a copy was announced twice"
        return {owner.removeprefix("kvstore-") for owner in owners}


class Subscriber:
    """Reads what one daemon publishes; `sequences` are those it has seen."""

    def __init__(self, endpoint: str, topic: str = "", curve: tuple[bytes, bytes, bytes] | None = None) -> None:
        """`curve`: the server's public key, our public and our secret one."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._curve = curve
        self._socket = self._make(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._socket.connect(endpoint)
        self.index = Index()
        self.events: list[Event] = []
        self.sequences: list[int] = []

    def _make(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        if self._curve is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._curve[0])
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._curve[1])
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve[2])
        return socket

    def read(self, timeout_s: float = 0.2) -> bool:
        """Take in what is there, but for what a replay has told before; return whether anything was."""
        is_any = False
        while self._socket.poll(0 if is_any else int(timeout_s * 1000)):
            _, sequence, payload = self._socket.recv_multipart()
            if not self.sequences or int.from_bytes(sequence, "big") > max(self.sequences):
                self._take(sequence, payload)
            is_any = True
        return is_any

    def replay(self, endpoint: str, begin: int, timeout_s: float = 5.0) -> list[int]:
        """Ask for everything from that sequence on, take it in, and return the sequences that came."""
        socket = self._make(zmq.DEALER)
        socket.connect(endpoint)
        socket.send_multipart([b"", begin.to_bytes(8, "big")])
        came = []
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not socket.poll(100):
                continue
            _, _, sequence, payload = socket.recv_multipart()
            if sequence == END:
                break
            came.append(int.from_bytes(sequence, "big"))
            self._take(sequence, payload)
        socket.close()
        return came

    def _take(self, sequence: bytes, payload: bytes) -> None:
        batch = decoder.decode(payload)
        self.sequences.append(int.from_bytes(sequence, "big"))
        self.events += batch.events
        self.index.apply(batch.events)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
