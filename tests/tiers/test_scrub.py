"""The walk over what a tier holds: damage of every kind is found, named, and removed if ordered; nothing else is."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.block import HEADER_BYTES
from kvstore.core.errors import TierUnavailable
from kvstore.core.outcome import Outcome
from tests.support.blocks import blank, key, meta, payload
from tiers.codec import PLAIN, Codec
from tiers.keys import KeyRing
from tiers.s3 import S3Tier
from tiers.s3client import S3Settings
from tiers.scrub import MAX_EXAMPLES, Finding, Orders, Step, Tally, Verdict
from tiers.ssd import SsdTier

KEY, OTHER = KeyRing(bytes(range(32))), KeyRing(bytes(range(50, 82)))
RECORD_BYTES = HEADER_BYTES + 8192
LOOK, REPAIR = Orders(), Orders(repair=True)
Open = Callable[..., SsdTier | S3Tier]

pytestmark = pytest.mark.usefixtures("s3_server")


@pytest.fixture(params=["ssd", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same tier again and again, with these or those keys."""
    tiers: list[SsdTier] = []

    def open_tier(keys: KeyRing | None = KEY) -> SsdTier | S3Tier:
        if request.param == "s3":
            tier: S3Tier = request.getfixturevalue("open_s3")(codec=Codec(keys))
            return tier
        if tiers:
            tiers[-1].close()
        tiers.append(SsdTier(tmp_path / "ssd", max_bytes=32 << 20, codec=Codec(keys), lock_wait_s=0.0))
        return tiers[-1]

    yield open_tier
    if tiers:
        tiers[-1].close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def ssd(folder: Path) -> Iterator[SsdTier]:
    tier = SsdTier(folder, max_bytes=32 << 20)
    yield tier
    tier.close()


def store(tier: Any, *numbers: int, payload_bytes: int = 8192) -> None:
    blocks = [meta(number, payload_bytes) for number in numbers]
    assert tier.write(blocks, [payload(block) for block in blocks]) == [Outcome.OK] * len(blocks)


def fetched(tier: Any, *numbers: int) -> list[Outcome]:
    blocks = [meta(number) for number in numbers]
    into = [blank(block) for block in blocks]
    outcomes: list[Outcome] = tier.read(blocks, into)
    for block, view, outcome in zip(blocks, into, outcomes, strict=True):
        assert outcome is not Outcome.OK or view == payload(block)
    return outcomes


def scrubbed(tier: Any, orders: Orders = LOOK) -> Tally:
    tally = Tally()
    for step in tier.scrub(orders):
        tally.add(step)
    return tally


def damage(tier: Any, number: int, position: int) -> None:
    """Flip a bit of a stored block behind the tier's back."""
    if isinstance(tier, SsdTier):
        (entry,) = tier._ledger.index.get([key(number)])
        assert entry is not None
        with segment_of(tier, entry).open("r+b") as file:
            file.seek(entry.place.slot * RECORD_BYTES + position)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    else:
        name = tier._blocks.name(key(number))
        data = bytearray(object_bytes(tier, name))
        data[position] ^= 1
        put_object(tier, name, bytes(data))


def segment_of(tier: SsdTier, entry: Any) -> Path:
    (path,) = (tier._space.folder / "segments").glob(f"{entry.place.segment:08}-*")
    return path


def object_bytes(tier: S3Tier, name: str) -> bytes:
    data = bytearray()

    def places(num_bytes: int) -> Iterator[memoryview]:
        data.extend(bytes(num_bytes))
        yield memoryview(data)

    assert tier.run(lambda deadline, _: tier.objects.get(name, places, deadline)) is not None
    return bytes(data)


def put_object(tier: S3Tier, name: str, data: bytes) -> None:
    assert tier.run(lambda deadline, _: tier.objects.put(name, [data], deadline)) is not None


# ---------------------------------------------------------------- both tiers


def test_an_empty_tier_is_clean(opened: Open) -> None:
    assert scrubbed(opened()).counts == {}


@pytest.mark.parametrize("keys", [None, KEY], ids=["plain", "encrypted"])
def test_what_is_whole_is_counted(opened: Open, keys: KeyRing | None) -> None:
    tier = opened(keys)
    store(tier, *range(20))
    for number in range(20):
        tier.records.put(f"sessions/{number}", b"text")
    tally = scrubbed(tier)
    assert tally.counts == {"blocks": {"ok": 20}, "records": {"ok": 20}}
    assert tally.num_seen == 40
    assert tally.num_bytes > 20 * RECORD_BYTES
    assert tally.examples == []


# In the header: magic, namespace, key, nonce, checksum, tag, seal; in the payload.
@pytest.mark.parametrize("position", [0, 20, 60, 165, 175, 185, 200, HEADER_BYTES, HEADER_BYTES + 8191])
def test_a_flipped_bit_is_found_and_after_a_repair_the_block_can_be_stored_again(opened: Open, position: int) -> None:
    tier = opened()
    store(tier, 1, 2, 3)
    damage(tier, 2, position)
    assert scrubbed(tier).counts == {"blocks": {"ok": 2, "corrupt": 1}}
    tally = scrubbed(tier, REPAIR)
    (finding,) = tally.examples
    assert (finding.verdict, finding.name, finding.is_removed) == (Verdict.CORRUPT, key(2).hex(), True)
    assert sum(tally.removed.values()) == 1
    assert scrubbed(tier).counts == {"blocks": {"ok": 2}}
    assert fetched(tier, 1, 2, 3) == [Outcome.OK, Outcome.MISS, Outcome.OK]
    store(tier, 2)
    assert fetched(tier, 2) == [Outcome.OK]


def test_a_step_names_the_blocks_that_are_gone(opened: Open) -> None:
    tier = opened()
    store(tier, 1, 2)
    damage(tier, 2, HEADER_BYTES)
    assert [lost for step in tier.scrub(LOOK) for lost in step.lost] == []
    assert [lost for step in tier.scrub(REPAIR) for lost in step.lost] == [key(2)]


def test_another_key_is_no_damage_and_a_repair_deletes_nothing(opened: Open) -> None:
    tier = opened(KEY)
    store(tier, 1, 2)
    tier.records.put("a", b"text")
    for keys in (OTHER, None):
        tally = scrubbed(opened(keys), REPAIR)
        assert tally.counts == {"blocks": {"wrong_key": 2}, "records": {"wrong_key": 1}}
        assert sum(tally.removed.values()) == 0
    assert fetched(opened(KEY), 1, 2) == [Outcome.OK] * 2


def test_what_no_key_opens_goes_only_on_an_order_of_its_own(opened: Open) -> None:
    tier = opened(KEY)
    store(tier, 1, 2)
    tier.records.put("a", b"text")
    tally = scrubbed(opened(OTHER), Orders(drop_wrong_key=True))
    assert sum(tally.removed.values()) == 3
    assert scrubbed(opened(OTHER)).counts == {}


def test_damage_is_found_without_the_key(opened: Open) -> None:
    tier = opened(KEY)
    store(tier, 1)
    damage(tier, 1, HEADER_BYTES)
    assert scrubbed(opened(None)).counts == {"blocks": {"corrupt": 1}}


def test_an_order_to_drop_what_no_key_opens_spares_damage(opened: Open) -> None:
    tier = opened(KEY)
    store(tier, 1)
    damage(tier, 1, HEADER_BYTES)
    assert sum(scrubbed(tier, Orders(drop_wrong_key=True)).removed.values()) == 0


def test_damaged_records_are_found_and_removed(opened: Open) -> None:
    tier = opened()
    tier.records.put("good", b"text")
    tier.records.put("bad", b"text")
    damage_record(tier, "bad")
    assert scrubbed(tier).counts == {"records": {"ok": 1, "corrupt": 1}}
    assert sum(scrubbed(tier, REPAIR).removed.values()) == 1
    assert scrubbed(tier).counts == {"records": {"ok": 1}}
    assert list(tier.records.names("")) == ["good"]


def test_a_record_that_was_written_meanwhile_is_not_removed(opened: Open) -> None:
    tier = opened()
    old = tier.records.put("a", b"1")
    tier.records.put("a", b"2")
    assert old is not None
    assert not tier.records.delete_unchanged("a", old)
    record = tier.records.get("a")
    assert record is not None
    assert tier.records.delete_unchanged("a", record.etag)
    assert tier.records.get("a") is None


def test_a_walk_may_be_left_at_any_step_and_the_tier_closes(opened: Open) -> None:
    tier = opened()
    store(tier, *range(5))
    next(iter(tier.scrub(LOOK)))
    tier.close()
    with pytest.raises(TierUnavailable):
        list(tier.scrub(LOOK))


def test_blocks_that_come_and_go_during_a_walk_are_no_findings(opened: Open) -> None:
    tier = opened()
    store(tier, *range(70))
    tally = Tally()
    for number, step in enumerate(tier.scrub(REPAIR)):
        tally.add(step)
        if number < 3:
            tier.delete([key(i) for i in range(30 + number * 10, 40 + number * 10)])
            store(tier, *range(100 + number * 10, 110 + number * 10))
    assert set(tally.counts) <= {"blocks"}
    assert set(tally.counts["blocks"]) == {"ok"}
    assert fetched(tier, *range(30)) == [Outcome.OK] * 30


def damage_record(tier: Any, name: str) -> None:
    if isinstance(tier, SsdTier):
        environment = tier.records._environment
        with environment.begin(write=True) as transaction:
            value = bytearray(transaction.get(name.encode()))
            value[-1] ^= 1
            transaction.put(name.encode(), bytes(value))
    else:
        key_name = tier.records._key(name)
        data = bytearray(object_bytes(tier, key_name))
        data[-1] ^= 1
        put_object(tier, key_name, bytes(data))


# ---------------------------------------------------------------- SSD


def test_blocks_that_were_swapped_on_the_disk_are_both_corrupt(ssd: SsdTier, folder: Path) -> None:
    store(ssd, 1, 2)
    (path,) = (folder / "segments").iterdir()
    with path.open("r+b") as file:
        first, second = file.read(RECORD_BYTES), file.read(RECORD_BYTES)
        file.seek(0)
        file.write(second + first)
    assert scrubbed(ssd, REPAIR).counts == {"blocks": {"corrupt": 2}}
    assert scrubbed(ssd).counts == {}


def test_what_the_file_does_not_hold_any_more_is_missing(ssd: SsdTier, folder: Path) -> None:
    store(ssd, 1, 2, 3)
    (path,) = (folder / "segments").iterdir()
    os.truncate(path, RECORD_BYTES + 100)
    assert scrubbed(ssd).counts == {"blocks": {"ok": 1, "missing": 2}}
    assert sum(scrubbed(ssd, REPAIR).removed.values()) == 2
    assert scrubbed(ssd).counts == {"blocks": {"ok": 1}}


def test_an_unaligned_payload_is_checked_to_its_end(ssd: SsdTier) -> None:
    store(ssd, 1, payload_bytes=5000)
    damage(ssd, 1, HEADER_BYTES + 4999)
    assert scrubbed(ssd).counts == {"blocks": {"corrupt": 1}}


def test_foreign_files_are_told_of_and_left_alone(ssd: SsdTier, folder: Path) -> None:
    store(ssd, 1)
    foreign = [folder / "notes.txt", folder / "segments" / "00000099.tmp"]
    for path in foreign:
        path.write_text("mine")
    tally = scrubbed(ssd, REPAIR)
    assert tally.counts == {"blocks": {"ok": 1}, "files": {"foreign": 2}}
    assert {finding.name for finding in tally.examples} == {"notes.txt", "segments/00000099.tmp"}
    assert all(path.read_text() == "mine" for path in foreign)


def test_a_slot_that_is_taken_for_nothing_is_freed(ssd: SsdTier) -> None:
    store(ssd, 1)
    places = ssd._segments.take(RECORD_BYTES, 2)
    assert scrubbed(ssd).counts == {"blocks": {"ok": 1}}, "a block may be on its way there"
    ssd._segments.settle(places)
    assert scrubbed(ssd).counts == {"blocks": {"ok": 1}, "slots": {"orphaned": 2}}
    assert sum(scrubbed(ssd, REPAIR).removed.values()) == 2
    assert scrubbed(ssd).counts == {"blocks": {"ok": 1}}
    ssd.check_integrity()


def test_slots_that_are_left_alone_since_the_disk_is_bad_there_are_not_orphaned(ssd: SsdTier, folder: Path) -> None:
    store(ssd, 1, 2)
    (path,) = (folder / "segments").iterdir()
    os.truncate(path, RECORD_BYTES)
    assert sorted(fetched(ssd, 1, 2)) == [Outcome.OK, Outcome.CORRUPT]
    assert scrubbed(ssd).counts == {"blocks": {"ok": 1}}


def test_a_walk_knows_how_many_blocks_there_are(ssd: SsdTier) -> None:
    store(ssd, *range(7))
    assert scrubbed(ssd).total == 7


# ---------------------------------------------------------------- S3


@pytest.mark.parametrize("content", [b"", b"short", b"x" * HEADER_BYTES, b"x" * RECORD_BYTES])
def test_an_object_that_is_no_block_under_the_name_of_one_is_corrupt(
    open_s3: Callable[..., S3Tier], content: bytes
) -> None:
    tier = open_s3()
    put_object(tier, tier._blocks.name(key(5)), content)
    assert scrubbed(tier, REPAIR).counts == {"blocks": {"corrupt": 1}}
    assert scrubbed(tier).counts == {}


def test_an_object_under_the_name_of_another_block_is_corrupt(open_s3: Callable[..., S3Tier]) -> None:
    tier = open_s3()
    store(tier, 1)
    put_object(tier, tier._blocks.name(key(2)), object_bytes(tier, tier._blocks.name(key(1))))
    tally = scrubbed(tier)
    assert tally.counts == {"blocks": {"ok": 1, "corrupt": 1}}
    assert tally.examples[0].name == key(2).hex()


def test_objects_that_are_not_ours_are_told_of_and_left_alone(
    open_s3: Callable[..., S3Tier], s3_settings: S3Settings
) -> None:
    tier = open_s3()
    store(tier, 1)
    foreign = [s3_settings.key(f"blocks/{name}") for name in ("notes.txt", "ab/cd", f"00/{key(1).hex()}")]
    foreign.append(s3_settings.key("records/notes.txt"))
    elsewhere = s3_settings.key("other/notes.txt")
    for name in (*foreign, elsewhere):
        put_object(tier, name, b"mine")
    tally = scrubbed(tier, REPAIR)
    assert tally.counts == {"blocks": {"ok": 1, "foreign": 3}, "records": {"foreign": 1}}
    assert {finding.name for finding in tally.examples} == set(foreign)
    assert all(object_bytes(tier, name) == b"mine" for name in (*foreign, elsewhere))


def test_several_objects_are_read_at_once_where_that_is_asked_for(open_s3: Callable[..., S3Tier]) -> None:
    tier = open_s3()
    store(tier, *range(10))
    damage(tier, 4, HEADER_BYTES)
    tally = Tally()
    for step in tier.scrub(REPAIR, parallel=4):
        tally.add(step)
    assert tally.counts == {"blocks": {"ok": 9, "corrupt": 1}}
    assert fetched(tier, 3, 4) == [Outcome.OK, Outcome.MISS]


def test_damage_found_while_walking_does_not_make_the_bucket_look_sick(open_s3: Callable[..., S3Tier]) -> None:
    tier = open_s3(codec=PLAIN)
    for number in range(20):
        put_object(tier, tier._blocks.name(key(number)), b"x" * RECORD_BYTES)
    assert scrubbed(tier).counts == {"blocks": {"corrupt": 20}}
    assert not tier.is_left_alone


# ---------------------------------------------------------------- the sum


def test_only_the_first_few_of_each_verdict_are_kept_by_name() -> None:
    tally = Tally()
    for number in range(100):
        findings = tuple(Finding(verdict, "blocks", str(number)) for verdict in (Verdict.CORRUPT, Verdict.MISSING))
        tally.add(Step("blocks", 1, findings))
    assert tally.counts == {"blocks": {"ok": 100, "corrupt": 100, "missing": 100}}
    assert len(tally.examples) == 2 * MAX_EXAMPLES
