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
from urllib.parse import urlsplit

import httpx
import msgspec

from kvstore.bench.plan.cases import AUTO_PLAN, LOAD, Case, LinkSetting, PlanName
from kvstore.bench.plan.link import Line
from kvstore.bench.plan.linkprocess import LinkProcess
from kvstore.bench.plan.race import Run
from kvstore.core.errors import KVStoreError, ProtocolError, TierUnavailable
from kvstore.demo.processes import Daemon, EngineProcess
from kvstore.demo.texts import talks
from kvstore.s3server import REGION, S3Server
from policies.decision import Decision

_BUCKET: Final = "kvstore-bench-plan"
_DEADLINE_S: Final = 120.0
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

    def engine(self, run_dir: Path) -> list[str]:
        return [
            *self.model_arguments,
            *("--hbm-bytes", str(self.hbm_bytes)),
            *("--block-tokens", str(self.block_tokens)),
            *("--chunk-tokens", str(self.chunk_tokens)),
            *("--run-dir", str(run_dir)),
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
        self._stack = contextlib.ExitStack()
        self._engine: EngineProcess | None = None
        self._helper: EngineProcess | None = None
        self._http = self._stack.enter_context(httpx.Client(timeout=_DEADLINE_S))

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    # ------------------------------------------------------------ the link and the engine

    def be(self, link: LinkSetting) -> None:
        """The link is like that during runs."""
        self._line = Line(link.round_trip_ms / 1000, link.mb_per_s * 1e6)

    def restart_engine(self) -> None:
        """A new engine knows nothing of the link before."""
        if self._engine is not None:
            self._engine.kill()
            self._engine = None
        self._engine = self._new_engine(f"engine-{len(list(self._folder.glob('engine-*.log')))}")

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
        self._link.be(_OPEN)
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
        self._link.be(breaks or self._line)
        began_s = time.perf_counter()
        try:
            request_id, answer = self._ask(self._engine, prompt, self.body_plan(case, plan), 2, limit_s)
        except httpx.ReadTimeout:
            # The engine hears of it between two steps, its fetch a little later.
            time.sleep(_GIVE_UP_S)
            return Run(None, limit_s=limit_s)
        finally:
            taken_s = time.perf_counter() - began_s
            self._link.be(_OPEN)
        if not answer.ttft_s <= taken_s:
            raise KVStoreError(f"the engine says {answer.ttft_s} s to the first token of an answer of {taken_s} s")
        if answer.served_tokens.get("hbm"):
            raise KVStoreError("a run found blocks in HBM that were to be elsewhere")
        self._compare(text, case.prefix_tokens, plan, answer.token_ids)
        decided = self._decision(request_id) if plan == AUTO_PLAN else {}
        return Run(answer.ttft_s, answer.plan, answer.served_tokens, decision=decided)

    def down_bytes(self) -> int:
        """What has come down the link so far."""
        return self._link.be(_OPEN).down_bytes

    def bucket_works(self) -> bool:
        tiers: Any = self._console.stats()["tiers"]
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
        answer = self._http.post(f"{engine.url}/v1/completions", json=body, timeout=limit_s or _DEADLINE_S)
        told = _checked(answer)
        return str(told["id"]), msgspec.convert(told["kvstore"], Answer)

    def _decision(self, request_id: str) -> dict[str, Any]:
        """Return what was predicted and what came of it; the engine reports it a moment after its answer."""
        deadline = time.monotonic() + _REPORT_DEADLINE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ProtocolError):
                decision = self._console.decision_get(request_id).decision
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
        deadline = time.monotonic() + _QUIET_DEADLINE_S
        while True:
            self._drop_hbm()
            self._wait_quiet()
            freed = self._console.evict(["ram"]).freed["ram"]
            if not freed and not self._in_hbm():
                return
            if time.monotonic() > deadline:
                raise TierUnavailable("RAM and HBM do not become empty")

    def _wait_quiet(self) -> None:
        """Return when nothing has come down the link for a moment."""
        deadline = time.monotonic() + _QUIET_DEADLINE_S
        before = -1
        while (passed := self._link.be(_OPEN).down_bytes) != before:
            if time.monotonic() > deadline:
                raise TierUnavailable("the link does not become quiet")
            before = passed
            time.sleep(_LOOK_EVERY_S)

    def _drop_hbm(self) -> None:
        for engine in self._engines():
            _checked(self._http.post(f"{engine.url}/v1/hbm/drop", json={}))

    def _in_hbm(self) -> int:
        return sum(
            int(_checked(self._http.get(f"{engine.url}/v1/hbm"))["indexed_blocks"]) for engine in self._engines()
        )

    def _engines(self) -> list[EngineProcess]:
        return [engine for engine in (self._engine, self._helper) if engine is not None]

    # ------------------------------------------------------------ start

    def _start(self) -> None:
        s3 = self._stack.enter_context(S3Server(self._folder / "s3", buckets=[_BUCKET]))
        address = urlsplit(s3.endpoint)
        assert address.hostname is not None and address.port is not None
        self._link = self._stack.enter_context(LinkProcess(address.hostname, address.port))
        self._daemon = self._new_daemon(s3)
        self._stack.callback(self._daemon.kill)
        self._daemon.start()
        self._console = self._stack.enter_context(contextlib.closing(self._daemon.console()))
        self._stack.callback(self._end_engines)
        self._helper = self._new_engine("helper")
        for talk in talks(self._num_texts, self.scale.text_chars):
            self.texts.append(self._write(talk.session_id, talk.opening))
        self._wait_stored()

    def _new_daemon(self, s3: S3Server) -> Daemon:
        keys = self._folder / "keys"
        keys.mkdir(mode=0o700)
        for name, secret in (("access", s3.access_key), ("secret", s3.secret_key)):
            (keys / name).touch(mode=0o600)
            (keys / name).write_text(secret)
        environment = {
            "KVSTORE_RAM_SIZE": self.scale.ram_size,
            "KVSTORE_SSD_ENABLED": "false",
            "KVSTORE_HTTP_ENABLED": "false",
            "KVSTORE_S3_BUCKET": _BUCKET,
            "KVSTORE_S3_ENDPOINT": self._link.endpoint,
            "KVSTORE_S3_REGION": REGION,
            "KVSTORE_S3_ACCESS_KEY_FILE": str(keys / "access"),
            "KVSTORE_S3_SECRET_KEY_FILE": str(keys / "secret"),
            # A slow link needs longer for eight blocks at once; nothing is swept while we run.
            "KVSTORE_S3_REQUEST_DEADLINE": "60s",
            "KVSTORE_S3_SWEEP_EVERY": "1d",
        }
        return Daemon(self._folder / "run", self._folder / "daemon.log", environment)

    def _write(self, session_id: str, text: str) -> list[int]:
        """Compute and store a text as the first turn of a session; return its tokens, as the session remembers them."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "session_id": session_id,
            "max_tokens": 1,
            "ignore_eos": True,
        }
        assert self._helper is not None
        _checked(self._http.post(f"{self._helper.url}/v1/chat/completions", json=body))
        session = self._console.session_get(session_id)
        if session is None:
            raise KVStoreError("the daemon does not know a session that was just saved")
        tokens = [token for message in session.messages[:-1] for token in message.token_ids]
        if len(tokens) < self._longest_tokens + self.scale.block_tokens:
            raise KVStoreError(f"a text has {len(tokens)} tokens, too few for prefixes of {self._longest_tokens}")
        return tokens

    def _wait_stored(self) -> None:
        """Return when all texts are in the bucket."""
        deadline = time.monotonic() + _DEADLINE_S
        wanted = len(self.texts)
        while True:
            sessions = self._console.session_list().sessions
            if len(sessions) == wanted and all(view.durable == "s3" for view in sessions):
                return
            if time.monotonic() > deadline:
                raise TierUnavailable(f"the texts are not in the bucket after {_DEADLINE_S:.0f} s")
            time.sleep(0.1)

    def _end_engines(self) -> None:
        for engine in self._engines():
            engine.kill()

    def _new_engine(self, name: str) -> EngineProcess:
        arguments = self.scale.engine(self._daemon.run_dir)
        # The user's own engines have measured this machine, and must not learn from our links.
        arguments += ["--profile-dir", str(self._folder / f"profile-{name}")]
        engine = EngineProcess(arguments, self._folder / f"{name}.log")
        try:
            engine.start()
        except BaseException:
            engine.kill()
            raise
        return engine


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


def _checked(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise KVStoreError(f"the engine answered {answer.status_code}: {answer.text[:500]}")
    return dict(answer.json())
