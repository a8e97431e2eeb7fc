"""Blocks that vLLM takes for filled though a load before a step has not brought them.

vLLM enters such a load's blocks in its prefix cache when it makes room for them, and under the policy `recompute`
leaves them there when the load fails: it trusts that the same request computes them again. One that is preempted or
aborted before that does not, and the next prompt would find them. So what did not come is taken out of the prefix
cache, with all that was computed over it in the same step, before anything else is scheduled.

    allocated ─► begun        one step ─► ended: evicts

Right only while vLLM has one step under way at a time. A load beside the steps needs none of this: its blocks are
entered once it has ended.
"""

from collections.abc import Callable, Iterable, Sequence

from kvstore.connectors.vllm_parts.orders import News
from kvstore.connectors.vllm_parts.tracked import Tracked


class Unfilled:
    """`evict` takes blocks out of vLLM's prefix cache. Owned by the scheduler's thread."""

    def __init__(self, evict: Callable[[set[int]], None]) -> None:
        self._evict = evict
        self._loading: dict[str, Sequence[int]] = {}
        self._left: list[Sequence[int]] = []

    def begun(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A load before the step now being scheduled is to fill these blocks."""
        self._loading[request_id] = block_ids

    def left(self, block_ids: Sequence[int]) -> None:
        """A request has ended whose blocks may be among them, or computed over them."""
        if self._loading:
            self._left.append(block_ids)

    def ended(self, news: News | None, requests: Iterable[Tracked]) -> None:
        """The step is over. What is not known to have come counts as not come. Of the requests that share such blocks
        nothing more is stored: vLLM lets them go on as if another had computed them."""
        lost: set[int] = set()
        for request_id, block_ids in self._loading.items():
            if news is None or request_id not in news.num_ended:
                lost.update(block_ids)
            elif request_id in news.failed_from:
                lost.update(block_ids[news.failed_from[request_id] :])
        evicted = set(lost)
        for tracked in requests if lost else ():
            over = _computed_over(lost, tracked.block_ids)
            evicted.update(over)
            if over and tracked.request.request_id not in self._loading:
                tracked.may_store = False
        for left in self._left:
            evicted.update(_computed_over(lost, left))
        self._loading, self._left = {}, []
        if evicted:
            self._evict(evicted)


def _computed_over(lost: set[int], block_ids: Sequence[int]) -> Sequence[int]:
    first = next((index for index, block in enumerate(block_ids) if block in lost), len(block_ids))
    return block_ids[first:]
