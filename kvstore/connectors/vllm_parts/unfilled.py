"""Blocks that vLLM takes for filled though a load before a step has not brought them.

vLLM enters such a load's blocks in its prefix cache when it makes room for them, and under the policy `recompute`
leaves them there when the load fails: it trusts that the same request computes them again. One that is preempted or
aborted before that does not, and the next prompt would find them. So what did not come is taken out of the prefix
cache, with all that was computed over it in the same step, before anything else is scheduled.

    allocated ─► begun        one step ─► ended: evicts        computed again, or `leaves` before that

Others that have such blocks go on as if they had come, which is right once they were computed again and else not: what
these write over them is wrong as well, and in vLLM's prefix cache.

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
        # What each request has to compute again.
        self._owed: dict[str, set[int]] = {}

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
        lost: dict[str, set[int]] = {}
        for request_id, block_ids in self._loading.items():
            first = 0 if news is None or request_id not in news.num_ended else news.failed_from.get(request_id)
            if first is not None:
                lost[request_id] = set(block_ids[first:])
        all_lost: set[int] = set().union(*lost.values())
        evicted = set(all_lost)
        for tracked in requests if lost else ():
            name = tracked.request.request_id
            evicted.update(_computed_over(all_lost, tracked.block_ids))
            if any(other != name and not blocks.isdisjoint(tracked.block_ids) for other, blocks in lost.items()):
                tracked.may_store = False
            if name in lost:
                self._owed[name] = set(_computed_over(lost[name], tracked.block_ids))
        for left in self._left:
            evicted.update(_computed_over(all_lost, left))
        self._loading, self._left = {}, []
        if evicted:
            self._evict(evicted)

    def computed(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A step computes all of these blocks."""
        owed = self._owed.get(request_id)
        if owed is not None:
            owed.difference_update(block_ids)
            if not owed:
                del self._owed[request_id]

    def leaves(self, request_id: str, others: Iterable[Tracked]) -> bool:
        """The request lets go of its blocks. Return whether others go on over some that it has not computed again."""
        owed = self._owed.pop(request_id, set())
        return any(not owed.isdisjoint(tracked.block_ids) for tracked in others) if owed else False


def _computed_over(lost: set[int], block_ids: Sequence[int]) -> Sequence[int]:
    first = next((index for index, block in enumerate(block_ids) if block in lost), len(block_ids))
    return block_ids[first:]
