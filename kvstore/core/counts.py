"""Counts by kind: a label set that is bounded, so that no client can grow it."""

_MAX_KINDS = 64
_MAX_COUNT = 1 << 53


class Counts:
    """Counts by kind, at most _MAX_KINDS of them and "other"."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, kind: str, number: int = 1) -> None:
        if number <= 0:
            return
        if kind not in self._counts and (len(self._counts) >= _MAX_KINDS or not is_plain(kind)):
            kind = "other"
        self._counts[kind] = min(_MAX_COUNT, self._counts.get(kind, 0) + number)

    def snapshot(self) -> dict[str, int]:
        return dict(sorted(self._counts.items()))


def is_plain(kind: str) -> bool:
    """Whether it is a short word of letters, digits and underscores."""
    return 0 < len(kind) <= 64 and kind.isascii() and kind.replace("_", "").isalnum()
