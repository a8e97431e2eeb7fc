"""The S3 server, for the tests of this folder."""

from tests.support.s3server import open_s3, s3_client, s3_server, s3_settings

__all__ = ["open_s3", "s3_client", "s3_server", "s3_settings"]
