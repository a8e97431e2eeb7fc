"""What a request says of itself in `kv_transfer_params`: its session, and hints on what will become of its blocks."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_MAX_ID_CHARS = 200
_SALT_CHARS = 16
_MAX_PRIORITY = 2
# As the daemon has it: it refuses more.
_MAX_TTL_S = 366 * 86400.0


_FLAGS = ("expect_followup", "end", "pin")
_HINTS = (*_FLAGS, "ttl", "priority")
# All hints that we do not know, of which there may be as many as fit into a request, in a client's own words.
UNKNOWN_HINT = "an unknown hint"


@dataclass(frozen=True, slots=True)
class Wishes:
    """As in `kvstore.wire.Hint`. `session_id` "": none. `pin` None: as it was."""

    session_id: str = ""
    expect_followup: bool = False
    end: bool = False
    ttl_s: float = 0.0
    pin: bool | None = None
    priority: int = 0

    @property
    def has_hints(self) -> bool:
        return self != Wishes(session_id=self.session_id)


def read(params: object) -> tuple[Wishes, list[str]]:
    """Return what the params ask for, and the names of what in them is of no use: a wrong hint fails no request. The
    names are ours, and few, whatever a client sends. Never raises."""
    if not isinstance(params, Mapping):
        return Wishes(), [] if params is None else ["kv_transfer_params"]
    values: dict[str, Any] = {}
    wrong = []
    session_id = params.get("session_id")
    if session_id is not None:
        if isinstance(session_id, str) and 0 < len(session_id) <= _MAX_ID_CHARS and session_id.isprintable():
            values["session_id"] = session_id
        else:
            wrong.append("session_id")
    hints = params.get("hints") or {}
    if not isinstance(hints, Mapping):
        return Wishes(**values), [*wrong, "hints"]
    given = [name for name in _HINTS if name in hints]
    for name in given:
        raw = hints[name]
        if name in _FLAGS and isinstance(raw, bool):
            values[name] = raw
        elif name == "ttl" and _is_number(raw) and 0 <= raw <= _MAX_TTL_S:
            values["ttl_s"] = float(raw)
        elif name == "priority" and _is_number(raw) and raw in range(-_MAX_PRIORITY, _MAX_PRIORITY + 1):
            values["priority"] = int(raw)
        else:
            wrong.append(f"hints.{name}")
    if len(hints) > len(given):
        wrong.append(UNKNOWN_HINT)
    if values.get("expect_followup") and values.get("end"):
        # The daemon refuses both at once, with all that came beside them.
        del values["expect_followup"], values["end"]
        wrong.append("hints.end")
    return Wishes(**values), wrong


def of_salt(wishes: Wishes, salt: str) -> Wishes:
    """Return the wishes of a request with vLLM's `cache_salt`, by which a server keeps its clients apart: a session of
    theirs is one of that salt, so that who names another's neither ends nor overwrites it."""
    if not (wishes.session_id and salt):
        return wishes
    digest = hashlib.sha256(f"{len(salt)} {salt}{wishes.session_id}".encode()).hexdigest()[:_SALT_CHARS]
    return replace(wishes, session_id=f"{wishes.session_id[: _MAX_ID_CHARS - _SALT_CHARS - 1]}@{digest}")


def _is_number(raw: object) -> bool:
    # Nothing is made a float before it is known to fit: JSON has numbers of any length.
    return isinstance(raw, int | float) and not isinstance(raw, bool)
