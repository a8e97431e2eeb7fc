"""Turns of sessions, recorded in the daemon so that their blocks are kept, go to SSD and S3, and are found by id
again.

vLLM speaks of tokens, so a turn is one message without text: the tokens that it added. A prompt that does not go on
from what the session had (an edited history, a template that drops thoughts) begins its messages anew, same id.

Not thread-safe: the teller's thread owns it, but for `knows`.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvstore.client import Client
from kvstore.connectors.vllm_parts.consult import Shard
from kvstore.connectors.vllm_parts.stats import Counters
from kvstore.connectors.vllm_parts.wishes import Wishes
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import join_keys
from kvstore.wire import ChatMessage, ErrorCode, SessionPut, SessionSaved, SessionView

_MAX_KNOWN = 4096
_ROLE = "turn"


@dataclass(frozen=True, slots=True)
class _Known:
    """A session as the daemon had it last, for one rank: `ends[i]` is how many tokens it had after turn i, `digest` is
    over all of them. `id` differs from the asked one after a fork."""

    id: str
    revision: int
    ends: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished request: its tokens, and vLLM's hashes of those of its full blocks that are computed."""

    wishes: Wishes
    token_ids: Sequence[int]
    hashes: Sequence[bytes]


class Sessions:
    def __init__(self, tenant: str, counters: Counters, clock: Callable[[], float]) -> None:
        self._tenant = tenant
        self._counters = counters
        self._clock = clock
        self._known: OrderedDict[tuple[bytes, str], _Known] = OrderedDict()
        # In how many namespaces each is known.
        self._counts: dict[str, int] = {}

    def knows(self, session_id: str, num_shards: int) -> bool:
        """Whether the session was asked for, or saved, in the namespaces of all ranks. From any thread."""
        return self._counts.get(session_id, 0) >= num_shards

    def greet(self, shards: Sequence[Shard], session_id: str, deadline_s: float) -> None:
        """Ask for a session that is new here: the daemon finds out what its bucket has of it, blocks included.

        Raises TierUnavailable and ProtocolError.
        """
        until_s = self._clock() + deadline_s
        for shard in shards:
            digest = shard.namespace.digest()
            if (digest, session_id) in self._known:
                continue
            # Half of what is left, so that there is time for the lookup.
            wait_s = (until_s - self._clock()) / 2
            if wait_s <= 0:
                raise TierUnavailable("the daemon took too long to find sessions")
            view = shard.client.session_get(session_id, self._tenant, wait_s)
            self._remember(digest, session_id, _Known(session_id, 0, (), b"") if view is None else _of(view))

    def save(self, shards: Sequence[Shard], turn: Turn) -> None:
        """Record a turn, in the namespace of every rank. Raises TierUnavailable and ProtocolError."""
        try:
            self._save(shards, turn)
        except TierUnavailable:
            self._counters.add("sessions_saved", "unavailable")
            raise
        except ProtocolError:
            self._counters.add("sessions_saved", "refused")
            raise

    def _save(self, shards: Sequence[Shard], turn: Turn) -> None:
        tokens = array("I", turn.token_ids)
        for shard in shards:
            digest = shard.namespace.digest()
            known = self._known.get((digest, turn.wishes.session_id))
            if known is None:
                view = shard.client.session_get(turn.wishes.session_id, self._tenant)
                known = _Known(turn.wishes.session_id, 0, (), b"") if view is None else _of(view)
            saved, ends = self._put(shard, known, tokens, turn)
            if saved.forked and known.revision:
                saved, ends = self._rejoin(shard, known, tokens, turn, saved, ends)
            self._counters.add("sessions_saved", "forked" if saved.forked else "saved")
            self._remember(
                digest, turn.wishes.session_id, _Known(saved.id, saved.revision, ends, _digest(tokens, len(tokens)))
            )

    def _put(
        self, shard: Shard, known: _Known, tokens: "array[int]", turn: Turn
    ) -> tuple[SessionSaved, tuple[int, ...]]:
        ends = known.ends
        last = ends[-1] if ends else 0
        if last >= len(tokens) or (ends and _digest(tokens, last) != known.digest):
            ends = ()
        ends = (*ends, len(tokens))
        starts = (0, *ends[:-1])
        wishes = turn.wishes
        put = SessionPut(
            id=known.id,
            tenant=self._tenant,
            namespace=shard.namespace.digest(),
            revision=known.revision,
            messages=[
                ChatMessage(_ROLE, "", tokens[start:end].tolist()) for start, end in zip(starts, ends, strict=True)
            ],
            keys=join_keys(shard.keys(turn.hashes)),
            ttl_s=wishes.ttl_s,
            pin=wishes.pin,
            expect_followup=wishes.expect_followup,
            end=wishes.end,
            priority=wishes.priority,
        )
        return _put_pinned_or_not(shard.client, put), ends

    def _rejoin(
        self, shard: Shard, known: _Known, tokens: "array[int]", turn: Turn, fork: SessionSaved, ends: tuple[int, ...]
    ) -> tuple[SessionSaved, tuple[int, ...]]:
        """Give the session the turn that went to a fork, where it had not moved on: the daemon was killed before the
        turns that we know of were on disk. The turn brings the whole history along."""
        view = shard.client.session_get(known.id, self._tenant)
        if view is None or view.revision >= known.revision:
            return fork, ends
        saved, ends_there = self._put(shard, _of(view), tokens, turn)
        if saved.forked:
            return fork, ends
        shard.client.session_delete(fork.id, self._tenant, shard.namespace.digest())
        return saved, ends_there

    def _remember(self, digest: bytes, session_id: str, known: _Known) -> None:
        if (digest, session_id) not in self._known:
            self._counts[session_id] = self._counts.get(session_id, 0) + 1
        self._known[digest, session_id] = known
        self._known.move_to_end((digest, session_id))
        while len(self._known) > _MAX_KNOWN:
            (_, forgotten), _ = self._known.popitem(last=False)
            self._counts[forgotten] -= 1
            if not self._counts[forgotten]:
                del self._counts[forgotten]


def tell_hints(shards: Sequence[Shard], wishes: Wishes, hashes: Sequence[bytes], pin_s: float = 3600.0) -> None:
    """Say what will become of a prompt's blocks where no session says it. Raises TierUnavailable, ProtocolError."""
    if not hashes:
        return
    name = hashlib.sha256(hashes[-1]).hexdigest()
    for shard in shards:
        shard.client.hint(
            shard.keys(hashes),
            expect_followup=wishes.expect_followup,
            end=wishes.end,
            priority=wishes.priority,
            ttl_s=wishes.ttl_s,
            pin_s=None if wishes.pin is None else pin_s if wishes.pin else 0.0,
            pin_name=name,
        )


def _put_pinned_or_not(client: Client, put: SessionPut) -> SessionSaved:
    """A turn that cannot be pinned is recorded all the same."""
    try:
        return client.session_put(put)
    except ProtocolError as error:
        if error.code != ErrorCode.BUSY or not put.pin:
            raise
        return client.session_put(msgspec.structs.replace(put, pin=None))


def _of(view: SessionView) -> _Known:
    tokens = array("I")
    ends = []
    for message in view.messages:
        tokens.extend(message.token_ids)
        ends.append(len(tokens))
    return _Known(view.id, view.revision, tuple(ends), _digest(tokens, len(tokens)))


def _digest(tokens: "array[int]", count: int) -> bytes:
    return hashlib.sha256(memoryview(tokens)[:count]).digest()
