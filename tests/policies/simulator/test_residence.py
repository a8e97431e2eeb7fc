"""Blocks fall from DRAM to NVMe to S3, the tail of a prompt before its head."""

from kvstore.core.outcome import TierKind
from policies.simulator.residence import Residence

RAM, SSD, S3 = TierKind.RAM, TierKind.SSD, TierKind.S3


def test_a_prompt_that_does_not_fit_keeps_its_head_near() -> None:
    residence = Residence(ram_blocks=2, ssd_blocks=2)
    residence.use([1, 2, 3, 4, 5])
    assert residence.lookup([1, 2, 3, 4, 5, 6]) == [RAM, RAM, SSD, SSD, S3]


def test_the_prompt_that_was_used_last_is_near() -> None:
    residence = Residence(ram_blocks=2, ssd_blocks=2)
    residence.use([1, 2])
    residence.use([7, 8])
    assert residence.lookup([1, 2]) == [SSD, SSD]
    residence.use([1, 2])
    assert residence.lookup([1, 2]) == [RAM, RAM]
    assert residence.lookup([7, 8]) == [SSD, SSD]


def test_a_lookup_ends_at_the_first_block_that_is_nowhere() -> None:
    residence = Residence(None, None)
    residence.use([1, 2, 3])
    assert residence.lookup([1, 9, 3]) == [RAM]
    assert residence.lookup([]) == []
