"""Settings under which every part of the benchmark takes a second, and a real S3 server."""

from pathlib import Path

import pytest

from kvstore.bench.settings import MIB, BenchSettings
from kvstore.s3server import S3Server
from tests.support.bench import TINY, Rounds
from tests.support.s3server import BUCKET, s3_server

__all__ = ["s3_server"]


@pytest.fixture
def settings(tmp_path: Path, shm_dir: Path) -> BenchSettings:
    return BenchSettings(
        tmp_path,
        shm_dir,
        (TINY,),
        rounds=2,
        churn_bytes=4 * MIB,
        lookup_tokens=2048,
        lookup_rounds=3,
        catalog_blocks=700,
    )


@pytest.fixture
def rounds() -> "Rounds":
    return Rounds()


@pytest.fixture
def where(s3_server: S3Server, tmp_path: Path) -> dict[str, str]:
    """How a daemon finds the tests' own server."""
    for name, secret in (("access", s3_server.access_key), ("secret", s3_server.secret_key)):
        (tmp_path / name).write_text(secret)
    return {
        "bucket": BUCKET,
        "endpoint": s3_server.endpoint,
        "region": "us-east-1",
        "access_key_file": str(tmp_path / "access"),
        "secret_key_file": str(tmp_path / "secret"),
    }
