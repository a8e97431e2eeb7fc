"""boto3 behind the border of object stores: the names of its faults."""

import http.client

import pytest
from botocore.exceptions import BotoCoreError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError
from botocore.parsers import ResponseParserError

from tiers.objects import DeadlinePassed, kind_of
from tiers.s3boto import _kind


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("NoSuchBucket", 404, "no_bucket"),
        ("SignatureDoesNotMatch", 403, "forbidden"),
        ("403", 403, "forbidden"),
        ("InternalError", 500, "server_error"),
        ("SlowDown", 503, "throttled"),
        ("", 429, "throttled"),
        ("ConditionalRequestConflict", 409, "conflict"),
        ("InvalidRequest", 400, "refused"),
    ],
)
def test_answers_of_a_server_are_faults_by_kind(code: str, status: int, kind: str) -> None:
    assert kind_of(code, status) == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoCredentialsError(), "credentials"),
        (EndpointConnectionError(endpoint_url="x"), "connection"),
        (ReadTimeoutError(endpoint_url="x"), "connection"),
        (ResponseParserError("x"), "connection"),
        (http.client.BadStatusLine("x"), "connection"),
        (ConnectionResetError(), "connection"),
        (TimeoutError(), "timeout"),
        (DeadlinePassed(), "timeout"),
        (BotoCoreError(), "refused"),
    ],
)
def test_exceptions_on_the_way_are_faults_by_kind(error: Exception, kind: str) -> None:
    assert _kind(error) == kind
