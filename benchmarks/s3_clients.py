"""What the clients of the S3 tier cost: bytes per second, and CPU seconds of the client per gigabyte.

    python -m benchmarks.s3_clients [--block-mib 2] [--blocks 64] [--threads 8] [--rounds 7] [--json]

Each round puts and then gets all blocks with every client in turn, beginning with another one each time, against a real
server (SeaweedFS) on loopback, so that what disturbs the machine disturbs all of them. "raw" is boto3 as one would use
it: `put_object(Body=bytes)` and `get_object()["Body"].read()`, checksums only when required. The others are the tier's
own clients, which also send a header page and receive into a place that is there already.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import boto3
from botocore.config import Config

from kvstore.core.block import HEADER_BYTES
from kvstore.s3server import REGION, S3Server
from tiers.objects import ObjectStore
from tiers.s3boto import BotoObjects
from tiers.s3client import S3Settings
from tiers.s3obstore import ObstoreObjects

_BUCKET = "bench"
_DEADLINE_S = 60.0
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Client:
    """`put(name, payload)` and `get(name, place)` make one request each; any thread may call them."""

    put: Callable[[str, bytes], object]
    get: Callable[[str, memoryview], object]


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians over the rounds; `spread` is (largest - smallest) / median of the speeds."""

    client: str
    what: str
    gb_per_s: float
    spread: float
    cpu_s_per_gb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--block-mib", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="s3-clients-") as folder, _clients(Path(folder), options.threads) as found:
        figures = _measure(found, options.block_mib << 20, options.blocks, options.threads, options.rounds)
    about = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "block_bytes": options.block_mib << 20,
        "blocks": options.blocks,
        "threads": options.threads,
        "rounds": options.rounds,
    }
    if options.json:
        print(json.dumps({**about, "figures": [asdict(figure) for figure in figures]}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'client':10}{'':6}{'GB/s':>8}{'spread':>8}{'CPU s/GB':>10}")
    for figure in figures:
        print(f"{figure.client:10}{figure.what:6}{figure.gb_per_s:8.3f}{figure.spread:8.0%}{figure.cpu_s_per_gb:10.2f}")


def _measure(clients: dict[str, Client], block_bytes: int, blocks: int, threads: int, rounds: int) -> list[Figure]:
    payloads = [os.urandom(block_bytes) for _ in range(4)]
    places = threading.local()
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def place() -> memoryview:
        if not hasattr(places, "view"):
            places.view = memoryview(bytearray(block_bytes))
        view: memoryview = places.view
        return view

    names = list(clients)
    with ThreadPoolExecutor(threads) as pool:
        for number in range(rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                client = clients[name]
                keys = [f"{name}/{number}/{block}" for block in range(blocks)]
                for what, action in (
                    ("put", lambda key, client=client: client.put(key, payloads[len(key) % 4])),
                    ("get", lambda key, client=client: client.get(key, place())),
                ):
                    sample = _timed(lambda action=action, keys=keys: list(pool.map(action, keys)))
                    # The first round opens connections and touches memory.
                    if number:
                        samples.setdefault((name, what), []).append(sample)
    num_gb = blocks * block_bytes / _GB
    figures = []
    for (name, what), found in sorted(samples.items(), key=lambda item: (item[0][1], names.index(item[0][0]))):
        speeds = [num_gb / wall_s for wall_s, _ in found]
        middle = statistics.median(speeds)
        cpu_s = statistics.median(cpu_s for _, cpu_s in found)
        figures.append(Figure(name, what, middle, (max(speeds) - min(speeds)) / middle, cpu_s / num_gb))
    return figures


def _timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds; the server is another process, and not counted."""
    before, began_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    action()
    wall_s, after = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_SELF)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextmanager
def _clients(folder: Path, threads: int) -> Iterator[dict[str, Client]]:
    server = S3Server(folder / "server", buckets=[_BUCKET])
    for name, secret in (("access", server.access_key), ("secret", server.secret_key)):
        (folder / name).write_text(secret)
    settings = S3Settings(
        _BUCKET,
        endpoint=server.endpoint,
        region=REGION,
        access_key_file=str(folder / "access"),
        secret_key_file=str(folder / "secret"),
        threads=threads,
        request_deadline_s=_DEADLINE_S,
    )
    ours = [BotoObjects(settings), ObstoreObjects(settings)]
    try:
        yield {"raw": _raw(server, threads), "boto3": _through(ours[0]), "obstore": _through(ours[1])}
    finally:
        for objects in ours:
            objects.close()
        server.kill()


def _through(objects: ObjectStore) -> Client:
    header = bytes(HEADER_BYTES)

    def put(name: str, payload: bytes) -> None:
        objects.put(name, [header, payload], time.monotonic() + _DEADLINE_S, if_absent=True)

    def get(name: str, place: memoryview) -> None:
        head = memoryview(bytearray(HEADER_BYTES))
        objects.get(name, lambda _num_bytes: [head, place], time.monotonic() + _DEADLINE_S)

    return Client(put, get)


def _raw(server: S3Server, threads: int) -> Client:
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=REGION,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(
            max_pool_connections=threads,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        ),
    )
    return Client(
        lambda name, payload: client.put_object(Bucket=_BUCKET, Key=name, Body=payload),
        lambda name, _place: client.get_object(Bucket=_BUCKET, Key=name)["Body"].read(),
    )


if __name__ == "__main__":
    main()
