"""A request's decision in words, for somebody who sees one for the first time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from kvstore.commands.common import clean, plain_table
from kvstore.core.outcome import TierKind
from kvstore.core.units import approximate_size
from kvstore.wire import DecisionView
from policies.decision import Decision, Happened, PlanKind, PlanSeconds, Situation, Why, kind_of

_BAR_CELLS: Final = 72
_IN_TIER: Final = {TierKind.HBM: "H", TierKind.RAM: "R", TierKind.SSD: "S", TierKind.S3: "3"}
_NOWHERE, _THERE, _LOADED, _COMPUTED = ".", "-", "<", "#"
NAMES: Final = {
    PlanKind.LOAD_ALL: "load all",
    PlanKind.RECOMPUTE_ALL: "recompute all",
    PlanKind.PREFIX_CUT: "load the front, compute the rest",
    PlanKind.TWO_ENDED: "compute the front while the rest loads",
    PlanKind.INTERVAL: "compute a middle piece while both ends load",
    PlanKind.NO_CHOICE: "nothing to load",
}
_REASONS: Final = {
    Why.LATENCY: "it has the least predicted time to the first token",
    Why.THROUGHPUT: "it is the cheapest, with a price on GPU seconds (throughput of all before latency of one)",
    Why.NOT_MEASURED: "too little was measured yet to compare: this plan is safe, and shows what things cost",
    Why.PINNED: "the request asked for it",
    Why.NOTHING_CACHED: "no block of this prompt is cached",
    Why.ALL_IN_HBM: "what is cached of this prompt is in HBM already",
    Why.NOT_ASKED: "no daemon was asked, or none answered in time",
}


def explained(view: DecisionView) -> str:
    """Return the whole account of one request, as lines."""
    return "".join(f"{line}\n" for line in _lines(view))


def _lines(view: DecisionView) -> Iterator[str]:
    decision = view.decision
    yield f"request  {clean(view.id)}"
    when_s = view.reported_s if decision is None else decision.unix_s
    yield f"when     {datetime.fromtimestamp(when_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
    yield f"model    {clean(view.model) or '-'}" + (f", tenant {clean(view.tenant)}" if view.tenant else "")
    if decision is None:
        yield f"prompt   {view.prompt_tokens} tokens"
        yield ""
        yield "The engine did not tell what it decided. What it did:"
        yield f"  from {_tokens(view.served_tokens)}; computed {view.recomputed_tokens} tokens ({view.plan})"
        yield f"  first token after {seconds(view.ttft_s)}"
        return
    yield from _prompt(decision)
    yield from _plans(decision)
    if decision.happened is not None:
        yield from _happened(decision, decision.happened)


# ---------------------------------------------------------------- the blocks


def _prompt(decision: Decision) -> Iterator[str]:
    situation = decision.situation
    blocks, rest = divmod(situation.prompt_tokens, situation.block_tokens or 1)
    yield (
        f"prompt   {situation.prompt_tokens} tokens: {blocks} blocks of {situation.block_tokens} tokens "
        f"({approximate_size(situation.block_bytes)} each), and {rest} tokens that fill none"
    )
    yield ""
    yield "Where its blocks lay, from the first to the last, and what was to be done with each"
    for name, bar, legend in bars(decision):
        yield f"  {name:<8} {bar}"
        yield f"  {'':<8} {legend}"


def bars(decision: Decision) -> Iterator[tuple[str, str, str]]:
    """Yield name, bar and legend of each row: where the blocks lay, what was planned, and what was done. The same place
    in two bars is the same block; a bar is about as long as a line, however many blocks there are."""
    pieces = _pieces(decision)
    widths = _widths([piece.blocks for piece in pieces])
    places = {sign: tier.label for tier, sign in _IN_TIER.items()} | {_NOWHERE: "nowhere"}
    plans = {_THERE: "in HBM already", _LOADED: "load", _COMPUTED: "compute"}
    deeds = {_THERE: "in HBM already", _LOADED: "loaded", _COMPUTED: "computed"}
    rows = [("lay in", [piece.where for piece in pieces], places)]
    rows.append(("planned", [piece.planned for piece in pieces], plans))
    if decision.happened is not None:
        rows.append(("done", [piece.done for piece in pieces], deeds))
    for name, signs, words in rows:
        counts: dict[str, int] = {}
        for sign, piece in zip(signs, pieces, strict=True):
            counts[sign] = counts.get(sign, 0) + piece.blocks
        legend = "   ".join(f"{sign} {words[sign]} {count}" for sign, count in counts.items())
        yield name, "".join(sign * width for sign, width in zip(signs, widths, strict=True)), legend


@dataclass(frozen=True, slots=True)
class _Piece:
    """So many blocks after one another with the same fate."""

    blocks: int
    where: str
    planned: str
    done: str


def _pieces(decision: Decision) -> list[_Piece]:
    situation, chosen, happened = decision.situation, decision.chosen, decision.happened
    resident, cached = situation.resident_blocks, situation.num_cached
    total = max(situation.prompt_tokens // (situation.block_tokens or 1), resident + cached)
    real = (0, 0) if happened is None else (happened.start, happened.end)
    marks = {0, resident, resident + cached, total}
    position = resident
    for run in situation.cached:
        marks.add(position)
        position += run.blocks
    marks |= {resident + mark for mark in (chosen.start, chosen.end, *real)}
    borders = sorted(marks)
    pieces = []
    for begin, end in pairwise(borders):
        index = begin - resident
        if index < 0:
            pieces.append(_Piece(end - begin, _IN_TIER[TierKind.HBM], _THERE, _THERE))
        elif index >= cached:
            pieces.append(_Piece(end - begin, _NOWHERE, _COMPUTED, _COMPUTED))
        else:
            planned = _COMPUTED if chosen.start <= index < chosen.end else _LOADED
            done = _COMPUTED if real[0] <= index < real[1] else _LOADED
            pieces.append(_Piece(end - begin, _IN_TIER[_tier_of(situation, index)], planned, done))
    return pieces


def _tier_of(situation: Situation, index: int) -> TierKind:
    for run in situation.cached:
        if index < run.blocks:
            return run.tier
        index -= run.blocks
    raise AssertionError("an index beyond the cached blocks")


def _widths(counts: list[int]) -> list[int]:
    """Return cells per piece: in proportion, but none invisible."""
    total = sum(counts)
    if total <= _BAR_CELLS:
        return counts
    return [max(1, round(count * _BAR_CELLS / total)) for count in counts]


# ---------------------------------------------------------------- the plans


def _plans(decision: Decision) -> Iterator[str]:
    situation, chosen = decision.situation, decision.chosen
    yield ""
    if not situation.num_cached:
        yield f"There was nothing to choose: {_REASONS[decision.why]}."
        return
    guess = "" if situation.is_measured else ", partly guessed: too little was measured"
    yield f"Plans that were compared (seconds until the first token, predicted{guess})"
    # The best of a kind may be no real one of that kind: a cut that loads all is "load all".
    plans = [p for p in decision.plans if kind_of(p.start, p.end, situation.num_cached) is p.kind]
    rows = [_plan_row(plan, situation, "<- chosen" if _is_same(plan, chosen) else "") for plan in plans]
    if not any(_is_same(plan, chosen) for plan in plans):
        rows.append(_plan_row(chosen, situation, "<- chosen"))
    columns = ("plan", "load", "compute", "seconds", "of them computing", "")
    for line in plain_table(columns, rows).splitlines():
        yield f"  {line.removesuffix(' -').rstrip()}"
    queues = [f"GPU {seconds(situation.gpu_queue_s)}"] if situation.gpu_queue_s else []
    queues += [f"{tier.label} {seconds(wait_s)}" for tier, wait_s in situation.tier_queue_s.items() if wait_s]
    if queues:
        yield f"  work of others in front: {', '.join(queues)}"
    yield ""
    yield f"Chosen: {NAMES[chosen.kind]}, since {_REASONS[decision.why]}."


def _is_same(plan: PlanSeconds, other: PlanSeconds) -> bool:
    both_load_all = plan.kind is other.kind is PlanKind.LOAD_ALL
    return both_load_all or (plan.start, plan.end) == (other.start, other.end)


def _plan_row(plan: PlanSeconds, situation: Situation, mark: str) -> list[str]:
    computed = plan.end - plan.start
    is_predicted = plan.seconds > 0
    return [
        NAMES[plan.kind],
        str(situation.num_cached - computed),
        str(computed),
        seconds(plan.seconds, unit="") if is_predicted else "",
        seconds(plan.gpu_s, unit="") if is_predicted else "",
        mark,
    ]


# ---------------------------------------------------------------- what came of it


def _happened(decision: Decision, happened: Happened) -> Iterator[str]:
    yield ""
    yield "What happened"
    yield (
        f"  first token after {seconds(happened.ttft_s)}, of which {seconds(happened.waited_s)} before the decision "
        "(looking up, waiting for a place)"
    )
    for tier, blocks in sorted(happened.loaded.items()):
        took = f" in {seconds(happened.load_s[tier])}" if tier in happened.load_s else ""
        yield f"  {_blocks(blocks)} came from {tier.label}{took}"
    if happened.end > happened.start:
        yield f"  of the cached ones {_blocks(happened.end - happened.start)} computed"
    for count, what in (
        (happened.late, "came too late"),
        (happened.failed, "not there, or not valid"),
        (happened.abandoned, "not needed any more, computing was there first"),
    ):
        if count:
            yield f"  of those to be loaded {_blocks(count)} {what}"
    predicted_s, real_s = decision.chosen.seconds, happened.ttft_s - happened.waited_s
    if predicted_s > 0:
        yield (
            f"  predicted {seconds(predicted_s)} from the decision on, really {seconds(real_s)} "
            f"({100 * (real_s / predicted_s - 1):+.0f}%)"
        )
    yield f"  prefill saved, against computing the whole prompt: {seconds(happened.saved_prefill_s)} (predicted)"
    yield from _regret(decision, happened)


def _regret(decision: Decision, happened: Happened) -> Iterator[str]:
    regret_s, best = decision.regret_s, decision.best_afterwards
    if regret_s is None or best is None:
        yield "  regret: none, there was no choice"
        return
    share = 100 * regret_s / happened.ttft_s if happened.ttft_s > 0 else 0.0
    yield f"  regret: {seconds(regret_s)}, {share:.0f}% of the time" + (": none" if regret_s <= 0 else "")
    yield f"    best, with what is known now: {NAMES[best.kind]}, {seconds(best.seconds)} from the decision on"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def seconds(value: float, unit: str = " s") -> str:
    """Return three significant digits, never an exponent for times of any request."""
    if value and abs(value) < 1e-4:
        return f"{'-' if value < 0 else ''}<0.0001{unit}"
    return f"{float(f'{value:.3g}'):g}{unit}"


def _tokens(served: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {tokens}" for tier, tokens in served.items() if tokens) or "nowhere"
