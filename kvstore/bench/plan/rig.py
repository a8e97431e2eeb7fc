"""Everything a case needs, as a user would start it: a real S3 server, the link in front of it, a daemon, an engine.

    engine, helper ─► daemon (RAM, no SSD) ─► link ─► S3 server

The texts are computed and stored once, over the open link. Before each run HBM is emptied, RAM too, and the link is
quiet; then the head is brought into RAM where the case says so. All of that is done by the helper, an engine of its
own: what it meets on the open link must not teach the one that is measured.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec

from kvstore.bench.plan.cases import AUTO_PLAN, LOAD, Case, LinkSetting, PlanName
from kvstore.bench.plan.link import Line
from kvstore.bench.plan.race import Run
from kvstore.bench.site import Site, wait
from kvstore.core.errors import KVStoreError, ProtocolError
from kvstore.demo.processes import EngineProcess
from kvstore.demo.texts import talks
from policies.decision import Decision

_LOOK_EVERY_S: Final = 0.03
_QUIET_DEADLINE_S: Final = 30.0
_GIVE_UP_S: Final = 0.2
_REPORT_DEADLINE_S: Final = 2.0
_OPEN: Final = Line()


@dataclass(frozen=True, slots=True)
class Scale:
    """The model, how it is served, and how long the texts are. Blocks are small, so that a plan can be cut anywhere."""

    model_arguments: tuple[str, ...] = ()
    block_tokens: int = 16
    chunk_tokens: int = 256
    hbm_bytes: int = 1 << 30
    ram_size: str = "1GiB"
    text_chars: int = 11_000
    engine_arguments: tuple[str, ...] = ()

    def engine(self) -> list[str]:
        return [
            *self.model_arguments,
            *("--hbm-bytes", str(self.hbm_bytes)),
            *("--block-tokens", str(self.block_tokens)),
            *("--chunk-tokens", str(self.chunk_tokens)),
            *self.engine_arguments,
        ]


class Answer(msgspec.Struct, frozen=True):
    """Of the engine's answer, what counts here."""

    prompt_tokens: int
    served_tokens: dict[str, int]
    recomputed_tokens: int
    plan: str
    ttft_s: float
    token_ids: list[int]


class Rig:
    """`texts[0]` is what is measured, the others are for warming up; each is token ids. Raises KVStoreError."""

    def __init__(self, folder: Path, scale: Scale, num_texts: int, longest_tokens: int) -> None:
        self._folder = folder
        self.scale = scale
        self._longest_tokens = longest_tokens
        self._num_texts = num_texts
        self.texts: list[list[int]] = []
        self._line = _OPEN
        self._expected: dict[int, list[int]] = {}
        self._engine: EngineProcess | None = None
        self._helper: EngineProcess | None = None
        # A slow link needs longer for eight blocks at once; nothing is swept while we run.
        environment = {"KVSTORE_S3_REQUEST_DEADLINE": "60s", "KVSTORE_S3_SWEEP_EVERY": "1d"}
        self._site = Site(folder, scale.ram_size, has_link=True, environment=environment)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._site)
            self._begin()
            stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._site.__exit__(kind, error, at)

    # ------------------------------------------------------------ the link and the engine

    def be(self, link: LinkSetting) -> None:
        """The link is like that during runs."""
        self._line = Line(link.round_trip_ms / 1000, link.mb_per_s * 1e6)

    def restart_engine(self) -> None:
        """A new engine knows nothing of the link before."""
        if self._engine is not None:
            self._engine.kill()
            self._engine = None
        number = len(list(self._folder.glob("engine-*.log")))
        self._engine = self._site.new_engine(f"engine-{number}", self.scale.engine())

    @property
    def url(self) -> str:
        assert self._engine is not None
        return self._engine.url

    # ------------------------------------------------------------ runs

    def prompt(self, text: int, prefix_tokens: int) -> list[int]:
        """The prefix, which is cached, and some new tokens, less than a block."""
        return self.texts[text][: prefix_tokens + self.scale.block_tokens - 1]

    def place(self, text: int, head_tokens: int) -> None:
        """Empty HBM and RAM, then bring the first `head_tokens` of the text into RAM; the link is open meanwhile."""
        self._site.link.be(_OPEN)
        self._empty()
        if head_tokens:
            self._ask(self._helper, self.texts[text][: head_tokens + 1], "fetch", 1)
            self._wait_quiet()

    def measure(self, case: Case, text: int, plan: PlanName, limit_s: float | None, breaks: Line | None = None) -> Run:
        """Run one plan of a case; `breaks` is how the link is instead of how `be` said. None of the engine's threads
        is busy before, but with other streams.

        Raises KVStoreError where another plan's tokens differ, or the blocks are not where the case says.
        """
        self.place(text, case.head_tokens)
        prompt = self.prompt(text, case.prefix_tokens)
        self._site.link.be(breaks or self._line)
        began_s = time.perf_counter()
        try:
            request_id, answer = self._ask(self._engine, prompt, self.body_plan(case, plan), 2, limit_s)
        except httpx.ReadTimeout:
            # The engine hears of it between two steps, its fetch a little later.
            time.sleep(_GIVE_UP_S)
            return Run(None, limit_s=limit_s)
        finally:
            taken_s = time.perf_counter() - began_s
            self._site.link.be(_OPEN)
        if not answer.ttft_s <= taken_s:
            raise KVStoreError(f"the engine says {answer.ttft_s} s to the first token of an answer of {taken_s} s")
        if answer.served_tokens.get("hbm"):
            raise KVStoreError("a run found blocks in HBM that were to be elsewhere")
        self._compare(text, case.prefix_tokens, plan, answer.token_ids)
        decided = self._decision(request_id) if plan == AUTO_PLAN else {}
        return Run(answer.ttft_s, answer.plan, answer.served_tokens, decision=decided)

    def down_bytes(self) -> int:
        """What has come down the link so far."""
        return self._site.link.be(_OPEN).down_bytes

    def bucket_works(self) -> bool:
        tiers: Any = self._site.console.stats()["tiers"]
        return bool(tiers["s3"]["state"] == "ok")

    def body_plan(self, case: Case, plan: PlanName) -> str | list[int]:
        if plan.name == LOAD:
            return "fetch"
        if plan.cut_tokens < 0:
            return plan.name
        return [plan.cut_tokens // self.scale.block_tokens, case.prefix_tokens // self.scale.block_tokens]

    def _ask(
        self,
        engine: EngineProcess | None,
        prompt: Sequence[int],
        plan: str | list[int],
        max_tokens: int,
        limit_s: float | None = None,
    ) -> tuple[str, Answer]:
        """Return the request's id and the answer. Raises httpx.ReadTimeout after `limit_s`, KVStoreError where the
        engine refuses."""
        assert engine is not None
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True, "plan": plan}
        told = self._site.post(engine, "/v1/completions", body, limit_s)
        return str(told["id"]), msgspec.convert(told["kvstore"], Answer)

    def _decision(self, request_id: str) -> dict[str, Any]:
        """Return what was predicted and what came of it; the engine reports it a moment after its answer."""
        deadline = time.monotonic() + _REPORT_DEADLINE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ProtocolError):
                decision = self._site.console.decision_get(request_id).decision
                return {} if decision is None else _in_short(decision)
            time.sleep(_LOOK_EVERY_S)
        return {}

    def _compare(self, text: int, prefix_tokens: int, plan: PlanName, token_ids: list[int]) -> None:
        expected = self._expected.setdefault((text << 32) + prefix_tokens, token_ids)
        if expected != token_ids:
            raise KVStoreError(f"the plan {plan} of {prefix_tokens} tokens answers {token_ids}, others {expected}")

    # ------------------------------------------------------------ putting things in their places

    def _empty(self) -> None:
        """Return when HBM and RAM hold nothing of the texts and nothing comes any more."""

        def is_empty() -> bool:
            self._drop_hbm()
            self._wait_quiet()
            freed = self._site.console.evict(["ram"]).freed["ram"]
            return not freed and not self._in_hbm()

        wait(is_empty, "RAM and HBM are not empty", _QUIET_DEADLINE_S, 0.0)

    def _wait_quiet(self) -> None:
        """Return when nothing has come down the link for a moment."""
        seen = [-1, self.down_bytes()]

        def is_quiet() -> bool:
            seen[:] = seen[1], self.down_bytes()
            return seen[0] == seen[1]

        time.sleep(_LOOK_EVERY_S)
        wait(is_quiet, "the link is not quiet", _QUIET_DEADLINE_S, _LOOK_EVERY_S)

    def _drop_hbm(self) -> None:
        for engine in self._engines():
            self._site.post(engine, "/v1/hbm/drop", {})

    def _in_hbm(self) -> int:
        return sum(int(self._site.get(engine, "/v1/hbm")["indexed_blocks"]) for engine in self._engines())

    def _engines(self) -> list[EngineProcess]:
        return [engine for engine in (self._engine, self._helper) if engine is not None]

    # ------------------------------------------------------------ start

    def _begin(self) -> None:
        self._helper = self._site.new_engine("helper", self.scale.engine())
        written = talks(self._num_texts, self.scale.text_chars)
        for talk in written:
            self.texts.append(self._write(talk.session_id, talk.opening))
        self._site.wait_durable([talk.session_id for talk in written])

    def _write(self, session_id: str, text: str) -> list[int]:
        """Compute and store a text as the first turn of a session; return its tokens, as the session remembers them."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "session_id": session_id,
            "max_tokens": 1,
            "ignore_eos": True,
        }
        assert self._helper is not None
        self._site.post(self._helper, "/v1/chat/completions", body)
        session = self._site.console.session_get(session_id)
        if session is None:
            raise KVStoreError("the daemon does not know a session that was just saved")
        tokens = [token for message in session.messages[:-1] for token in message.token_ids]
        if len(tokens) < self._longest_tokens + self.scale.block_tokens:
            raise KVStoreError(f"a text has {len(tokens)} tokens, too few for prefixes of {self._longest_tokens}")
        return tokens


def _in_short(decision: Decision) -> dict[str, Any]:
    """What tells why a plan was good or not; blocks and seconds."""
    chosen, happened = decision.chosen, decision.happened
    return {
        "why": decision.why,
        "predicted_s": {plan.kind: round(plan.seconds, 4) for plan in decision.plans},
        "chosen": [chosen.start, chosen.end, round(chosen.seconds, 4), round(chosen.gpu_s, 4)],
        "gpu_queue_s": decision.situation.gpu_queue_s,
        "happened": None if happened is None else msgspec.to_builtins(happened, str_keys=True),
    }
