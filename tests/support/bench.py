"""What the tests of the benchmark share."""

from kvstore.bench.samples import Compared
from kvstore.bench.settings import Sizes

TINY = Sizes(64 << 10, 4)


class Rounds:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.count = 0
        self.parts: list[str] = []
        self.promised = 0.0
        self.done = 0.0

    def __call__(self) -> None:
        self.count += 1

    def begin(self, part: str, steps: int) -> None:
        self.parts.append(part)
        self.promised += steps

    def step(self, done: float = 1.0) -> None:
        self.done += done


def assert_compared(measured: dict[str, Compared], ceilings: set[str], rounds: int = 2) -> None:
    """Both sides have a sample of each round, of the same bytes."""
    for compared in measured.values():
        timings = [compared.ours, *compared.ceilings.values()]
        assert set(compared.ceilings) == ceilings
        assert all(len(timing.seconds) == rounds and min(timing.seconds) > 0 for timing in timings)
        assert len({timing.num_bytes for timing in timings}) == 1
