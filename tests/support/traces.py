"""Traces for tests: made-up conversations, and where the published ones lie."""

import random
from pathlib import Path

import pytest

from policies.trace import Trace, TraceRequest, read_trace

# Beside this project's own folder; not part of it.
_SHARED = Path(__file__).parents[3] / "shared" / "traces"


def published_trace(name: str) -> Trace:
    """Return a trace that Mooncake published; skips the test where it is not at hand."""
    path = _SHARED / name
    if not path.exists():
        pytest.skip(f"../shared/traces/{name} is not there")
    return read_trace(path)


def conversations(seed: int, *, num_sessions: int, block_tokens: int = 512, mean_gap_s: float = 2.0) -> Trace:
    """Return sessions that begin one after the other, share a system prompt, and grow turn by turn."""
    draw = random.Random(seed)
    requests: list[TraceRequest] = []
    next_block, begins_s = 1, 0.0
    for _ in range(num_sessions):
        begins_s += draw.expovariate(1 / mean_gap_s)
        arrival_s, tokens, blocks = begins_s, block_tokens, [0]
        for _ in range(draw.randint(1, 5)):
            tokens += draw.randint(1, 12 * block_tokens)
            # A block that was partial gets another number when it is filled up.
            blocks = blocks[: (requests[-1].prompt_tokens if len(blocks) > 1 else block_tokens) // block_tokens]
            while len(blocks) < -(-tokens // block_tokens):
                blocks.append(next_block)
                next_block += 1
            requests.append(TraceRequest(arrival_s, tokens, draw.randint(1, 400), tuple(blocks)))
            arrival_s += draw.expovariate(1 / 20)
    return Trace(tuple(sorted(requests, key=lambda request: request.arrival_s)), block_tokens)
