"""What the connector counts, as values that any thread may add to and that vLLM carries to its own /metrics.

A taken report holds what was counted since the last one, so that reports of several workers and steps add up:

    {"counts": {"loaded_blocks|ram": 12, …}, "levels": {"attached|worker": 1, …}, "seconds": {"consult": [0.0004, …]}}

The part after `|` is the value of the metric's one label.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict

# Of seconds that nobody fetches.
_MAX_SAMPLES: Final = 4096
_EVERY_S: Final = 0.05

COUNTS: Final[Mapping[str, tuple[str, str]]] = {
    "loaded_blocks": ("tier", "Blocks loaded into the KV cache."),
    "loaded_bytes": ("tier", "Bytes loaded into the KV cache."),
    "failed_blocks": ("reason", "Blocks that were to be loaded and did not come."),
    "stored_blocks": ("outcome", "Blocks offered to kvstore, by what became of them."),
    "stored_bytes": ("", "Bytes copied out of the KV cache."),
    "unstored_blocks": ("reason", "Blocks left out because storing lagged behind or their place was needed."),
    "consults": ("answer", "Questions about what is cached for a prompt, by answer."),
    "planned_blocks": ("plan", "Blocks found in kvstore, by what the plan does with them."),
    "loads": ("end", "Requests whose loads have ended."),
    "sessions_saved": ("outcome", "Turns saved as sessions."),
    "faults": ("kind", "Faults inside of the connector, after which vLLM went on without it."),
}
LEVELS: Final[Mapping[str, tuple[str, str]]] = {
    "attached": ("side", "Whether this side was attached to the daemon at the last step; 0 before the first."),
    "store_queue_bytes": ("", "Bytes that wait to be stored."),
    "load_queue_blocks": ("", "Blocks that are being loaded or wait for it."),
}
SECONDS: Final[Mapping[str, str]] = {
    "consult": "Seconds from a request's arrival to the answer about what is cached for it.",
    "load": "Seconds from the order to load a request's blocks to its end.",
    "store": "Seconds from a step to the end of storing its blocks.",
}


class Report(TypedDict):
    counts: dict[str, int]
    levels: dict[str, float]
    seconds: dict[str, list[float]]


class Counters:
    """Thread-safe. Reports are taken every step, and are put together so often only that a step hardly notices."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken_s = -math.inf
        self._lock = threading.Lock()
        self._report = empty()
        self._levels: dict[str, Callable[[], float]] = {}
        self._told_levels: dict[str, float] = {}

    def add(self, name: str, label: str = "", count: int = 1) -> None:
        assert name in COUNTS, name
        if count:
            key = f"{name}|{label}" if label else name
            with self._lock:
                self._report["counts"][key] = self._report["counts"].get(key, 0) + count

    def took(self, name: str, seconds: float) -> None:
        assert name in SECONDS, name
        with self._lock:
            samples = self._report["seconds"].setdefault(name, [])
            if len(samples) < _MAX_SAMPLES:
                samples.append(seconds)

    def level(self, name: str, label: str, read: Callable[[], float]) -> None:
        """Have `read` asked whenever a report is taken."""
        assert name in LEVELS, name
        self._levels[f"{name}|{label}" if label else name] = read

    def take(self) -> Report | None:
        """Return what is new since the last report; None: nothing is, or that was a moment ago."""
        now = self._clock()
        if now < self._taken_s + _EVERY_S:
            return None
        self._taken_s = now
        levels = {key: float(read()) for key, read in self._levels.items()}
        with self._lock:
            report, self._report = self._report, empty()
        if levels == self._told_levels and is_empty(report):
            return None
        self._told_levels = levels
        report["levels"] = levels
        return report


def empty() -> Report:
    return {"counts": {}, "levels": {}, "seconds": {}}


def is_empty(report: Report) -> bool:
    return not (report["counts"] or report["levels"] or report["seconds"])


def merged(first: Report, second: Report) -> Report:
    """Return both in one. Of levels the second's counts: it is the newer, or another side's."""
    both = empty()
    for report in (first, second):
        for key, count in report["counts"].items():
            both["counts"][key] = both["counts"].get(key, 0) + count
        both["levels"].update(report["levels"])
        for key, samples in report["seconds"].items():
            both["seconds"][key] = (both["seconds"].get(key, []) + samples)[:_MAX_SAMPLES]
    return both


def summary(report: Report) -> dict[str, int | float]:
    """Return one number for each name, for a line of the log."""
    line: dict[str, int | float] = {
        f"kvstore_{key.replace('|', '_')}": count for key, count in report["counts"].items()
    }
    for key, samples in report["seconds"].items():
        if samples:
            line[f"kvstore_{key}_ms_mean"] = round(1000 * sum(samples) / len(samples), 3)
    return line


def sound(data: Mapping[str, Any] | None) -> Report:
    """Return what vLLM hands back as a report; what is missing is empty."""
    report = empty()
    if data:
        report["counts"].update(data.get("counts", {}))
        report["levels"].update(data.get("levels", {}))
        report["seconds"].update(data.get("seconds", {}))
    return report
