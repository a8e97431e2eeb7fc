import pytest

from kvstore.connectors.vllm_parts.gate import Gate
from kvstore.core.errors import ProtocolError, TierUnavailable
from kvstore.wire import ErrorCode


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_daemon_that_is_away_may_be_asked_for_each_time() -> None:
    gate = Gate("test", Clock())
    gate.failed(TierUnavailable("no daemon"))
    assert gate.is_open
    assert not gate.is_attached
    gate.passed()
    assert gate.is_attached


def test_one_that_refuses_us_is_left_alone_for_longer_and_longer() -> None:
    clock = Clock()
    gate = Gate("test", clock)
    waits = []
    for _ in range(9):
        gate.failed(ProtocolError(ErrorCode.VERSION, "another version"))
        began = clock.now
        while not gate.is_open:
            clock.now += 0.25
        waits.append(clock.now - began)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_an_answer_ends_the_waiting() -> None:
    clock = Clock()
    gate = Gate("test", clock)
    gate.failed(ProtocolError(ErrorCode.VERSION, "another version"))
    clock.now += 1.0
    gate.passed()
    gate.failed(ProtocolError(ErrorCode.VERSION, "another version"))
    clock.now += 0.5
    assert gate.is_open


def test_a_refusal_of_one_request_says_nothing_of_the_next() -> None:
    gate = Gate("test", Clock())
    gate.passed()
    gate.failed(ProtocolError(ErrorCode.BUSY, "no room for a pin"))
    assert gate.is_open
    assert gate.is_attached


@pytest.mark.parametrize(
    "code", [ErrorCode.BAD_REQUEST, ErrorCode.TOO_LONG, ErrorCode.CONFLICT, ErrorCode.INTERNAL, ErrorCode.BUSY]
)
def test_what_one_client_asked_for_shuts_nobody_out(code: str) -> None:
    """A hint that the daemon refused kept the cache off for everybody, for as long as a client sent it."""
    gate = Gate("test", Clock())
    gate.passed()
    gate.failed(ProtocolError(code, "not like this"))
    assert gate.is_open
    assert gate.is_attached


def test_a_refused_attachment_is_not_asked_for_again_at_once() -> None:
    gate = Gate("test", Clock())
    gate.failed(ProtocolError(ErrorCode.BAD_REQUEST, "no such namespace"))
    assert not gate.is_open


@pytest.mark.parametrize("code", [ErrorCode.VERSION, ErrorCode.MALFORMED])
def test_a_daemon_that_does_not_understand_us_is_left_alone_whatever_it_was_before(code: str) -> None:
    gate = Gate("test", Clock())
    gate.passed()
    gate.failed(ProtocolError(code, "what?"))
    assert not gate.is_open
