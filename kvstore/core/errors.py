"""Faults: everything that is not an expected result.

Expected results of a call (miss, pending, busy, full …) are values, see `outcome.py`.
"""


class KVStoreError(Exception):
    """Base of every fault this project raises."""


class ConfigError(KVStoreError):
    """A setting is unknown, malformed or cannot hold on this machine; the message says what to change."""


class CorruptBlock(KVStoreError):
    """Bytes that came back are not the bytes that were stored; the copy is to be deleted, the answer is a miss."""


class WrongKey(KVStoreError):
    """Bytes that came back are whole but encrypted with a key we do not have, or not encrypted where they must be; the
    copy stays, since the right key may come with the next start, the answer is a miss."""


class TierUnavailable(KVStoreError):
    """A tier, or the whole daemon, does not answer now; whatever was asked for counts as a miss."""


class ProtocolError(KVStoreError):
    """A message breaks the wire protocol: malformed, over-long, another version, an older epoch.

    `code` is one of `kvstore.wire.ErrorCode`, so that programs need not read the text.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
