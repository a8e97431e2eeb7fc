"""The region is pinned once, on a thread of its own, never leaves under a copy, and stays mapped while it is pinned."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError
from kvstore.region_pin import RegionPin
from tiers.region import Region

SIZE = 1 << 16
WAIT_S = 10.0


class Driver:
    """Takes notes, and takes its time where `held` is cleared."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.calls = 0
        self.error: Exception | None = None
        self.held = threading.Event()
        self.held.set()
        self.began = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)

    def pin(self, address: int, num_bytes: int, goes_on: Callable[[], bool]) -> None:
        self.calls += 1
        assert num_bytes == SIZE
        self.began.release()
        assert self.held.wait(WAIT_S)
        if self.error is None and goes_on():
            self.pinned.append(address)
        self.ended.release()
        if self.error is not None:
            raise self.error

    def unpin(self, address: int) -> None:
        if address in self.pinned:
            self.pinned.remove(address)
        self.ended.release()

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.ended.acquire(timeout=WAIT_S), "nothing was pinned or unpinned"


@pytest.fixture
def regions(shm_dir: Path) -> Iterator[list[Region]]:
    made = [Region.create(shm_dir / f"r{epoch}", SIZE, epoch) for epoch in (1, 2)]
    yield made
    for region in made:
        region.close()
        region.unlink()


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def pins(driver: Driver) -> Iterator[RegionPin]:
    pins = RegionPin(driver)
    yield pins
    driver.held.set()
    pins.close(WAIT_S)
    assert driver.pinned == []


def test_a_region_is_pinned_once_and_unpinned_for_the_next(
    regions: list[Region], driver: Driver, pins: RegionPin
) -> None:
    pins.ensure(None)
    pins.ensure(regions[0])
    pins.ensure(regions[0])
    driver.wait()
    assert (driver.pinned, driver.calls) == ([regions[0].address], 1)
    pins.ensure(regions[1])
    driver.wait(2)
    assert driver.pinned == [regions[1].address]
    pins.close(WAIT_S)
    pins.close(WAIT_S)
    assert driver.pinned == []


def test_no_copy_waits_while_a_region_is_being_pinned(regions: list[Region], driver: Driver, pins: RegionPin) -> None:
    """Registering held the lock that every copy took: after a restart of the daemon the first fetches waited for
    seconds, and missed their promise."""
    driver.held.clear()
    pins.ensure(regions[0])
    assert driver.began.acquire(timeout=WAIT_S)
    with pins.copying(regions[0].view(0, 8)) as may_copy:
        assert may_copy
        pins.ensure(regions[0])
    assert driver.pinned == []
    driver.held.set()
    driver.wait()
    assert driver.pinned == [regions[0].address]


def test_a_region_leaves_only_when_no_copy_uses_it_and_then_no_copy_begins(
    regions: list[Region], driver: Driver, pins: RegionPin
) -> None:
    pins.ensure(regions[0])
    driver.wait()
    with pins.copying(regions[0].view(0, 8)) as may_copy:
        assert may_copy
        pins.ensure(regions[1])
        with pins.copying(regions[1].view(0, 8)) as may_copy_new:
            assert may_copy_new, "the new region is not made to wait for the old one"
        assert driver.pinned == [regions[0].address]
        while True:  # until the thread has seen it
            with pins.copying(regions[0].view(64, 8)) as may_still:
                if not may_still:
                    break
        assert driver.pinned == [regions[0].address]
    driver.wait(2)
    assert driver.pinned == [regions[1].address]


def test_pinning_stops_where_another_region_is_wanted(regions: list[Region], driver: Driver, pins: RegionPin) -> None:
    driver.held.clear()
    pins.ensure(regions[0])
    assert driver.began.acquire(timeout=WAIT_S)
    pins.ensure(regions[1])
    driver.held.set()
    driver.wait(3)
    assert driver.pinned == [regions[1].address]


def is_mapped(region: Region) -> bool:
    return str(region.path) in Path("/proc/self/maps").read_text()


def test_a_closed_region_stays_mapped_until_it_is_unpinned(
    regions: list[Region], driver: Driver, pins: RegionPin
) -> None:
    pins.ensure(regions[0])
    driver.wait()
    regions[0].close()
    assert is_mapped(regions[0])
    pins.ensure(regions[0])
    assert driver.calls == 1
    pins.close(WAIT_S)
    regions[0]._mapping.close()
    assert not is_mapped(regions[0])


def test_a_region_that_was_closed_before_its_turn_is_passed_over(
    regions: list[Region], driver: Driver, pins: RegionPin
) -> None:
    regions[0].close()
    pins.ensure(regions[0])
    pins.ensure(regions[1])
    driver.wait()
    assert driver.pinned == [regions[1].address]


@pytest.mark.parametrize("error", [ConfigError("no more locked memory"), RuntimeError("the driver is gone")])
def test_a_refusal_is_accepted_for_good(
    regions: list[Region], driver: Driver, pins: RegionPin, error: Exception
) -> None:
    driver.error = error
    pins.ensure(regions[0])
    driver.wait(2)
    pins.ensure(regions[1])
    pins.close(WAIT_S)
    assert driver.calls == 1
    with pins.copying(regions[0].view(0, 8)) as may_copy:
        assert may_copy
