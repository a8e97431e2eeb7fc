"""Lists the blocks and records that are in a bucket: `tiers.inventory.Inventory` on the S3 tier."""

import re
from collections.abc import Sequence

import numpy as np

from kvstore.core.key import KEY_BYTES, BlockKey
from kvstore.core.outcome import Outcome
from tiers.inventory import BlockPage, RecordPage
from tiers.objects import Page
from tiers.s3 import S3Tier
from tiers.s3client import S3Settings

_BLOCK = re.compile(rf"([0-9a-f]{{2}})/(\1[0-9a-f]{{{2 * KEY_BYTES - 2}}})")


class S3Inventory:
    """Thread-safe; makes its requests as `tier` does, with the same breaker in front of them."""

    def __init__(self, settings: S3Settings, tier: S3Tier) -> None:
        self._folder = settings.key("blocks/")
        self._tier = tier

    def blocks(self, following: str | None = None) -> BlockPage:
        page: Page = self._tier.run(
            lambda deadline, _attempt: self._tier.objects.list(self._folder, deadline, following=following)
        )
        keys, num_bytes, modified_s = [], [], []
        for listed in page.objects:
            match = _BLOCK.fullmatch(listed.name.removeprefix(self._folder))
            if match is not None:
                keys.append(bytes.fromhex(match[2]))
                num_bytes.append(listed.num_bytes)
                modified_s.append(listed.modified_s)
        return BlockPage(
            b"".join(keys),
            np.array(num_bytes, dtype=np.int64),
            np.array(modified_s, dtype=np.float64),
            page.following,
        )

    def records(self, prefix: str, following: str | None = None) -> RecordPage:
        return self._tier.records.page(prefix, following)

    def delete_blocks(self, keys: Sequence[BlockKey]) -> int:
        return sum(outcome != Outcome.OK for outcome in self._tier.delete(keys))

    def abort_uploads(self, begun_before_s: float) -> int:
        return self._tier.abort_unfinished_uploads(begun_before_s)
