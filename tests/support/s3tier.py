"""An S3 tier on a real server, with each client, and what stands between the two. Import the fixtures that are used."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from kvstore.core.outcome import Outcome
from kvstore.s3server import S3Server
from tests.support.blocks import blank, key, meta, payload
from tests.support.proxy import Proxy
from tiers.base import Tier
from tiers.s3 import S3Tier
from tiers.s3client import S3Settings, make_client

# Everything here holds with every client.
CLIENTS = ["boto3", "obstore"]
OPEN = Callable[..., S3Tier]
DEADLINE_S = 1.0


def store(tier: Tier, *numbers: int) -> list[Outcome]:
    blocks = [meta(number) for number in numbers]
    return tier.write(blocks, [payload(block) for block in blocks])


def fetch(tier: Tier, *numbers: int) -> list[Outcome]:
    """Read the blocks; every one that answers OK must have the right bytes."""
    blocks = [meta(number) for number in numbers]
    into = [blank(block) for block in blocks]
    outcomes = tier.read(blocks, into)
    for block, view, outcome in zip(blocks, into, outcomes, strict=True):
        assert outcome is not Outcome.OK or view == payload(block)
    return outcomes


def name_of(settings: S3Settings, number: int) -> str:
    text = key(number).hex()
    return f"{settings.prefix}/blocks/{text[:2]}/{text}"


class Bucket:
    """The bucket as anybody with the credentials sees it."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self.client = make_client(settings)

    def get(self, name: str) -> bytes:
        with self.client.get_object(Bucket=self.settings.bucket, Key=name)["Body"] as body:
            data = body.read()
        assert isinstance(data, bytes)
        return data

    def put(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.settings.bucket, Key=name, Body=data)


@pytest.fixture(params=CLIENTS)
def s3_client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bucket(s3_settings: S3Settings) -> Iterator[Bucket]:
    bucket = Bucket(s3_settings)
    yield bucket
    bucket.client.close()


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    address = urlsplit(s3_server.endpoint)
    assert address.hostname is not None
    assert address.port is not None
    with Proxy((address.hostname, address.port)) as proxy:
        yield proxy


@pytest.fixture
def behind_proxy(proxy: Proxy, s3_settings: S3Settings, open_s3: OPEN) -> S3Tier:
    tier = open_s3(replace(s3_settings, endpoint=proxy.endpoint, request_deadline_s=DEADLINE_S))
    assert store(tier, 1) == [Outcome.OK]
    return tier
