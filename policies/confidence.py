"""How sure a cost is. Higher is surer."""

from enum import IntEnum


class Confidence(IntEnum):
    """
    GUESSED ──(measured)──► ROUGH ──► MEASURED
       │                      │           │
    (profile)              (long ago)     │
       ▼                      ▼           │
     SAVED ──(long ago)──► STALE ◄────────┘

    A plan relies on SAVED and above, and takes the safe way below: what is done then is the next measurement.
    """

    GUESSED = 0
    """Nothing was measured: figures of another machine."""
    STALE = 1
    """Measured once, but too long ago."""
    SAVED = 2
    """From this machine's profile: measured in an earlier run."""
    ROUGH = 3
    """Measured a few times."""
    MEASURED = 4

    @property
    def is_known(self) -> bool:
        """True: a plan may rely on it."""
        return self >= Confidence.SAVED

    @property
    def label(self) -> str:
        return self.name.lower()
