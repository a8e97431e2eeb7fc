"""What gittins.py knows of a request that may go on, and of one whose blocks may have left."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from policies.eviction.kinds import smooth
from policies.eviction.reach import Ended
from policies.eviction.runs import Runs

MAX_TURN: Final = 1_000
_MAX_ENDS: Final = 32_768


class Ghost(NamedTuple):
    """What is known of a run by its last block's name, also after it left. `fan` above 1: it is shared."""

    life: int
    used_s: float
    turn: int
    gap_s: float
    fan: int
    request: int


@dataclass(slots=True)
class Request:
    """What was used last, and may be continued by what is used or inserted next. Its runs bear its number."""

    number: int
    gap_s: float | None = None
    turn: int = 1
    num_new: int = 0  # blocks that were never seen before, those that are expected among them
    num_come: int = 0
    to_come: int = 0
    end: int = -1  # the name of the last expected block but the tail
    is_counted: bool = False  # whether it has inserted anything
    body: int = -1  # the life of what was inserted, but for the tail
    remembered: int = -1  # the name that its last piece is remembered by
    is_tail_new: bool = False  # whether its last block was never seen before
    ended: Ended | None = None  # what was told of its last piece: that a use had ended there

    def follows(self, ghost: Ghost, now_s: float) -> None:
        """It is the next of these that its blocks tell of."""
        self.gap_s, self.turn = None, 1
        if ghost.fan <= 1:
            self.gap_s = smooth(now_s - ghost.used_s, ghost.gap_s)
            self.turn = min(ghost.turn + 1, MAX_TURN)


class Ends:
    """Runs by the names of their last blocks, by which they are known when they return. Bounded: what was put first is
    forgotten first."""

    def __init__(self) -> None:
        self._ghosts: dict[int, Ghost] = {}

    def __len__(self) -> int:
        return len(self._ghosts)

    def put(self, name: int, runs: Runs, run: int) -> None:
        self._ghosts.pop(name, None)
        self._ghosts[name] = Ghost(
            int(runs.life[run]),
            float(runs.used_s[run]),
            int(runs.turn[run]),
            float(runs.gap_s[run]),
            int(runs.fan[run]) if runs.is_shared[run] else 0,
            int(runs.request[run]),
        )
        if len(self._ghosts) > _MAX_ENDS:
            del self._ghosts[next(iter(self._ghosts))]

    @property
    def oldest_life(self) -> int:
        """Of lives before this one the ends may be forgotten."""
        return next(iter(self._ghosts.values())).life if len(self._ghosts) == _MAX_ENDS else 0

    def get(self, name: int) -> Ghost | None:
        return self._ghosts.get(name)

    def among(self, names: list[int]) -> list[tuple[int, Ghost]]:
        """Return those of these that are known, each with how many of the names there are up to it."""
        ghosts = self._ghosts
        return [(at + 1, ghosts[name]) for at, name in enumerate(names) if name in ghosts]

    def forget_piece(self, request: Request) -> None:
        """What a request has come to is remembered only while it has not gone on."""
        ghost = self._ghosts.get(request.remembered)
        if ghost is not None and ghost.fan <= 1 and ghost.request == request.number:
            del self._ghosts[request.remembered]
