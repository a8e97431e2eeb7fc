"""The HTTP API over a fake model and a fake kvstore, through a real socket."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import typer
from typer.testing import CliRunner

from engine import server
from engine.service import Engine, EngineOptions
from kernels.quantized import QuantizedDtype
from kvstore.core.errors import ConfigError
from kvstore.core.key import Namespace
from kvstore.core.outcome import TierKind
from tests.engine.fakes import FakeHbm, FakeStore, continuation, fake_pool
from tests.engine.serving import OPTIONS, Model, Served, serving
from tests.engine.tiny_tokenizer import END, VOCAB
from tests.support.waiting import until

KEYS = {"key-of-the-first-one": "", "key-of-the-other-one": "other"}


@pytest.fixture(scope="module")
def store() -> FakeStore:
    return FakeStore(block_bytes=32)


@pytest.fixture(scope="module")
def shared(store: FakeStore) -> Iterator[Served]:
    with serving(store) as served:
        yield served


def test_a_chat_answers_in_openais_form_and_tells_where_its_kv_came_from(shared: Served, store: FakeStore) -> None:
    first = shared.chat("hello", session_id="form").json()
    assert first["object"] == "chat.completion"
    assert first["choices"][0]["finish_reason"] == "length"
    told = first["kvstore"]
    text = shared.model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    prompt = shared.model.tokenizer.encode(str(text), add_special_tokens=False)
    assert told["token_ids"] == continuation(prompt, 5, vocab=VOCAB)
    assert told["prompt_tokens"] == len(prompt) == told["recomputed_tokens"]
    assert first["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 5,
        "total_tokens": len(prompt) + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (told["session_id"], told["forked"], told["revision"], told["session_saved"]) == ("form", False, 1, True)
    second = shared.chat("more", session_id="form").json()["kvstore"]
    assert second["revision"] == 2
    assert second["served_tokens"]["hbm"] == (len(prompt) + 4) // 4 * 4
    assert sum(second["served_tokens"].values()) + second["recomputed_tokens"] == second["prompt_tokens"]
    assert sum(second["miss"].values()) == second["recomputed_tokens"]
    assert second["ttft_s"] > 0
    assert {report.plan for report in store.reports} <= {"prefill", "hbm", "fetch", "cut", "recompute"}


def test_after_hbm_was_dropped_the_blocks_come_from_kvstore(shared: Served, store: FakeStore) -> None:
    store.tier = TierKind.SSD
    told = shared.chat("something to remember", session_id="drop").json()["kvstore"]
    shared.rest()
    assert shared.http.post("/v1/hbm/drop", json={}).json()["dropped_pool_blocks"] > 0
    again = shared.chat("and?", session_id="drop", plan="fetch").json()["kvstore"]
    assert again["served_tokens"]["ssd"] == (told["prompt_tokens"] + 4) // 4 * 4
    assert again["plan"] == "fetch"
    messages = store.sessions["", "drop"].messages
    tokens = [token for message in messages[:-1] for token in message.token_ids]
    assert again["token_ids"] == continuation(tokens, 5, vocab=VOCAB)


@pytest.mark.parametrize(
    ("plan", "fetched", "told"),
    [([2, 8], 2, "cut"), ([0, 99], 0, "recompute"), ([8, 8], 8, "fetch"), ([99, 99], 8, "fetch")],
)
def test_a_plan_can_be_pinned_to_an_interval(
    shared: Served, store: FakeStore, plan: list[int], fetched: int, told: str
) -> None:
    store.tier = TierKind.SSD
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5] * 3
    token_ids = shared.complete(prompt).json()["kvstore"]["token_ids"]
    shared.rest()
    shared.http.post("/v1/hbm/drop", json={})
    again = shared.complete(prompt, plan=plan).json()["kvstore"]
    assert again["served_tokens"]["ssd"] == fetched * 4
    assert (again["plan"], again["token_ids"]) == (told, token_ids)


def events_of(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_brings_the_same_text_in_pieces_and_the_account_at_its_end(shared: Served) -> None:
    whole = shared.chat("stream me").json()
    response = shared.chat("stream me", stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream"
    events = events_of(response)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-2]["kvstore"]["token_ids"] == whole["kvstore"]["token_ids"]
    assert events[-1]["usage"]["completion_tokens"] == 5


def test_completions_take_text_and_token_ids(shared: Served) -> None:
    by_ids = shared.complete([1, 2, 3]).json()
    assert by_ids["object"] == "text_completion"
    assert by_ids["kvstore"]["token_ids"] == continuation([1, 2, 3], 5, vocab=VOCAB)
    ids = shared.model.tokenizer.encode("abc", add_special_tokens=False)
    assert shared.complete("abc").json()["kvstore"]["token_ids"] == continuation(ids, 5, vocab=VOCAB)
    streamed = events_of(shared.complete([1, 2, 3], stream=True))
    assert "".join(e["choices"][0]["text"] for e in streamed) == by_ids["choices"][0]["text"]


def test_sampling_follows_its_seed(shared: Served) -> None:
    answers = [
        shared.complete([7] * 9, max_tokens=12, temperature=1.5, top_p=0.9, seed=seed).json()["kvstore"]["token_ids"]
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_a_tiny_temperature_puts_no_engine_out_of_service(shared: Served) -> None:
    """A temperature of 1e-310 ended the step loop for every request, see `choose_tokens`."""
    greedy = shared.complete([7] * 9).json()["kvstore"]["token_ids"]
    assert shared.complete([7] * 9, temperature=1e-310).json()["kvstore"]["token_ids"] == greedy
    assert shared.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"logprobs": True}, "logprobs is not supported"),
        ({"n": 2}, "n is not supported"),
        ({"stop": ["x"]}, "stop is not supported"),
        ({"tools": [{}]}, "tools is not supported"),
        ({"sesion_id": "x"}, "did you mean 'session_id'"),
        ({"temperature": 3}, "<= 2.0"),
        ({"max_tokens": 0}, ">= 1"),
        ({"max_tokens": 101}, "at most 100"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "differ"),
        ({"plan": "guess"}, "'auto', 'fetch', 'recompute', or [start, end]"),
        ({"plan": [3]}, "plan"),
        ({"plan": [3, 2]}, "0 <= start <= end"),
        ({"session_id": ""}, "length >= 1"),
        ({"session_id": "a\n"}, "printed"),
        ({"resume_only": True}, "need a session_id"),
        ({"messages": []}, "length >= 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "last message"),
        ({"messages": [{"role": "user", "content": "x" * 700}]}, "context is 600"),
    ],
)
def test_what_is_not_served_is_refused_by_name(shared: Served, fields: dict[str, Any], text: str) -> None:
    response = shared.chat("hi", **fields)
    assert response.status_code == 400
    assert text in response.json()["error"]["message"]


def test_what_will_become_of_a_chat_reaches_kvstore(shared: Served, store: FakeStore) -> None:
    shared.chat("hello", session_id="said", expect_followup=True, priority=1, ttl=60, pin=True)
    put = next(put for put in store.puts if put.id == "said")
    assert (put.expect_followup, put.end, put.priority, put.ttl_s, put.pin) == (True, False, 1, 60.0, True)
    answer = shared.http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 1, "end": True, "expect_followup": True}
    )
    assert answer.status_code == 400 and "contradict" in answer.text


def test_neutral_and_harmless_fields_are_accepted(shared: Served) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    response = shared.chat(
        "",
        messages=[{"role": "user", "content": parts}],
        n=1,
        logprobs=False,
        stop=None,
        user="me",
        tools=[],
        model="fake",
    )
    assert response.status_code == 200
    assert shared.chat("hi", model="gpt-4").status_code == 404


def test_bad_bodies_are_refused(shared: Served) -> None:
    post = shared.http.post
    assert post("/v1/completions", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert post("/v1/completions", content=b"[1]", headers={"content-type": "application/json"}).status_code == 400
    assert post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert post("/v1/completions", json={"prompt": "x" * (5 << 20)}).status_code == 413
    bad = shared.complete([1, 258])
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "bad_token")
    assert shared.http.get("/v1/nothing").status_code == 404
    assert shared.http.get("/v1/completions").status_code == 405


def test_an_unknown_session_is_404_where_only_resuming_was_asked_for(shared: Served) -> None:
    response = shared.chat("hi", session_id="nobody", resume_only=True)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "session_unknown")


def test_health_models_and_metrics(shared: Served) -> None:
    assert shared.http.get("/health").json()["status"] == "ready"
    assert shared.http.get("/v1/models").json()["data"][0]["id"] == "fake"
    text = shared.http.get("/metrics").text
    assert 'kvstore_engine_hbm_pool_blocks{state="free"}' in text
    assert "kvstore_engine_ttft_seconds_count" in text


def test_another_host_name_is_refused_without_keys(shared: Served) -> None:
    assert shared.http.get("/v1/hbm", headers={"host": "evil.example"}).status_code == 403
    assert shared.http.get("/v1/hbm", headers={"host": "localhost:8000"}).status_code == 200


@pytest.mark.parametrize("host", ["[", "[::1", "a]b", "", "127.0.0.1.evil.example", "evil@evil.example"])
def test_a_host_that_is_no_host_is_refused_not_a_fault(shared: Served, host: str) -> None:
    """The header "[" made the parser raise: the answer was 500, and every such request left a traceback in the log."""
    assert shared.http.get("/v1/hbm", headers={"host": host}).status_code == 403


def test_a_very_long_field_name_is_not_compared_nor_sent_back(shared: Served) -> None:
    """Looking for the nearest field kept the event loop, and so every stream, for half a second per request."""
    response = shared.complete([1], **{"x" * (3 << 20): 1})
    assert response.status_code == 400
    assert len(response.content) < 500
    assert len(shared.complete([1], model="x" * (3 << 20)).content) < 500


def test_a_client_that_goes_away_cancels_its_request(shared: Served) -> None:
    shared.model.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        shared.http.post(
            "/v1/completions", json={"prompt": [5] * 40, "max_tokens": 90, "ignore_eos": True}, timeout=0.3
        )
    steps = shared.model.num_steps
    shared.model.gate.set()
    shared.rest()
    assert shared.model.num_steps - steps < 80
    with shared.http.stream(
        "POST", "/v1/completions", json={"prompt": [6] * 9, "max_tokens": 100, "ignore_eos": True, "stream": True}
    ) as response:
        next(response.iter_lines())
    shared.rest()


def test_too_many_requests_are_refused_not_queued(shared: Served) -> None:
    shared.model.gate.clear()
    answers: list[int] = []

    def ask(number: int) -> None:
        with httpx.Client(base_url=shared.http.base_url, timeout=20) as http:
            body = {"prompt": [number] * 5, "max_tokens": 2}
            answers.append(http.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    until(lambda: len(answers) == 4)
    shared.model.gate.set()
    for thread in threads:
        thread.join(20)
    assert sorted(answers) == [200] * 6 + [429] * 4


def test_many_sessions_at_once_all_get_their_own_continuation(shared: Served, store: FakeStore) -> None:
    def talk(name: str) -> None:
        with httpx.Client(base_url=shared.http.base_url, timeout=20) as http:
            for turn in range(4):
                body = {"messages": [{"role": "user", "content": f"{name} {turn}"}], "session_id": name}
                answer = http.post("/v1/chat/completions", json=body | {"max_tokens": 7})
                assert answer.status_code == 200, answer.text

    threads = [threading.Thread(target=talk, args=(f"many-{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(6):
        view = store.sessions["", f"many-{number}"]
        assert view.revision == 4
        tokens: list[int] = []
        for message in view.messages:
            if message.role == "assistant":
                assert message.token_ids == continuation(tokens, 7, frozenset({END}), VOCAB)
            tokens += message.token_ids
    shared.rest()


def test_keys_are_needed_where_there_are_keys_and_decide_the_tenant() -> None:
    store = FakeStore()
    with serving(store, keys=KEYS) as served:
        assert served.http.get("/health").status_code == 200
        refused = served.chat("hi")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        for key in ("wrong", "key-of-the-first-on"):
            served.http.headers["authorization"] = f"Bearer {key}"
            assert served.http.get("/v1/hbm").status_code == 401
        served.http.headers["authorization"] = "Bearer key-of-the-first-one"
        assert served.chat("hi", session_id="s").status_code == 200
        assert served.chat("hi", tenant="other").status_code == 400
        served.http.headers["authorization"] = "Bearer key-of-the-other-one"
        assert served.chat("hi", session_id="s", resume_only=True).status_code == 404
        told = served.chat("hi", session_id="s").json()["kvstore"]
        assert told["served_tokens"]["hbm"] == 0, "the same words of another tenant are not shared"
        assert set(store.sessions) == {("", "s"), ("other", "s")}


def test_without_keys_the_body_may_name_the_tenant_up_to_a_number_of_them() -> None:
    store = FakeStore()
    with serving(store) as served:
        assert served.engine.roots is not None
        served.engine.roots._max_tenants = 2
        assert served.chat("hi", tenant="a", session_id="s").status_code == 200
        assert served.chat("hi", tenant="b").json()["error"]["code"] == "too_many_tenants"
        assert ("a", "s") in store.sessions


def test_while_the_daemon_is_away_chats_go_on_and_say_so() -> None:
    store = FakeStore(up=False)
    with serving(store) as served:
        told = served.chat("hi", session_id="s").json()["kvstore"]
        assert told["session_saved"] is False
        told = served.chat("more", session_id="s").json()["kvstore"]
        assert told["prompt_tokens"] > 60
        served.rest()
        store.up = True
        assert served.chat("again", session_id="s").json()["kvstore"]["session_saved"] is True
    assert len(store.sessions["", "s"].messages) == 6


def test_a_fault_of_the_model_shows_in_health() -> None:
    with serving(None, replace(OPTIONS, warm_up=False)) as served:
        served.model.tokenizer = None  # type: ignore[assignment]

        def broken(*_: Any) -> None:
            raise RuntimeError("the device is gone")

        served.model.forward = broken  # type: ignore[method-assign, assignment]
        assert served.complete([1, 2]).status_code == 500
        assert served.http.get("/health").status_code == 503
        assert served.complete([1, 2]).status_code == 503


def test_the_smallest_pool_is_warmed_up_too() -> None:
    """Warming up took one token more than a pool of two tokens has, and the engine did not start."""
    for num_pool_blocks in range(1, 12):
        pool = fake_pool(num_pool_blocks, 1)
        options = EngineOptions(block_tokens=1, pool_block_tokens=1, chunk_tokens=32)
        model = Model(pool_block_tokens=1)
        Engine(model, pool, FakeHbm(pool), options)._warm_up()


def test_what_kv_is_stored_as_is_part_of_the_namespace_and_off_by_default() -> None:
    pool = fake_pool(8, 4)

    def namespace(store_dtype: QuantizedDtype | None) -> Namespace:
        return Engine(Model(), pool, FakeHbm(pool), replace(OPTIONS, kv_store_dtype=store_dtype)).namespace

    assert OPTIONS.kv_store_dtype is None
    assert namespace(None) == Namespace("fake", "0", "float32", "LKTHD-1", 4, 32, 1, 1, 1)
    int8, fp8 = namespace("int8"), namespace("fp8")
    assert (int8.dtype, fp8.dtype) == ("float32-as-int8", "float32-as-fp8")
    assert int8.kv_layout == fp8.kv_layout != "LKTHD-1"
    # 8 numbers of 4 bytes each become codes of one byte and, heads being of one number here, scales of two.
    assert int8.block_bytes == 24
    with pytest.raises(ConfigError, match="int8 cannot be quantised"):
        Engine(Model(), pool.to(torch.int8), FakeHbm(pool), replace(OPTIONS, kv_store_dtype="fp8"))


def test_stopping_lets_running_requests_end() -> None:
    answers: list[int] = []

    def ask(base_url: httpx.URL) -> None:
        with httpx.Client(base_url=base_url, timeout=20) as http:
            answers.append(http.post("/v1/completions", json={"prompt": [1] * 9, "max_tokens": 3}).status_code)

    with serving(None) as served:
        served.model.gate.clear()
        thread = threading.Thread(target=ask, args=(served.http.base_url,))
        thread.start()
        until(lambda: served.engine.scheduler.num_active)
    thread.join(10)
    assert answers == [200]


# ---------------------------------------------------------------- the command line


def test_a_host_that_others_can_reach_needs_keys(tmp_path: Path) -> None:
    command = typer.Typer()
    command.command()(server.main)
    result = CliRunner().invoke(command, ["--host", "0.0.0.0"])
    assert result.exit_code == 2
    assert "--api-key-file" in result.output
    result = CliRunner().invoke(command, ["--hbm-bytes", "12 parsecs"])
    assert result.exit_code == 2
    assert "--hbm-bytes" in result.output
    result = CliRunner().invoke(command, ["--kv-store-dtype", "int4"])
    assert result.exit_code == 2
    assert "--kv-store-dtype: 'int4' is not one of auto, int8, fp8" in result.output
    result = CliRunner().invoke(command, ["--objective", "speed"])
    assert "--objective is 'speed'; known are latency, throughput" in result.output
    assert "Example:" in CliRunner().invoke(command, ["--help"]).output


def test_a_user_without_a_home_is_told_to_name_the_models_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="--cache-dir"):
        server.default_cache_dir()
