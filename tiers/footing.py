"""Whether the files that are open are still those which their names lead to.

Whoever clears a folder, puts back an older copy of it or mounts another disk over it takes our files away without a
word: what is open goes on working, and what is written to it is gone at the next start.
"""

import os
from collections.abc import Sequence
from pathlib import Path


class Footing:
    """The files as they were found; immutable, so thread-safe."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises OSError where one of them is not there."""
        self._found = {path: os.lstat(path) for path in paths}

    def displaced(self) -> Path | None:
        """Return a file that was removed or replaced since; None where all are what they were."""
        for path, status in self._found.items():
            if not is_at(status, path):
                return path
        return None


def is_at(status: os.stat_result, path: Path) -> bool:
    """Say whether the path leads to the file of that status, which must be open: else its number may be used again."""
    try:
        return os.path.samestat(status, os.lstat(path))
    except OSError:
        return False
