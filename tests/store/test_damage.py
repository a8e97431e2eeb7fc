"""What an engine found damaged by a checksum of its own can be stored again."""

from collections.abc import Callable

import pytest

from kvstore import wire
from kvstore.config import S3Config
from kvstore.core.errors import ProtocolError
from kvstore.core.key import join_keys
from kvstore.core.outcome import Outcome, TierKind
from tests.support.chats import Prefix, namespace
from tests.support.rig import Rig, memory

NAMESPACE = namespace()
MakeRig = Callable[..., Rig]


def test_blocks_that_came_damaged_from_ram_are_taken_from_ssd_the_next_time(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD, 40))
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 6).keys
    rig.put(engine, NAMESPACE, keys)
    rig.settle()
    rig.store.damaged(engine, wire.Damaged(join_keys(keys[2:4]), int(TierKind.RAM)))
    rig.settle()
    ram, ssd = TierKind.RAM, TierKind.SSD
    assert rig.lookup(engine, keys) == [ram, ram, ssd, ssd, ram, ram]
    assert rig.stats()["errors"]["corrupt"] == 2
    rig.check()


def test_what_came_damaged_from_ssd_is_nowhere_and_can_be_stored_anew(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=memory(TierKind.SSD, 40))
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 6).keys
    rig.put(engine, NAMESPACE, keys)
    rig.settle()
    rig.store.damaged(engine, wire.Damaged(join_keys(keys[2:4]), int(TierKind.SSD)))
    rig.settle()
    assert len(rig.lookup(engine, keys)) == 2
    assert rig.put(engine, NAMESPACE, keys[:4])[2:] == [Outcome.OK, Outcome.OK]
    rig.settle()
    assert len(rig.lookup(engine, keys)) == 6
    rig.check()


@pytest.mark.parametrize(("source", "left"), [(TierKind.SSD, 6), (TierKind.S3, 5)])
def test_a_copy_in_the_bucket_goes_only_where_it_was_the_damaged_one(
    make_rig: MakeRig, source: TierKind, left: int
) -> None:
    rig = make_rig(s3=memory(TierKind.S3), s3_config=S3Config(write="all"))
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 6).keys
    rig.put(engine, NAMESPACE, keys)
    rig.settle()
    rig.store.damaged(engine, wire.Damaged(join_keys(keys[5:]), int(source)))
    rig.settle()
    assert len(rig.lookup(engine, keys)) == left
    rig.check()


def test_a_block_that_somebody_is_reading_stays(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = rig.attach(NAMESPACE)
    keys = Prefix(NAMESPACE, 1, 3).keys
    rig.put(engine, NAMESPACE, keys)
    reader = rig.begin_fetch(engine, keys)
    rig.turn()
    rig.store.damaged(engine, wire.Damaged(join_keys(keys), int(TierKind.RAM)))
    assert len(rig.lookup(engine, keys)) == 3
    reader.release()
    rig.store.damaged(engine, wire.Damaged(join_keys(keys), int(TierKind.RAM)))
    assert rig.lookup(engine, keys) == []
    rig.check()


def test_blocks_of_another_namespace_are_nobodys_to_drop(make_rig: MakeRig) -> None:
    rig = make_rig()
    other = namespace("another model")
    mine, theirs = rig.attach(NAMESPACE), rig.attach(other)
    keys = Prefix(other, 1, 3).keys
    rig.put(theirs, other, keys)
    rig.store.damaged(mine, wire.Damaged(join_keys(keys), int(TierKind.RAM)))
    assert len(rig.lookup(theirs, keys)) == 3


def test_a_source_that_is_none_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig()
    engine = rig.attach(NAMESPACE)
    with pytest.raises(ProtocolError, match="no tier"):
        rig.store.damaged(engine, wire.Damaged(join_keys(Prefix(NAMESPACE, 1, 1).keys), 0))
