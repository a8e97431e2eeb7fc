"""The bytes of boto3's requests: one deadline for all of them, connections that serve again, proxies, TLS."""

import datetime
import ipaddress
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvstore.core.errors import ConfigError
from tests.support.clock import Clock
from tests.support.scripted import fault, length_of, receive_body, receive_head, respond, scripted
from tiers.objects import ObjectFault
from tiers.s3boto import BotoObjects
from tiers.s3client import S3Settings

DEADLINE_S = 10.0
OPEN = Callable[..., BotoObjects]
ETAG = 'ETag: "tag"\r\n'


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def open_objects(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[OPEN]:
    opened: list[BotoObjects] = []
    for name in ("access", "secret"):
        (tmp_path / name).write_text("a-key")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)

    def open_one(endpoint: str) -> BotoObjects:
        settings = S3Settings(
            "bucket",
            endpoint=endpoint,
            access_key_file=str(tmp_path / "access"),
            secret_key_file=str(tmp_path / "secret"),
            request_deadline_s=DEADLINE_S,
        )
        opened.append(BotoObjects(settings, clock))
        return opened[-1]

    yield open_one
    for objects in opened:
        objects.close()


def get(objects: BotoObjects, num_bytes: int = 4, deadline: float = DEADLINE_S) -> bytes:
    place = bytearray(num_bytes)
    assert objects.get("a", lambda _num_bytes: [memoryview(place)], deadline) is not None
    return bytes(place)


# ---------------------------------------------------------------- one deadline


@pytest.mark.parametrize("part", ["status line", "headers", "body"])
def test_bytes_that_come_one_by_one_end_at_the_deadline(open_objects: OPEN, clock: Clock, part: str) -> None:
    """The time limit was one of single system calls, and set anew for the body: a header could overrun it by half, and
    one that came byte by byte took for ever."""
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n" + b"X-Slow: header\r\n" * 10 + b"\r\n" + bytes(1000)
    at_once = {"status line": 2, "headers": 30, "body": whole.index(b"\r\n\r\n") + 10}[part]
    sent: list[int] = []

    def answer(connection: socket.socket, _head: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(whole[:at_once])
        for byte in whole[at_once:]:
            clock.now += 0.25
            sent.append(byte)
            connection.sendall(bytes([byte]))

    with scripted(answer) as server:
        objects = open_objects(f"http://127.0.0.1:{server.port}")
        with pytest.raises(ObjectFault, match="timeout"):
            get(objects, 1000)
        objects.close()


def test_a_body_that_is_not_taken_ends_at_the_deadline(open_objects: OPEN, clock: Clock) -> None:
    def answer(connection: socket.socket, _head: bytes) -> None:
        connection.recv(1 << 16)
        clock.now += DEADLINE_S
        while connection.recv(1 << 16):
            pass

    with scripted(answer) as server:
        objects = open_objects(f"http://127.0.0.1:{server.port}")
        with pytest.raises(ObjectFault, match="timeout"):
            objects.put("a", [bytes(64 << 20)], DEADLINE_S)


def test_a_request_without_time_is_not_made(open_objects: OPEN, clock: Clock) -> None:
    with scripted(lambda connection, _head: respond(connection, "200 OK", b"data", ETAG)) as server:
        clock.now = DEADLINE_S
        with pytest.raises(ObjectFault, match="timeout"):
            get(open_objects(f"http://127.0.0.1:{server.port}"))
        assert server.heads == []


# ---------------------------------------------------------------- connections


def test_a_connection_that_the_server_closed_meanwhile_is_not_used_again(open_objects: OPEN) -> None:
    closed = []

    def answer_once(connection: socket.socket, _head: bytes) -> None:
        respond(connection, "200 OK", b"data", ETAG)
        if not closed:
            closed.append(True)
            connection.shutdown(socket.SHUT_RDWR)

    with scripted(answer_once) as server:
        objects = open_objects(f"http://127.0.0.1:{server.port}")
        assert get(objects) == b"data"
        (idle,) = objects._transport._idle
        # Until the end of the connection has come.
        select.select([idle.sock], [], [], 30)
        assert [get(objects), get(objects)] == [b"data"] * 2
        assert server.num_connections == 2


def test_an_answer_that_was_not_read_to_its_end_costs_its_connection(open_objects: OPEN) -> None:
    class Enough(Exception):
        pass

    def places(_num_bytes: int) -> Iterator[memoryview]:
        yield memoryview(bytearray(2))
        raise Enough

    with scripted(lambda connection, _head: respond(connection, "200 OK", b"data", ETAG)) as server:
        objects = open_objects(f"http://127.0.0.1:{server.port}")
        with pytest.raises(Enough):
            objects.get("a", places, DEADLINE_S)
        assert get(objects) == b"data"
        assert server.num_connections == 2


def test_a_refusal_before_the_body_was_taken_is_heard(open_objects: OPEN) -> None:
    def answer(connection: socket.socket, _head: bytes) -> None:
        respond(connection, "412 Precondition Failed", fault("PreconditionFailed"), "Connection: close\r\n")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass

    with scripted(answer) as server:
        objects = open_objects(f"http://127.0.0.1:{server.port}")
        assert objects.put("a", [bytes(1 << 20)], DEADLINE_S, if_absent=True) is None


def test_a_body_in_chunks_of_no_stated_length_is_no_object(open_objects: OPEN) -> None:
    def answer(connection: socket.socket, _head: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ndata\r\n0\r\n\r\n")

    with (
        scripted(answer) as server,
        pytest.raises(ObjectFault, match="connection"),
    ):
        get(open_objects(f"http://127.0.0.1:{server.port}"))


@pytest.mark.parametrize("garbage", [b"no HTTP at all\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"])
def test_an_answer_that_is_none_is_a_fault_of_the_connection(open_objects: OPEN, garbage: bytes) -> None:
    def answer(connection: socket.socket, _head: bytes) -> None:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_RDWR)

    with scripted(answer) as server, pytest.raises(ObjectFault, match="connection"):
        get(open_objects(f"http://127.0.0.1:{server.port}"), 9)


def test_a_put_sends_the_pieces_in_order_and_asks_for_no_permission(open_objects: OPEN) -> None:
    bodies = []

    def answer(connection: socket.socket, head: bytes) -> None:
        bodies.append(receive_body(connection, head))
        respond(connection, "200 OK", b"", ETAG)

    pieces = [b"small", memoryview(bytes(range(256)) * 1000), b"", b"end"]
    with scripted(answer) as server:
        assert open_objects(f"http://127.0.0.1:{server.port}").put("a", pieces, DEADLINE_S) == '"tag"'
        (head,) = server.heads
    assert bodies == [b"".join(pieces)]
    assert length_of(head) == len(bodies[0])
    assert b"expect" not in head.lower()
    assert b"chunked" not in head.lower()


# ---------------------------------------------------------------- proxies, TLS


def test_a_proxy_of_the_environment_is_told_the_whole_address(
    open_objects: OPEN, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted(lambda connection, _head: respond(connection, "200 OK", b"data", ETAG)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:p%40ss@127.0.0.1:{proxy.port}")
        objects = open_objects("http://bucket.invalid:8333")
        assert get(objects) == b"data"
        (head,) = proxy.heads
        monkeypatch.setenv("no_proxy", "bucket.invalid")
        with pytest.raises(ObjectFault, match="connection"):
            get(open_objects("http://bucket.invalid:8333"))
    assert head.startswith(b"GET http://bucket.invalid:8333/bucket/a HTTP/1.1\r\nHost: bucket.invalid:8333\r\n")
    assert b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n" in head


def test_https_trusts_the_bundle_that_is_named_and_nobody_else(
    open_objects: OPEN, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, bundle = self_signed(tmp_path)
    with scripted(lambda connection, _head: respond(connection, "200 OK", b"data", ETAG), tls) as server:
        with pytest.raises(ObjectFault, match="connection"):
            get(open_objects(f"https://127.0.0.1:{server.port}"))
        monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
        assert get(open_objects(f"https://127.0.0.1:{server.port}")) == b"data"


def test_a_bundle_that_cannot_be_read_is_an_error_of_configuration(
    open_objects: OPEN, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="CA bundle"):
        open_objects("https://127.0.0.1:1")


def test_https_goes_through_a_proxy_in_a_tunnel(
    open_objects: OPEN, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, bundle = self_signed(tmp_path)
    asked: list[bytes] = []

    def tunnel(connection: socket.socket, head: bytes) -> None:
        asked.append(head)
        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        with tls.wrap_socket(connection.dup(), server_side=True) as inside:
            receive_head(inside)
            respond(inside, "200 OK", b"data", ETAG + "Connection: close\r\n")

    with scripted(tunnel) as proxy:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        assert get(open_objects("https://127.0.0.1:8444")) == b"data"
    assert asked[0].startswith(b"CONNECT 127.0.0.1:8444 HTTP/1.1\r\n")


def self_signed(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Return what a server of 127.0.0.1 needs, and the certificate that its clients must trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    bundle = folder / "certificate.pem"
    bundle.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "private.pem").write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(bundle, folder / "private.pem")
    return context, bundle
