"""Being attached to the daemon: what all clones of one client in one process share.

Covers: the lock that says that we live, attaching once for all threads, forgetting a daemon that is no more. What
belongs together of one boot of the daemon (region, epoch, incarnation) is one frozen object, so that no thread ever
takes an offset of one boot for a place in the region of another.
"""

import contextlib
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kvstore import forking, wire
from kvstore.connection import Connection, daemon_lives, lock
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import Namespace
from kvstore.wire import ErrorCode
from tiers.region import Region

_DETACH_DEADLINE_S = 0.2


@dataclass(frozen=True, slots=True)
class Attached:
    """One engine attached to one boot of the daemon. `region` may have been closed meanwhile; views of it stay good."""

    region: Region
    epoch: int
    incarnation: int
    tiers: tuple[str, ...]
    wants_tokens: bool = False


class Attachment:
    """Thread-safe."""

    def __init__(self, run_dir: Path, namespace: Namespace, model_label: str, name: str) -> None:
        self._run_dir = run_dir
        self._spec = wire.NamespaceSpec(
            namespace.digest(),
            namespace.root(),
            model_label or namespace.model,
            namespace.block_tokens,
            namespace.block_bytes,
        )
        self._name = name
        # The first is held while one thread asks the daemon, the second never for long.
        self._attaching = threading.Lock()
        self._mutex = threading.Lock()
        self._current: Attached | None = None
        self._liveness: tuple[int, Path] | None = None
        self._users = 1
        forking.watch(self)

    @property
    def current(self) -> Attached | None:
        """What we are attached to, as far as we know."""
        return self._current

    def ensure(self, connection: Connection, deadline_s: float) -> Attached:
        """Attach unless that is done. Of several threads one asks and the others wait, none beyond its deadline.

        Raises TierUnavailable and ProtocolError.
        """
        if (current := self._current) is not None:
            return current
        deadline = time.monotonic() + deadline_s
        if not self._attaching.acquire(timeout=max(0.0, deadline_s)):
            raise TierUnavailable("the daemon does not answer another thread that attaches")
        try:
            if (current := self._current) is None:
                self._current = current = self._attach(connection, deadline)
            return current
        finally:
            self._attaching.release()

    def forget(self, attached: Attached) -> None:
        """That boot of the daemon is no more; the next call attaches anew. Copies under way keep its mapping alive."""
        with self._mutex:
            if self._current is attached:
                self._current = None
            attached.region.close()

    def join(self) -> None:
        with self._mutex:
            self._users += 1

    def leave(self, connection: Connection) -> None:
        """The last user detaches, and closes everything."""
        with self._mutex:
            self._users -= 1
            if self._users:
                return
            current, self._current = self._current, None
        if current is not None:
            # Before the lock falls, so that we are not taken for dead.
            self._detach(connection, current.epoch, current.incarnation)
            current.region.close()
        if self._liveness is not None:
            descriptor, path = self._liveness
            path.unlink(missing_ok=True)
            os.close(descriptor)
            self._liveness = None

    def forked(self) -> None:
        """The child attaches anew, as an engine of its own: what was granted to the parent is not the child's to
        write or to end, and the parent's lock falls with the parent."""
        self._attaching, self._mutex = threading.Lock(), threading.Lock()
        self._current = None
        if self._liveness is not None:
            os.close(self._liveness[0])
            self._liveness = None

    # ------------------------------------------------------------ private

    def _attach(self, connection: Connection, deadline: float) -> Attached:
        if not daemon_lives(self._run_dir):
            raise TierUnavailable(f"no daemon runs in {self._run_dir}")
        request = wire.Attach(self._spec, self._hold_liveness(), self._name)
        reply = connection.request(0, 0, request, deadline - time.monotonic())
        if not isinstance(reply, wire.Attached):
            raise ProtocolError(ErrorCode.MALFORMED, f"expected Attached, got {type(reply).__name__}")
        try:
            region = Region.attach(Path(reply.region_path), reply.epoch)
        except TierUnavailable:
            self._detach(connection, reply.epoch, reply.incarnation)
            raise
        return Attached(region, reply.epoch, reply.incarnation, tuple(reply.tiers), reply.wants_tokens)

    def _detach(self, connection: Connection, epoch: int, incarnation: int) -> None:
        with contextlib.suppress(TierUnavailable, ProtocolError):
            connection.request(epoch, incarnation, wire.Detach(), _DETACH_DEADLINE_S)

    def _hold_liveness(self) -> str:
        if self._liveness is not None and not self._liveness[1].exists():
            os.close(self._liveness[0])  # another boot of the daemon has cleared its folder
            self._liveness = None
        if self._liveness is None:
            path = self._run_dir / "clients" / secrets.token_hex(8)
            try:
                self._liveness = (lock(path), path)
            except OSError as error:
                raise TierUnavailable(f"cannot hold a lock in {path.parent}: {error.strerror}") from error
        return self._liveness[1].name
