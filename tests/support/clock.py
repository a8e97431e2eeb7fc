"""A clock that only the test moves."""


class Clock:
    """Gives `now`, in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
