"""The last requests that engines reported, with their decisions, and what the decisions have cost in sum.

Each is kept as the bytes that answer a question about it, so that a thousand of them take about a megabyte and listing
them costs the control thread no time. They go with the daemon. Never holds tokens, keys or text.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore import wire
from kvstore.core.counts import Counts, is_plain
from kvstore.core.errors import ProtocolError
from kvstore.wire import DecisionView, ErrorCode
from policies.decision import MAX_ID_CHARS, Why, check

MAX_KEPT: Final = 1000
MAX_ENTRY_BYTES: Final = 16 << 10
_MAX_TENANT_CHARS: Final = 200
_MAX_REASONS: Final = 32
# So many of the ids that begin alike are told.
_MAX_NAMED: Final = 8

_encoder = msgspec.msgpack.Encoder()


class Decisions:
    """A ring by request id; whoever reports an id again replaces what was known of it. The control thread's own."""

    def __init__(self, wall_clock: Callable[[], float], max_kept: int = MAX_KEPT) -> None:
        self._wall_clock = wall_clock
        self._max_kept = max_kept
        # Newest last: the tenant, and an encoded DecisionView.
        self._entries: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._chosen = Counts()
        self._why = Counts()
        self._judged = 0
        self._lost_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    @staticmethod
    def check(report: wire.Report) -> None:
        """Raises ValueError where the report's decision makes no sense. One without a decision is fine."""
        if len(report.tenant) > _MAX_TENANT_CHARS:
            raise ValueError(f"a tenant has at most {_MAX_TENANT_CHARS} characters")
        if report.decision is not None:
            check(report.decision)
            if report.decision.request_id != report.request_id:
                raise ValueError("the decision is another request's than the report")

    def add(self, report: wire.Report, model: str) -> None:
        """Take in a checked report of an engine that serves `model`."""
        decision = report.decision
        if decision is not None:
            self._chosen.add(decision.chosen.kind)
            self._why.add(decision.why)
            # Who pins a plan wants that plan, whatever it costs: no choice of ours.
            if decision.regret_s is not None and decision.why is not Why.PINNED:
                self._judged += 1
                self._lost_s += max(0.0, decision.regret_s)
        if not 0 < len(report.request_id) <= MAX_ID_CHARS or not report.request_id.isprintable():
            return
        entry = _encoder.encode(_view(report, model, self._wall_clock()))
        if len(entry) > MAX_ENTRY_BYTES:
            return
        self._entries.pop(report.request_id, None)
        self._entries[report.request_id] = (report.tenant, entry)
        if len(self._entries) > self._max_kept:
            self._entries.popitem(last=False)

    def list(self, request: wire.DecisionList) -> wire.Decisions:
        """Raises ProtocolError (bad_request)."""
        if request.limit < 0:
            raise ProtocolError(ErrorCode.BAD_REQUEST, "limit must not be negative")
        wanted = [
            entry
            for tenant, entry in reversed(self._entries.values())
            if request.tenant is None or tenant == request.tenant
        ]
        return wire.Decisions(wanted[: request.limit], len(wanted))

    def get(self, request: wire.DecisionGet) -> wire.Decisions:
        """Return the request of that id, or else the only one whose id begins so: vLLM appends to what it answers.

        Raises ProtocolError (not_found; conflict where several begin so).
        """
        tenant, entry = self._entries.get(request.request_id, ("", b""))
        if entry and request.tenant in (None, tenant):
            return wire.Decisions([entry], 1)
        found = [
            (request_id, entry)
            for request_id, (tenant, entry) in reversed(self._entries.items())
            if request.request_id and request_id.startswith(request.request_id) and request.tenant in (None, tenant)
        ]
        if not found:
            raise ProtocolError(
                ErrorCode.NOT_FOUND,
                f"nothing is known of request {request.request_id[:MAX_ID_CHARS]!r}: the daemon knows the last "
                f"{self._max_kept} that were answered since it started, and none that were pinned to 'recompute'",
            )
        if len(found) > 1:
            named = ", ".join(request_id for request_id, _ in found[:_MAX_NAMED])
            raise ProtocolError(
                ErrorCode.CONFLICT,
                f"{len(found)} requests begin with {request.request_id!r}: {named}{', …' * (len(found) > _MAX_NAMED)}",
            )
        return wire.Decisions([found[0][1]], 1)

    def snapshot(self) -> dict[str, object]:
        return {
            "chosen": self._chosen.snapshot(),
            "why": self._why.snapshot(),
            "judged": self._judged,
            "lost_s": round(self._lost_s, 6),
        }


def _view(report: wire.Report, model: str, now_s: float) -> DecisionView:
    miss = {reason: tokens for reason, tokens in list(report.miss.items())[:_MAX_REASONS] if is_plain(reason)}
    return DecisionView(
        id=report.request_id,
        tenant=report.tenant,
        model=model,
        reported_s=now_s,
        prompt_tokens=report.prompt_tokens,
        served_tokens={"hbm": report.hbm, "ram": report.ram, "ssd": report.ssd, "s3": report.s3},
        recomputed_tokens=report.recomputed,
        miss=miss,
        plan=report.plan if is_plain(report.plan) else "other",
        ttft_s=report.ttft_s,
        saved_prefill_s=report.saved_prefill_s,
        decision=report.decision,
    )
