"""Bodies on their way to and from a bucket, held to a deadline: a network that only crawls must not keep a thread.

boto3's own timeouts are about single system calls, so a byte now and then keeps a request going for hours.
"""

import io
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tiers.s3calls import DeadlinePassed

# One receive at a time, so that the clock is looked at between them.
_RECEIVE_BYTES = 1 << 20


class Traffic:
    """Sends and receives for requests that have `request_deadline_s` each. Thread-safe."""

    def __init__(self, request_deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._request_deadline_s = request_deadline_s
        self._clock = clock

    def body(self, data: bytes, deadline: float) -> io.BytesIO:
        """Return `data` as a body for boto3. Sending it raises DeadlinePassed, wrapped, once `deadline` is over."""
        return _Outgoing(data, deadline, self._clock)

    def receive(self, body: Any, places: Iterable[memoryview], deadline: float) -> None:
        """Fill the places from boto3's `body`, each before the next is asked for.

        Raises DeadlinePassed, or what urllib3 raises; the connection is then closed."""
        # The body as urllib3 gives it: botocore's wrapper has no way to receive what is there and no more.
        with body as stream:
            for place in places:
                filled = 0
                while filled < len(place):
                    piece = self._piece(body, stream, len(place) - filled, deadline)
                    if not piece:
                        raise ConnectionError("the body ended early")
                    place[filled : filled + len(piece)] = piece
                    filled += len(piece)
            # Takes note of the end of the body, so that the connection can serve the next request.
            stream.read1(1)

    def receive_all(self, response: Mapping[str, Any], max_bytes: int, deadline: float) -> bytes | None:
        """Return the whole body of boto3's `response`, None where it is longer than `max_bytes`. Raises as `receive`
        does."""
        num_bytes = response.get("ContentLength")
        if num_bytes is None:
            raise ConnectionError("the answer does not say how long its body is")
        if num_bytes > max_bytes:
            response["Body"].close()
            return None
        data = bytearray(num_bytes)
        self.receive(response["Body"], [memoryview(data)], deadline)
        return bytes(data)

    def _piece(self, body: Any, stream: Any, num_bytes: int, deadline: float) -> bytes:
        left_s = deadline - self._clock()
        if left_s <= 0:
            raise DeadlinePassed
        # Not as short as a moment: the next request over this connection will be sent with the same timeout.
        body.set_socket_timeout(max(left_s, self._request_deadline_s / 10))
        piece: bytes = stream.read1(min(_RECEIVE_BYTES, num_bytes))
        return piece


class _Outgoing(io.BytesIO):
    def __init__(self, data: bytes, deadline: float, clock: Callable[[], float]) -> None:
        super().__init__(data)
        self._deadline = deadline
        self._clock = clock

    def read(self, size: int | None = -1, /) -> bytes:
        if self._clock() >= self._deadline:
            raise DeadlinePassed
        return super().read(size)
