"""Two real daemons and one real bucket: what one deletes, finds and keeps in order for the other."""

import contextlib
import os
import signal
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from kvstore import wire
from kvstore.client import Client
from kvstore.core.key import BlockKey
from kvstore.core.outcome import Outcome, TierKind
from kvstore.s3server import S3Server
from tests.flows.test_bucket import NAMESPACE, Bucket, bucket, durable, turn
from tests.support.chats import Prefix
from tests.support.daemons import DaemonProcess, fetch, store_all
from tests.support.proxy import Proxy
from tests.support.waiting import until

__all__ = ["bucket"]

MakeDaemon = Callable[..., DaemonProcess]
pytestmark = pytest.mark.usefixtures("s3_server")
POLL = {"s3_tombstone_poll": "200ms"}


def level(daemon: DaemonProcess) -> dict[str, object]:
    return dict(daemon.stats()["tiers"]["s3"]["bucket"])


def found(client: Client, keys: list[BlockKey]) -> int:
    return len(client.lookup(keys).tiers)


def test_blocks_that_one_daemon_put_there_are_found_by_another_that_was_never_told(bucket: Bucket) -> None:
    first, second = bucket.daemon("a"), bucket.daemon("b")
    prefix = Prefix(NAMESPACE, 1, 40)
    with contextlib.closing(first.engine()) as one, contextlib.closing(second.engine()) as two:
        turn(one, prefix)
        until(lambda: durable(one) == "s3")
        longer = Prefix(NAMESPACE, 1, 60)
        answer = two.lookup(longer.keys)
        assert answer.tiers == [] and answer.s3 == Outcome.UNKNOWN
        until(lambda: found(two, longer.keys) == 40)
        answer = two.lookup(longer.keys)
        assert set(answer.tiers) == {TierKind.S3} and answer.next == Outcome.MISS and answer.s3 == Outcome.MISS
        outcomes, sources = fetch(two, NAMESPACE, prefix.keys)
        assert outcomes == [Outcome.OK] * 40 and set(sources) == {TierKind.S3}
        assert second.stats()["discovery"]["found_blocks"] == 40
    assert first.errors() == second.errors() == {}


def test_a_deletion_reaches_both_daemons_and_spares_what_the_other_ones_session_uses(bucket: Bucket) -> None:
    first, second = bucket.daemon("a", **POLL), bucket.daemon("b", **POLL)
    long, short = Prefix(NAMESPACE, 1, 30), Prefix(NAMESPACE, 1, 12)
    with contextlib.closing(first.engine()) as one, contextlib.closing(second.engine()) as two:
        turn(one, long)
        until(lambda: durable(one) == "s3")
        assert two.session_get("chat") is not None
        fetch(two, NAMESPACE, short.keys)
        turn(two, short, session_id="theirs")
        until(lambda: durable(two, "theirs") == "s3")
        assert len(bucket.names("blocks")) == 30
        one.session_delete("chat", namespace=NAMESPACE.digest())
        until(lambda: len(bucket.names("blocks")) == 12)
        until(lambda: durable(two, "chat") == "unknown")
        assert two.session_get("chat") is None and one.session_get("chat") is None
        second.wait_written()
        two.evict(["ram", "ssd"])
        assert fetch(two, NAMESPACE, short.keys)[0] == [Outcome.OK] * 12
        assert two.session_get("theirs") is not None
    assert len(bucket.names("records/sessions")) == 1 and len(bucket.names("records/tombstones")) == 1


def test_a_deletion_goes_on_after_a_kill_of_who_ordered_it(bucket: Bucket) -> None:
    holder = bucket.daemon("a", **POLL)
    until(lambda: level(holder)["has_lease"])
    deleter = bucket.daemon("b", **POLL)
    with contextlib.closing(deleter.engine()) as client:
        turn(client, Prefix(NAMESPACE, 1, 60))
        until(lambda: durable(client) == "s3")
        assert client.session_delete("chat", namespace=NAMESPACE.digest()).blocks_deleted == 60
    deleter.kill()
    deleter.start()
    until(lambda: not bucket.names("blocks") and not bucket.names("records/sessions"))
    with contextlib.closing(holder.engine()) as client:
        assert client.session_get("chat") is None


def test_a_deletion_while_the_bucket_is_away_is_made_good_after_a_kill(bucket: Bucket, s3_server: S3Server) -> None:
    address = urlsplit(s3_server.endpoint)
    assert address.hostname is not None and address.port is not None
    other = bucket.daemon("b", **POLL)
    until(lambda: level(other)["has_lease"])
    with Proxy((address.hostname, address.port)) as proxy:
        daemon = bucket.daemon("a", s3_endpoint=proxy.endpoint, s3_request_deadline="1s", **POLL)
        with contextlib.closing(daemon.engine()) as client:
            turn(client, Prefix(NAMESPACE, 1, 20))
            until(lambda: durable(client) == "s3")
            proxy.misbehave("refuse")
            os.kill(daemon.worker("s3"), signal.SIGKILL)  # and with it the connections that it had
            client.session_delete("chat", namespace=NAMESPACE.digest())
            assert not bucket.names("records/tombstones")
        daemon.kill()
        proxy.misbehave("pass")
        daemon.start()
        until(lambda: not bucket.names("blocks") and not bucket.names("records/sessions"))
        assert len(bucket.names("records/tombstones")) == 1
        daemon.kill()


def test_a_kill_in_the_middle_of_uploads_leaves_a_bucket_that_is_right_and_is_made_whole(bucket: Bucket) -> None:
    daemon = bucket.daemon("a", s3_threads=8)
    prefix = Prefix(NAMESPACE, 1, 200)
    with contextlib.closing(daemon.engine()) as client:
        turn(client, prefix)
        until(lambda: len(bucket.names("blocks")) > 20)
        until(lambda: durable(client) != "none")  # or nobody would know after the kill that more is to be uploaded
    daemon.kill()
    reader = bucket.daemon("b")
    with contextlib.closing(reader.engine()) as client:
        client.lookup(prefix.keys)
        until(lambda: "answered" in reader.stats()["discovery"])
        shown = found(client, prefix.keys)
        assert shown > 0
        assert set(fetch(client, NAMESPACE, prefix.keys[:shown])[0]) <= {Outcome.OK, Outcome.MISS}
    daemon.start()
    with contextlib.closing(daemon.engine()) as client:
        until(lambda: durable(client) == "s3")
        assert len(bucket.names("blocks")) == 200


def test_one_sweep_deletes_what_nobody_names_and_what_is_too_much(bucket: Bucket) -> None:
    daemon = bucket.daemon("a", s3_write="all", s3_sweep_every="500ms", s3_max_bytes="400KiB", s3_orphan_grace="1s")
    with contextlib.closing(daemon.engine()) as client:
        turn(client, Prefix(NAMESPACE, 1, 20))
        until(lambda: durable(client) == "s3")
        store_all(client, NAMESPACE, Prefix(NAMESPACE, 2, 40).keys)
        until(lambda: level(daemon)["deleted"].get("size_blocks", 0) > 0)  # type: ignore[attr-defined]
        until(lambda: level(daemon)["bytes"] is not None and len(bucket.names("blocks")) < 48)
        assert isinstance(client.session_get("chat"), wire.SessionView)
        until(lambda: level(daemon)["blocks"] == len(bucket.names("blocks")))
        assert durable(client) == "s3" and level(daemon)["waits"] == ""
