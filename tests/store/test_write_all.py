"""`s3.write = "all"`: every block that engines store goes to the bucket, of a session or not, and not for ever."""

from collections.abc import Callable
from dataclasses import replace

from kvstore import wire
from kvstore.config import S3Config
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from tests.support.chats import Prefix
from tests.support.rig import JANITOR, Rig, memory
from tests.support.sessions import NAMESPACE, Bucket, put
from tiers.faulty import Fault, FaultyTier, ScriptedPlan

MakeRig = Callable[..., Rig]
ALL = S3Config(write="all")
KEYS = Prefix(NAMESPACE, 1, 12).keys


def there(bucket: Bucket, keys: list[BlockKey] = KEYS) -> int:
    found = [key in bucket.tier.blocks for key in keys]
    assert found == sorted(found, reverse=True)
    return sum(found)


def test_blocks_of_no_session_go_to_the_bucket_and_come_back_at_another_daemon(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    rig = make_rig("a", ssd=memory(TierKind.SSD), s3_config=ALL, **bucket.options())
    rig.put(rig.attach(NAMESPACE), NAMESPACE, KEYS)
    rig.settle(seconds=2.0)
    assert there(bucket) == 12
    other = make_rig("b", s3_config=ALL, **bucket.options())
    engine = other.attach(NAMESPACE)
    assert other.lookup(engine, KEYS) == []
    other.settle()
    assert other.lookup(engine, KEYS) == [TierKind.S3] * 12
    assert other.fetch(engine, KEYS).outcomes == [Outcome.OK] * 12
    rig.check()
    other.check()


def test_by_default_they_do_not(make_rig: MakeRig, bucket: Bucket) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD), **bucket.options())
    rig.put(rig.attach(NAMESPACE), NAMESPACE, KEYS)
    rig.settle(seconds=2.0)
    assert there(bucket) == 0


def test_what_a_sick_bucket_did_not_take_comes_before_the_next_blocks_of_its_chain(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    plan = ScriptedPlan().add("write", [Fault(Outcome.UNAVAILABLE)] * 40)
    tier = FaultyTier(bucket.tier, plan)
    rig = make_rig(ssd=memory(TierKind.SSD), s3=tier, s3_records=bucket.records, s3_config=ALL)
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, KEYS[:4])
    rig.settle(seconds=60.0)
    assert there(bucket) == 0
    plan.faults.clear()
    rig.put(engine, NAMESPACE, KEYS, 4)
    rig.settle(seconds=60.0)
    assert there(bucket) == 12
    rig.check()


def test_they_go_when_they_are_as_old_as_a_session_may_get_and_a_session_keeps_its_own(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    janitor = replace(JANITOR, write="all", ttl_s=20_000.0)
    rig = make_rig(ssd=memory(TierKind.SSD), s3_config=ALL, janitor=janitor, **bucket.options())
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, KEYS)
    rig.store.session_put(engine, put(5))
    rig.settle(seconds=15_000.0)
    assert there(bucket) == 12
    rig.settle(seconds=8_000.0)
    assert there(bucket) == 5
    assert rig.stats()["tiers"]["s3"]["bucket"]["deleted"] == {"orphan_blocks": 7}


def test_where_there_is_too_much_they_go_first_and_the_oldest_before_the_others(
    make_rig: MakeRig, bucket: Bucket
) -> None:
    janitor = replace(JANITOR, write="all", max_bytes=20 * 8192, sweep_every_s=100.0)
    rig = make_rig(ram_bytes=80 * 8192, ssd=memory(TierKind.SSD), s3_config=ALL, janitor=janitor, **bucket.options())
    engine = rig.attach(NAMESPACE)
    rig.put(engine, NAMESPACE, KEYS[:5])
    rig.store.session_put(engine, put(5))
    old, new = Prefix(NAMESPACE, 2, 8).keys, Prefix(NAMESPACE, 3, 6).keys
    rig.put(engine, NAMESPACE, old)
    rig.settle(seconds=300.0)
    rig.put(engine, NAMESPACE, new)
    rig.settle(seconds=300.0)
    assert there(bucket, KEYS) == 5 and there(bucket, new) == 6 and len(bucket.tier.blocks) == 19
    rig.put(engine, NAMESPACE, Prefix(NAMESPACE, 4, 4).keys)
    rig.settle(seconds=300.0)
    left = bucket.tier.blocks.keys()
    assert len(left) == 19 and set(KEYS[:5]) <= left and set(new) <= left, "four of the old ones went"
    rig.store.evict(wire.Evict(["ram"]), lambda _: None)
    rig.check()
