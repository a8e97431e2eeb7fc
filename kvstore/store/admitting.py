"""Asks a tier's admission policy which blocks are worth writing down, and sees to the budget and to what was promised.

    stored, or used in RAM ─► promised (a session's, or pinned)? ─► written
                              else the policy, then the budget   ─► written, or refused: it stays in RAM alone

What is refused is asked about again when it is used. A promise goes before policy and budget, and counts against it.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.config import Config
from kvstore.core.index import Ids
from kvstore.core.key import KEY_BYTES
from kvstore.core.outcome import TierKind
from kvstore.store.catalog import Catalog
from policies import admission
from policies.admission import Admission, Always, Learned, Prompt, WriteBudget
from policies.seen import Names

# Requests whose blocks may still come.
_MAX_PROMPTS = 4096
_MIN_ROWS = 1024


class Admitting:
    """Owned by the control thread; one for each tier that is written in the background."""

    def __init__(
        self, catalog: Catalog, tier: TierKind, policy: Admission, budget: WriteBudget, *, keeps_promises: bool = True
    ) -> None:
        """`budget` is in bytes for the SSD and in requests for the bucket."""
        self._catalog = catalog
        self._tier = tier
        self._policy = policy
        self._budget = budget
        self._keeps_promises = keeps_promises
        # By the key of the block that is to come next, or of the prompt's first.
        self._prompts: OrderedDict[bytes, Prompt] = OrderedDict()
        self._is_refused: npt.NDArray[np.bool_] = np.zeros(_MIN_ROWS, dtype=np.bool_)
        self._counts = {"admitted": 0, "promised": 0, "refused": 0, "over_budget": 0}
        self.takes_all = isinstance(policy, Always) and not budget.per_day

    def asked(self, keys: bytes, num_found: int) -> None:
        """A request with this prompt (joined keys) begins; so many of its blocks are there."""
        if self.takes_all:
            return
        prompt = self._policy.prompt(_names(keys))
        self._remember(keys[:KEY_BYTES], prompt)
        start = num_found * KEY_BYTES
        if 0 < start < len(keys):
            self._remember(keys[start : start + KEY_BYTES], prompt)

    def stored(self, blocks: Sequence[int]) -> Sequence[int]:
        """New blocks of one prefix, in order; return which to write down."""
        if self.takes_all or not len(blocks):
            return blocks
        parent = self._catalog.parent(blocks[0])
        known = self._prompts.get(self._catalog.key(blocks[0]))
        if known is None and parent >= 0:
            known = self._prompts.get(self._catalog.key(parent))
        prompt = Prompt(len(blocks), len(blocks)) if known is None else known
        self._remember(self._catalog.key(blocks[-1]), prompt)
        return self._with_missing_parents(self._admit(blocks, prompt))

    def used(self, keys: bytes, blocks: Sequence[int]) -> Sequence[int]:
        """Blocks of one prefix that were used in RAM; return which of them to write down now."""
        if self.takes_all:
            return ()
        lacking = [block for block in blocks if not self._catalog.resident(block, self._tier)]
        if not lacking:
            return ()
        prompt = self._prompts.get(keys[:KEY_BYTES], Prompt(len(keys) // KEY_BYTES, 0))
        return self._with_missing_parents(self._admit(lacking, prompt))

    def promised(self, blocks: Ids) -> Sequence[int]:
        """The blocks of a session that was recorded; return which of them to write down."""
        if self.takes_all or not self._keeps_promises:
            return ()
        refused = [block for block in blocks.tolist() if self.is_refused(block)]
        self._spend(refused, "promised")
        return refused

    def read(self, block: int) -> None:
        """The tier had it when no faster one had."""
        if not self.takes_all:
            self._policy.on_read(self._names_of([block]))

    def evicted(self, blocks: Sequence[int]) -> None:
        """Before the tier forgets them."""
        if not self.takes_all and len(blocks):
            self._policy.on_evicted(self._names_of(blocks))

    def is_refused(self, block: int) -> bool:
        """Whether the block is not to be written, as far as is known."""
        return block < len(self._is_refused) and bool(self._is_refused[block])

    def ended(self, block: int) -> None:
        """The id may become another block's."""
        if block < len(self._is_refused):
            self._is_refused[block] = False

    def snapshot(self) -> dict[str, int]:
        return dict(self._counts)

    # ------------------------------------------------------------ private

    def _admit(self, blocks: Sequence[int], prompt: Prompt) -> Sequence[int]:
        costs = np.array([self._cost(block) for block in blocks])
        if isinstance(self._policy, Learned):
            self._policy.budget_blocks_per_day = self._budget.per_day / float(costs[0])
        num_promised = 0
        if self._keeps_promises:
            promised = [at for at, block in enumerate(blocks) if self._catalog.session_refs(block)]
            num_promised = promised[-1] + 1 if promised else 0
        wanted = max(self._policy.admit(self._names_of(blocks), prompt), num_promised)
        affordable = np.searchsorted(
            np.cumsum(costs[:wanted]), self._budget.allows(float(costs[:wanted].sum())), side="right"
        )
        admitted = max(int(affordable), num_promised)
        self._counts["over_budget"] += wanted - admitted
        self._counts["refused"] += len(blocks) - wanted
        self._spend(blocks[:num_promised], "promised")
        self._spend(blocks[num_promised:admitted], "admitted")
        self._refuse(blocks[admitted:])
        return blocks[:admitted]

    def _spend(self, blocks: Sequence[int], count: str) -> None:
        self._counts[count] += len(blocks)
        self._budget.spend(sum(self._cost(block) for block in blocks))
        for block in blocks:
            self.ended(block)

    def _refuse(self, blocks: Sequence[int]) -> None:
        if len(blocks):
            rows = max(blocks) + 1
            if rows > len(self._is_refused):
                larger = np.zeros(max(rows, 2 * len(self._is_refused)), dtype=np.bool_)
                larger[: len(self._is_refused)] = self._is_refused
                self._is_refused = larger
            self._is_refused[list(blocks)] = True

    def _with_missing_parents(self, blocks: Sequence[int]) -> Sequence[int]:
        """What was refused before, and is needed now that its child is written, goes too."""
        if not len(blocks):
            return blocks
        above: list[int] = []
        block = self._catalog.parent(blocks[0])
        while block >= 0 and self.is_refused(block) and self._catalog.resident(block, TierKind.RAM):
            above.append(block)
            block = self._catalog.parent(block)
        self._spend(above, "admitted")
        return [*reversed(above), *blocks]

    def _cost(self, block: int) -> float:
        return float(self._catalog.size_bytes(block)) if self._tier == TierKind.SSD else 1.0

    def _names_of(self, blocks: Sequence[int]) -> Names:
        return _names(b"".join(self._catalog.key(block) for block in blocks))

    def _remember(self, key: bytes, prompt: Prompt) -> None:
        self._prompts[key] = prompt
        self._prompts.move_to_end(key)
        if len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)


def make_admitting(
    catalog: Catalog, config: Config, links: Collection[TierKind], clock: Callable[[], float]
) -> dict[TierKind, Admitting]:
    """One for the SSD, and one for the bucket where all blocks go there; as far as these tiers are configured."""
    found = {}
    if TierKind.SSD in links:
        found[TierKind.SSD] = Admitting(
            catalog,
            TierKind.SSD,
            admission.make(config.ssd.admission, clock),
            WriteBudget(config.ssd.write_budget_bytes, clock),
            keeps_promises=config.sessions.durable == "all",
        )
    if TierKind.S3 in links and config.s3.write == "all":
        found[TierKind.S3] = Admitting(
            catalog,
            TierKind.S3,
            admission.make(config.s3.admission, clock),
            WriteBudget(config.s3.request_budget, clock),
        )
    return found


def _names(keys: bytes) -> Names:
    """Return the first 64 bits of each key: keys are hashes."""
    return np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_BYTES // 8)[:, 0].astype(np.uint64)
