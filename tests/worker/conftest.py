"""The rigs that the tests here work with."""

from tests.support.rigs import bucket, make_rig

__all__ = ["bucket", "make_rig"]
