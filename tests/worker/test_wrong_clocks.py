"""A daemon whose clock is wrong by years, beside one that keeps the bucket in order."""

from collections.abc import Callable

from kvstore.config import SessionsConfig
from kvstore.core.outcome import TierKind
from tests.support.clock import Clock
from tests.support.janitors import in_bucket, stones
from tests.support.rig import JANITOR, Rig, memory
from tests.support.sessions import NAMESPACE, Bucket, delete, turn

MakeRig = Callable[..., Rig]
TTL_S = 2 * 86400.0


def test_a_session_of_a_daemon_whose_clock_is_behind_lives_for_its_ttl(make_rig: MakeRig, bucket: Bucket) -> None:
    """Its last turn was years ago by the server's clock: it was deleted at the next sweep, in the middle of use."""
    slow = make_rig("a", ssd=memory(TierKind.SSD), sessions=SessionsConfig(ttl_s=TTL_S), **bucket.options())
    slow.links[TierKind.S3].is_tidying = False
    turn(slow, slow.attach(NAMESPACE), 4)
    slow.settle(seconds=1.0)
    right = make_rig("b", ssd=memory(TierKind.SSD), clock=Clock(1e9), **bucket.options())
    right.settle(seconds=2 * JANITOR.sweep_every_s)
    assert bucket.revision() == 1 and in_bucket(bucket) == 4
    right.clock.now += TTL_S
    right.settle(seconds=2 * JANITOR.sweep_every_s)
    assert bucket.revision() is None and in_bucket(bucket) == 0


def test_a_session_of_a_daemon_whose_clock_is_ahead_does_not_stay_for_ever(make_rig: MakeRig, bucket: Bucket) -> None:
    sessions = SessionsConfig(ttl_s=TTL_S)
    fast = make_rig("a", ssd=memory(TierKind.SSD), sessions=sessions, clock=Clock(1e9), **bucket.options())
    fast.links[TierKind.S3].is_tidying = False
    turn(fast, fast.attach(NAMESPACE), 4)
    fast.settle(seconds=1.0)
    right = make_rig("b", ssd=memory(TierKind.SSD), **bucket.options())
    right.settle(seconds=2 * JANITOR.sweep_every_s)
    assert bucket.revision() == 1
    right.clock.now += TTL_S
    right.settle(seconds=2 * JANITOR.sweep_every_s)
    assert bucket.revision() is None and in_bucket(bucket) == 0


def test_a_tombstone_of_a_daemon_whose_clock_is_behind_stays_as_long_as_any(make_rig: MakeRig, bucket: Bucket) -> None:
    """It was taken away as soon as its blocks were gone, before others had read it."""
    slow = make_rig("a", ssd=memory(TierKind.SSD), sessions=SessionsConfig(ttl_s=TTL_S), **bucket.options())
    slow.links[TierKind.S3].is_tidying = False
    turn(slow, slow.attach(NAMESPACE), 4)
    slow.settle(seconds=1.0)
    delete(slow)
    slow.settle(seconds=1.0)
    right = make_rig("b", ssd=memory(TierKind.SSD), clock=Clock(1e9), **bucket.options())
    right.settle(seconds=2 * JANITOR.sweep_every_s)
    assert [stone.keys for stone in stones(bucket)] == [b""] and in_bucket(bucket) == 0
    right.clock.now += TTL_S
    right.settle(seconds=2 * JANITOR.sweep_every_s)
    assert not stones(bucket)
