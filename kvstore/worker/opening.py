"""What a worker is told when it starts, and the tier that it opens accordingly."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

import msgspec

from kvstore.config import EncryptionConfig, S3Config, SsdConfig
from kvstore.worker.encryption import load_keys
from tiers.base import RecordStore, Tier
from tiers.codec import Codec
from tiers.inventory import Inventory


class WorkerSettings(msgspec.Struct, frozen=True):
    """`parent` is the process that the worker must not outlive; `ttl_s` is that of sessions."""

    tier: Literal["ssd", "s3"]
    socket: str
    parent: int
    log_level: str
    region_path: str
    epoch: int
    ssd: SsdConfig | None = None
    s3: S3Config | None = None
    encryption: EncryptionConfig = EncryptionConfig()
    ttl_s: float = 0.0

    @property
    def threads(self) -> int:
        """How many blocks are read at once, and in S3 written."""
        section = self.ssd or self.s3
        assert section is not None
        return section.threads


def open_tier(settings: WorkerSettings, *, huge_slots: bool = False) -> tuple[Tier, RecordStore, Inventory | None]:
    """Open the tier that the settings name; `huge_slots`: as for SsdTier. Raises ConfigError, TierUnavailable."""
    # Imported here, so that the SSD's worker does not carry boto3 and the bucket's does not carry LMDB.
    codec = Codec(load_keys(settings.encryption))
    if settings.tier == "ssd":
        from tiers.ssd import SsdTier

        assert settings.ssd is not None
        ssd = SsdTier(
            Path(settings.ssd.path),
            max_bytes=settings.ssd.max_bytes,
            min_free_bytes=settings.ssd.min_free_bytes,
            segment_bytes=settings.ssd.segment_bytes,
            codec=codec,
            huge_slots=huge_slots,
        )
        return ssd, ssd.records, None
    from tiers.autopack import AutoPacking
    from tiers.s3 import S3Settings, S3Tier
    from tiers.s3inventory import S3Inventory

    assert settings.s3 is not None
    # What others packed can be read whatever is configured here.
    packing = AutoPacking()
    packs = settings.s3.compression == "auto"
    codec = replace(codec, transforms={packing.number: packing}, packs_with=packing if packs else None)
    s3_settings = S3Settings(**{field.name: getattr(settings.s3, field.name) for field in fields(S3Settings)})
    s3 = S3Tier(s3_settings, codec=codec, on_sent=packing.sent)
    return s3, s3.records, S3Inventory(s3_settings, s3)
