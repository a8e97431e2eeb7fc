"""Large blocks: sent in parts and fetched by ranges, whole or not at all, nothing left behind."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.block import HEADER_BYTES
from kvstore.core.outcome import Outcome
from kvstore.s3server import S3Server
from tests.support.blocks import blank, key, meta, payload
from tests.support.proxy import Proxy
from tiers.codec import Codec
from tiers.keys import KeyRing
from tiers.objects import ObjectFault
from tiers.s3 import S3Tier
from tiers.s3client import S3Settings, make_client
from tiers.s3large import cut
from tiers.s3uploads import BotoUploads

MIB = 1 << 20
LARGE_BYTES = 13 * MIB + 17
OPEN = Callable[..., S3Tier]


@pytest.fixture(params=["boto3", "obstore"])
def s3_client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def settings(s3_settings: S3Settings) -> S3Settings:
    return replace(s3_settings, multipart_threshold_bytes=6 * MIB, part_bytes=5 * MIB)


@pytest.fixture
def unfinished(s3_settings: S3Settings) -> Iterator[Callable[[], int]]:
    client = make_client(s3_settings)

    def count() -> int:
        found = client.list_multipart_uploads(Bucket=s3_settings.bucket, Prefix=s3_settings.prefix)
        return len(found.get("Uploads", []))

    yield count
    client.close()


def store(tier: S3Tier, number: int, num_bytes: int = LARGE_BYTES) -> Outcome:
    block = meta(number, num_bytes)
    return tier.write([block], [payload(block)])[0]


def fetch(tier: S3Tier, number: int, num_bytes: int = LARGE_BYTES) -> Outcome:
    block = meta(number, num_bytes)
    view = blank(block)
    (outcome,) = tier.read([block], [view])
    assert outcome is not Outcome.OK or view == payload(block)
    return outcome


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_large_block_comes_back_and_is_stored_once(
    open_s3: OPEN, settings: S3Settings, unfinished: Callable[[], int], encrypted: bool
) -> None:
    codec = Codec(KeyRing(bytes(range(32)))) if encrypted else Codec()
    tier = open_s3(settings, codec=codec)
    assert fetch(tier, 1) is Outcome.MISS
    assert store(tier, 1) is Outcome.OK
    assert store(tier, 1) is Outcome.EXISTS
    assert fetch(open_s3(settings, codec=codec), 1) is Outcome.OK
    assert tier.usage().used_bytes == LARGE_BYTES + HEADER_BYTES
    assert unfinished() == 0
    assert tier.faults() == {}


def test_whether_it_came_in_parts_makes_no_difference_to_who_reads_it(open_s3: OPEN, settings: S3Settings) -> None:
    whole = replace(settings, multipart_threshold_bytes=1 << 30)
    assert store(open_s3(settings), 1) is Outcome.OK
    assert fetch(open_s3(whole), 1) is Outcome.OK
    assert store(open_s3(whole), 2) is Outcome.OK
    assert fetch(open_s3(settings), 2) is Outcome.OK


def test_of_two_that_store_the_same_block_at_once_one_is_first_and_nothing_is_left(
    open_s3: OPEN, settings: S3Settings, unfinished: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_s3(settings), open_s3(settings)
    monkeypatch.setattr(first.objects, "head", lambda _name, _deadline: None)
    assert store(second, 1) is Outcome.OK
    assert store(first, 1) is Outcome.EXISTS
    assert unfinished() == 0
    assert fetch(second, 1) is Outcome.OK


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty", "tiny"])
def test_a_damaged_large_object_is_corrupt_once_then_heals(open_s3: OPEN, settings: S3Settings, damage: str) -> None:
    tier = open_s3(settings)
    store(tier, 1)
    client = make_client(settings)
    text = key(1).hex()
    name = f"{settings.prefix}/blocks/{text[:2]}/{text}"
    with client.get_object(Bucket=settings.bucket, Key=name)["Body"] as body:
        data = body.read()
    damaged = {
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "short": data[: 11 * MIB],
        "long": data + b"x",
        "empty": b"",
        "tiny": data[:100],
    }[damage]
    client.put_object(Bucket=settings.bucket, Key=name, Body=damaged)
    client.close()
    assert fetch(tier, 1) is Outcome.CORRUPT
    assert fetch(tier, 1) is Outcome.MISS
    assert store(tier, 1) is Outcome.OK
    assert fetch(tier, 1) is Outcome.OK
    assert tier.faults() == {"corrupt": 1}


def test_an_upload_that_fails_in_the_middle_leaves_nothing_behind(
    open_s3: OPEN, settings: S3Settings, unfinished: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_part = BotoUploads.put_part

    def fail_at_the_second(self: BotoUploads, upload: object, number: int, *rest: object) -> str:
        if number == 2:
            raise ObjectFault("refused", "in a test")
        return put_part(self, upload, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(BotoUploads, "put_part", fail_at_the_second)
    tier = open_s3(settings)
    assert store(tier, 1) is Outcome.UNAVAILABLE
    assert unfinished() == 0
    assert fetch(tier, 1) is Outcome.MISS
    assert tier.faults() == {"refused": 1}


def test_what_a_process_that_died_left_unfinished_is_aborted_once_it_is_old(
    open_s3: OPEN, settings: S3Settings, unfinished: Callable[[], int]
) -> None:
    tier = open_s3(settings)
    client = make_client(settings)
    client.create_multipart_upload(Bucket=settings.bucket, Key=f"{settings.prefix}/blocks/00/00")
    client.create_multipart_upload(Bucket=settings.bucket, Key=f"{settings.prefix}/other/00")
    client.close()
    assert tier.abort_unfinished_uploads(0.0) == 0
    assert tier.abort_unfinished_uploads(1e11) == 1
    assert unfinished() == 1
    assert tier.abort_unfinished_uploads(1e11) == 0


def test_connections_that_break_in_the_middle_of_parts_are_tried_again(
    open_s3: OPEN, settings: S3Settings, s3_server: S3Server
) -> None:
    address = urlsplit(s3_server.endpoint)
    assert address.hostname is not None
    assert address.port is not None
    with Proxy((address.hostname, address.port)) as proxy:
        tier = open_s3(replace(settings, endpoint=proxy.endpoint, request_deadline_s=2.0))
        assert store(tier, 1) is Outcome.OK
        proxy.misbehave("reset", 3 * MIB)
        assert fetch(tier, 1) is Outcome.UNAVAILABLE
        proxy.misbehave("pass")
        assert fetch(tier, 1) is Outcome.OK
        tier.close()


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 25))
def test_parts_are_the_pieces_in_order_and_all_but_the_last_full(pieces: list[bytes], part_bytes: int) -> None:
    parts = [b"".join(part) for part in cut(pieces, part_bytes)]
    assert b"".join(parts) == b"".join(pieces)
    assert all(len(part) == part_bytes for part in parts[:-1])
    assert all(0 < len(part) <= part_bytes for part in parts)
