"""The snapshot that `kvstore stats --json` prints, put together from everybody's counters (form: docs/stats.md)."""

from kvstore.core.counts import Counts
from kvstore.core.outcome import TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.demoter import Demoter
from kvstore.store.link import WorkerLink
from kvstore.store.room import Room
from kvstore.store.stats import RequestStats
from tiers.ram import RamTier


def error_counts(errors: Counts, links: dict[TierKind, WorkerLink]) -> dict[str, int]:
    """Our own counts and those of the workers, by kind."""
    together = Counts()
    for kind, number in errors.snapshot().items():
        together.add(kind, number)
    for tier, link in links.items():
        for kind, number in link.level.faults.items():
            together.add(f"{tier.label}_{kind}", number)
    return together.snapshot()


def ram_stats(catalog: Catalog, ram: RamTier, room: Room, requests: RequestStats) -> dict[str, object]:
    usage = ram.usage()
    return {
        "state": "ok",
        "blocks": catalog.blocks_in(TierKind.RAM),
        "used_bytes": usage.used_bytes,
        "capacity_bytes": usage.capacity_bytes,
        "hit_tokens": requests.hit_tokens(TierKind.RAM),
        "evicted_blocks": room.evicted[TierKind.RAM],
    }


def slow_tier_stats(
    tier: TierKind,
    link: WorkerLink | None,
    demoter: Demoter | None,
    catalog: Catalog,
    room: Room,
    requests: RequestStats,
) -> dict[str, object]:
    """`state` is ok, degraded (the worker says so), down (no worker) or off (not configured)."""
    if link is None or demoter is None:
        return {"state": "off", "hit_tokens": requests.hit_tokens(tier)}
    return {
        "state": link.level.state if link.ready else "down",
        "reason": link.failure or link.level.reason,
        "blocks": catalog.blocks_in(tier),
        "used_bytes": link.level.used_bytes,
        "capacity_bytes": link.level.capacity_bytes,
        "hit_tokens": requests.hit_tokens(tier),
        "bytes_in": link.bytes_in,
        "bytes_out": link.bytes_out,
        "evicted_blocks": room.evicted[tier],
        "queue": len(demoter),
        **({"bucket": bucket_level(link)} if tier == TierKind.S3 else {}),
    }


def bucket_level(link: WorkerLink) -> dict[str, object]:
    """What is in the bucket, whoever put it there, and what keeping it in order has come to."""
    level = link.bucket
    return {
        "has_lease": level.has_lease,
        "blocks": level.num_blocks if level.swept_s else None,
        "bytes": level.num_bytes if level.swept_s else None,
        "sessions": level.num_sessions,
        "swept_s": level.swept_s,
        "sweep_took_s": round(level.sweep_took_s, 3),
        "deleted": level.deleted,
        "waits": level.waits,
    }
