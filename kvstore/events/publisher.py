"""The process that publishes KV events: it encodes what the control thread hands it, sends it, and sends it again.

Its own process, since encoding token ids and replaying thousands of batches burn CPU beside the control thread.
Started by `kvstore/events_process.py` as `python -m kvstore.events.publisher` with PublisherSettings as JSON on
standard input; it dies with its parent.

    PAIR    batches from the control thread, answered one by one
    PUB     [topic, sequence as 8 bytes big-endian, payload]; who reads too slowly misses some, as the sequence shows
    ROUTER  asked for a sequence, it sends the batches from there on that are still kept (kvstore/events/replay.py)
"""

import logging
import os
import signal
import sys

import msgspec
import zmq

from kvstore.config import EventsConfig
from kvstore.core.errors import ConfigError
from kvstore.events import admission, changes, vllm_format
from kvstore.events.replay import Replay
from kvstore.process import HTTP_NICE, end_with_parent, stand_back

_log = logging.getLogger(__name__)
BAD_SETTINGS = 2
# Batches that wait in the library for one slow reader, until it misses some.
_HIGH_WATER = 10_000
_REPLAY_HIGH_WATER = 256
_BATCHES_PER_STEP = 32
# A reader that takes nothing more is tried again after so long.
_RETRY_MS = 20


class PublisherSettings(msgspec.Struct, frozen=True):
    """`socket` is the control thread's; `parent` the process not to be outlived."""

    socket: str
    parent: int
    log_level: str
    events: EventsConfig


def main() -> int:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=PublisherSettings)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s events: %(message)s")
    end_with_parent(settings.parent, signal.SIGKILL)
    stand_back(HTTP_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)  # sockets of ipc:// are files
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        publisher = Publisher(context, settings.events, settings.socket)
    except (ConfigError, zmq.ZMQError) as error:
        _log.error("events cannot be published: %s", error)
        context.destroy(linger=0)
        return BAD_SETTINGS
    try:
        publisher.run()
    finally:
        context.destroy(linger=0)
    return 0


class Publisher:
    """See the module. Raises ConfigError and zmq.ZMQError where it cannot be opened."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", events: EventsConfig, control: str) -> None:
        self._topic = events.topic.encode()
        self._gate: admission.Gate | None = None
        secret_key = b""
        if events.curve_secret_key_file:
            secret_key = admission.read_secret_key(events.curve_secret_key_file)
            allowed = admission.read_public_keys(events.curve_clients_file)
            self._gate = admission.make_gate(context, allowed)
        self._pub = context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._open(self._pub, events.endpoint, secret_key, connect=events.connect)
        self._router: zmq.Socket[bytes] | None = None
        if events.replay_endpoint:
            self._router = context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, _REPLAY_HIGH_WATER)
            # Without this, what a slow or lost reader does not take would be dropped in silence.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._open(self._router, events.replay_endpoint, secret_key)
        self._replay = Replay(events.replay_bytes, self._topic, self._send_again)
        self._control = context.socket(zmq.PAIR)
        self._control.connect(control)

    def run(self) -> None:
        """Serve until the process is ended."""
        poller = zmq.Poller()
        for socket in (self._control, self._router, None if self._gate is None else self._gate.socket):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        can_send = False
        while True:
            timeout = None if not self._replay.is_busy else 0 if can_send else _RETRY_MS
            ready = dict(poller.poll(timeout))
            if self._gate is not None and self._gate.socket in ready:
                self._gate.answer()
            if self._control in ready:
                self._publish(self._control.recv(zmq.NOBLOCK))
            if self._router is not None and self._router in ready:
                self._replay.ask(self._router.recv_multipart(zmq.NOBLOCK))
            can_send = self._replay.step(_BATCHES_PER_STEP)

    def _publish(self, frame: bytes) -> None:
        batch = changes.batch_decoder.decode(frame)
        payload = vllm_format.encode(batch)
        # A PUB socket never waits: a reader that is too slow misses the message.
        self._pub.send_multipart((self._topic, batch.sequence.to_bytes(8, "big"), payload))
        if self._router is not None:
            self._replay.keep(batch.sequence, payload)
        self._control.send(changes.encoder.encode(changes.Published(batch.sequence)))

    def _send_again(self, reader: bytes, frames: list[bytes]) -> bool:
        assert self._router is not None
        try:
            self._router.send_multipart([reader, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise ConnectionError(str(error)) from error
        return True

    def _open(self, socket: "zmq.Socket[bytes]", endpoint: str, secret_key: bytes, *, connect: bool = False) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        if secret_key:
            admission.secure(socket, secret_key)
        if connect:
            socket.connect(endpoint)
        else:
            socket.bind(endpoint)
        _log.info("%s %s", "connected to" if connect else "bound", endpoint)


if __name__ == "__main__":
    sys.exit(main())
