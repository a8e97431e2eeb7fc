import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvstore import metrics
from tests.support.consoles import SNAPSHOT

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(snapshot: metrics.Snapshot | None) -> Samples:
    body, _ = metrics.render(snapshot)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_every_number_of_the_snapshot_becomes_a_sample() -> None:
    found = samples(SNAPSHOT)
    assert value(found, "kvstore_up") == 1
    assert value(found, "kvstore_build_info", version="0.1.0") == 1
    assert value(found, "kvstore_tier_blocks", tier="ram") == 12
    assert value(found, "kvstore_tier_capacity_bytes", tier="ram") == 1 << 30
    assert value(found, "kvstore_tier_written_bytes_total", tier="ram") == 5 << 20
    assert value(found, "kvstore_tier_state", tier="s3", state="down") == 1
    assert value(found, "kvstore_tier_state", tier="s3", state="ok") == 0
    assert value(found, "kvstore_prompt_tokens_total") == 1000
    assert value(found, "kvstore_served_tokens_total", tier="hbm") == 100
    assert value(found, "kvstore_missed_tokens_total", reason="never_stored") == 600
    assert value(found, "kvstore_ttft_seconds_sum") == 2.5
    assert value(found, "kvstore_ttft_seconds_count") == 4
    assert value(found, "kvstore_plans_total", plan="fetch") == 3
    assert value(found, "kvstore_saved_prefill_seconds_total") == 1.25
    assert value(found, "kvstore_errors_total", kind="corrupt") == 2
    assert value(found, "kvstore_sessions", durable="ssd") == 2
    assert value(found, "kvstore_refused_blocks_total", reason="full") == 1
    assert value(found, "kvstore_bucket_lease") == 1
    assert value(found, "kvstore_bucket_bytes") == 7 << 20
    assert value(found, "kvstore_bucket_deleted_total", reason="orphan_blocks") == 3
    assert value(found, "kvstore_discovery_total", kind="found_blocks") == 4
    assert value(found, "kvstore_event_changes_total", result="dropped") == 1
    assert value(found, "kvstore_prefetched_blocks_total", result="useful") == 7
    assert value(found, "kvstore_prefetch_held_bytes") == 4096
    assert value(found, "kvstore_pinned_bytes", tier="ssd") == 16384
    assert value(found, "kvstore_refused_pins_total") == 3
    assert value(found, "kvstore_admission_blocks_total", tier="s3", decision="refused") == 6


def test_the_manual_lists_exactly_these_metrics() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    rows = [line for line in manual.splitlines() if line.startswith("| `kvstore_")]
    listed = {name for row in rows for name in re.findall(r"`(kvstore_\w+)`", row)}
    assert listed == {name for name, _ in samples(SNAPSHOT)}


def test_a_tier_without_a_limit_has_no_capacity_rather_than_a_wrong_one() -> None:
    assert ("kvstore_tier_capacity_bytes", frozenset({("tier", "s3")})) not in samples(SNAPSHOT)


def test_a_daemon_that_does_not_answer_is_down_and_nothing_else() -> None:
    assert samples(None) == {("kvstore_up", frozenset()): 0.0}


def test_a_snapshot_of_another_version_gives_what_it_has() -> None:
    assert value(samples({"daemon": {"uptime_s": 3}, "tiers": None}), "kvstore_uptime_seconds") == 3


def test_openmetrics_is_given_to_those_who_ask() -> None:
    body, content_type = metrics.render(SNAPSHOT, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
