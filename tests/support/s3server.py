"""Fixtures around a real S3 server; imported by the conftest of those folders whose tests need one.

A test that comes to its server by `getfixturevalue` also says `usefixtures("s3_server")`, or the server looks like
something it left open.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from kvstore.s3server import REGION, S3Server
from tiers.s3 import S3Tier
from tiers.s3client import S3Settings

BUCKET = "kvstore-test"
_prefixes = itertools.count()


# A fixture that several conftests import is a fixture of each of them; the server is the same.
_running: list[S3Server] = []
_num_users = 0


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all tests of a run, in a fresh folder; each test has a prefix of its own."""
    global _num_users
    if not _running:
        # Its first call starts threads that stay, and must not look like a test's own.
        MemoryStore().put("x", b"")
        _running.append(S3Server(tmp_path_factory.mktemp("s3"), buckets=[BUCKET]))
    _num_users += 1
    yield _running[0]
    _num_users -= 1
    if _num_users == 0:
        _running.pop().kill()


@pytest.fixture
def s3_client() -> str:
    """The library that talks to the server; a module that runs on every one of them overrides this."""
    return "boto3"


@pytest.fixture
def s3_settings(s3_server: S3Server, s3_client: str, tmp_path: Path) -> S3Settings:
    """Settings with a prefix that nobody else has."""
    return settings_for(s3_server, tmp_path, client=s3_client)


@pytest.fixture
def open_s3(s3_settings: S3Settings) -> Iterator[Callable[..., S3Tier]]:
    """Opens tiers on the server, with other settings where they are given, and closes them."""
    with_clients: list[S3Tier] = []

    def open_tier(settings: S3Settings = s3_settings, client: str = s3_settings.client, **options: Any) -> S3Tier:
        with_clients.append(S3Tier(replace(settings, client=client), **options))
        return with_clients[-1]

    yield open_tier
    for tier in with_clients:
        tier.close()


def settings_for(server: S3Server, folder: Path, **options: Any) -> S3Settings:
    """Return settings for `server`, the credentials in files below `folder`."""
    for name, secret in (("access", server.access_key), ("secret", server.secret_key)):
        (folder / name).write_text(secret + "\n")
    return S3Settings(
        **{
            "bucket": BUCKET,
            "prefix": f"test-{next(_prefixes)}",
            "endpoint": server.endpoint,
            "region": REGION,
            "access_key_file": str(folder / "access"),
            "secret_key_file": str(folder / "secret"),
            **options,
        }
    )
