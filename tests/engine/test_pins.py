"""The region is pinned once, never under a copy, and stays mapped for as long as it is pinned."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.pins import RegionPin
from kvstore.core.errors import ConfigError
from tiers.region import Region

SIZE = 1 << 16


class Driver:
    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.calls = 0
        self.refuses = False

    def pin(self, address: int, num_bytes: int) -> None:
        self.calls += 1
        if self.refuses:
            raise ConfigError("no more locked memory")
        assert num_bytes == SIZE
        self.pinned.append(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.fixture
def regions(shm_dir: Path) -> Iterator[list[Region]]:
    made = [Region.create(shm_dir / f"r{epoch}", SIZE, epoch) for epoch in (1, 2)]
    yield made
    for region in made:
        region.close()
        region.unlink()


def test_a_region_is_pinned_once_and_unpinned_for_the_next(regions: list[Region]) -> None:
    driver = Driver()
    pins = RegionPin(driver)
    pins.ensure(None)
    pins.ensure(regions[0])
    pins.ensure(regions[0])
    assert (driver.pinned, driver.calls) == ([regions[0].address], 1)
    pins.ensure(regions[1])
    assert driver.pinned == [regions[1].address]
    pins.close()
    pins.close()
    assert driver.pinned == []


def test_nothing_changes_under_a_copy(regions: list[Region]) -> None:
    driver = Driver()
    pins = RegionPin(driver)
    pins.ensure(regions[0])
    with pins.copying():
        pins.ensure(regions[1])
        assert driver.pinned == [regions[0].address]
    pins.ensure(regions[1])
    assert driver.pinned == [regions[1].address]
    pins.close()


def test_a_closed_region_stays_mapped_until_it_is_unpinned(regions: list[Region]) -> None:
    driver = Driver()
    pins = RegionPin(driver)
    pins.ensure(regions[0])
    regions[0].close()
    with pytest.raises(BufferError):
        regions[0]._mapping.close()
    pins.ensure(regions[0])
    assert driver.calls == 1
    pins.close()
    regions[0]._mapping.close()


def test_a_refusal_is_accepted_for_good(regions: list[Region]) -> None:
    driver = Driver()
    driver.refuses = True
    pins = RegionPin(driver)
    pins.ensure(regions[0])
    pins.ensure(regions[1])
    assert driver.calls == 1
    pins.close()
