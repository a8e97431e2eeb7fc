"""Reads a trace of requests in Mooncake's JSONL format, one request per line, in order of arrival.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2354]}

`timestamp` is in milliseconds from the start of the trace. `hash_ids[i]` names the i-th block of the prompt together
with everything before it, the last block may be partial; equal numbers are equal prefixes. How many tokens a block has
stands nowhere in the file: it follows from the lengths (512 in the traces of Mooncake, arXiv 2407.00079).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvstore.core.errors import ConfigError

# The size in Mooncake's traces; taken where a trace is too short to tell.
_USUAL_BLOCK_TOKENS: Final = 512
_MAX_LINE_BYTES: Final = 64 * 2**20
_MAX_TOKENS: Final = 2**31


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request; `hash_ids` as above, ⌈prompt_tokens / block_tokens⌉ of them, none twice."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """At least one request, with arrivals that never go back."""

    requests: Sequence[TraceRequest]
    block_tokens: int


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, *, block_tokens: int | None = None, max_requests: int | None = None) -> Trace:
    """Return the trace, or its first `max_requests`. Blocks; empty lines are passed over, unknown keys too.

    Raises ConfigError, which names the file and the line, for whatever does not follow the format, for a trace without
    requests, and where lengths and numbers of blocks fit no size of block (or not `block_tokens`, if it is given).
    """
    requests: list[TraceRequest] = []
    numbers: list[int] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
                if max_requests is not None and len(requests) >= max_requests:
                    break
                if not line.strip():
                    continue
                try:
                    requests.append(_request(line, requests[-1].arrival_s if requests else 0.0))
                except ValueError as error:
                    raise ConfigError(f"{path}:{number}: {error}") from None
                numbers.append(number)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from None
    if not requests:
        raise ConfigError(f"{path}: no requests in it")
    return Trace(tuple(requests), _block_tokens(path, requests, numbers, block_tokens))


def _request(line: bytes, not_before_s: float) -> TraceRequest:
    """Return the line's request; ValueError says what is wrong with it."""
    try:
        read = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    if not math.isfinite(read.timestamp) or read.timestamp < 0:
        raise ValueError(f"timestamp {read.timestamp} is not a time from the start of the trace")
    if read.timestamp / 1e3 < not_before_s:
        raise ValueError(f"timestamp {read.timestamp:g} goes back; the requests are to be in order of arrival")
    if not 1 <= read.input_length <= _MAX_TOKENS:
        raise ValueError(f"input_length {read.input_length} is not between 1 and {_MAX_TOKENS}")
    if not 0 <= read.output_length <= _MAX_TOKENS:
        raise ValueError(f"output_length {read.output_length} is not between 0 and {_MAX_TOKENS}")
    if not read.hash_ids:
        raise ValueError("hash_ids is empty, though a prompt has at least one block")
    if len(set(read.hash_ids)) != len(read.hash_ids):
        raise ValueError("a number stands twice in hash_ids, though each names everything before it, too")
    return TraceRequest(read.timestamp / 1e3, read.input_length, read.output_length, read.hash_ids)


def _block_tokens(path: Path, requests: Sequence[TraceRequest], numbers: Sequence[int], given: int | None) -> int:
    """Return the size of a block that fits every request: ⌈prompt_tokens / size⌉ hash_ids each."""
    at_least, at_most = (1, _MAX_TOKENS) if given is None else (given, given)
    for number, request in zip(numbers, requests, strict=True):
        tokens, blocks = request.prompt_tokens, len(request.hash_ids)
        smallest = -(-tokens // blocks)
        # One token fewer than tokens / (blocks - 1), or as large as one likes where there is one block.
        largest = (tokens - 1) // (blocks - 1) if blocks > 1 else _MAX_TOKENS
        if max(at_least, smallest) > min(at_most, largest):
            expected = f"{at_least} tokens" if at_least == at_most else f"{at_least} to {at_most} tokens"
            raise ConfigError(f"{path}:{number}: {blocks} hash_ids for {tokens} tokens do not fit blocks of {expected}")
        at_least, at_most = max(at_least, smallest), min(at_most, largest)
    return _likely(at_least, at_most)


def _likely(at_least: int, at_most: int) -> int:
    """Return the likeliest of the sizes that are left: the usual one, or the smallest power of two, or the smallest."""
    if at_least <= _USUAL_BLOCK_TOKENS <= at_most:
        return _USUAL_BLOCK_TOKENS
    power = 1 << (at_least - 1).bit_length()
    return power if power <= at_most else at_least


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write the requests in the same format, timestamps in whole milliseconds."""
    with path.open("wb") as file:
        for request in requests:
            file.write(line_of(request))


def line_of(request: TraceRequest) -> bytes:
    """Return the request's line, with its end."""
    line = _Line(round(request.arrival_s * 1e3), request.prompt_tokens, request.output_tokens, request.hash_ids)
    return msgspec.json.encode(line) + b"\n"
