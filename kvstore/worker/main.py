"""The worker process of one slow tier: it alone touches the disk or the bucket, and the shared region.

A process of its own, since checksums and S3 clients burn CPU and the control thread must not wait for the
interpreter lock. Started by `kvstore/store/link.py` as `python -m kvstore.worker.main` with WorkerSettings as JSON on
standard input; it ends on Stop and dies with its parent. What it does meanwhile is in `serving.py`.
"""

import logging
import signal
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from kvstore.config import S3Config
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.process import WORKER_NICE, end_with_parent, stand_back
from kvstore.worker import ops
from kvstore.worker.janitor import Janitor, JanitorSettings
from kvstore.worker.opening import WorkerSettings, open_tier
from kvstore.worker.serving import Worker
from tiers.region import Region


def main() -> int:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSettings)
    logging.basicConfig(
        level=settings.log_level.upper(), format=f"%(asctime)s %(levelname)s {settings.tier}: %(message)s"
    )
    end_with_parent(settings.parent, signal.SIGKILL)
    stand_back(WORKER_NICE)
    # The daemon decides when to stop; a Ctrl-C in its terminal reaches this process too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(settings.socket)
    try:
        region = Region.attach(Path(settings.region_path), settings.epoch)
        tier, records, inventory = open_tier(settings, huge_slots=region.is_huge())
    except KVStoreError as error:
        failed = ops.Failed(str(error), fatal=isinstance(error, ConfigError))
        socket.send(ops.encoder.encode([failed]))
        context.destroy()
        return 1
    # Else the first copy to each slot would be several times as slow; meanwhile the worker serves.
    threading.Thread(target=region.populate, name="populate", daemon=True).start()
    worker = Worker(socket, tier, records, region, settings.threads, batching=settings.tier == "ssd")
    if inventory is not None and settings.s3 is not None:
        worker.janitor = Janitor(records, inventory, _janitor_settings(settings.s3, settings.ttl_s), worker.report)
    try:
        worker.run()
    finally:
        tier.close()
        region.close()
        context.destroy()
    return 0


def _janitor_settings(s3: S3Config, ttl_s: float) -> JanitorSettings:
    return JanitorSettings(
        tombstone_poll_s=s3.tombstone_poll_s,
        sweep_every_s=s3.sweep_every_s,
        orphan_grace_s=s3.orphan_grace_s,
        max_bytes=s3.max_bytes,
        ttl_s=ttl_s,
        write=s3.write,
    )


if __name__ == "__main__":
    sys.exit(main())
