"""An engine that does with the connector what vLLM does: paged blocks with a prefix cache, chunked prefill, decodes,
preemption, aborts, loads before a step or beside it, and recomputing what did not come.

It computes nothing: a block's KV follows from its hash. Whenever a step reads a block it is compared with that, so
wrong KV shows the moment it would be used.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace

from kvstore.connectors.vllm_parts.scheduler import Scheduler
from kvstore.connectors.vllm_parts.worker import Worker
from tests.support.vllm import BLOCK_TOKENS, BODY_BYTES, FakeRequest, MemoryPages, kv_of


@dataclass(eq=False)
class Running:
    request: FakeRequest
    max_tokens: int
    prompt: list[int]
    block_ids: list[int] = field(default_factory=list)
    state: str = "waiting"
    output: int = 0
    is_new: bool = True
    was_preempted: bool = False
    num_external: int = 0


class FakeEngine:
    """`num_blocks` of KV cache; block 0 is nobody's, as in vLLM. At most `budget` tokens a step."""

    def __init__(
        self, scheduler: Scheduler, worker: Worker, pages: MemoryPages, budget: int = 24, seed: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.pages = pages
        self.budget = budget
        self.random = random.Random(seed)
        self.queue: list[Running] = []
        self.outputs: dict[str, list[int]] = {}
        self.external_tokens = 0
        self.recomputed = 0
        self._refs = dict.fromkeys(range(1, len(pages.blocks)), 0)
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in self._refs)
        self._cached: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._finished: dict[str, Running] = {}

    # ------------------------------------------------------------ what a user does

    def add(self, request: FakeRequest, max_tokens: int = 4) -> None:
        self.queue.append(Running(request, max_tokens, list(request.all_token_ids)))
        self.scheduler.on_new_request(request)

    def abort(self, running: Running) -> None:
        self.queue.remove(running)
        self._finish(running)

    def preempt(self, running: Running) -> None:
        running.request.num_computed_tokens = 0
        running.request.num_preemptions += 1
        running.state, running.was_preempted = "waiting", True
        self._release(running)

    def evict(self, block_ids: set[int]) -> None:
        for block in block_ids:
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self._cached[block_hash]

    def drop_prefix_cache(self) -> None:
        self._cached.clear()
        self._hash_of.clear()

    @property
    def is_idle(self) -> bool:
        return not self.queue and not self._finished

    def run(self, max_steps: int = 20000) -> None:
        for _ in range(max_steps):
            if self.is_idle:
                return
            self.step()
        left = [(each.state, each.request.num_computed_tokens, each.block_ids) for each in self.queue]
        raise AssertionError(f"these do not end: {left}, {len(self._finished)} finished; {len(self._free)} free blocks")

    # ------------------------------------------------------------ a step

    def step(self) -> None:
        new, cached = (
            [],
            SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], num_output_tokens=[], resumed_req_ids=set()
            ),
        )
        budget = self.budget
        scheduled: list[tuple[Running, int]] = []
        sync_targets: list[tuple[Running, list[int]]] = []
        for running in list(self.queue):
            request = running.request
            if running.state == "loading":
                continue
            if running.state == "waiting":
                if not self._admit(running, sync_targets):
                    continue
                if running.state == "loading":
                    continue
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count <= 0:
                continue
            more = self._blocks_for(running, request.num_computed_tokens + count)
            if more is None:
                if running.state == "running" and not self.scheduler.is_holding and len(scheduled) == 0:
                    self.preempt(running)
                continue
            running.block_ids += more
            budget -= count
            if running.is_new:
                new.append(
                    SimpleNamespace(
                        req_id=request.request_id,
                        block_ids=(list(running.block_ids),),
                        num_computed_tokens=request.num_computed_tokens,
                    )
                )
            else:
                if running.was_preempted:
                    cached.resumed_req_ids.add(request.request_id)
                    more = list(running.block_ids)
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append((more,) if more else None)
                cached.num_computed_tokens.append(request.num_computed_tokens)
                cached.num_output_tokens.append(running.output)
            running.state, running.is_new, running.was_preempted = "running", False, False
            scheduled.append((running, count))
        holders = [each for each in self.queue if each.state == "waiting" and each.block_ids]
        if not scheduled and len(holders) > 1 and not any(each.state == "loading" for each in self.queue):
            # Loaded, and each in the other's way.
            self.preempt(holders[-1])
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={running.request.request_id: count for running, count in scheduled},
            total_num_scheduled_tokens=sum(count for _, count in scheduled),
        )
        step = self.scheduler.begin_step(output)
        self.worker.clear(step)
        self.worker.load(step)
        lost: set[int] = set()
        for running, targets in sync_targets:
            lost |= {
                block
                for index, block in enumerate(targets)
                if self.pages.blocks[block] != kv_of(running.request.block_hashes[index + running.num_external])
            }
        for running, count in scheduled:
            self._compute(running, count, lost)
        self.worker.store(step)
        ended = self.worker.take(step)
        assert lost <= ended.failed_blocks, "wrong KV was taken for right"
        self._update(scheduled, ended.failed_blocks, ended.loaded)
        self.scheduler.end_step(self.worker.take_news(), ended.stored)
        for request_id in ended.stored | (ended.loaded & set(self._finished)):
            self._release(self._finished.pop(request_id))

    def _admit(self, running: Running, sync_targets: list[tuple[Running, list[int]]]) -> bool:
        """Begin a request that waits; whether it has its blocks."""
        request = running.request
        hits: list[int] = []
        if request.num_computed_tokens == 0:
            # Of a load that failed from its first block on, before the request had its turn.
            self._release(running)
            hits = self._local_hits(request)
            local = len(hits) * BLOCK_TOKENS
            external, is_async = self.scheduler.match(request, local)
            if external is None:
                return False
            assert external % BLOCK_TOKENS == 0
            assert local + external <= request.num_tokens - (not is_async and external > 0)
            wanted = (local + external) // BLOCK_TOKENS - len(hits)
            for block in hits:
                self._hold(block)
            fresh = self._take(wanted)
            if fresh is None:
                self._let_go(hits)
                return False
            running.block_ids = hits + fresh
            self.scheduler.allocated(request, running.block_ids, external)
            self.external_tokens += external
            running.num_external = len(hits)
            request.num_computed_tokens = local + external
            if external and is_async:
                running.state = "loading"
            elif external:
                # As vLLM does: in the prefix cache before they are filled.
                self._index(running)
                sync_targets.append((running, fresh))
        return True

    def _compute(self, running: Running, count: int, lost: set[int]) -> None:
        request = running.request
        first = request.num_computed_tokens
        hashes = request.block_hashes
        for index in range(first // BLOCK_TOKENS):
            block = running.block_ids[index]
            assert block in lost or self.pages.blocks[block] == kv_of(hashes[index]), "wrong KV is read"
        is_garbage = any(block in lost for block in running.block_ids)
        for index in range(first // BLOCK_TOKENS, -(-(first + count) // BLOCK_TOKENS)):
            is_full = (index + 1) * BLOCK_TOKENS <= first + count
            content = kv_of(hashes[index]) if is_full and not is_garbage else bytes([255]) * BODY_BYTES
            self.pages.blocks[running.block_ids[index]][:] = content

    def _update(self, scheduled: list[tuple[Running, int]], failed: set[int], loaded: set[str]) -> None:
        for running, count in scheduled:
            running.request.num_computed_tokens += count
        taken_back: set[Running] = set()
        for running in self.queue:
            bad = next((i for i, block in enumerate(running.block_ids) if block in failed), None)
            if bad is not None and bad * BLOCK_TOKENS < running.request.num_computed_tokens:
                self.recomputed += running.request.num_computed_tokens - bad * BLOCK_TOKENS
                running.request.num_computed_tokens = bad * BLOCK_TOKENS
                if running.state == "running":
                    taken_back.add(running)
        for running in list(self.queue):
            request = running.request
            if running.state == "loading" and request.request_id in loaded:
                running.state = "waiting"
                if request.num_computed_tokens == 0:
                    self._release(running)
                elif request.num_computed_tokens == request.num_tokens:
                    request.num_computed_tokens -= 1
                self._index(running)
        for running, _ in scheduled:
            request = running.request
            if running in taken_back or running not in self.queue:
                continue
            self._index(running)
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(sum(request.all_token_ids[-3:]) % 97)
                running.output += 1
                if running.output == running.max_tokens:
                    self.queue.remove(running)
                    self.outputs[request.request_id] = request.all_token_ids[len(running.prompt) :]
                    self._finish(running)

    def _finish(self, running: Running) -> None:
        request = running.request
        count = -(-request.num_computed_tokens // BLOCK_TOKENS)
        held = self.scheduler.finished(request, running.block_ids[:count])
        if held or running.state == "loading":
            assert not (held and running.state == "loading"), "freed twice"
            self._finished[request.request_id] = running
        else:
            self._release(running)

    # ------------------------------------------------------------ blocks

    def _local_hits(self, request: FakeRequest) -> list[int]:
        hits = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS]:
            if block_hash not in self._cached:
                break
            hits.append(self._cached[block_hash])
        return hits

    def _index(self, running: Running) -> None:
        hashes = running.request.block_hashes
        for index in range(min(running.request.num_computed_tokens // BLOCK_TOKENS, len(running.block_ids))):
            block = running.block_ids[index]
            if hashes[index] not in self._cached and block not in self._hash_of:
                self._cached[hashes[index]], self._hash_of[block] = block, hashes[index]

    def _blocks_for(self, running: Running, num_tokens: int) -> list[int] | None:
        return self._take(-(-num_tokens // BLOCK_TOKENS) - len(running.block_ids))

    def _take(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(max(0, count))]
        for block in taken:
            self._refs[block] = 1
            block_hash = self._hash_of.pop(block, None)
            if block_hash is not None:
                del self._cached[block_hash]
        return taken

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self._refs[block] += 1

    def _let_go(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None

    def _release(self, running: Running) -> None:
        self._let_go(running.block_ids)
        running.block_ids = []
