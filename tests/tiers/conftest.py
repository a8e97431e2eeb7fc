"""The S3 server and an SSD tier, for the tests of this folder."""

from tests.support.s3server import open_s3, s3_client, s3_server, s3_settings
from tests.support.ssd import folder, opened

__all__ = ["folder", "open_s3", "opened", "s3_client", "s3_server", "s3_settings"]
