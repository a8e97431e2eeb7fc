"""Times loads from each tier of a running daemon into HBM, at several sizes and several at once.

The daemon is `kvstore calibrate`'s own: the blocks it holds are of no use, and tiers are emptied as needed.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from engine.model import ModelSpec
from kvstore.client import Client
from kvstore.core.errors import KVStoreError, TierUnavailable
from kvstore.core.key import BlockKey, Namespace, chain_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.region_pin import RegionPin
from tiers.hbm import HbmTier

_SIZES: Final = (1, 4, 16, 64)
_AT_ONCE: Final = (1, 2, 4)
_ROUNDS: Final = 3
_STORE_AT_ONCE: Final = 32
_DEADLINE_S: Final = 60.0
_DURABLE_S: Final = 120.0
_POLL_S: Final = 0.05


class TimedLoads:
    """`num_blocks` fit the pool of `hbm`. Opens clients; close it."""

    def __init__(
        self, spec: ModelSpec, hbm: HbmTier, run_dir: Path, block_tokens: int, num_blocks: int, tier_budget_s: float
    ) -> None:
        self._hbm = hbm
        self._num_blocks = num_blocks
        self._tier_budget_s = tier_budget_s
        self._namespace = Namespace(
            model=f"calibrate-{os.urandom(8).hex()}",
            weights_digest=spec.weights_digest,
            dtype=spec.dtype,
            kv_layout="calibrate",
            block_tokens=block_tokens,
            block_bytes=hbm.payload_bytes,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )
        self._client = Client(run_dir, namespace=self._namespace, name="calibrate", deadline_s=5.0)
        self._clones = [self._client.clone() for _ in range(max(_AT_ONCE))]
        self._pins = RegionPin(hbm)
        # One prefix per load that runs at once.
        share = num_blocks // max(_AT_ONCE)
        self._sizes = [size for size in _SIZES if size <= num_blocks]
        self._prefixes = [self._prefix(number, share) for number in range(1, max(_AT_ONCE))]
        self._prefixes.insert(0, self._prefix(0, max(max(self._sizes), share)))

    def run(self, tell: Callable[[str, Any], None]) -> None:
        """Tell each load: tier, blocks of one, how many at once, bytes of all, seconds until the last was there."""
        for keys in self._prefixes:
            self._store(keys)
        cases = [(1, size) for size in self._sizes]
        cases += [(at_once, len(self._prefixes[1]) // 2) for at_once in _AT_ONCE[1:]]
        self._pins.ensure(self._client.region)
        for tier, emptied in ((TierKind.RAM, []), (TierKind.SSD, ["ram"]), (TierKind.S3, ["ram", "ssd"])):
            if tier.label not in self._client.tiers:
                continue
            tell("part", {"name": f"loads from {tier.label}", "total": _ROUNDS * len(cases)})
            began = time.monotonic()
            for _ in range(_ROUNDS):
                for at_once, num_blocks in cases:
                    if time.monotonic() - began > self._tier_budget_s:
                        break
                    self._empty(emptied)
                    seconds, sources = self._load(at_once, num_blocks)
                    # Of a block that is elsewhere by now nothing is learned about this tier.
                    if sources == {tier}:
                        num_bytes = at_once * num_blocks * self._namespace.block_bytes
                        told = {"tier": tier.label, "blocks": num_blocks, "at_once": at_once, "bytes": num_bytes}
                        tell("load", told | {"seconds": seconds})

    def close(self) -> None:
        """Drop the blocks everywhere and detach."""
        try:
            self._client.evict([tier for tier in self._client.tiers if tier != "hbm"], drop=True)
        except KVStoreError:
            # Whoever started the daemon clears up after it.
            pass
        finally:
            self._pins.close()
            for clone in self._clones:
                clone.close()
            self._client.close()

    def _prefix(self, number: int, num_blocks: int) -> list[BlockKey]:
        return chain_keys(self._namespace, [number + 1] * (num_blocks * self._namespace.block_tokens))

    def _store(self, keys: Sequence[BlockKey]) -> None:
        for first in range(0, len(keys), _STORE_AT_ONCE):
            part = keys[first : first + _STORE_AT_ONCE]
            parent = keys[first - 1] if first else self._namespace.root()
            grant = self._client.store(part, parent, first)
            if any(block.outcome is not Outcome.OK for block in grant.blocks):
                raise TierUnavailable("the daemon has no room for the blocks to measure with; give it more ram.size")
            for block in grant.blocks:
                assert block.view is not None
                # Noise, since blocks of zeros would be packed to nothing.
                block.view[:] = os.urandom(len(block.view))
                block.view.release()
            generations = [block.generation for block in grant.blocks]
            self._client.commit(part, generations, [True] * len(part))

    def _empty(self, tiers: list[str]) -> None:
        """Free these tiers, once everything has a copy further away."""
        deadline = time.monotonic() + _DURABLE_S
        while tiers and any(self._client.evict(tiers).kept.values()):
            if time.monotonic() > deadline:
                raise TierUnavailable(f"the blocks are not durable beyond {tiers[-1]} after {_DURABLE_S:.0f} s")
            time.sleep(_POLL_S)

    def _load(self, at_once: int, num_blocks: int) -> tuple[float, set[TierKind]]:
        """Return seconds from asking until all blocks of all loads are in HBM, and where they came from."""
        sources: set[TierKind] = set()
        faults: list[Exception] = []
        gate = threading.Barrier(at_once + 1)

        def one(number: int) -> None:
            try:
                gate.wait()
                sources.update(self._fetch(self._clones[number], self._prefixes[number][:num_blocks], number))
            except Exception as error:
                # Raised again where the threads are waited for.
                faults.append(error)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(at_once)]
        for thread in threads:
            thread.start()
        gate.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        if faults:
            raise TierUnavailable(f"a load failed: {faults[0]}") from faults[0]
        return seconds, sources

    def _fetch(self, client: Client, keys: Sequence[BlockKey], number: int) -> set[TierKind]:
        sources, per_block = set(), self._hbm.pool_blocks_per_block
        first = number * (self._num_blocks // max(_AT_ONCE)) if number else 0
        with client.fetch(keys, deadline_s=_DEADLINE_S) as stream:
            landed = 0
            while landed < len(keys):
                blocks = stream.landed(1.0)
                for block in blocks:
                    if block.outcome is not Outcome.OK or block.view is None:
                        raise TierUnavailable(f"a block answered {block.outcome.label}")
                    at = (first + block.index) * per_block
                    with self._pins.copying(block.view):
                        self._hbm.scatter(block.view, list(range(at, at + per_block)))
                    sources.add(block.source)
                stream.release_blocks([block.index for block in blocks])
                landed += len(blocks)
                if stream.done and not blocks and landed < len(keys):
                    raise TierUnavailable("a load ended early")
        return sources
