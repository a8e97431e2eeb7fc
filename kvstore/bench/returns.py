"""Users who come back: how often a session that lies in S3 alone is in RAM before its user's next turn.

    engine ─► daemon (RAM, no SSD) ─► S3 server

Each user has a pause of their own, which varies by a fifth from turn to turn. After every turn the session is written
to the bucket, then it leaves HBM and RAM, as if others had needed the room. What the engine finds at the next turn is
in its answer: tokens that RAM served were there in time, tokens from S3 were not. Half of the users are announced: the
daemon is told two seconds before they come, as by a client whose user begins to type.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.bench.site import DEADLINE_S, Site, wait
from kvstore.demo.texts import Talk, talks

# Of a pause, either way.
_JITTER: Final = 0.2
# A prediction needs two pauses.
_LEARNED_TURNS: Final = 3
_TYPING_S: Final = 2.0
_LOOK_EVERY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class ReturnSettings:
    """`num_users` of each kind, each with a pause between the two bounds; `turns` are measured of each."""

    folder: Path
    num_users: int = 3
    turns: int = 2
    pauses_s: tuple[float, float] = (9.0, 15.0)
    text_chars: int = 2_000
    ram_size: str = "512MiB"
    prefetch_share: float = 0.25
    engine_arguments: tuple[str, ...] = ()
    seed: int = 5


@dataclass(slots=True)
class _User:
    talk: Talk
    pause_s: float
    is_announced: bool
    turns: int = 0
    due_s: float = 0.0
    announce_s: float | None = None


def run(settings: ReturnSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """Return shares of the measured turns, and the daemon's own counts. Takes some minutes of pauses; KVStoreError."""
    environment = {"KVSTORE_PREFETCH_RAM_SHARE": str(settings.prefetch_share)}
    with Site(settings.folder, settings.ram_size, environment=environment) as site:
        rig = _Rig(site, settings)
        draw = random.Random(settings.seed)
        users = [
            _User(talk, draw.uniform(*settings.pauses_s), is_announced=number % 2 == 1)
            for number, talk in enumerate(talks(2 * settings.num_users, settings.text_chars))
        ]
        measured: list[dict[str, Any]] = []
        most_held = 0
        while waiting := [user for user in users if user.turns < _LEARNED_TURNS + settings.turns]:
            now = time.monotonic()
            for user in waiting:
                if user.announce_s is not None and user.announce_s <= now:
                    user.announce_s = None
                    rig.announce(user.talk.session_id)
            user = min(waiting, key=lambda one: one.due_s)
            if user.due_s > now:
                most_held = max(most_held, rig.held_bytes())
                time.sleep(min(_LOOK_EVERY_S, user.due_s - now))
                continue
            served = rig.turn(user.talk, user.turns)
            user.turns += 1
            if user.turns > _LEARNED_TURNS:
                measured.append({"kind": "announced" if user.is_announced else "predicted", "served_tokens": served})
                say(f"{len(measured)} of {2 * settings.num_users * settings.turns}: {served}")
            rig.put_away(user.talk.session_id)
            pause_s = user.pause_s * draw.uniform(1 - _JITTER, 1 + _JITTER)
            user.due_s = time.monotonic() + pause_s
            if user.is_announced:
                user.announce_s = user.due_s - _TYPING_S
        return _figures(settings, measured, most_held, rig)


def _figures(settings: ReturnSettings, measured: list[dict[str, Any]], most_held: int, rig: "_Rig") -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for kind in ("predicted", "announced"):
        turns = [one["served_tokens"] for one in measured if one["kind"] == kind]
        ready = [served for served in turns if served.get("ram", 0) > 0 and not served.get("s3", 0)]
        figures[kind] = {"turns": len(turns), "ready_share": len(ready) / len(turns) if turns else None}
    capacity_bytes = rig.capacity_bytes()
    return {
        "ready_share": figures["predicted"]["ready_share"],
        **figures,
        "most_held_share_of_ram": most_held / capacity_bytes,
        "budget_share_of_ram": settings.prefetch_share,
        "is_within_budget": most_held <= settings.prefetch_share * capacity_bytes,
        "pauses_s": list(settings.pauses_s),
        "prefetch": rig.counts(),
        "measured": measured,
    }


class _Rig:
    """The users' engine and daemon."""

    def __init__(self, site: Site, settings: ReturnSettings) -> None:
        self._site = site
        self._engine = site.new_engine("engine", settings.engine_arguments)

    def turn(self, talk: Talk, number: int) -> dict[str, int]:
        """One turn of a chat; return the tokens that each tier served."""
        text = talk.questions[(number - 1) % len(talk.questions)] if number else talk.opening
        body = {
            "messages": [{"role": "user", "content": text}],
            "session_id": talk.session_id,
            # Nothing is shared: what one leaves must not be missing to another.
            "tenant": talk.session_id,
            "max_tokens": 4,
            "ignore_eos": True,
            "plan": "fetch",
        }
        answer = self._site.post(self._engine, "/v1/chat/completions", body)
        return dict(answer["kvstore"]["served_tokens"])

    def put_away(self, session_id: str) -> None:
        """Return when the session is in the bucket and nowhere else."""
        self._site.wait_durable([session_id])
        self._site.post(self._engine, "/v1/hbm/drop", {})

        def is_away() -> bool:
            return not self._site.console.evict(["ram"], session_id=session_id).kept["ram"]

        wait(is_away, "a session is not in the bucket alone", DEADLINE_S, _LOOK_EVERY_S)

    def announce(self, session_id: str) -> None:
        self._site.console.session_prefetch(session_id)

    def counts(self) -> dict[str, Any]:
        found: Any = self._site.console.stats()["prefetch"]
        return dict(found)

    def held_bytes(self) -> int:
        counts = self.counts()
        return int(counts["held_bytes"]) + int(counts["loading_bytes"])

    def capacity_bytes(self) -> int:
        tiers: Any = self._site.console.stats()["tiers"]
        return int(tiers["ram"]["capacity_bytes"])
