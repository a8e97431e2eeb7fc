"""`kvstore verify` in the daemon: has the workers walk over their tiers, and tells how far they are.

One verification at a time. What a repair removes the catalog forgets at once, so that it can be stored again.
"""

from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.key import split_keys
from kvstore.core.outcome import Outcome, TierKind
from kvstore.store.catalog import Catalog
from kvstore.store.link import WorkerLink
from kvstore.wire import ErrorCode, ScrubReport, Verify, VerifyReport
from kvstore.worker import ops

_STATES = {Outcome.OK: "done", Outcome.CANCELLED: "cancelled"}


class Verification:
    """Owned by the control thread. `on_lost` is told of every block that a tier does not hold any more."""

    def __init__(
        self,
        catalog: Catalog,
        links: Mapping[TierKind, WorkerLink],
        on_lost: Callable[[int, TierKind, Outcome], None],
    ) -> None:
        self._catalog = catalog
        self._links = links
        self._on_lost = on_lost
        self._reports: dict[TierKind, ScrubReport] = {}

    def start(self, order: Verify) -> VerifyReport:
        """Raises ProtocolError, and has begun nothing then: bad_request where the order names a tier that there is not,
        busy where a verification is under way or a tier is down."""
        known = {tier.label: tier for tier in self._links}
        if unknown := [name for name in order.tiers if name not in known]:
            raise ProtocolError(ErrorCode.BAD_REQUEST, f"there is no tier {unknown[0]!r} to verify")
        if self._is_running():
            raise ProtocolError(ErrorCode.BUSY, "a verification is under way already")
        tiers = [tier for name, tier in known.items() if name in order.tiers or not order.tiers]
        if down := [tier.label for tier in tiers if not self._links[tier].ready]:
            raise ProtocolError(ErrorCode.BUSY, f"the tier {down[0]} does not answer now; try again later")
        self._reports = {tier: ScrubReport(state="running") for tier in tiers}
        for tier in tiers:
            link = self._links[tier]
            op = ops.Scrub(link.next_op(), order.repair, order.drop_wrong_key)
            link.scrub(op, partial(self._stepped, tier), partial(self._ended, tier))
        return self.report()

    def report(self) -> VerifyReport:
        """Return how far the present verification is, or how the last one ended."""
        return VerifyReport(self._is_running(), {tier.label: report for tier, report in self._reports.items()})

    def cancel(self) -> VerifyReport:
        """End it soon; what was removed stays so."""
        for tier, report in self._reports.items():
            if report.state == "running":
                self._links[tier].cancel_scrub()
        return self.report()

    def _is_running(self) -> bool:
        return any(report.state == "running" for report in self._reports.values())

    def _stepped(self, tier: TierKind, reply: ops.Scrubbed) -> None:
        self._reports[tier] = msgspec.structs.replace(reply.report, state="running")
        for key in split_keys(reply.lost):
            block = self._catalog.find(key)
            if block >= 0 and self._catalog.resident(block, tier):
                self._on_lost(block, tier, Outcome.CORRUPT)

    def _ended(self, tier: TierKind, result: ops.Result) -> None:
        state = _STATES.get(Outcome(result.outcome), "failed")
        self._reports[tier] = msgspec.structs.replace(self._reports[tier], state=state)
