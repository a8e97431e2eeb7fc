"""`kvstore verify` in the daemon: one at a time, and what it removes can be stored again."""

from collections.abc import Callable, Iterator

import pytest

from kvstore import wire
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from kvstore.wire import ErrorCode
from kvstore.worker import ops
from tests.support.chats import Prefix, namespace
from tests.support.memory import MemoryTier
from tests.support.rig import Rig
from tiers.scrub import Finding, Orders, Step, Verdict

NAMESPACE = namespace()
PREFIX = Prefix(NAMESPACE, 1, 4)
MakeRig = Callable[..., Rig]


class Scrubbed(MemoryTier):
    """Finds the blocks in `damaged` corrupt."""

    def __init__(self, kind: TierKind) -> None:
        super().__init__(kind)
        self.damaged: set[BlockKey] = set()
        self.orders: list[Orders] = []
        self.fault: Exception | None = None

    def scrub(self, orders: Orders, parallel: int = 1) -> Iterator[Step]:
        self.orders.append(orders)
        for key in list(self.blocks):
            is_damaged = key in self.damaged
            if is_damaged and orders.repair:
                del self.blocks[key]
            found = (Finding(Verdict.CORRUPT, "blocks", key.hex(), "", orders.repair),) if is_damaged else ()
            lost = (key,) if is_damaged and orders.repair else ()
            yield Step("blocks", int(not is_damaged), found, 8192, lost)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def disk() -> Scrubbed:
    return Scrubbed(TierKind.SSD)


@pytest.fixture
def rig(make_rig: MakeRig, disk: Scrubbed) -> Rig:
    return make_rig(ssd=disk)


def verified(rig: Rig, order: wire.Verify) -> wire.ScrubReport:
    """Verify to the end; return what came of the SSD."""
    assert rig.store.verify(order).is_running
    rig.settle()
    found = rig.store.verify(wire.VerifyStatus())
    assert not found.is_running
    return found.tiers["ssd"]


def test_before_the_first_verification_there_is_nothing_to_report(rig: Rig) -> None:
    assert rig.store.verify(wire.VerifyStatus()) == wire.VerifyReport(False, {})
    assert rig.store.verify(wire.VerifyCancel()) == wire.VerifyReport(False, {})


def test_a_verification_walks_over_all_tiers_and_says_what_it_found(rig: Rig, disk: Scrubbed) -> None:
    rig.put(rig.attach(NAMESPACE), NAMESPACE, PREFIX.keys)
    rig.settle()
    disk.damaged = {PREFIX.keys[3]}
    report = verified(rig, wire.Verify([]))
    assert (report.state, report.counts) == ("done", {"blocks": {"ok": 3, "corrupt": 1}})
    assert disk.orders == [Orders()]
    rig.check()


def test_what_a_repair_removes_is_forgotten_and_can_be_stored_again(rig: Rig, disk: Scrubbed) -> None:
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, PREFIX.keys)
    rig.settle()
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    disk.damaged = {PREFIX.keys[3]}
    assert verified(rig, wire.Verify(["ssd"], repair=True)).removed == {"blocks": 1}
    assert rig.lookup(engine, PREFIX.keys) == [TierKind.SSD] * 3
    assert rig.put(engine, NAMESPACE, PREFIX.keys, 3) == [Outcome.OK]
    rig.settle()
    assert len(disk.blocks) == 4
    rig.check()


def test_a_block_in_ram_keeps_that_copy_and_is_written_down_again(rig: Rig, disk: Scrubbed) -> None:
    rig.put(rig.attach(NAMESPACE), NAMESPACE, PREFIX.keys)
    rig.settle()
    disk.damaged = {PREFIX.keys[3]}
    verified(rig, wire.Verify(["ssd"], repair=True))
    rig.settle(seconds=10)
    assert len(disk.blocks) == 4
    rig.check()


def test_one_at_a_time(rig: Rig) -> None:
    rig.store.verify(wire.Verify([]))
    with pytest.raises(ProtocolError, match="under way already") as caught:
        rig.store.verify(wire.Verify([]))
    assert caught.value.code == ErrorCode.BUSY
    rig.settle()
    rig.store.verify(wire.Verify([]))
    rig.settle()


def test_a_tier_that_is_not_there_is_a_bad_request_and_nothing_begins(rig: Rig, disk: Scrubbed) -> None:
    for tiers in (["s3"], ["ram"], ["ssd", "nowhere"]):
        with pytest.raises(ProtocolError) as caught:
            rig.store.verify(wire.Verify(tiers))
        assert caught.value.code == ErrorCode.BAD_REQUEST
    rig.settle()
    assert disk.orders == []


def test_cancelling_reaches_the_worker_once_it_runs(rig: Rig) -> None:
    rig.store.verify(wire.Verify([]))
    assert rig.store.verify(wire.VerifyCancel()).is_running
    assert any(isinstance(op, ops.CancelScrub) for op in rig.links[TierKind.SSD].wire.sent)
    rig.settle()
    assert not rig.store.verify(wire.VerifyStatus()).is_running


def test_a_medium_that_fails_or_a_worker_that_dies_ends_it_as_failed(rig: Rig, disk: Scrubbed) -> None:
    disk.fault = TierUnavailable("gone")
    assert verified(rig, wire.Verify([])).state == "failed"
    disk.fault = None
    rig.store.verify(wire.Verify([]))
    rig.links[TierKind.SSD].die()
    rig.settle(seconds=2)
    found = rig.store.verify(wire.VerifyStatus())
    assert (found.is_running, found.tiers["ssd"].state) == (False, "failed")
    assert verified(rig, wire.Verify([])).state == "done"


def test_a_tier_that_is_down_is_named(rig: Rig) -> None:
    rig.links[TierKind.SSD].ready = False
    with pytest.raises(ProtocolError, match="the tier ssd does not answer now"):
        rig.store.verify(wire.Verify([]))
