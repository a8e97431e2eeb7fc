"""Turns the daemon's statistics snapshot into Prometheus metrics; keeps no numbers of its own.

The names are part of the interface (dashboards and alerts use them): change them only together with docs/http.md.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

Snapshot = Mapping[str, Any]

_TIER_GAUGES: Final = {
    "blocks": ("blocks", "Blocks with a copy in the tier."),
    "used_bytes": ("used_bytes", "Bytes the tier takes up, headers and slack included."),
    "capacity_bytes": ("capacity_bytes", "Bytes the tier may take up."),
    "queue": ("queue_length", "Blocks waiting to be moved into or out of the tier."),
}
_TIER_COUNTERS: Final = {
    "bytes_in": ("written_bytes", "Payload bytes written to the tier."),
    "bytes_out": ("read_bytes", "Payload bytes read from the tier."),
    "evicted_blocks": ("evicted_blocks", "Copies the tier gave up to make room."),
}
_STATES: Final = ("ok", "degraded", "down", "off")


class StatsCollector:
    """A collector over one snapshot; None says that the daemon did not answer, and then only `kvstore_up` is given."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvstore_up", "Whether the daemon answers.", value=float(self._snapshot is not None))
        if self._snapshot is None:
            return
        yield from _daemon(_section(self._snapshot, "daemon"))
        yield from _tiers(_section(self._snapshot, "tiers"))
        yield from _requests(_section(self._snapshot, "requests"))
        yield _by_label("kvstore_errors", "Faults by kind.", "kind", _section(self._snapshot, "errors"))
        yield from _sessions(_section(self._snapshot, "sessions"))
        yield from _store(_section(self._snapshot, "store"))
        yield from _bucket(_section(_section(_section(self._snapshot, "tiers"), "s3"), "bucket"))
        yield from _keeping(self._snapshot)
        events = {
            name.removesuffix("_changes"): value
            for name, value in _section(self._snapshot, "events").items()
            if name.endswith("_changes")
        }
        yield _by_label("kvstore_event_changes", "Changes that routers are told of.", "result", events)
        asked = _section(self._snapshot, "discovery")
        yield _by_label("kvstore_discovery", "Asking the bucket for what is not known here.", "kind", asked)


def render(snapshot: Snapshot | None, accept: str = "") -> tuple[bytes, str]:
    """Return the body and its content type: Prometheus' text form, or OpenMetrics where `accept` asks for it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatsCollector(snapshot))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _daemon(daemon: Snapshot) -> Iterator[Metric]:
    info = GaugeMetricFamily("kvstore_build_info", "Always 1; the label is the daemon's version.", labels=["version"])
    info.add_metric([str(daemon.get("version", ""))], 1.0)
    yield info
    yield from _gauge("kvstore_uptime_seconds", "Seconds since the daemon started.", daemon.get("uptime_s"))
    yield from _gauge("kvstore_engines", "Engines attached now.", daemon.get("engines"))


def _tiers(tiers: Snapshot) -> Iterator[Metric]:
    state = GaugeMetricFamily("kvstore_tier_state", "1 for the state the tier is in.", labels=["tier", "state"])
    for tier, values in tiers.items():
        for name in _STATES:
            if "state" in values:
                state.add_metric([tier, name], float(values["state"] == name))
    yield state
    for key, (name, text) in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"kvstore_tier_{name}", text, labels=["tier"])
        for tier, value in _per_tier(tiers, key):
            gauge.add_metric([tier], value)
        yield gauge
    for key, (name, text) in _TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"kvstore_tier_{name}", text, labels=["tier"])
        for tier, value in _per_tier(tiers, key):
            counter.add_metric([tier], value)
        yield counter


def _requests(requests: Snapshot) -> Iterator[Metric]:
    yield from _counter("kvstore_requests", "Finished requests that engines reported.", requests.get("count"))
    yield from _counter("kvstore_prompt_tokens", "Prompt tokens of those requests.", requests.get("prompt_tokens"))
    served = _section(requests, "hit_tokens")
    yield _by_label("kvstore_served_tokens", "Prompt tokens whose KV came from the tier.", "tier", served)
    recomputed = requests.get("recomputed_tokens")
    yield from _counter("kvstore_recomputed_tokens", "Prompt tokens that were prefilled.", recomputed)
    missed = _section(requests, "miss_tokens")
    yield _by_label("kvstore_missed_tokens", "Prefilled prompt tokens by the reason of the miss.", "reason", missed)
    yield _by_label("kvstore_plans", "Requests by what was planned for them.", "plan", _section(requests, "plans"))
    saved = requests.get("saved_prefill_s")
    yield from _counter("kvstore_saved_prefill_seconds", "Prefill time that fetching saved.", saved)
    yield from _decisions(_section(requests, "decisions"))
    ttft = _section(requests, "ttft_s")
    if "count" in requests and "sum" in ttft:
        summary = SummaryMetricFamily("kvstore_ttft_seconds", "Time to first token.")
        summary.add_metric([], count_value=requests["count"], sum_value=ttft["sum"])
        yield summary


def _decisions(decisions: Snapshot) -> Iterator[Metric]:
    chosen, why = _section(decisions, "chosen"), _section(decisions, "why")
    yield _by_label("kvstore_decisions", "Decisions by the kind of the chosen plan.", "plan", chosen)
    yield _by_label("kvstore_decision_reasons", "Decisions by why the plan was chosen.", "why", why)
    lost = decisions.get("lost_s")
    yield from _counter("kvstore_lost_seconds", "Time to first token that another choice would have saved.", lost)


def _sessions(sessions: Snapshot) -> Iterator[Metric]:
    durable = GaugeMetricFamily("kvstore_sessions", "Sessions by what their newest turn survives.", labels=["durable"])
    for name, value in _section(sessions, "durable").items():
        durable.add_metric([name], value)
    yield durable
    yield from _gauge("kvstore_sessions_pinned", "Sessions that are pinned.", sessions.get("pinned"))


def _store(store: Snapshot) -> Iterator[Metric]:
    stored = store.get("blocks_stored")
    yield from _counter("kvstore_stored_blocks", "Blocks that engines stored and that became readable.", stored)
    refused = _section(store, "refused")
    yield _by_label("kvstore_refused_blocks", "Blocks that were not stored, by reason.", "reason", refused)


def _keeping(snapshot: Snapshot) -> Iterator[Metric]:
    prefetch, pins = _section(snapshot, "prefetch"), _section(snapshot, "pins")
    blocks = {name.removesuffix("_blocks"): value for name, value in prefetch.items() if name.endswith("_blocks")}
    yield _by_label("kvstore_prefetched_blocks", "Blocks to be in RAM before a return.", "result", blocks)
    yield from _gauge("kvstore_prefetch_held_bytes", "In RAM for who has not come yet.", prefetch.get("held_bytes"))
    pinned = GaugeMetricFamily("kvstore_pinned_bytes", "Bytes that users have pinned.", labels=["tier"])
    for tier in ("ram", "ssd"):
        if f"{tier}_bytes" in pins:
            pinned.add_metric([tier], pins[f"{tier}_bytes"])
    yield pinned
    yield from _counter("kvstore_refused_pins", "Pins for which there was no budget.", pins.get("refused"))
    decided = CounterMetricFamily(
        "kvstore_admission_blocks", "Blocks by what the tier's admission decided.", labels=["tier", "decision"]
    )
    for tier, values in _section(snapshot, "tiers").items():
        for name, value in _section(values, "admission").items():
            decided.add_metric([tier, name], value)
    yield decided


def _bucket(bucket: Snapshot) -> Iterator[Metric]:
    yield from _gauge("kvstore_bucket_lease", "1 where this daemon keeps the bucket in order.", bucket.get("has_lease"))
    yield from _gauge(
        "kvstore_bucket_bytes", "Bytes of all blocks in the bucket, at the last sweep.", bucket.get("bytes")
    )
    yield from _gauge("kvstore_bucket_blocks", "Blocks in the bucket, at the last sweep.", bucket.get("blocks"))
    deleted = _section(bucket, "deleted")
    yield _by_label("kvstore_bucket_deleted", "What was deleted in the bucket, by reason.", "reason", deleted)


def _section(snapshot: Snapshot, key: str) -> Snapshot:
    value = snapshot.get(key)
    return value if isinstance(value, Mapping) else {}


def _per_tier(tiers: Snapshot, key: str) -> Iterator[tuple[str, float]]:
    # None is "no limit of its own": no sample is better than a wrong one.
    for tier, values in tiers.items():
        if values.get(key) is not None:
            yield tier, values[key]


def _gauge(name: str, text: str, value: float | None) -> Iterable[Metric]:
    return [] if value is None else [GaugeMetricFamily(name, text, value=value)]


def _counter(name: str, text: str, value: float | None) -> Iterable[Metric]:
    return [] if value is None else [CounterMetricFamily(name, text, value=value)]


def _by_label(name: str, text: str, label: str, values: Snapshot) -> Metric:
    counter = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        counter.add_metric([key], value)
    return counter
