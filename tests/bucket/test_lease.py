"""One daemon at a time holds the bucket's lease, whatever their clocks say and whatever gets lost."""

import random

import pytest

from kvstore.bucket.lease import LEASE_NAME, LEASE_S, RENEW_EVERY_S, BucketLease
from tests.support.clock import Clock
from tests.support.memory import MemoryRecords


def test_the_first_one_gets_it_and_keeps_it_by_renewing() -> None:
    records, clock = MemoryRecords(), Clock()
    first, second = BucketLease(records, clock), BucketLease(records, clock)
    for _ in range(20):
        first.tick()
        second.tick()
        assert first.is_held and not second.is_held
        clock.now += RENEW_EVERY_S


def test_nothing_is_asked_before_it_is_time() -> None:
    records, clock = MemoryRecords(), Clock()
    lease = BucketLease(records, clock)
    lease.tick()
    etag = records.records[LEASE_NAME].etag
    clock.now = lease.next_look - 0.1
    lease.tick()
    assert records.records[LEASE_NAME].etag == etag
    clock.now = lease.next_look
    lease.tick()
    assert records.records[LEASE_NAME].etag != etag


def test_one_that_is_gone_is_followed_after_a_whole_lease_of_the_others_own_time() -> None:
    records, mine, theirs = MemoryRecords(), Clock(1e6), Clock(5.0)
    first, second = BucketLease(records, theirs), BucketLease(records, mine)
    first.tick()
    began = mine.now
    while not second.is_held:
        second.tick()
        mine.now += 1.0
        assert mine.now - began < 2 * LEASE_S
    assert mine.now - began >= LEASE_S
    theirs.now += RENEW_EVERY_S
    first.tick()
    assert not first.is_held and second.is_held


def test_one_that_is_let_go_is_taken_at_once() -> None:
    records, clock = MemoryRecords(), Clock()
    first, second = BucketLease(records, clock), BucketLease(records, clock)
    first.tick()
    first.release()
    assert not first.is_held
    second.tick()
    assert second.is_held
    first.release()
    clock.now += RENEW_EVERY_S
    first.tick()
    second.tick()
    assert second.is_held and not first.is_held


def test_a_bucket_that_is_away_for_longer_than_the_lease_ends_it() -> None:
    records, clock = MemoryRecords(), Clock()
    lease = BucketLease(records, clock)
    lease.tick()
    records.is_down = True
    for _ in range(2):
        clock.now += RENEW_EVERY_S
        lease.tick()
        assert lease.is_held
    clock.now += RENEW_EVERY_S
    assert not lease.is_held
    lease.tick()
    records.is_down = False
    clock.now += RENEW_EVERY_S
    lease.tick()
    assert not lease.is_held, "it is not known what became of the last renewal"
    clock.now += LEASE_S
    lease.tick()
    assert lease.is_held


@pytest.mark.parametrize("seed", range(20))
def test_two_never_hold_it_at_once(seed: int) -> None:
    """Each has a clock of its own; daemons stop and the bucket is away now and then."""
    choice, records = random.Random(seed), MemoryRecords()
    clocks = [Clock(choice.uniform(0, 1e6)) for _ in range(3)]
    leases = [BucketLease(records, clock) for clock in clocks]
    is_stopped = [False] * 3
    held = 0
    for _ in range(2000):
        passed = choice.uniform(0, 8.0)
        for clock in clocks:
            clock.now += passed
        records.is_down = choice.random() < 0.2
        for index, lease in enumerate(leases):
            is_stopped[index] ^= choice.random() < 0.01
            if not is_stopped[index]:
                lease.tick()
        assert sum(lease.is_held for lease in leases) <= 1
        held += any(lease.is_held for lease in leases)
    assert held > 500
