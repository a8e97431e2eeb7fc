"""The S3 tier on a real server: objects, damaged objects, records."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore.core.block import HEADER_BYTES
from kvstore.core.outcome import Outcome
from tests.support.blocks import blank, key, meta, payload
from tests.support.proxy import Proxy
from tests.support.s3tier import OPEN, Bucket, behind_proxy, bucket, fetch, name_of, proxy, s3_client, store
from tiers.autopack import AutoPacking
from tiers.codec import PLAIN, Codec
from tiers.keys import KeyRing
from tiers.objects import ObjectFault
from tiers.s3 import S3Tier
from tiers.s3client import S3Settings

__all__ = ["behind_proxy", "bucket", "proxy", "s3_client"]


# ---------------------------------------------------------------- objects


def test_an_object_is_header_and_payload_under_a_spread_name(
    open_s3: OPEN, bucket: Bucket, s3_settings: S3Settings
) -> None:
    store(open_s3(), 1)
    data = bucket.get(name_of(s3_settings, 1))
    assert data[HEADER_BYTES:] == payload(meta(1))


def test_another_daemon_finds_the_blocks_and_does_not_replace_them(open_s3: OPEN) -> None:
    first, second = open_s3(), open_s3()
    assert store(first, 1) == [Outcome.OK]
    assert second.write([meta(1)], [payload(meta(1), salt=1)]) == [Outcome.EXISTS]
    assert fetch(second, 1) == [Outcome.OK]


def test_deleted_blocks_take_up_nothing_any_more(open_s3: OPEN) -> None:
    """Deleting took blocks off the count but no bytes, so `used_bytes` in the statistics only ever grew."""
    tier = open_s3()
    store(tier, 1, 2)
    full = tier.usage()
    tier.delete([key(1)])
    assert (tier.usage().blocks, tier.usage().used_bytes) == (1, full.used_bytes // 2)
    tier.delete([key(2), key(3)])
    assert (tier.usage().blocks, tier.usage().used_bytes) == (0, 0)


def test_prefixes_share_nothing(open_s3: OPEN, s3_settings: S3Settings) -> None:
    store(open_s3(), 1)
    assert fetch(open_s3(replace(s3_settings, prefix=s3_settings.prefix + "x")), 1) == [Outcome.MISS]


def test_an_empty_prefix_is_the_bucket_itself(open_s3: OPEN, s3_settings: S3Settings) -> None:
    tier = open_s3(replace(s3_settings, prefix=""))
    store(tier, 77)
    tier.records.put("sessions/a", b"1")
    assert fetch(tier, 77) == [Outcome.OK]
    assert list(tier.records.names("sessions/")) == ["sessions/a"]
    tier.delete([key(77)])
    tier.records.delete("sessions/a")


def test_a_start_with_the_wrong_key_misses_every_block_and_deletes_none(open_s3: OPEN) -> None:
    right, wrong = Codec(KeyRing(bytes(range(32)))), Codec(KeyRing(bytes(32)))
    assert store(open_s3(codec=right), 1, 2) == [Outcome.OK] * 2
    for codec in (wrong, PLAIN):
        tier = open_s3(codec=codec)
        assert fetch(tier, 1, 2) == [Outcome.MISS] * 2
        assert tier.faults() == {"wrong_key": 2}
    assert fetch(open_s3(codec=right), 1, 2) == [Outcome.OK] * 2


def test_a_block_that_was_packed_takes_fewer_bytes_and_is_read_by_who_packs_nothing(
    open_s3: OPEN, bucket: Bucket, s3_settings: S3Settings
) -> None:
    packing = AutoPacking()
    reads = Codec(transforms={packing.number: packing})
    tier = open_s3(codec=replace(reads, packs_with=packing), on_sent=packing.sent)
    block = meta(1, 1 << 20)
    bits = np.random.default_rng(1).normal(size=block.payload_bytes // 2).astype(np.float32).view(np.uint32) >> 16
    content = memoryview(bits.astype("<u2").tobytes())
    assert tier.write([block], [content]) == [Outcome.OK]
    stored = bucket.get(name_of(s3_settings, 1))
    assert len(stored) == tier.usage().used_bytes < 0.8 * block.payload_bytes
    for reader in (tier, open_s3(codec=reads), open_s3(replace(s3_settings, multipart_threshold_bytes=1), codec=reads)):
        view = blank(block)
        assert reader.read([block], [view]) == [Outcome.OK]
        assert view == content
    bucket.put(name_of(s3_settings, 1), stored[:-1] + bytes([stored[-1] ^ 1]))
    assert tier.read([block], [view]) == [Outcome.CORRUPT]


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty", "foreign"])
def test_a_damaged_object_is_corrupt_once_then_heals(
    open_s3: OPEN, bucket: Bucket, s3_settings: S3Settings, damage: str
) -> None:
    tier = open_s3()
    store(tier, 1, 2)
    name = name_of(s3_settings, 1)
    data = bucket.get(name)
    bucket.put(
        name,
        {
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "short": data[:-1],
            "long": data + b"x",
            "empty": b"",
            "foreign": bucket.get(name_of(s3_settings, 2)),
        }[damage],
    )
    assert fetch(tier, 1) == [Outcome.CORRUPT]
    assert fetch(tier, 1) == [Outcome.MISS]
    assert store(tier, 1) == [Outcome.OK]
    assert fetch(tier, 1, 2) == [Outcome.OK, Outcome.OK]
    assert tier.faults() == {"corrupt": 1}


def test_a_damaged_object_that_may_not_be_deleted_is_corrupt_and_the_bucket_well(
    open_s3: OPEN, bucket: Bucket, s3_settings: S3Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With credentials that may only read, each damaged object answered UNAVAILABLE, and some of them closed the whole
    bucket."""
    tier = open_s3()
    store(tier, 1, 2)
    bucket.put(name_of(s3_settings, 1), b"damaged")

    monkeypatch.setattr(tier.objects, "delete", lambda names, _deadline: set(names))
    for _ in range(8):
        assert fetch(tier, 1, 2) == [Outcome.CORRUPT, Outcome.OK]
    assert tier.faults() == {"corrupt": 8, "delete_refused": 8}


def test_a_batch_larger_than_one_delete_request_is_deleted(open_s3: OPEN) -> None:
    tier = open_s3()
    store(tier, 1, 2)
    keys = [key(number) for number in range(1001)]
    assert tier.delete(keys) == [Outcome.OK] * 1001
    assert tier.contains([key(1), key(2)]) == [Outcome.MISS, Outcome.MISS]


def test_connections_are_used_again(behind_proxy: S3Tier, proxy: Proxy, s3_client: str) -> None:
    before = proxy.num_connections
    for _ in range(10):
        assert fetch(behind_proxy, 1, 2) == [Outcome.OK, Outcome.MISS]
    # obstore takes a connection back on a thread of its own, at times after the next request has looked for one.
    assert proxy.num_connections <= before + (0 if s3_client == "boto3" else 5)


def test_write_options_go_with_every_object() -> None:
    settings = S3Settings("bucket", sse="aws:kms", sse_kms_key_id="key", storage_class="STANDARD_IA")
    assert settings.write_options() == {
        "ServerSideEncryption": "aws:kms",
        "SSEKMSKeyId": "key",
        "StorageClass": "STANDARD_IA",
    }
    assert S3Settings("bucket").write_options() == {}


def test_a_storage_class_is_accepted_by_the_server(open_s3: OPEN, s3_settings: S3Settings) -> None:
    tier = open_s3(replace(s3_settings, storage_class="STANDARD_IA"))
    assert store(tier, 1) == [Outcome.OK]
    assert fetch(tier, 1) == [Outcome.OK]


# ---------------------------------------------------------------- records


def test_a_record_whose_answer_was_lost_is_known_again(
    proxy: Proxy, behind_proxy: S3Tier, open_s3: OPEN, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try is carried out and its answer lost; the second finds its own record in the way."""
    records = behind_proxy.records
    put = behind_proxy.objects.put
    is_lost: list[bool] = []

    def lose_the_first_answer(*arguments: Any, **conditions: Any) -> str | None:
        tag = put(*arguments, **conditions)
        if not is_lost:
            is_lost.append(True)
            raise ObjectFault("connection", "lost")
        return tag

    monkeypatch.setattr(behind_proxy.objects, "put", lose_the_first_answer)
    tag = records.put("sessions/a", b"mine", if_absent=True)
    record = open_s3().records.get("sessions/a")
    assert record is not None
    assert (record.data, record.etag) == (b"mine", tag)


def test_equal_records_have_different_tags(open_s3: OPEN) -> None:
    records = open_s3().records
    first = records.put("a", b"same")
    assert records.put("a", b"same") != first
    assert records.put("a", b"other", if_match=first) is None


def test_an_object_that_is_far_too_long_for_a_record_is_not_taken_into_memory(
    open_s3: OPEN, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the bucket could fill the worker's memory with one object."""
    monkeypatch.setattr("tiers.s3records._MAX_RECORD_BYTES", 3 << 20)
    tier = open_s3()
    tier.records.put("sessions/long", bytes(5 << 20))
    assert tier.records.get("sessions/long") is None
    assert tier.faults() == {"record_corrupt": 1}


def test_a_damaged_record_is_counted_and_none(open_s3: OPEN, bucket: Bucket, s3_settings: S3Settings) -> None:
    tier = open_s3()
    tier.records.put("sessions/a", b"text")
    bucket.put(f"{s3_settings.prefix}/records/sessions/a=r", b"KVR1 something else altogether")
    assert tier.records.get("sessions/a") is None
    assert tier.faults() == {"record_corrupt": 1}


def test_more_names_than_one_listing_holds_are_all_listed(open_s3: OPEN, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_s3()
    monkeypatch.setattr(tier.objects, "list", partial(tier.objects.list, limit=3))
    for number in range(8):
        tier.records.put(f"sessions/{number}", b"")
    assert list(tier.records.names("sessions/")) == [f"sessions/{number}" for number in range(8)]


def test_bytes_that_are_damaged_on_the_way_are_read_again_and_cost_no_copy(open_s3: OPEN) -> None:
    """A good object was deleted because one answer had been changed between the bucket and here."""
    tier = open_s3()
    assert store(tier, 1) == [Outcome.OK]
    into = blank(meta(1))
    get = tier.objects.get
    num_gets = 0

    def damaged_once(*arguments: Any, **options: Any) -> object:
        nonlocal num_gets
        num_gets += 1
        found = get(*arguments, **options)
        into[5] ^= num_gets == 1
        return found

    tier.objects.get = damaged_once  # type: ignore[method-assign]
    assert tier.read([meta(1)], [into]) == [Outcome.OK] and into == payload(meta(1))
    assert num_gets == 2 and tier.faults() == {"damaged_on_the_way": 1}
    assert tier.contains([meta(1).key]) == [Outcome.OK]
