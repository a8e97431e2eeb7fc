"""The demo: hold chat sessions, take things away one by one, resume by ID, compare every token.

First an engine that is never interrupted and has HBM for everything answers all turns: the reference. Then the same
talks run on an engine with too little HBM and a daemon with all four tiers, and between the turns:

    hbm_pressure     the sessions that HBM still holds go on there; those it had no room for come back from RAM
    engine_restart   SIGKILL of the engine
    daemon_restart   SIGKILL of the daemon once the sessions are durable on SSD, HBM emptied too
    s3_only          RAM and SSD emptied once the sessions are durable in S3, HBM emptied too
    other_daemon     a second daemon with an empty disk and a new engine, sharing nothing but the bucket
    planner          as before, but the planner decides what to fetch

Plans are pinned to `fetch`, but for the last. After the second to fourth, five of the prompts are timed with everything
recomputed, in turn with the resumed ones; after the others two.
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvstore.core.errors import KVStoreError, TierUnavailable
from kvstore.core.outcome import TierKind
from kvstore.demo import chats
from kvstore.demo.chats import REPLY_TOKENS, Reply
from kvstore.demo.processes import Daemon, EngineProcess
from kvstore.demo.report import Row, Turn, as_json, describe, show, write
from kvstore.demo.texts import Talk, talks
from kvstore.s3server import REGION, S3Server

_DURABLE_DEADLINE_S = 180.0
_BUCKET = "kvstore-demo"
_TURNS = 7
_WIDTH = 100
# Where no ratio is promised, fewer prompts are recomputed: each takes seconds.
_TIMED_BESIDE = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the demo is. `hbm_blocks` has room for the resumed sessions, not for the displaced ones beside them."""

    model: str
    model_arguments: tuple[str, ...]
    pool_block_bytes: int
    resumed: int = 8
    displaced: int = 1
    timed: int = 5
    at_once: int = 4
    block_tokens: int = 16
    opening_chars: int = 6300
    hbm_blocks: int = 850
    reference_hbm_blocks: int = 1200
    ram_size: str = "1152MiB"
    ssd_max_bytes: str = "4GiB"

    def engine_arguments(self, hbm_blocks: int) -> list[str]:
        hbm_bytes = hbm_blocks * self.pool_block_bytes
        return [*self.model_arguments, "--hbm-bytes", str(hbm_bytes), "--block-tokens", str(self.block_tokens)]


# 30 layers x 2 x 3 KV heads x 64 x 4 bytes are 46,080 bytes per token; the texts make about 1,430 tokens each.
SMOLLM2 = Scale("SmolLM2-135M-Instruct, float32", (), 16 * 46_080)


def run(report_path: Path, scale: Scale = SMOLLM2) -> int:
    """Run everything, print the table, write the report; return 0 if every token was equal."""
    # A file or pipe has no width of its own; the table needs this much.
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-demo-")))
        progress = stack.enter_context(
            Progress(BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console)
        )
        task = progress.add_task("starting", total=14)

        def step(text: str) -> None:
            progress.update(task, advance=1, description=text)
            if not console.is_terminal:
                note(text)

        def note(text: str) -> None:
            console.print(f"{time.monotonic() - started:6.1f} s  {text}", highlight=False)

        spoken = talks(scale.displaced + scale.resumed, scale.opening_chars)
        step("reference: an engine that is never interrupted")
        reference = _reference(folder, scale, spoken)
        demo = Demo(folder, scale, spoken, reference, stack, step, note)
        rows, extra = demo.play()
        progress.update(task, completed=14, description="done")
    seconds = time.monotonic() - started
    show([*rows, *extra], console)
    settings = {"model": scale.model, "block_tokens": scale.block_tokens, "reply_tokens": REPLY_TOKENS}
    report = as_json(rows, extra, settings | {"seconds": round(seconds, 1)})
    write(report, report_path)
    all_equal = all(row["tokens_equal"] for row in [*report["interruptions"], *report["also"]])
    console.print(f"{seconds:.0f} s; the figures are in {report_path}")
    if not all_equal:
        console.print("[bold red]Some tokens differ from the run that was never interrupted.[/]")
    return 0 if all_equal else 1


def _reference(folder: Path, scale: Scale, spoken: Sequence[Talk]) -> list[list[Reply]]:
    """Return the replies of every turn of every talk, reference[turn][talk]."""
    engine = EngineProcess(scale.engine_arguments(scale.reference_hbm_blocks), folder / "reference.log")
    try:
        engine.start()
        replies = []
        for turn in range(_TURNS):
            messages = [_message(talk, turn) for talk in spoken]
            replies.append(chats.say_all(engine.url, spoken, messages, "auto", at_once=len(spoken)))
    finally:
        engine.kill()
    return replies


class Demo:
    """The interrupted run; `play` goes through it once."""

    def __init__(
        self,
        folder: Path,
        scale: Scale,
        spoken: Sequence[Talk],
        reference: list[list[Reply]],
        stack: contextlib.ExitStack,
        step: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._scale = scale
        self._displaced, self._resumed = spoken[: scale.displaced], spoken[scale.displaced :]
        self._reference = {
            (talk.session_id, turn): reference[turn][index]
            for index, talk in enumerate(spoken)
            for turn in range(_TURNS)
        }
        self._last: dict[str, Reply] = {}
        self._turn: dict[str, int] = {}
        self._step = step
        self._note = note
        self._stack = stack
        step("a real S3 server on loopback")
        self._s3 = stack.enter_context(S3Server(folder / "s3", buckets=[_BUCKET]))
        self._daemon = self._new_daemon("first")
        self._engine = self._new_engine(self._daemon)

    def play(self) -> tuple[list[Row], list[Row]]:
        """Return the rows of the five interruptions, and the rows that come beside them."""
        step = self._step
        step("daemon and engine")
        self._daemon.start()
        self._engine.start()
        step("the sessions' first turns")
        self._open(self._displaced)
        self._open(self._resumed)
        rows, extra = [], []
        step("HBM is too small for all sessions")
        rows.append(self._resume("hbm_pressure", "HBM too small", self._resumed, timed=_TIMED_BESIDE))
        extra.append(self._resume("hbm_displaced", "HBM too small, displaced", self._displaced, timed=0))
        step("the engine is killed")
        self._engine.kill()
        self._engine = self._new_engine(self._daemon)
        self._engine.start()
        rows.append(self._resume("engine_restart", "engine killed", self._resumed))
        step("waiting until the sessions are durable on SSD")
        self._wait_durable(("ssd", "s3"))
        step("the daemon is killed")
        self._daemon.kill()
        chats.drop_hbm(self._engine.url)
        self._daemon.start()
        # Uploads that the kill cut short go on from SSD by way of RAM; a turn meanwhile might find its blocks there.
        self._wait_durable(("s3",))
        rows.append(self._resume("daemon_restart", "daemon killed", self._resumed))
        step("waiting until the sessions are durable in S3")
        self._wait_durable(("s3",))
        step("RAM and SSD are emptied")
        self._evict(self._daemon)
        chats.drop_hbm(self._engine.url)
        rows.append(self._resume("s3_only", "RAM and SSD emptied", self._resumed))
        self._wait_durable(("s3",))
        step("a second daemon with an empty disk")
        self._engine.kill()
        other = self._new_daemon("second")
        other.start()
        self._engine = self._new_engine(other)
        self._engine.start()
        self._daemon = other
        rows.append(self._resume("other_daemon", "another daemon, same bucket", self._resumed, timed=_TIMED_BESIDE))
        self._wait_durable(("s3",))
        step("the planner decides")
        self._evict(other)
        chats.drop_hbm(self._engine.url)
        extra.append(self._resume("planner", "planner decides, from S3", self._resumed[:4], plan="auto", timed=0))
        return rows, extra

    # ------------------------------------------------------------ turns

    def _open(self, spoken: Sequence[Talk]) -> None:
        """The first turns, some side by side."""
        messages = [_message(talk, 0) for talk in spoken]
        replies = chats.say_all(self._engine.url, spoken, messages, "fetch", self._scale.at_once)
        for talk, reply in zip(spoken, replies, strict=True):
            if not self._take(talk, reply).tokens_equal:
                raise KVStoreError(
                    f"the first reply of {talk.session_id} differs from the reference's, with no cache used"
                )

    def _say(self, talk: Talk, plan: str) -> Turn:
        message = _message(talk, self._turn[talk.session_id])
        return self._take(talk, chats.say(self._engine.url, talk.session_id, message, plan))

    def _take(self, talk: Talk, reply: Reply) -> Turn:
        """Compare a reply with the reference's and keep it as the session's last."""
        turn = self._turn.get(talk.session_id, 0)
        before = self._last.get(talk.session_id)
        expected = self._reference[talk.session_id, turn]
        self._last[talk.session_id] = reply
        self._turn[talk.session_id] = turn + 1
        return Turn(
            talk.session_id,
            reply.prompt_tokens,
            0 if before is None else before.cached_tokens(self._scale.block_tokens),
            {tier.label: reply.served_tokens.get(tier.label, 0) for tier in TierKind},
            reply.recomputed_tokens,
            reply.ttft_s,
            (reply.token_ids, reply.prompt_tokens) == (expected.token_ids, expected.prompt_tokens),
            reply.plan,
        )

    def _resume(
        self, name: str, title: str, spoken: Sequence[Talk], plan: str = "fetch", timed: int | None = None
    ) -> Row:
        """One more turn of each session, in turn with the timing of prompts with everything recomputed."""
        turns, recompute_s = [], []
        for index, talk in enumerate(spoken):
            turns.append(self._say(talk, plan))
            if index < min(self._scale.timed, len(spoken) if timed is None else timed):
                seconds, first = chats.recompute(self._engine.url, self._prompt(talk))
                recompute_s.append(seconds)
                if first != self._last[talk.session_id].token_ids[0]:
                    raise KVStoreError(f"recomputing {talk.session_id} gave another first token")
        row = Row(name, title, turns, recompute_s)
        self._note(describe(row))
        return row

    def _prompt(self, talk: Talk) -> list[int]:
        """The token ids of the last turn's prompt, as the session remembers them."""
        with contextlib.closing(self._daemon.console()) as console:
            session = console.session_get(talk.session_id)
        if session is None:
            raise KVStoreError(f"the daemon does not know session {talk.session_id}")
        return [token for message in session.messages[:-1] for token in message.token_ids]

    # ------------------------------------------------------------ taking away

    def _wait_durable(self, enough: tuple[str, ...]) -> None:
        deadline = time.monotonic() + _DURABLE_DEADLINE_S
        with contextlib.closing(self._daemon.console()) as console:
            while True:
                wanted = {talk.session_id for talk in self._resumed}
                sessions = [view for view in console.session_list().sessions if view.id in wanted]
                if len(sessions) == len(wanted) and all(view.durable in enough for view in sessions):
                    return
                if time.monotonic() > deadline:
                    raise TierUnavailable(
                        f"the sessions are not durable in {enough[0]} after {_DURABLE_DEADLINE_S:.0f} s"
                    )
                time.sleep(0.1)

    def _evict(self, daemon: Daemon) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "kvstore",
            "evict",
            "--tier",
            "ram,ssd",
            "--run-dir",
            str(daemon.run_dir),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KVStoreError(f"kvstore evict ended with {done.returncode}: {done.stderr}")

    # ------------------------------------------------------------ processes

    def _new_daemon(self, name: str) -> Daemon:
        keys = self._folder / f"{name}-keys"
        keys.mkdir(mode=0o700)
        for file_name, secret in (("access", self._s3.access_key), ("secret", self._s3.secret_key)):
            (keys / file_name).write_text(secret)
            (keys / file_name).chmod(0o600)
        environment = {
            "KVSTORE_RAM_SIZE": self._scale.ram_size,
            "KVSTORE_SSD_PATH": str(self._folder / f"{name}-ssd"),
            "KVSTORE_SSD_MAX_BYTES": self._scale.ssd_max_bytes,
            "KVSTORE_S3_BUCKET": _BUCKET,
            "KVSTORE_S3_ENDPOINT": self._s3.endpoint,
            "KVSTORE_S3_REGION": REGION,
            "KVSTORE_S3_ACCESS_KEY_FILE": str(keys / "access"),
            "KVSTORE_S3_SECRET_KEY_FILE": str(keys / "secret"),
            "KVSTORE_HTTP_PORT": "0",
        }
        daemon = Daemon(self._folder / f"{name}-run", self._folder / f"{name}-daemon.log", environment)
        self._stack.callback(daemon.stop)
        return daemon

    def _new_engine(self, daemon: Daemon) -> EngineProcess:
        arguments = [*self._scale.engine_arguments(self._scale.hbm_blocks), "--run-dir", str(daemon.run_dir)]
        engine = EngineProcess(arguments, self._folder / "engine.log")
        self._stack.callback(lambda: engine.kill())
        return engine


def _message(talk: Talk, turn: int) -> str:
    return talk.opening if turn == 0 else talk.questions[turn - 1]
