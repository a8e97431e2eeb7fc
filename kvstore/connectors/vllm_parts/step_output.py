"""What is read of the steps that vLLM schedules."""

from collections.abc import Sequence
from typing import Any, Protocol


class StepOutput(Protocol):
    """The part of `vllm.v1.core.sched.output.SchedulerOutput` that is used."""

    scheduled_new_reqs: Sequence[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int


def written(output: StepOutput, block_tokens: int) -> tuple[int, ...]:
    """Return the blocks that vLLM may write from this step on and that their requests did not have before, whether we
    follow those requests or not."""
    blocks: list[int] = []
    for new in output.scheduled_new_reqs:
        blocks += new.block_ids[0][new.num_computed_tokens // block_tokens :]
    cached = output.scheduled_cached_reqs
    for i, request_id in enumerate(cached.req_ids):
        added = [] if cached.new_block_ids[i] is None else cached.new_block_ids[i][0]
        is_resumed = request_id in cached.resumed_req_ids
        blocks += added[cached.num_computed_tokens[i] // block_tokens if is_resumed else 0 :]
    return tuple(blocks)
