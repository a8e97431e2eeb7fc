"""`kvstore bench plan`: runs every case, link by link, and puts the figures together.

A link's cases run on an engine of their own, which learns what that link and the machine cost as it would in use: from
its own requests, of other texts, before the first case of each scenario and all along. Nobody tells it.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstore.bench import machine
from kvstore.bench.plan import figures
from kvstore.bench.plan.broken import measure_broken
from kvstore.bench.plan.cases import (
    AUTO_PLAN,
    LINKS,
    PREFIXES,
    SCENARIOS,
    Case,
    CutSearch,
    LinkSetting,
    PlanName,
    Scenario,
    cases,
)
from kvstore.bench.plan.race import Run, race
from kvstore.bench.plan.rig import Rig, Scale
from kvstore.bench.plan.streams import Streams

_NUM_STREAMS: Final = 2
_STREAM_PROMPT_TOKENS: Final = 64
# Shares of the longest prefix: what the engine meets before the cases of a scenario.
_WARM_UP: Final = (0.25, 0.5, 0.25, 0.5)
# Which link breaks, and how long the prompt is.
BROKEN_LINK: Final = LINKS[2]


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """`folder` and `shm_dir` exist and are the caller's; `out` keeps a file per case, and cases whose file is there are
    not run again. A plan is run `rounds` times, up to `max_rounds` where the figures scatter."""

    folder: Path
    shm_dir: Path
    links: tuple[LinkSetting, ...] = LINKS
    prefixes: tuple[int, ...] = PREFIXES
    scenarios: tuple[Scenario, ...] = SCENARIOS
    rounds: int = 3
    max_rounds: int = 5
    out: Path | None = None
    scale: Scale = field(default_factory=Scale)


Note = Callable[[str], None]
"""Is told what is done next, and what came out."""


def run(settings: PlanSettings, note: Note) -> dict[str, Any]:
    """Return the report. Raises KVStoreError where something of the rig fails, or tokens differ between plans."""
    report: dict[str, Any] = {
        "machine": machine.describe(settings.folder, settings.shm_dir),
        "settings": _as_json(settings),
    }
    began_s = time.monotonic()
    done = finished(settings.out, [case.name for case in _wanted(settings)])
    missing = [case for case in _wanted(settings) if case.name not in done]
    if missing:
        note("a real S3 server, the link, a daemon, an engine; the texts are computed and stored")
        with Rig(settings.folder, settings.scale, 2, max(settings.prefixes)) as rig:
            for link in dict.fromkeys(case.link for case in missing):
                _run_link(rig, settings, [case for case in missing if case.link == link], done, note)
    report["machine"]["load_average_after"] = list(os.getloadavg())
    report["seconds"] = time.monotonic() - began_s
    return report | figures.summarise([done[case.name] for case in _wanted(settings) if case.name in done])


def _wanted(settings: PlanSettings) -> list[Case]:
    wanted = list(cases(settings.links, settings.prefixes, settings.scenarios))
    if "cut" in settings.scenarios:
        wanted.append(Case("cut", BROKEN_LINK, max(settings.prefixes)))
    return wanted


def _run_link(rig: Rig, settings: PlanSettings, wanted: Sequence[Case], done: dict[str, Any], note: Note) -> None:
    note(f"link {wanted[0].link.name}: a new engine")
    rig.restart_engine()
    rig.be(wanted[0].link)
    for scenario in dict.fromkeys(case.scenario for case in wanted):
        with contextlib.ExitStack() as stack:
            if scenario == "beside":
                stack.enter_context(Streams(rig.url, rig.texts[1][:_STREAM_PROMPT_TOKENS], _NUM_STREAMS))
            note(f"{scenario}, {wanted[0].link.name}: the engine learns")
            warm_up(rig, Case(scenario, wanted[0].link, max(settings.prefixes)))
            for case in (case for case in wanted if case.scenario == scenario):
                began_s = time.monotonic()
                result = _run_case(rig, settings, case)
                result["seconds"] = time.monotonic() - began_s
                done[case.name] = result
                _keep(settings, case, result)
                note(figures.line(result))


def warm_up(rig: Rig, case: Case) -> None:
    """Let the engine meet the link, and whatever runs beside it, with another text."""
    for share in _WARM_UP:
        tokens = _whole_blocks(case.prefix_tokens * share, rig.scale.block_tokens)
        rig.measure(Case(case.scenario, case.link, tokens), 1, AUTO_PLAN, None)


def _run_case(rig: Rig, settings: PlanSettings, case: Case) -> dict[str, Any]:
    described: dict[str, Any] = {"case": case.name, "scenario": case.scenario, "link": case.link._asdict()}
    described |= {"prefix_tokens": case.prefix_tokens, "head_tokens": case.head_tokens}
    if case.scenario == "cut":
        return described | measure_broken(rig, case, settings.rounds)

    def measure(plan: PlanName, limit_s: float | None) -> Run:
        return rig.measure(case, 0, plan, limit_s)

    always = (case.head_tokens,) if case.head_tokens else ()
    cuts = CutSearch(case.prefix_tokens, settings.scale.chunk_tokens, always)
    is_load_faster = case.link.mb_per_s > _EVEN_MB_PER_S
    results = race(measure, case.prefix_tokens, cuts, is_load_faster, settings.rounds, settings.max_rounds)
    return described | results.as_json()


# Only decides which plan goes first, so that the other need not take long.
_EVEN_MB_PER_S: Final = 15.0


def _whole_blocks(tokens: float, block_tokens: int) -> int:
    return max(1, int(tokens) // block_tokens) * block_tokens


# ---------------------------------------------------------------- files


def finished(folder: Path | None, names: Sequence[str]) -> dict[str, Any]:
    """Return the results of an earlier run, by case; whatever else lies in the folder is left alone."""
    if folder is None:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.json" for name in names}
    return {name: msgspec.json.decode(file.read_bytes()) for name, file in files.items() if file.is_file()}


def _keep(settings: PlanSettings, case: Case, result: dict[str, Any]) -> None:
    if settings.out is not None:
        text = msgspec.json.format(msgspec.json.encode(result), indent=2)
        part = settings.out / f"{case.name}.part"
        part.write_bytes(text)
        part.rename(settings.out / f"{case.name}.json")


def _as_json(settings: PlanSettings) -> dict[str, Any]:
    return {
        "links": [link._asdict() for link in settings.links],
        "prefixes": settings.prefixes,
        "scenarios": settings.scenarios,
        "rounds": settings.rounds,
        "max_rounds": settings.max_rounds,
        "scale": asdict(settings.scale),
        "streams": _NUM_STREAMS,
    }
