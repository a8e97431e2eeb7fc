"""What gittins.py knows of a request that may go on, and of one whose blocks may have left."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from policies.eviction.kinds import smooth

MAX_TURN: Final = 1_000


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

    def follows(self, ghost: Ghost, now_s: float) -> None:
        """It is the next of these that its blocks tell of."""
        self.gap_s, self.turn = None, 1
        if ghost.fan <= 1:
            self.gap_s = smooth(now_s - ghost.used_s, ghost.gap_s)
            self.turn = min(ghost.turn + 1, MAX_TURN)
