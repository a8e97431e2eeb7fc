"""Looks for the daemon while nobody needs it, so that it is known from an engine's start whether there is one, and one
that was restarted is attached to before somebody asks.

Threads that have nothing to do call it every `EVERY_S`. A daemon that is away costs a look at its lock, one that is
silent `_DEADLINE_S`, and one that refuses us is left alone by the gate for longer and longer.
"""

import logging
from collections.abc import Iterable

from kvstore.client import Client
from kvstore.connectors.vllm_parts.gate import Gate
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import BlockKey

_log = logging.getLogger("vllm.kvstore")

EVERY_S = 1.0
_DEADLINE_S = 0.25


def scout(gate: Gate, clients: Iterable[tuple[Client, BlockKey]]) -> None:
    """Attach each client, whose namespace has this root, and tell the gate what came of it. Never raises."""
    if not gate.is_open:
        return
    try:
        for client, root in clients:
            # Which may take all of its time where the engine is just starting, and then leaves none to ask.
            client.attach(_DEADLINE_S)
            # The root is no block: asking for it counts as no request.
            client.lookup([root], _DEADLINE_S)
        gate.passed()
    except (TierUnavailable, ProtocolError) as error:
        gate.failed(error)
    except Exception:
        _log.exception("kvstore: attaching failed")
