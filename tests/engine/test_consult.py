"""What the consult thread makes of a request: prompt, keys, lookup, limits; and sessions through good and bad times."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from engine.chat import Chat, Said, concatenate
from engine.consult import Consult, Limits
from engine.counters import Counters
from engine.link import Roots
from engine.request import Request, Served
from engine.turn import Ask, Keep, Refused, Saved, Turn
from kvstore.core.key import chain_keys
from kvstore.core.outcome import TierKind
from kvstore.wire import ErrorCode
from tests.engine.fakes import FakeClient, FakeStore, namespace_of
from tests.engine.tiny_tokenizer import END, VOCAB, tiny_tokenizer

LIMITS = Limits(VOCAB, 400, 320, 32, frozenset({END}))
TOKENIZER = tiny_tokenizer()


class Desk:
    """A consult thread over a fake store; requests end up in `submitted`."""

    def __init__(self, store: FakeStore | None, tenant: str = "") -> None:
        self.store = store
        self.counters = Counters()
        self.faults = Counters()
        self.submitted: list[Request] = []
        self.predicted_s: float | None = None
        self.namespace = namespace_of(4, tenant)
        self.consult = Consult(
            None if store is None else Roots(lambda tenant: FakeClient(store, tenant)),
            self.namespace,
            Chat(TOKENIZER, [END], LIMITS.max_context_tokens),
            TOKENIZER,
            LIMITS,
            lambda _, request: self.submitted.append(request),
            lambda _: self.predicted_s,
            self.counters,
            self.faults,
        )
        self.consult.start()
        self.num_asked = 0

    def open(self, *said: str | Said, **options: Any) -> Turn:
        self.num_asked += 1
        messages: Sequence[Said] | None = [s if isinstance(s, Said) else Said("user", s) for s in said] or None
        ask = Ask(f"r{self.num_asked}", options.pop("tenant", self.namespace.tenant), 0.0, messages, **options)
        turn, future = self.consult.open(ask, lambda _: None)
        future.result(10)
        return turn

    def close(self, turn: Turn, text: str = "yes") -> Saved:
        assert turn.request is not None
        reply = [*TOKENIZER.encode(text, add_special_tokens=False), END]
        turn.request.output = reply
        tokens = turn.request.prompt + reply
        turn.request.keys = chain_keys(self.namespace, tokens[:-1])
        saved = self.consult.close(turn, reply, text).result(10)
        assert saved is not None
        return saved

    def settle(self) -> None:
        """What the thread does by itself every second."""
        self.consult._enqueue(self.consult._settle).result(10)

    def chat(self, session_id: str, *said: str | Said, **options: Any) -> Saved:
        return self.close(self.open(*said, session_id=session_id, **options))


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def desk(store: FakeStore) -> Iterator[Desk]:
    desk = Desk(store)
    yield desk
    desk.consult.stop()


@pytest.fixture
def alone() -> Iterator[Desk]:
    desk = Desk(None)
    yield desk
    desk.consult.stop()


def refusal(desk: Desk, *said: str, **options: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        desk.open(*said, **options)
    return caught.value


# ---------------------------------------------------------------- prompts


def test_a_prompt_gets_its_keys_and_what_is_cached_of_them(desk: Desk, store: FakeStore) -> None:
    tokens = list(range(14))
    keys = chain_keys(desk.namespace, tokens)
    store.blocks = dict.fromkeys(keys[:2], b"")
    store.tier = TierKind.SSD
    request = desk.open(prompt=tokens).request
    assert request is not None
    assert (request.prompt, request.keys, request.root) == (tokens, keys, desk.namespace.root())
    assert (list(request.cached.tiers), request.cached.why) == ([TierKind.SSD] * 2, "never_stored")
    assert request.max_new_tokens == 32
    assert request.stop_token_ids == {END}


def test_a_block_that_ends_with_the_prompt_is_not_asked_for(desk: Desk, store: FakeStore) -> None:
    tokens = list(range(8))
    store.blocks = dict.fromkeys(chain_keys(desk.namespace, tokens), b"")
    request = desk.open(prompt=tokens).request
    assert request is not None
    assert len(request.cached.tiers) == 1


def test_without_an_answer_everything_is_recomputed(desk: Desk, store: FakeStore) -> None:
    store.up = False
    request = desk.open(prompt=[1] * 9).request
    assert request is not None
    assert (request.cached.asked, request.cached.why) == (False, "unavailable")


def test_recompute_asks_nobody_and_leaves_no_trace_unless_a_session_needs_it(desk: Desk, store: FakeStore) -> None:
    request = desk.open(prompt=[1] * 9, plan="recompute").request
    assert request is not None
    assert not request.cache
    request = desk.open("hi", session_id="s", plan="recompute").request
    assert request is not None
    assert request.cache
    request = desk.open("hi", session_id="s", plan="recompute", save_session=False).request
    assert request is not None
    assert not request.cache


def test_what_cannot_fit_is_refused_with_the_numbers(desk: Desk) -> None:
    assert refusal(desk, prompt=[]).code == "empty_prompt"
    assert "258" in str(refusal(desk, prompt=[1, 258]))
    assert refusal(desk, prompt=[1, -1]).code == "bad_token"
    too_long = refusal(desk, prompt=[1] * 390, max_tokens=20)
    assert (too_long.status, too_long.code) == (400, "context_length_exceeded")
    assert "390" in str(too_long)
    assert refusal(desk, prompt=[1] * 400).code == "context_length_exceeded"
    assert refusal(desk, prompt=[1] * 318, max_tokens=4).code == "hbm_too_small"
    request = desk.open(prompt=[1] * 318, max_tokens=3).request
    assert request is not None
    request = desk.open(prompt=[1] * 310).request
    assert request is not None
    assert request.max_new_tokens == 11


def test_text_prompts_are_tokenised_and_eos_can_be_ignored(desk: Desk) -> None:
    request = desk.open(prompt="abc", ignore_eos=True).request
    assert request is not None
    assert request.prompt == TOKENIZER.encode("abc", add_special_tokens=False)
    assert request.stop_token_ids == frozenset()


def test_messages_that_the_template_refuses_are_a_bad_request(desk: Desk) -> None:
    assert refusal(desk, Said("assistant", "x"), Said("user", "y")).status == 400  # type: ignore[arg-type]


def test_tenants_share_no_keys(desk: Desk) -> None:
    mine, theirs = desk.open(prompt=[1] * 9).request, desk.open(prompt=[1] * 9, tenant="b").request
    assert mine is not None
    assert theirs is not None
    assert set(mine.keys).isdisjoint(theirs.keys)


# ---------------------------------------------------------------- sessions


def test_a_session_goes_on_from_its_very_tokens(desk: Desk, store: FakeStore) -> None:
    first = desk.open("hi", session_id="s")
    saved = desk.close(first, "yes")
    assert saved == Saved("s", 1, forked=False, in_kvstore=True)
    assert first.request is not None
    second = desk.open("more", session_id="s")
    assert second.request is not None
    so_far = first.request.prompt + first.request.output
    assert second.request.prompt[: len(so_far)] == so_far
    assert desk.close(second).revision == 2
    view = store.sessions["", "s"]
    assert [m.content for m in view.messages] == ["hi", "yes", "more", "yes"]
    assert concatenate(view.messages) == second.request.prompt + second.request.output
    assert view.num_blocks == (view.num_tokens - 1) // 4


def test_a_turn_asks_for_its_prompt_once_and_else_only_whether_the_daemon_is_there(
    desk: Desk, store: FakeStore
) -> None:
    """Looking whether it is awake once asked for the session's first block: a request that nobody ever reported."""
    prompts = []
    for said in ("hello there, you", "and then?", "and then?"):
        turn = desk.open(said, session_id="s")
        desk.close(turn)
        assert turn.request is not None
        prompts.append(turn.request.keys[: (len(turn.request.prompt) - 1) // 4])
    assert [keys for keys in store.lookups if keys != [desk.namespace.root()]] == prompts


def test_a_full_history_is_recognised_and_an_edited_one_forks(desk: Desk, store: FakeStore) -> None:
    desk.chat("s", "a")
    desk.chat("s", "b")
    history = [Said("user", "a"), Said("assistant", "yes"), Said("user", "b"), Said("assistant", "yes")]
    saved = desk.chat("s", *history, "c")
    assert (saved.session_id, saved.revision, saved.forked) == ("s", 3, False)
    edited = desk.open(*history[:2], "other", session_id="s")
    assert edited.request is not None
    shared = concatenate(store.sessions["", "s"].messages[:2])
    assert edited.request.prompt[: len(shared)] == shared
    fork = desk.close(edited)
    assert fork.forked
    assert fork.session_id != "s"
    assert [m.content for m in store.sessions["", fork.session_id].messages] == ["a", "yes", "other", "yes"]
    assert store.sessions["", "s"].revision == 3


def test_the_mode_can_be_forced(desk: Desk, store: FakeStore) -> None:
    desk.chat("s", "a")
    desk.chat("s", "b", "c", session_mode="append")
    assert [m.content for m in store.sessions["", "s"].messages] == ["a", "yes", "b", "c", "yes"]
    fork = desk.chat("s", "anew", session_mode="history")
    assert fork.forked


def test_two_turns_at_once_end_as_a_session_and_a_fork(desk: Desk, store: FakeStore) -> None:
    desk.chat("s", "a")
    one, two = desk.open("x", session_id="s"), desk.open("y", session_id="s")
    assert desk.close(one) == Saved("s", 2, forked=False, in_kvstore=True)
    fork = desk.close(two)
    assert fork.forked
    assert {i for _, i in store.sessions} == {"s", fork.session_id}


def test_an_unknown_session_begins_or_is_refused(desk: Desk, store: FakeStore) -> None:
    unknown = refusal(desk, "hi", session_id="nobody", resume_only=True)
    assert (unknown.status, unknown.code) == (404, "session_unknown")
    assert desk.faults.snapshot() == {"session_unknown": 1}
    assert desk.chat("nobody", "hi").revision == 1
    store.up = False
    away = refusal(desk, "hi", session_id="other", resume_only=True)
    assert away.status == 503


def test_a_session_that_was_deleted_does_not_come_back(desk: Desk, store: FakeStore) -> None:
    desk.chat("s", "secret")
    store.sessions.clear()
    turn = desk.open("hi", session_id="s")
    assert [m.content for m in turn.messages] == ["hi"]


def test_a_chat_goes_on_while_the_daemon_is_away_and_is_put_again(desk: Desk, store: FakeStore) -> None:
    desk.chat("s", "a")
    store.up = False
    saved = desk.chat("s", "b")
    assert (saved.session_id, saved.in_kvstore) == ("s", False)
    assert desk.chat("new", "n").in_kvstore is False
    store.up = True
    saved = desk.chat("s", "c")
    assert (saved.session_id, saved.in_kvstore) == ("s", True)
    assert [m.content for m in store.sessions["", "s"].messages] == ["a", "yes", "b", "yes", "c", "yes"]
    assert ("", "new") not in store.sessions
    desk.consult.stop()
    assert ("", "new") in store.sessions, "stopping tries once more"


def test_a_session_for_which_the_daemon_has_no_room_yet_is_put_again(desk: Desk, store: FakeStore) -> None:
    """A daemon that held too much to take one more session answered "busy". That counted as a refusal for good: the
    turn was never put again, and was lost with the process."""
    desk.chat("s", "a")
    store.put_refused = ErrorCode.BUSY
    assert desk.chat("s", "b").in_kvstore is False
    desk.settle()
    assert store.sessions["", "s"].revision == 1
    store.put_refused = ""
    desk.settle()
    assert [m.content for m in store.sessions["", "s"].messages] == ["a", "yes", "b", "yes"]


def test_a_turn_is_saved_however_many_requests_wait_to_be_opened(desk: Desk, store: FakeStore) -> None:
    """Opening and saving shared one bounded queue. Requests that were opened and dropped filled it while the daemon was
    slow, and a turn that ended then was not saved anywhere, though the answer had been given."""
    turn = desk.open("a", session_id="s")
    desk.consult._max_jobs = 3
    gate = threading.Event()
    desk.consult._enqueue(lambda: gate.wait(10))
    asks = [desk.consult.open(Ask(f"q{number}", "", 0.0, prompt=[1]), lambda _: None) for number in range(8)]
    saving = desk.consult.close(turn, [END], "")
    asks[0][0].cancelled = True
    gate.set()
    saved = saving.result(10)
    assert saved is not None
    assert saved.in_kvstore
    errors = [future.exception(10) for _, future in asks]
    codes = [error.code if isinstance(error, Refused) else "" for error in errors]
    assert codes.count("busy") >= 5
    assert codes[0] == "cancelled", "nobody waits for a request whose client is gone"
    assert [request.id for request in desk.submitted[1:]] == [f"q{n}" for n, code in enumerate(codes) if not code]


def test_tenants_that_anybody_may_name_are_not_remembered_for_ever(
    alone: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without keys and without kvstore the body names any tenant; each stayed in memory until the engine ended."""
    monkeypatch.setattr("engine.consult._MAX_NAMESPACES", 4)
    for number in range(20):
        alone.open(prompt=[1, 2], tenant=f"t{number}")
    assert len(alone.consult._namespaces) <= 4


def test_a_turn_during_which_the_unsaved_session_was_put_is_no_conflict(desk: Desk, store: FakeStore) -> None:
    desk.chat("s", "a")
    store.up = False
    desk.chat("s", "b")
    turn = desk.open("c", session_id="s")
    store.up = True
    desk.settle()
    assert store.sessions["", "s"].revision == 2
    saved = desk.close(turn)
    assert (saved.session_id, saved.forked, saved.revision) == ("s", False, 3)


def test_a_session_that_moved_on_elsewhere_meanwhile_forks_and_its_old_id_leads_there(
    desk: Desk, store: FakeStore
) -> None:
    desk.chat("s", "a")
    elsewhere = Desk(store)
    store.up = False
    desk.chat("s", "mine")
    store.up = True
    elsewhere.chat("s", "theirs")
    elsewhere.consult.stop()
    turn = desk.open("next", session_id="s")
    assert [m.content for m in turn.messages][-3:] == ["mine", "yes", "next"]
    saved = desk.close(turn)
    assert saved.session_id != "s"
    assert saved.in_kvstore
    assert "theirs" in [m.content for m in store.sessions["", "s"].messages]


def test_two_turns_at_once_while_the_daemon_is_away_fork_too(desk: Desk, store: FakeStore) -> None:
    desk.chat("s", "a")
    store.up = False
    one, two = desk.open("x", session_id="s"), desk.open("y", session_id="s")
    assert desk.close(one).session_id == "s"
    fork = desk.close(two)
    assert fork.forked
    assert fork.session_id.startswith("s~")


def test_without_kvstore_sessions_live_in_the_process(alone: Desk) -> None:
    assert alone.chat("s", "a") == Saved("s", 1, forked=False, in_kvstore=False)
    assert alone.chat("s", "b").revision == 2
    turn = alone.open("c", session_id="s")
    assert len(turn.messages) == 5
    assert refusal(alone, "x", session_id="t", resume_only=True).status == 404


# ---------------------------------------------------------------- reports


def test_a_finished_request_is_reported_unless_it_only_measured(desk: Desk, store: FakeStore) -> None:
    for plan in ("auto", "recompute"):
        turn = desk.open("hi", session_id="s", plan=plan)
        assert turn.request is not None
        turn.request.result = Served(
            20, {TierKind.HBM: 4, TierKind.S3: 8}, 8, 0, {"partial_block": 8}, "fetch", 0.2, 1.0
        )
        desk.close(turn)
    desk.consult.stop()
    (report,) = store.reports
    assert (report.hbm, report.s3, report.recomputed, report.plan) == (4, 8, 8, "fetch")


def test_faults_are_told_once_the_daemon_can_be_told(desk: Desk, store: FakeStore) -> None:
    store.up = False
    desk.faults.add("stale_slot", 2)
    desk.settle()
    store.up = True
    desk.settle()
    desk.settle()
    assert store.observed == [{"stale_slot": 2}]


# ---------------------------------------------------------------- what will become of it


def test_what_a_client_says_will_become_of_a_session_goes_with_its_turn(store: FakeStore, desk: Desk) -> None:
    desk.chat("chat", "hello there", keep=Keep(end=True, priority=-1, ttl_s=60.0, pin=True))
    put = store.puts[-1]
    assert (put.end, put.expect_followup, put.priority, put.ttl_s, put.pin) == (True, False, -1, 60.0, True)
    assert not store.hints


def test_what_it_says_of_a_prompt_without_a_session_goes_with_the_blocks_of_the_prompt(
    store: FakeStore, desk: Desk
) -> None:
    turn = desk.open(prompt=list(range(10)), keep=Keep(expect_followup=True, pin=True))
    assert turn.request is not None
    desk.consult.close(turn, [1, 2], "x").result(10)
    desk.settle()
    (hint,) = store.hints
    assert hint.keys == b"".join(turn.request.keys[:2]) and hint.expect_followup and hint.pin_s == 3600.0
    desk.consult.close(desk.open(prompt=list(range(10))), [1], "x").result(10)
    desk.settle()
    assert len(store.hints) == 1, "who says nothing costs no message"


def test_requests_with_the_same_beginning_do_not_replace_each_others_pins(store: FakeStore, desk: Desk) -> None:
    """The pin had the name of the first block, and so all prompts behind one system prompt shared one pin."""

    def pin_name(*said: str, pin: bool = True, **asked: Any) -> str:
        turn = desk.open(*said, keep=Keep(pin=pin), **asked)
        desk.consult.close(turn, [1], "x").result(10)
        desk.settle()
        return store.hints[-1].pin_name

    system = list(range(8))
    names = [pin_name(prompt=system + rest) for rest in ([], [1], [2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6])]
    assert len(set(names)) == 5, "though some have the same whole blocks"
    assert pin_name(prompt=[*system, 1], pin=False) == names[1], "who asks the same again can unpin it"
    one = pin_name("hello there", session_id="one", save_session=False)
    other = pin_name("hello there", session_id="other", save_session=False)
    again = pin_name("something else", session_id="one", save_session=False)
    assert one == again != other
    assert all(len(hint.pin_name) <= 200 for hint in store.hints)


def test_a_turn_that_cannot_be_pinned_is_recorded_all_the_same(store: FakeStore, desk: Desk) -> None:
    store.refuses_pins = True
    saved = desk.chat("chat", "hello there", keep=Keep(pin=True))
    assert saved.in_kvstore and store.puts[-1].pin is None
    assert desk.counters.snapshot()["pins_refused"] == 1
