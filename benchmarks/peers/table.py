"""What was measured, as one table: who is how fast, and where we fall short of what we promise.

Promised: at least 1.3 times as fast as every peer that is not within 10% of the ceiling, nowhere more than 3% behind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from contenders import CEILING, ENTRIES, OURS

FASTER, NEAR_CEILING, BEHIND = 1.3, 0.9, 0.97


@dataclass(frozen=True)
class Row:
    """An operation; `moves_bytes`: its figure is GB/s, else milliseconds."""

    op: str
    title: str
    moves_bytes: bool = True


# Operations of one group alternate: a fetch clears away what the store of its round has stored.
GROUPS: Sequence[Sequence[Row]] = (
    (Row("core_store", "RAM store, in process"), Row("core_fetch", "RAM fetch, in process")),
    (Row("daemon_store", "store through the daemon"), Row("daemon_fetch", "fetch through the daemon")),
    (Row("paged_store", "the same from a paged pool"), Row("paged_fetch", "the same into a paged pool")),
    (Row("write", "write, never synced"),),
    (Row("durable_write", "durable write"), Row("cold_read", "cold read")),
    (Row("lookup", "lookup, all hits", moves_bytes=False),),
    (Row("ping", "round trip", moves_bytes=False),),
)

# Per operation, per entry's name, the seconds of each round.
Seconds = Mapping[str, Mapping[str, Sequence[float]]]


def as_json(seconds: Seconds, total_bytes: int) -> list[dict[str, Any]]:
    """Return one object per row: the best entry of each column, our speed against each peer, and what falls short."""
    return [_row(row, seconds[row.op], total_bytes) for group in GROUPS for row in group if seconds.get(row.op)]


def columns() -> list[str]:
    """Return the columns in the order of the entries."""
    return list(dict.fromkeys(entry.column for entry in ENTRIES))


def lines(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of the table."""
    peers = [name for name in columns() if name not in (CEILING, OURS)]
    header = ["operation", "unit", *columns(), *(f"kvstore/{peer}" for peer in peers), "short of"]
    cells = []
    for row in rows:
        best = row["best"]
        speeds = [f"{best[name]['figure']:.3f}" if name in best else "" for name in columns()]
        ratios = [f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "" for peer in peers]
        cells.append([row["title"], row["unit"], *speeds, *ratios, ", ".join(row["short_of"])])
    return header, cells


def _row(row: Row, by_entry: Mapping[str, Sequence[float]], total_bytes: int) -> dict[str, Any]:
    best: dict[str, dict[str, Any]] = {}
    for entry in ENTRIES:
        if entry.name not in by_entry:
            continue
        taken = by_entry[entry.name]
        median_s = median(taken)
        if entry.column not in best or median_s < best[entry.column]["median_s"]:
            best[entry.column] = {
                "entry": entry.name,
                "median_s": median_s,
                "min_s": min(taken),
                "max_s": max(taken),
                "runs": len(taken),
                "figure": total_bytes / median_s / 1e9 if row.moves_bytes else median_s * 1e3,
            }
    peers = [name for name in best if name not in (CEILING, OURS)]
    ratios = {peer: best[peer]["median_s"] / best[OURS]["median_s"] for peer in peers if OURS in best}
    return {
        "op": row.op,
        "title": row.title,
        "unit": "GB/s" if row.moves_bytes else "ms",
        "best": best,
        "ratios": ratios,
        "short_of": [peer for peer, ratio in ratios.items() if falls_short(ratio, _share(best, peer))],
        "entries": {name: {"median_s": median(taken), "runs": len(taken)} for name, taken in by_entry.items()},
    }


def falls_short(ratio: float, peers_share: float | None) -> bool:
    """Whether `ratio`, our speed against a peer's, breaks the promise; `peers_share` is the peer's of the ceiling."""
    if ratio < BEHIND:
        return True
    return ratio < FASTER and (peers_share is None or peers_share < NEAR_CEILING)


def _share(best: Mapping[str, Mapping[str, Any]], peer: str) -> float | None:
    if CEILING not in best:
        return None
    return float(best[CEILING]["median_s"] / best[peer]["median_s"])
