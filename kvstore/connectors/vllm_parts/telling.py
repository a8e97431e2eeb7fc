"""What the daemon is told of a request that has ended: its turn of a session or its hints, and the report of it."""

from collections.abc import Sequence

import msgspec

from kvstore.connectors.vllm_parts.consult import Shard
from kvstore.connectors.vllm_parts.sessions import Sessions, Turn, tell_hints
from kvstore.connectors.vllm_parts.teller import Work
from kvstore.connectors.vllm_parts.tracked import Tracked
from kvstore.wire import Report


def telling(
    sessions: Sessions,
    tracked: Tracked,
    hashes: Sequence[bytes],
    looked_up: Sequence[bytes],
    report: Report | None,
) -> Work:
    """Return what the teller's thread is to do; all that it needs of the request is taken now.

    `hashes` are those of its full blocks that were computed, `looked_up` has the last block that was asked for.
    """
    wishes = tracked.wishes
    turn = None
    if wishes.session_id and hashes:
        turn = Turn(wishes, tuple(tracked.request.all_token_ids), hashes)

    def tell(shards: Sequence[Shard]) -> None:
        try:
            if turn is not None:
                sessions.save(shards, turn)
            elif wishes.has_hints:
                tell_hints(shards, wishes, hashes)
        finally:
            # Never raises: what was refused of the request's wishes is reported all the same.
            if shards and report is not None:
                last = b"".join(shards[0].keys(looked_up))
                shards[0].client.report(msgspec.structs.replace(report, last_block=last))

    return tell
