"""Sessions and blocks in a real bucket: what survives the daemon and its disk, and what a sick bucket costs."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import boto3
import pytest

from kvstore import wire
from kvstore.client import Client
from kvstore.core.errors import KVStoreError
from kvstore.core.key import join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.s3server import S3Server
from tests.support.chats import Prefix, namespace
from tests.support.daemons import DaemonProcess, fetch, store_all
from tests.support.proxy import Proxy
from tests.support.s3server import settings_for
from tests.support.waiting import until
from tiers.s3client import S3Settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

NAMESPACE = namespace()
MakeDaemon = Callable[..., DaemonProcess]

pytestmark = pytest.mark.usefixtures("s3_server")


class Bucket:
    """The part of the bucket that a test has for itself, and daemons that use it."""

    def __init__(self, make_daemon: MakeDaemon, settings: S3Settings, client: "S3Client") -> None:
        self._make_daemon = make_daemon
        self.settings = settings
        self._client = client

    def daemon(self, name: str = "d", **changes: object) -> DaemonProcess:
        chosen = {
            "s3_bucket": self.settings.bucket,
            "s3_prefix": self.settings.prefix,
            "s3_endpoint": self.settings.endpoint,
            "s3_access_key_file": self.settings.access_key_file,
            "s3_secret_key_file": self.settings.secret_key_file,
            "s3_request_deadline": "30s",
            "s3_threads": 4,
        }
        return self._make_daemon(name, **(chosen | changes))

    def names(self, folder: str) -> list[str]:
        """The objects below `folder` ("blocks", "records/sessions")."""
        listed = self._client.list_objects_v2(Bucket=self.settings.bucket, Prefix=f"{self.settings.prefix}/{folder}/")
        return [entry["Key"] for entry in listed.get("Contents", [])]

    def damage(self, name: str, how: str) -> None:
        if how == "missing":
            self._client.delete_object(Bucket=self.settings.bucket, Key=name)
            return
        body = bytearray(self._client.get_object(Bucket=self.settings.bucket, Key=name)["Body"].read())
        if how == "truncated":
            del body[len(body) // 2 :]
        else:
            body[-100] ^= 4
        self._client.put_object(Bucket=self.settings.bucket, Key=name, Body=bytes(body))


@pytest.fixture
def bucket(make_daemon: MakeDaemon, s3_server: S3Server, tmp_path: Path) -> Iterator[Bucket]:
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=s3_server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=s3_server.access_key,
        aws_secret_access_key=s3_server.secret_key,
    )
    yield Bucket(make_daemon, settings_for(s3_server, tmp_path), client)
    client.close()


def turn(client: Client, prefix: Prefix, revision: int = 0, session_id: str = "chat") -> wire.SessionSaved:
    """Store the blocks of a turn and record it."""
    store_all(client, NAMESPACE, prefix.keys)
    message = wire.ChatMessage("user", f"said {prefix.seed}", prefix.tokens)
    put = wire.SessionPut(session_id, "", NAMESPACE.digest(), revision, [message], join_keys(prefix.keys))
    return client.session_put(put)


def newest(client: Client, session_id: str = "chat") -> wire.SessionView:
    view = client.session_get(session_id)
    assert view is not None
    return view


def durable(client: Client, session_id: str = "chat") -> str:
    found = {view.id: view.durable for view in client.session_list().sessions}
    return found.get(session_id, "unknown")


def test_a_session_outlives_ram_and_ssd_in_the_bucket(bucket: Bucket) -> None:
    daemon = bucket.daemon()
    prefix = Prefix(NAMESPACE, 1, 40)
    with contextlib.closing(daemon.engine()) as client:
        turn(client, prefix)
        until(lambda: durable(client) == "s3")
        assert len(bucket.names("blocks")) == 40
        daemon.wait_written()
        client.evict(["ram", "ssd"])
        assert client.lookup(prefix.keys).tiers == [TierKind.S3] * 40
        outcomes, sources = fetch(client, NAMESPACE, prefix.keys)
        assert outcomes == [Outcome.OK] * 40 and set(sources) == {TierKind.S3}
        daemon.wait_written()
        client.evict(["ram", "ssd"])
        daemon.restart()
        assert client.lookup(prefix.keys).tiers == [TierKind.S3] * 40
        assert durable(client) == "s3"
        assert fetch(client, NAMESPACE, prefix.keys)[0] == [Outcome.OK] * 40
    assert daemon.errors() == {}


def test_a_second_daemon_with_an_empty_disk_goes_on_with_the_session(bucket: Bucket) -> None:
    first = bucket.daemon("a")
    prefix, longer = Prefix(NAMESPACE, 1, 20), Prefix(NAMESPACE, 1, 30)
    with contextlib.closing(first.engine()) as client:
        turn(client, prefix)
        until(lambda: durable(client) == "s3")
    first.kill()
    second = bucket.daemon("b")
    with contextlib.closing(second.engine()) as client:
        assert client.lookup(prefix.keys).tiers == []
        view = client.session_get("chat")
        assert view is not None and view.messages[0].token_ids == prefix.tokens
        assert client.lookup(prefix.keys).tiers == [TierKind.S3] * 20
        assert fetch(client, NAMESPACE, prefix.keys)[0] == [Outcome.OK] * 20
        assert turn(client, longer, view.revision).revision == 2
        until(lambda: durable(client) == "s3")
        assert client.session_get("unknown") is None
    first.start()
    with contextlib.closing(first.engine()) as client:
        # It knows an older turn, and does not wait for long for the bucket to say that there is a newer one.
        until(lambda: newest(client).revision == 2)
        assert newest(client).num_blocks == 30
        assert fetch(client, NAMESPACE, longer.keys)[0] == [Outcome.OK] * 30


def test_two_daemons_at_once_the_later_turn_becomes_a_fork_and_loses_nothing(bucket: Bucket) -> None:
    first, second = bucket.daemon("a"), bucket.daemon("b")
    with contextlib.closing(first.engine()) as one, contextlib.closing(second.engine()) as two:
        turn(one, Prefix(NAMESPACE, 1, 4))
        until(lambda: durable(one) == "s3")
        assert two.session_get("chat") is not None
        turn(one, Prefix(NAMESPACE, 2, 8), 1)
        until(lambda: durable(one) == "s3")
        turn(two, Prefix(NAMESPACE, 3, 8), 1)
        until(lambda: len(two.session_list().sessions) == 2)
        views = {view.id: two.session_get(view.id) for view in two.session_list().sessions}
        texts = {session_id: view.messages[0].content for session_id, view in views.items() if view is not None}
        (fork,) = set(texts) - {"chat"}
        assert texts == {"chat": "said 2", fork: "said 3"}
        until(lambda: durable(two, fork) == "s3")
        assert second.errors()["session_conflict"] == 1


@pytest.mark.parametrize("how", ["missing", "truncated", "corrupt"])
def test_an_object_that_is_not_the_block_becomes_a_miss_and_can_be_stored_again(bucket: Bucket, how: str) -> None:
    daemon = bucket.daemon()
    prefix = Prefix(NAMESPACE, 1, 6)
    with contextlib.closing(daemon.engine()) as client:
        turn(client, prefix)
        until(lambda: durable(client) == "s3")
        daemon.wait_written()
        client.evict(["ram", "ssd"])
        (name,) = [name for name in bucket.names("blocks") if prefix.keys[2].hex() in name]
        bucket.damage(name, how)
        outcomes, _ = fetch(client, NAMESPACE, prefix.keys)
        bad = Outcome.MISS if how == "missing" else Outcome.CORRUPT
        assert outcomes == [Outcome.OK] * 2 + [bad] + [Outcome.OK] * 3
        until(lambda: daemon.errors().get("s3_lost" if how == "missing" else "s3_corrupt", 0) >= 1)
        assert durable(client) != "s3"
        turn(client, Prefix(NAMESPACE, 1, 7), 1)
        until(lambda: durable(client) == "s3")
        daemon.wait_written()
        client.evict(["ram", "ssd"])
        assert fetch(client, NAMESPACE, prefix.keys)[0] == [Outcome.OK] * 6


def test_a_session_record_that_is_damaged_in_the_bucket_is_no_session(bucket: Bucket) -> None:
    first = bucket.daemon("a")
    with contextlib.closing(first.engine()) as client:
        turn(client, Prefix(NAMESPACE, 1, 4))
        until(lambda: durable(client) == "s3")
    (name,) = bucket.names("records/sessions")
    bucket.damage(name, "corrupt")
    second = bucket.daemon("b", ssd_enabled="false")
    with contextlib.closing(second.engine()) as client:
        assert client.session_get("chat") is None
        assert second.errors()["s3_record_corrupt"] >= 1
        turn(client, Prefix(NAMESPACE, 5, 4))
        until(lambda: durable(client) == "s3")


def test_deleting_a_session_deletes_its_own_blocks_in_every_tier_and_spares_shared_ones(bucket: Bucket) -> None:
    daemon = bucket.daemon()
    with contextlib.closing(daemon.engine()) as client:
        turn(client, Prefix(NAMESPACE, 1, 10))
        turn(client, Prefix(NAMESPACE, 1, 4), session_id="another")
        until(lambda: durable(client) == durable(client, "another") == "s3")
        deleted = client.session_delete("chat", namespace=NAMESPACE.digest())
        assert deleted == wire.SessionDeleted(blocks_deleted=6, blocks_shared=4)
        until(lambda: len(bucket.names("blocks")) == 4 and len(bucket.names("records/sessions")) == 1)
        until(lambda: daemon.stats()["tiers"]["ssd"]["blocks"] == 4)
        assert client.session_get("chat") is None
        assert len(client.lookup(Prefix(NAMESPACE, 1, 10).keys).tiers) == 4
        daemon.restart()
        assert client.session_get("chat") is None
        daemon.wait_written()
        client.evict(["ram", "ssd"])
        assert fetch(client, NAMESPACE, Prefix(NAMESPACE, 1, 4).keys)[0] == [Outcome.OK] * 4


@pytest.mark.parametrize("wrong", ["bucket", "secret", "server"])
def test_without_a_bucket_that_answers_everything_else_goes_on(bucket: Bucket, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("x" * 40)
    changes: dict[str, object] = {
        "bucket": {"s3_bucket": "not-there"},
        "secret": {"s3_secret_key_file": tmp_path / "wrong"},
        "server": {"s3_endpoint": "http://127.0.0.1:9", "s3_request_deadline": "1s"},
    }[wrong]
    daemon = bucket.daemon(**changes)
    prefix = Prefix(NAMESPACE, 1, 20)
    with contextlib.closing(daemon.engine()) as client:
        with contextlib.suppress(KVStoreError):
            assert client.session_get("chat", deadline_s=1.0) is None
        turn(client, prefix)
        until(lambda: durable(client) == "ssd")
        assert fetch(client, NAMESPACE, prefix.keys)[0] == [Outcome.OK] * 20
        until(lambda: any(kind.startswith("s3_") for kind in daemon.errors()))
        assert client.ping() > 0
        daemon.restart()
        view = client.session_get("chat")
        assert view is not None and view.durable == "ssd"
        assert fetch(client, NAMESPACE, prefix.keys)[0] == [Outcome.OK] * 20


@pytest.mark.parametrize("mode", ["stall", "reset"])
def test_a_bucket_that_stops_answering_costs_a_deadline_and_no_more(
    bucket: Bucket, s3_server: S3Server, mode: str
) -> None:
    address = urlsplit(s3_server.endpoint)
    assert address.hostname is not None and address.port is not None
    prefix = Prefix(NAMESPACE, 1, 30)
    with Proxy((address.hostname, address.port)) as proxy:
        daemon = bucket.daemon(s3_endpoint=proxy.endpoint, s3_request_deadline="2s")
        with contextlib.closing(daemon.engine()) as client:
            turn(client, prefix)
            until(lambda: durable(client) == "s3")
            daemon.wait_written()
            client.evict(["ram", "ssd"])
            proxy.misbehave(mode)  # type: ignore[arg-type]
            outcomes, _ = fetch(client, NAMESPACE, prefix.keys, deadline_s=0.7)
            assert set(outcomes) <= {Outcome.TIMED_OUT, Outcome.UNAVAILABLE}
            assert client.ping() > 0
            assert client.session_get("chat") is not None
            proxy.misbehave("pass")
            until(lambda: set(fetch(client, NAMESPACE, prefix.keys, 5.0)[0]) == {Outcome.OK})
        daemon.kill()


def test_a_secret_that_cannot_be_read_is_named_and_the_daemon_does_not_start(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    daemon = make_daemon(is_started=False, s3_bucket="bucket", s3_access_key_file=missing, s3_secret_key_file=missing)
    assert str(missing) in daemon.start_refused()


def test_the_buckets_worker_that_is_killed_comes_back(bucket: Bucket) -> None:
    daemon = bucket.daemon()
    prefix = Prefix(NAMESPACE, 1, 20)
    with contextlib.closing(daemon.engine()) as client:
        turn(client, prefix)
        daemon.kill_worker("s3")
        assert client.session_get("chat") is not None
        until(lambda: durable(client) == "s3")
        daemon.wait_written()
        client.evict(["ram", "ssd"])
        assert fetch(client, NAMESPACE, prefix.keys)[0] == [Outcome.OK] * 20


def test_sigterm_waits_until_the_bucket_has_the_session(bucket: Bucket) -> None:
    daemon = bucket.daemon()
    prefix = Prefix(NAMESPACE, 1, 30)
    with contextlib.closing(daemon.engine()) as client:
        turn(client, prefix)
        assert daemon.stop() == 0
    assert len(bucket.names("blocks")) == 30 and len(bucket.names("records/sessions")) == 1
    second = bucket.daemon("b")
    with contextlib.closing(second.engine()) as client:
        assert client.session_get("chat") is not None
        assert fetch(client, NAMESPACE, prefix.keys)[0] == [Outcome.OK] * 30


def test_with_no_disk_sessions_live_in_ram_and_the_bucket(bucket: Bucket) -> None:
    daemon = bucket.daemon(ssd_enabled="false", ram_size="2MiB")
    with contextlib.closing(daemon.engine()) as client:
        for seed in range(6):
            turn(client, Prefix(NAMESPACE, seed, 60), session_id=f"chat-{seed}")
            until(lambda seed=seed: durable(client, f"chat-{seed}") == "s3")
        for seed in range(6):
            assert set(fetch(client, NAMESPACE, Prefix(NAMESPACE, seed, 60).keys)[0]) == {Outcome.OK}
