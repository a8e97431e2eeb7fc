"""What the engine needs of kvstore's client, and one client per thread and tenant.

A client belongs to one thread and to one namespace, and the tenant is part of the namespace. So each thread has its
own `Links`, and those clone one root client per tenant, which holds the attachment.
"""

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from kvstore import wire
from kvstore.client import LandedBlock, LookupResult, StoreGrant
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome
from tiers.region import Region


class FetchStream(Protocol):
    """`kvstore.client.FetchStream`: leaving it as a context manager releases every pin of the fetch."""

    @property
    def done(self) -> bool: ...

    def landed(self, timeout_s: float) -> Sequence[LandedBlock]: ...

    def still_valid(self, block: LandedBlock) -> bool: ...

    def release_blocks(self, indexes: list[int]) -> None: ...

    def __enter__(self) -> "FetchStream": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class KVClient(Protocol):
    """The part of `kvstore.client.Client` that the engine uses; see there for what each call promises."""

    @property
    def region(self) -> Region | None: ...

    def clone(self) -> "KVClient": ...

    def close(self) -> None: ...

    def ping(self) -> float: ...

    def lookup(self, keys: Sequence[BlockKey], deadline_s: float | None = None) -> LookupResult: ...

    def fetch(self, keys: Sequence[BlockKey], deadline_s: float) -> FetchStream: ...

    def store(
        self, keys: Sequence[BlockKey], parent: BlockKey, depth: int, deadline_s: float | None = None
    ) -> StoreGrant: ...

    def commit(self, keys: Sequence[BlockKey], generations: list[int], written: list[bool]) -> list[Outcome]: ...

    def hint(
        self,
        keys: Sequence[BlockKey],
        *,
        expect_followup: bool = False,
        end: bool = False,
        priority: int = 0,
        ttl_s: float = 0.0,
        pin_s: float | None = None,
        pin_name: str = "",
    ) -> None: ...

    def report(self, report: wire.Report) -> None: ...

    def observe(self, errors: dict[str, int]) -> None: ...

    def session_get(
        self, session_id: str, tenant: str = "", deadline_s: float | None = None
    ) -> wire.SessionView | None: ...

    def session_put(self, put: wire.SessionPut, deadline_s: float | None = None) -> wire.SessionSaved: ...


class Roots:
    """The root client of each tenant, made when the tenant first appears. Any thread may use it."""

    def __init__(self, make: Callable[[str], KVClient], max_tenants: int = 32) -> None:
        self._make = make
        self._max_tenants = max_tenants
        self._lock = threading.Lock()
        self._clients: dict[str, KVClient] = {}

    def knows(self, tenant: str) -> bool:
        """Whether the tenant has a client or may still get one."""
        with self._lock:
            return tenant in self._clients or len(self._clients) < self._max_tenants

    def clone(self, tenant: str) -> KVClient:
        """Return a client for the calling thread, which closes it."""
        with self._lock:
            if tenant not in self._clients:
                self._clients[tenant] = self._make(tenant)
            return self._clients[tenant].clone()

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()


class Links:
    """One thread's clients by tenant."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._clients: dict[str, KVClient] = {}

    def client(self, tenant: str) -> KVClient:
        if tenant not in self._clients:
            self._clients[tenant] = self._roots.clone(tenant)
        return self._clients[tenant]

    def opened(self) -> list[KVClient]:
        return list(self._clients.values())

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()
