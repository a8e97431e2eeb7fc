"""S3: puts and gets of the real tier, against boto3 alone with the same concurrency, both on the same real server.

The server is SeaweedFS on this machine (`kvstore/s3server.py`), so the figures are about the client's CPU time and
not about a network. boto3 alone is a client with a default configuration but for the pool of connections, path
addresses and its own checksums, which are off where the server does not ask for them, as in the tier; its bodies are
in memory already and it verifies nothing. The tier writes a header and a checksum with each block and verifies both
on the way back.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from kvstore.bench.memory import Buffers
from kvstore.bench.samples import Compared, Timing, in_turns
from kvstore.bench.settings import BenchSettings, Sizes
from kvstore.bench.ssd import blocks, expect
from kvstore.s3server import REGION, S3Server
from tiers.s3 import S3Tier
from tiers.s3client import S3Settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "kvstore-bench"


@contextmanager
def server(folder: Path) -> Iterator[tuple[S3Server, dict[str, str]]]:
    """A running server with the bucket, and the settings under which a daemon finds it. Raises ConfigError where the
    server is not installed."""
    with S3Server(folder / "s3", buckets=[BUCKET]) as running:
        files = {"access_key_file": running.access_key, "secret_key_file": running.secret_key}
        for name, secret in files.items():
            path = folder / name
            path.touch(mode=0o600)
            path.write_text(secret)
        where = {"bucket": BUCKET, "endpoint": running.endpoint, "region": REGION}
        yield running, where | {name: str(folder / name) for name in files}


def measure(
    settings: BenchSettings, sizes: Sizes, where: dict[str, str], on_round: Callable[[], None]
) -> dict[str, Compared]:
    """Return put and get. `where`: from `server`."""
    options: dict[str, Any] = {**where, "prefix": f"tier-{sizes.block_bytes}", "threads": settings.s3_threads}
    chosen = S3Settings(**options)
    here, there = (Buffers(sizes.num_blocks, sizes.block_bytes, seed) for seed in (1, 2))
    bodies = [bytes(view) for view in here.views]
    indexes = range(sizes.num_blocks)
    with (
        closing(S3Tier(chosen)) as tier,
        closing(_plain(where, settings.s3_threads)) as client,
        ThreadPoolExecutor(settings.s3_threads) as threads,
    ):

        def ours(number: int) -> dict[str, float]:
            metas = blocks(sizes, number)
            started = time.perf_counter()
            for outcome in threads.map(lambda i: tier.write([metas[i]], [here.views[i]]), indexes):
                expect(outcome)
            put = time.perf_counter()
            for outcome in threads.map(lambda i: tier.read([metas[i]], [there.views[i]]), indexes):
                expect(outcome)
            got = time.perf_counter()
            assert there.views[-1] == here.views[-1], "other bytes came back"
            expect(tier.delete([meta.key for meta in metas]))
            return {"put": put - started, "get": got - put}

        def ceiling(number: int) -> dict[str, float]:
            names = [f"plain/{number}/{i}" for i in indexes]
            started = time.perf_counter()
            for _ in threads.map(lambda i: client.put_object(Bucket=BUCKET, Key=names[i], Body=bodies[i]), indexes):
                pass
            put = time.perf_counter()
            sizes_read = list(
                threads.map(lambda i: len(client.get_object(Bucket=BUCKET, Key=names[i])["Body"].read()), indexes)
            )
            got = time.perf_counter()
            assert sizes_read == [sizes.block_bytes] * sizes.num_blocks
            client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": name} for name in names]})
            return {"boto3 put": put - started, "boto3 get": got - put}

        seconds = in_turns([ours, ceiling], settings.rounds, on_round)
    timings = {part: Timing(tuple(taken), sizes.total_bytes) for part, taken in seconds.items()}
    return {part: Compared(timings[part], {"boto3": timings[f"boto3 {part}"]}) for part in ("put", "get")}


def _plain(where: dict[str, Any], threads: int) -> "S3Client":
    return boto3.session.Session().client(
        "s3",
        endpoint_url=where["endpoint"],
        region_name=where["region"],
        aws_access_key_id=Path(where["access_key_file"]).read_text(),
        aws_secret_access_key=Path(where["secret_key_file"]).read_text(),
        config=Config(
            max_pool_connections=threads,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        ),
    )
