"""Listing what is in a real bucket: our blocks and records, page by page, and nothing else."""

import time
from collections.abc import Callable

from kvstore.core.key import BlockKey, split_keys
from kvstore.core.outcome import Outcome
from tests.support.blocks import key, meta, payload
from tiers.inventory import BlockPage
from tiers.s3 import S3Tier
from tiers.s3client import S3Settings
from tiers.s3inventory import S3Inventory

OPEN = Callable[..., S3Tier]


def store(tier: S3Tier, *numbers: int) -> None:
    blocks = [meta(number) for number in numbers]
    assert tier.write(blocks, [payload(block) for block in blocks]) == [Outcome.OK] * len(blocks)


def all_pages(inventory: S3Inventory) -> list[BlockPage]:
    pages = [inventory.blocks()]
    while pages[-1].following is not None:
        pages.append(inventory.blocks(pages[-1].following))
    return pages


def test_blocks_are_listed_with_their_size_and_age(open_s3: OPEN, s3_settings: S3Settings) -> None:
    tier = open_s3()
    inventory = S3Inventory(s3_settings, tier)
    assert all_pages(inventory)[0].keys == b""
    store(tier, 1, 2, 3)
    (page,) = all_pages(inventory)
    assert set(split_keys(page.keys)) == {key(1), key(2), key(3)}
    assert all(size > meta(1).payload_bytes for size in page.num_bytes)
    assert all(abs(modified - time.time()) < 120 for modified in page.modified_s)


def test_a_listing_goes_on_where_a_page_ended(open_s3: OPEN, s3_settings: S3Settings) -> None:
    tier = open_s3()
    store(tier, *range(12))
    inventory = S3Inventory(s3_settings, tier)
    list_all = tier.objects.list
    tier.objects.list = lambda *a, **k: list_all(*a, **{**k, "limit": 5})  # type: ignore[method-assign]
    pages = all_pages(inventory)
    assert len(pages) == 3
    assert sorted(b for page in pages for b in split_keys(page.keys)) == sorted(key(n) for n in range(12))


def test_what_is_not_ours_is_left_out(open_s3: OPEN, s3_settings: S3Settings) -> None:
    tier = open_s3()
    store(tier, 1)
    text = key(2).hex()
    strange = [f"blocks/zz/{text}", f"blocks/{text[:2]}/{text}.bak", f"blocks/{text[:2]}/{text[:-2]}", "blocks/readme"]
    strange.append(f"blocks/{'00' if text[:2] != '00' else '01'}/{text}")
    for name in strange:
        full = s3_settings.key(name)
        tier.run(lambda deadline, _attempt, full=full: tier.objects.put(full, [b"x"], deadline))
    (page,) = all_pages(S3Inventory(s3_settings, tier))
    assert split_keys(page.keys) == [key(1)]


def test_records_are_listed_with_the_tag_that_a_put_answered(open_s3: OPEN, s3_settings: S3Settings) -> None:
    tier = open_s3()
    tag = tier.records.put("sessions/a", b"1")
    tier.records.put("tombstones/b", b"2")
    page = S3Inventory(s3_settings, tier).records("sessions/")
    assert [(listed.name, listed.etag) for listed in page.records] == [("sessions/a", tag)]
    assert abs(page.records[0].modified_s - time.time()) < 120 and page.following is None


def test_deleted_blocks_are_gone_and_those_that_were_not_there_are_no_fault(
    open_s3: OPEN, s3_settings: S3Settings
) -> None:
    tier = open_s3()
    store(tier, 1, 2)
    inventory = S3Inventory(s3_settings, tier)
    assert inventory.delete_blocks([key(1), BlockKey(b"?" * 32)]) == 0
    assert split_keys(all_pages(inventory)[0].keys) == [key(2)]
