"""Damage, verification and encryption with real daemons: nothing wrong is served, and what was bad is stored again."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import wire
from kvstore.client import Client
from kvstore.core.block import HEADER_BYTES
from kvstore.core.errors import ProtocolError
from kvstore.core.key import join_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.s3server import S3Server
from tests.support.chats import Prefix, namespace, payload
from tests.support.daemons import DaemonProcess, fetch, store_all
from tests.support.s3server import settings_for
from tests.support.waiting import until
from tiers.s3 import S3Tier

NAMESPACE = namespace()
PREFIX = Prefix(NAMESPACE, 1, 50)
SECRET = "the user's own words"
MakeDaemon = Callable[..., DaemonProcess]


def key_file(folder: Path, name: str, number: int) -> Path:
    path = folder / name
    path.write_text(bytes(range(number, number + 32)).hex())
    path.chmod(0o600)
    return path


def turn(client: Client) -> None:
    store_all(client, NAMESPACE, PREFIX.keys)
    message = wire.ChatMessage("user", SECRET, PREFIX.tokens)
    client.session_put(wire.SessionPut("chat", "", NAMESPACE.digest(), 0, [message], join_keys(PREFIX.keys)))


def durable(daemon: DaemonProcess) -> str:
    with contextlib.closing(daemon.console()) as console:
        return str(console.session_get("chat").durable)


def damage(daemon: DaemonProcess, *numbers: int) -> None:
    """Flip a bit in the payloads of blocks on the disk."""
    for path in sorted((daemon.ssd_dir / "segments").glob("*.seg")):
        data = path.read_bytes()
        with path.open("r+b") as file:
            for number in numbers:
                at = data.find(payload(PREFIX.keys[number]))
                if at >= 0:
                    file.seek(at + 4000)
                    file.write(bytes([data[at + 4000] ^ 1]))


def verified(daemon: DaemonProcess, **options: bool) -> dict[str, wire.ScrubReport]:
    """Verify through the daemon, to the end."""
    with contextlib.closing(daemon.console()) as console:
        console.verify(**options)
        until(lambda: not console.verify_status().is_running)
        found = console.verify_status().tiers
    assert {report.state for report in found.values()} == {"done"}
    return dict(found)


def by_command(daemon: DaemonProcess, *arguments: str, **changes: str) -> tuple[int, dict[str, Any]]:
    """`kvstore verify --json` in a process of its own, with the daemon's settings."""
    done = subprocess.run(
        [sys.executable, "-c", "from kvstore.cli import main; main()", "verify", "--json", *arguments],
        env=daemon._environment | changes,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert b"Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout or b"{}")


def test_damage_on_the_disk_is_found_repaired_and_stored_again_while_the_daemon_serves(
    make_daemon: MakeDaemon,
) -> None:
    daemon = make_daemon()
    with contextlib.closing(daemon.engine()) as client:
        turn(client)
        daemon.wait_written()
        assert verified(daemon)["ssd"].counts["blocks"] == {"ok": 50}
        damage(daemon, 3, 7)
        assert verified(daemon)["ssd"].counts["blocks"] == {"ok": 48, "corrupt": 2}
        client.evict(["ram"])
        code, found = by_command(daemon, "--repair")
        assert (code, found["tiers"]["ssd"]["removed"]) == (1, {"blocks": 2})
        assert by_command(daemon)[0] == 0
        assert len(client.lookup(PREFIX.keys).tiers) == 3
        store_all(client, NAMESPACE, PREFIX.keys)
        daemon.wait_written()
        client.evict(["ram"])
        outcomes, sources = fetch(client, NAMESPACE, PREFIX.keys)
        assert set(outcomes) == {Outcome.OK}
        assert set(sources) == {TierKind.SSD}
    assert verified(daemon)["ssd"].counts["blocks"] == {"ok": 50}


def test_a_damaged_block_that_is_fetched_is_counted_missed_and_healed(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    with contextlib.closing(daemon.engine()) as client:
        turn(client)
        daemon.wait_written()
        client.evict(["ram"])
        damage(daemon, 5)
        outcomes, _ = fetch(client, NAMESPACE, PREFIX.keys)
        assert [i for i, outcome in enumerate(outcomes) if outcome != Outcome.OK] == [5]
        assert outcomes[5] == Outcome.CORRUPT
        until(lambda: "ssd_corrupt" in daemon.errors())
        assert daemon.errors()["ssd_corrupt"] == 1
        store_all(client, NAMESPACE, PREFIX.keys)
        assert set(fetch(client, NAMESPACE, PREFIX.keys)[0]) == {Outcome.OK}


def test_without_a_daemon_the_command_opens_the_disk_itself_and_with_one_it_asks_it(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    with contextlib.closing(daemon.engine()) as client:
        turn(client)
    daemon.wait_written()
    until(lambda: durable(daemon) == "ssd")
    assert by_command(daemon)[0] == 0
    daemon.stop()
    damage(daemon, 1)
    code, found = by_command(daemon, "--repair")
    assert (code, found["tiers"]["ssd"]["counts"]) == (1, {"blocks": {"ok": 49, "corrupt": 1}, "records": {"ok": 1}})
    assert by_command(daemon)[0] == 0
    daemon.start()
    with contextlib.closing(daemon.engine()) as client:
        assert len(client.lookup(PREFIX.keys).tiers) == 1


def test_a_verification_that_is_cancelled_ends(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    with contextlib.closing(daemon.console()) as console:
        console.verify()
        with contextlib.suppress(ProtocolError):
            console.verify()
        console.verify_cancel()
        until(lambda: not console.verify_status().is_running)


def test_with_a_key_nothing_readable_is_on_the_disk_and_another_key_costs_nothing(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    keys = key_file(tmp_path, "key", 1), key_file(tmp_path, "other", 100)
    daemon = make_daemon(encryption_key_file=keys[0])
    with contextlib.closing(daemon.engine()) as client:
        turn(client)
        daemon.wait_written()
        until(lambda: durable(daemon) == "ssd")
        client.evict(["ram"])
        assert set(fetch(client, NAMESPACE, PREFIX.keys)[0]) == {Outcome.OK}
    stored = b"".join(path.read_bytes() for path in daemon.ssd_dir.rglob("*") if path.is_file())
    assert PREFIX.keys[0] in stored
    assert SECRET.encode() not in stored
    assert not any(payload(key)[:64] in stored for key in PREFIX.keys)
    assert verified(daemon)["ssd"].counts == {"blocks": {"ok": 50}, "records": {"ok": 1}}
    daemon.stop()

    daemon._environment["KVSTORE_ENCRYPTION_KEY_FILE"] = str(keys[1])
    daemon.start()
    with contextlib.closing(daemon.engine()) as client:
        assert set(fetch(client, NAMESPACE, PREFIX.keys)[0]) == {Outcome.MISS}
        assert daemon.errors()["ssd_wrong_key"] >= 50
    daemon.stop()

    daemon._environment["KVSTORE_ENCRYPTION_OLD_KEY_FILES"] = str(keys[0])
    daemon.start()
    with contextlib.closing(daemon.engine()) as client:
        assert set(fetch(client, NAMESPACE, PREFIX.keys)[0]) == {Outcome.OK}
        assert durable(daemon) == "ssd"
    log = daemon.log.read_text()
    for path in keys:
        assert path.read_text()[:16] not in log


def test_a_key_file_that_others_can_read_stops_the_start(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    path = key_file(tmp_path, "key", 1)
    path.chmod(0o644)
    daemon = make_daemon(is_started=False, encryption_key_file=path)
    assert f"chmod 600 {path}" in daemon.start_refused()


@pytest.fixture
def open_bucket(s3_server: S3Server, tmp_path: Path) -> Iterator[Callable[..., S3Tier]]:
    opened: list[S3Tier] = []

    def open_tier() -> S3Tier:
        opened.append(S3Tier(settings_for(s3_server, tmp_path)))
        return opened[-1]

    yield open_tier
    for tier in opened:
        tier.close()


def test_damage_in_the_bucket_is_found_and_repaired(
    make_daemon: MakeDaemon, open_bucket: Callable[[], S3Tier], tmp_path: Path
) -> None:
    tier = open_bucket()
    settings = tier._settings
    daemon = make_daemon(
        s3_bucket=settings.bucket,
        s3_prefix=settings.prefix,
        s3_endpoint=settings.endpoint,
        s3_access_key_file=settings.access_key_file,
        s3_secret_key_file=settings.secret_key_file,
        encryption_key_file=key_file(tmp_path, "key", 1),
    )
    with contextlib.closing(daemon.engine()) as client:
        turn(client)
    until(lambda: durable(daemon) == "s3")
    name = tier._blocks.name(PREFIX.keys[9])
    data = bytearray(8192 + HEADER_BYTES)

    def places(num_bytes: int) -> Iterator[memoryview]:
        yield memoryview(data)[:num_bytes]

    assert tier.run(lambda deadline, _: tier.objects.get(name, places, deadline)) is not None
    assert payload(PREFIX.keys[9])[:64] not in data
    data[-1] ^= 1
    tier.run(lambda deadline, _: tier.objects.put(name, [bytes(data)], deadline))
    found = verified(daemon, repair=True)
    assert found["s3"].counts["blocks"] == {"ok": 49, "corrupt": 1}
    assert found["s3"].removed == {"blocks": 1}
    assert found["ssd"].counts["blocks"] == {"ok": 50}
    again = verified(daemon)["s3"]
    assert "corrupt" not in again.counts["blocks"]
    assert again.counts["records"]["ok"] >= 1
