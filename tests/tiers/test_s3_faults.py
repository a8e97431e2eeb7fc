"""The S3 tier over buckets that are missing, forbidden or silent, and over slow networks."""

import logging
import random
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError, TierUnavailable
from kvstore.core.outcome import Outcome
from kvstore.s3server import S3Server
from tests.support.blocks import key, meta, payload
from tests.support.proxy import Mode, Proxy
from tests.support.s3tier import (
    DEADLINE_S,
    OPEN,
    behind_proxy,
    fetch,
    proxy,
    s3_client,
    store,
)
from tests.support.scripted import fault, receive_body, respond, scripted
from tiers.s3 import S3Tier
from tiers.s3client import S3Settings

__all__ = ["behind_proxy", "proxy", "s3_client"]


def test_a_missing_bucket_is_unavailable(open_s3: OPEN, s3_settings: S3Settings) -> None:
    tier = open_s3(replace(s3_settings, bucket="not-there"))
    assert store(tier, 1) == [Outcome.UNAVAILABLE]
    assert fetch(tier, 1) == [Outcome.UNAVAILABLE]
    assert tier.contains([key(1)]) == [Outcome.UNAVAILABLE]
    with pytest.raises(TierUnavailable):
        tier.records.get("a")
    assert tier.faults() == {"no_bucket": 4}
    assert "there is no bucket 'not-there'" in tier.trouble


def test_wrong_credentials_are_unavailable_and_never_logged(
    open_s3: OPEN, s3_settings: S3Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wrong").write_text("a-wrong-secret")
    tier = open_s3(replace(s3_settings, secret_key_file=str(tmp_path / "wrong")))
    assert store(tier, 1) == fetch(tier, 1) == tier.contains([key(1)]) == [Outcome.UNAVAILABLE]
    assert tier.faults() == {"forbidden": 3}
    access_key = (tmp_path / "access").read_text().strip()
    assert "forbidden" in caplog.text
    assert "a-wrong-secret" not in caplog.text
    assert access_key not in caplog.text


def test_no_credentials_are_logged_even_at_debug(
    open_s3: OPEN, s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """With `daemon.log_level = "debug"` boto3 logged every request: the access key, its signature, session ids."""
    with caplog.at_level(logging.DEBUG):
        open_s3().records.put("sessions/a", b"text")
    for secret in (s3_server.access_key, "Signature=", "sessions/a"):
        assert secret not in caplog.text


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_a_key_file_that_cannot_be_read_is_an_error_of_configuration(
    s3_settings: S3Settings, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "secret").write_text(content)
    else:
        (tmp_path / "secret").unlink()
    with pytest.raises(ConfigError, match="key file"):
        S3Tier(s3_settings)


def test_nobody_listening_is_unavailable_until_somebody_does(
    proxy: Proxy, behind_proxy: S3Tier, s3_settings: S3Settings
) -> None:
    proxy.misbehave("refuse")
    fresh = S3Tier(replace(s3_settings, endpoint=proxy.endpoint, request_deadline_s=DEADLINE_S))
    assert fetch(fresh, 1) == [Outcome.UNAVAILABLE]
    assert fresh.faults() == {"connection": 1}
    proxy.misbehave("pass")
    assert fetch(fresh, 1) == [Outcome.OK]
    fresh.close()


@pytest.mark.parametrize("answer_bytes", [0, 100, 5000])
@pytest.mark.parametrize("mode", ["stall", "reset", "cut"])
def test_an_answer_that_breaks_off_is_unavailable_within_its_deadline(
    proxy: Proxy, behind_proxy: S3Tier, mode: Mode, answer_bytes: int
) -> None:
    proxy.misbehave(mode, answer_bytes)
    started = time.monotonic()
    assert fetch(behind_proxy, 1) == [Outcome.UNAVAILABLE]
    # Generous, for a machine that is busy otherwise; without a deadline it would be a minute and more.
    assert time.monotonic() - started < 30.0
    assert behind_proxy.faults() == {"timeout" if mode == "stall" else "connection": 1}
    proxy.misbehave("pass")
    assert fetch(behind_proxy, 1) == [Outcome.OK]


def test_a_body_that_crawls_ends_at_its_deadline(behind_proxy: S3Tier, proxy: Proxy) -> None:
    """Timeouts of single system calls passed again and again: over a slow line a PUT of 16 MiB with a deadline of 2 s
    held its thread for 19 s, and a session's record could be received for as long as a byte came now and then."""
    behind_proxy.records.put("sessions/long", bytes(4 << 20))
    proxy.misbehave("crawl")
    large = meta(2, 16 << 20)
    began_s = time.monotonic()
    assert behind_proxy.write([large], [payload(large)]) == [Outcome.UNAVAILABLE]
    with pytest.raises(TierUnavailable, match="timeout"):
        behind_proxy.records.get("sessions/long")
    # Generous too: all of it would take about 20 s.
    assert time.monotonic() - began_s < 12.0
    assert behind_proxy.faults() == {"timeout": 2}


def test_a_sick_bucket_is_left_alone_and_probed_again(proxy: Proxy, s3_settings: S3Settings, open_s3: OPEN) -> None:
    now = [0.0]
    tier = open_s3(
        replace(s3_settings, endpoint=proxy.endpoint),
        clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
    )
    assert store(tier, 1) == [Outcome.OK]
    proxy.misbehave("reset")
    assert fetch(tier, *range(8)) == [Outcome.UNAVAILABLE] * 8
    assert tier.is_left_alone
    assert tier.faults() == {"connection": 5}
    proxy.misbehave("pass")
    before = proxy.num_connections
    assert fetch(tier, 1) == [Outcome.UNAVAILABLE]
    assert proxy.num_connections == before
    now[0] += 10
    assert fetch(tier, 1, 1) == [Outcome.OK, Outcome.OK]
    assert not tier.is_left_alone


def test_a_storm_of_slow_downs_is_met_with_pauses_then_left_alone(s3_settings: S3Settings, open_s3: OPEN) -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    def answer(connection: socket.socket, head: bytes) -> None:
        receive_body(connection, head)
        respond(connection, "503 Slow Down", fault("SlowDown"))

    with scripted(answer) as server:
        settings = replace(s3_settings, endpoint=f"http://127.0.0.1:{server.port}")
        tier = open_s3(settings, clock=lambda: now[0], sleep=sleep, jitter=random.Random(1))
        assert store(tier, *range(8)) == [Outcome.UNAVAILABLE] * 8
        tier.close()
        assert tier.faults() == {"throttled": 5}
        assert tier.is_left_alone
        # Three tries for each of the five, then none at all.
        assert len(server.heads) == 15
    assert len(pauses) == 10
    # Jitter: no two of them alike, so that daemons that were refused together do not come back together.
    assert len(set(pauses)) == 10


def test_a_block_gets_through_between_slow_downs(s3_settings: S3Settings, open_s3: OPEN) -> None:
    tries: list[bytes] = []

    def answer(connection: socket.socket, head: bytes) -> None:
        receive_body(connection, head)
        tries.append(head)
        if len(tries) % 3:
            respond(connection, "503 Slow Down", fault("SlowDown"))
        else:
            respond(connection, "200 OK", b"", 'ETag: "tag"\r\n')

    with scripted(answer) as server:
        settings = replace(s3_settings, endpoint=f"http://127.0.0.1:{server.port}")
        tier = open_s3(settings, sleep=lambda _seconds: None)
        assert store(tier, 1, 2) == [Outcome.OK, Outcome.OK]
        assert tier.faults() == {}
        tier.close()
    assert len(tries) == 6


def test_a_closed_tier_answers_unavailable(open_s3: OPEN) -> None:
    tier = open_s3()
    tier.close()
    assert store(tier, 1) == fetch(tier, 1) == tier.contains([key(1)]) == tier.delete([key(1)])
    assert fetch(tier, 1) == [Outcome.UNAVAILABLE]
