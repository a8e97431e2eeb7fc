"""The attached engines: who they are, what they may write to, and whether they still live.

An engine holds an exclusive flock on a file in the run folder's `clients/`; the lock falls with the process, whatever
killed it and in whatever container it ran. What a dead engine held (grants, leases) is given back. The daemon holds the
file open too: somebody who clears the folder away must not make a living engine's slots those of others.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.core.errors import ProtocolError
from kvstore.wire import ErrorCode

CLIENTS_FOLDER = "clients"
MAX_ENGINES = 256


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to write one block into its slot; lasts as long as its engine. `parent` is pinned until then, if not
    -1."""

    block: int
    generation: int
    parent: int


@dataclass(slots=True)
class Engine:
    """`namespace` is the catalog's id of the one namespace this engine reads and writes; `liveness` a descriptor."""

    incarnation: int
    namespace: int
    name: str
    liveness_file: Path
    liveness: int
    grants: dict[bytes, Grant] = field(default_factory=dict)


class EngineTable:
    """Owned by the control thread."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / CLIENTS_FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._engines: dict[int, Engine] = {}
        self._next = 1
        # A grant or lease of a daemon's predecessor is void by its epoch; its clients' files are of no use either.
        for left_over in self._folder.iterdir():
            descriptor = _open(left_over)
            if descriptor is None:
                continue
            if not _is_locked(descriptor):
                left_over.unlink(missing_ok=True)
            os.close(descriptor)

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def get(self, incarnation: int) -> Engine | None:
        return self._engines.get(incarnation)

    def attach(self, namespace: int, name: str, liveness_file: str) -> Engine:
        """Raises ProtocolError where the file is not locked (it would count as dead at once) or there are too many."""
        if not liveness_file.isprintable() or "/" in liveness_file or liveness_file in ("", ".", ".."):
            raise ProtocolError(ErrorCode.BAD_REQUEST, "liveness_file is a plain file name")
        if len(self._engines) >= MAX_ENGINES:
            raise ProtocolError(ErrorCode.BUSY, f"{MAX_ENGINES} engines are attached already")
        path = self._folder / liveness_file
        descriptor = _open(path)
        if descriptor is None or not _is_locked(descriptor):
            if descriptor is not None:
                os.close(descriptor)
            raise ProtocolError(ErrorCode.BAD_REQUEST, f"nobody holds the lock on clients/{liveness_file}")
        engine = Engine(self._next, namespace, name, path, descriptor)
        self._next += 1
        self._engines[engine.incarnation] = engine
        return engine

    def remove(self, engine: Engine) -> None:
        if self._engines.pop(engine.incarnation, None) is None:
            return
        os.close(engine.liveness)
        if not any(other.liveness_file == engine.liveness_file for other in self._engines.values()):
            with contextlib.suppress(OSError):
                engine.liveness_file.unlink(missing_ok=True)

    def dead(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if not _is_locked(engine.liveness)]

    def close(self) -> None:
        """Forget all engines; their files stay, since they may live on and attach to the next daemon."""
        for engine in self._engines.values():
            os.close(engine.liveness)
        self._engines.clear()


def _open(path: Path) -> int | None:
    try:
        # Not blocking: somebody may have put a pipe there.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
