from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError
from tiers.s3client import S3Settings, make_client
from tiers.s3trouble import describe

SETTINGS = S3Settings("my-kv", endpoint="http://name:password@store.example:9000/path")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no_bucket", "no bucket 'my-kv' at store.example:9000"),
        ("forbidden", "refuses our credentials"),
        ("credentials", "s3.access_key_file"),
        ("connection", "store.example:9000 cannot be reached"),
        ("throttled", "(throttled)"),
    ],
)
def test_each_fault_is_said_in_words_and_without_secrets(fault: str, said: str) -> None:
    text = describe(fault, SETTINGS)
    assert said in text
    assert "password" not in text


def test_without_an_endpoint_the_bucket_is_at_aws() -> None:
    assert "at AWS" in describe("no_bucket", S3Settings("my-kv"))


def test_half_of_the_credentials_is_a_wrong_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It ended the worker with a traceback, again and again."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY"):
        make_client(S3Settings("my-kv", endpoint="http://127.0.0.1:9"))


def test_a_profile_that_is_not_there_is_a_wrong_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="nobody"):
        make_client(S3Settings("my-kv", endpoint="http://127.0.0.1:9"))
