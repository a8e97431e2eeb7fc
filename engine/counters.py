"""Counts by name that any thread may add to."""

import threading
from collections import Counter


class Counters:
    """Only ever grow; a snapshot is consistent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
