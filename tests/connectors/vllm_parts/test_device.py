"""The GPU's copies: their bytes in the kernels' interpreter, their order against a CUDA that only takes notes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvstore.connectors.vllm_parts.device import CudaLane
from tests.support.interpreter import assert_passes_in_the_interpreter


def test_the_copies_pass_in_the_interpreter() -> None:
    assert_passes_in_the_interpreter(Path(__file__).with_name("device_interpreted.py"))


class NotedCuda:
    """As `torch.cuda`: streams and events that note what is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.computing = NotedStream(self, "compute")

    def Stream(self, device: Any) -> "NotedStream":
        return NotedStream(self, f"side stream of {device}")

    def Event(self) -> "NotedEvent":
        return NotedEvent(self)

    def current_stream(self, device: Any) -> "NotedStream":
        return self.computing

    @contextmanager
    def stream(self, stream: "NotedStream") -> Iterator[None]:
        self.log.append(f"onto the {stream.name}")
        yield
        self.log.append("back")

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.log.append(f"onto {device}")
        yield
        self.log.append("back")


class NotedStream:
    def __init__(self, cuda: NotedCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_event(self, event: "NotedEvent") -> None:
        self._cuda.log.append(f"{self.name} waits for the event on {event.where}")

    def synchronize(self) -> None:
        self._cuda.log.append(f"{self.name} is done")


class NotedEvent:
    def __init__(self, cuda: NotedCuda) -> None:
        self._cuda = cuda
        self.where = "nothing"

    def record(self, stream: NotedStream) -> None:
        self.where = stream.name
        self._cuda.log.append(f"event on {stream.name}")


SIDE = "side stream of cuda:1"


def test_what_is_launched_in_a_lane_comes_after_the_mark_and_is_done_when_it_is_left() -> None:
    cuda = NotedCuda()
    lane = CudaLane(torch.device("cuda", 1), cuda)
    mark = lane.mark()
    with lane.entered(mark):
        cuda.log.append("copy")
    assert cuda.log == [
        "event on compute",
        f"onto the {SIDE}",
        f"{SIDE} waits for the event on compute",
        "copy",
        f"{SIDE} is done",
        "back",
    ]


def test_without_a_mark_nothing_is_waited_for() -> None:
    cuda = NotedCuda()
    with CudaLane(torch.device("cuda", 1), cuda).entered(None):
        cuda.log.append("copy")
    assert cuda.log == [f"onto the {SIDE}", "copy", f"{SIDE} is done", "back"]


def test_a_lane_is_waited_for_after_an_error_as_well() -> None:
    """Else a copy would go on into memory that is given to others by then."""
    cuda = NotedCuda()
    lane = CudaLane(torch.device("cuda", 1), cuda)
    with pytest.raises(ZeroDivisionError), lane.entered(None):
        raise ZeroDivisionError
    assert cuda.log[-1] == f"{SIDE} is done"
    with lane.entered(None):
        pass


def test_a_lane_has_the_device_of_its_rank() -> None:
    cuda = NotedCuda()
    with CudaLane(torch.device("cuda", 1), cuda).on_device():
        pass
    assert cuda.log == ["onto cuda:1", "back"]
