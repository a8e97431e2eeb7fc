import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvstore.api import ApiSettings, create_app
from kvstore.config import HttpConfig
from kvstore.core.errors import ConfigError, ProtocolError, TierUnavailable
from kvstore.guard import MAX_BODY_BYTES
from kvstore.wire import ErrorCode
from tests.support.consoles import FakeClient, session
from tests.support.decisions import decision_view

TOKEN = "correct-horse-battery"


class Api:
    """The app, called in this process; each call is one event loop."""

    def __init__(self, client: FakeClient, http: HttpConfig | None = None) -> None:
        self.app = create_app(lambda: client, http or HttpConfig())  # type: ignore[arg-type,return-value]

    def __call__(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def ask(http: httpx.AsyncClient) -> httpx.Response:
            return await http.request(method, path, **options)

        return self.run(ask)

    def run(self, conversation: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        async def go() -> Any:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with (
                self.app.router.lifespan_context(self.app),
                httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8200") as http,
            ):
                return await conversation(http)

        return asyncio.run(go())


def error_of(response: httpx.Response) -> tuple[int, str]:
    body = response.json()
    assert set(body) == {"error"}
    assert body["error"]["message"]
    return response.status_code, body["error"]["code"]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


# ---------------------------------------------------------------- what it answers


def test_health_is_good_only_if_the_daemon_answers() -> None:
    client = FakeClient()
    assert Api(client)("GET", "/health").json() == {"status": "ok", "round_trip_s": 0.0001}
    client.fault = TierUnavailable("no daemon")
    assert error_of(Api(client)("GET", "/health")) == (503, "daemon_unreachable")


def test_stats_are_the_daemons_snapshot() -> None:
    client = FakeClient()
    assert Api(client)("GET", "/v1/stats").json() == client.snapshot


def test_metrics_are_in_prometheus_text_form() -> None:
    response = Api(FakeClient())("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'kvstore_served_tokens_total{tier="ram"} 250.0' in response.text.splitlines()


def test_metrics_say_that_the_daemon_is_down_instead_of_failing() -> None:
    client = FakeClient()
    client.fault = TierUnavailable("no daemon")
    response = Api(client)("GET", "/metrics")
    assert response.status_code == 200
    assert "kvstore_up 0.0" in response.text.splitlines()


def test_a_list_of_sessions_holds_nothing_that_was_said() -> None:
    response = Api(FakeClient(session("a"), session("b")))("GET", "/v1/sessions")
    assert [view["id"] for view in response.json()["sessions"]] == ["a", "b"]
    assert response.json()["total"] == 2
    assert "secret" not in response.text
    assert "messages" not in response.json()["sessions"][0]


def test_one_session_is_shown_with_its_messages() -> None:
    body = Api(FakeClient(session("a")))("GET", "/v1/sessions/a").json()
    assert body["messages"][0] == {"role": "user", "content": "a secret", "num_tokens": 3}
    assert body["durable"] == "ssd"


def test_a_session_is_pinned_and_deleted_for_its_tenant() -> None:
    client = FakeClient(session("a"))
    pinned = Api(client)("POST", "/v1/sessions/a/pin", json={"pinned": True}, params={"tenant": "t"})
    assert pinned.json() == {"id": "a", "pinned": True}
    deleted = Api(client)("DELETE", "/v1/sessions/a")
    assert deleted.json() == {"id": "a", "blocks_deleted": 5, "blocks_shared": 2}
    assert client.calls == [("session_pin", "a", True, "t"), ("session_delete", "a", "")]


def test_a_session_is_brought_into_ram_on_request() -> None:
    client = FakeClient(session("a"))
    begun = Api(client)("POST", "/v1/sessions/a/prefetch", params={"tenant": "t"})
    assert begun.json() == {"id": "a", "blocks_to_load": 3, "blocks": 5}
    assert client.calls == [("session_prefetch", "a", "t")]
    assert error_of(Api(client)("POST", "/v1/sessions/b/prefetch")) == (404, "not_found")


def test_what_will_become_of_a_session_can_be_said_and_is_checked() -> None:
    client = FakeClient(session("a"))
    said = Api(client)("POST", "/v1/sessions/a/hint", json={"end": True, "ttl_s": 60}, params={"tenant": "t"})
    assert said.json() == {"id": "a"}
    wanted = {"tenant": "t", "expect_followup": False, "end": True, "priority": 0, "ttl_s": 60.0}
    assert client.calls == [("session_hint", "a", wanted)]
    assert error_of(Api(client)("POST", "/v1/sessions/a/hint", json={"priority": 3})) == (400, "bad_request")
    assert error_of(Api(client)("POST", "/v1/sessions/b/hint", json={"end": True})) == (404, "not_found")


def test_decisions_are_listed_and_shown_one_by_one_with_tiers_by_name() -> None:
    client = FakeClient()
    client.decisions = [decision_view("a"), decision_view("b", decision=None)]
    listed = Api(client)("GET", "/v1/decisions", params={"limit": 1, "tenant": "t"}).json()
    assert [view["id"] for view in listed["decisions"]] == ["a"] and listed["total"] == 2
    shown = Api(client)("GET", "/v1/decisions/a").json()
    assert shown == listed["decisions"][0]
    decision = shown["decision"]
    assert decision["situation"]["cached"] == [{"tier": "ram", "blocks": 3}, {"tier": "s3", "blocks": 4}]
    assert decision["happened"]["loaded"] == {"ram": 3, "s3": 1} and decision["chosen"]["kind"] == "interval"
    assert Api(client)("GET", "/v1/decisions/b").json()["decision"] is None
    assert error_of(Api(client)("GET", "/v1/decisions/c")) == (404, "not_found")
    assert client.calls[:2] == [("decision_list", "t", 1), ("decision_get", "a", None)]


def test_decisions_need_the_token_and_a_limit_that_makes_sense(token_file: Path) -> None:
    api = Api(FakeClient(), HttpConfig(token_file=str(token_file)))
    for path in ("/v1/decisions", "/v1/decisions/a"):
        assert error_of(api("GET", path))[0] == 401
    for limit in ("0", "1001", "many"):
        assert error_of(Api(FakeClient())("GET", "/v1/decisions", params={"limit": limit})) == (400, "bad_request")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/sessions/a", None),
        ("DELETE", "/v1/sessions/a", None),
        ("POST", "/v1/sessions/a/pin", {"pinned": True}),
    ],
)
def test_an_unknown_session_is_not_found(method: str, path: str, body: Any) -> None:
    assert error_of(Api(FakeClient())(method, path, json=body)) == (404, "not_found")


def test_tiers_are_emptied_on_order() -> None:
    client = FakeClient()
    response = Api(client)("POST", "/v1/evict", json={"tiers": ["ram", "ssd"], "drop": True})
    assert response.json() == {"freed": {"ram": 3, "ssd": 3}, "kept": {"ram": 1, "ssd": 1}}
    assert client.calls == [("evict", ("ram", "ssd"), True)]


def test_health_is_answered_while_a_tier_is_being_emptied() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(FakeClient):
        def evict(self, tiers: list[str], drop: bool = False, deadline_s: float = 60.0) -> Any:
            entered.set()
            assert go_on.wait(20)
            return super().evict(tiers, drop)

    async def both(http: httpx.AsyncClient) -> tuple[int, int]:
        evicting = asyncio.create_task(http.post("/v1/evict", json={"tiers": ["ram"]}))
        await asyncio.to_thread(entered.wait, 20)
        health = await http.get("/health")
        go_on.set()
        return health.status_code, (await evicting).status_code

    assert Api(Slow()).run(both) == (200, 200)


def test_more_requests_than_may_wait_are_told_so_at_once() -> None:
    go_on = threading.Event()

    class Slow(FakeClient):
        def stats(self) -> dict[str, Any]:
            assert go_on.wait(20)
            return super().stats()

    async def crowd(http: httpx.AsyncClient) -> list[int]:
        asking = [asyncio.create_task(http.get("/v1/stats")) for _ in range(40)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        go_on.set()
        return sorted([response.status_code for response in await asyncio.gather(*asking)])

    assert Api(Slow()).run(crowd) == [200] * 32 + [503] * 8


def test_the_client_is_closed_with_the_app() -> None:
    client = FakeClient()
    Api(client)("GET", "/health")
    assert client.closed


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tiers": []}, "at least one"),
        ({"tiers": ["hbm"]}, "tiers"),
        ({"tiers": "ram"}, "tiers"),
        ({"tiers": ["ram"], "dorp": True}, "dorp"),
        ({"tiers": ["ram"], "drop": "yes"}, "drop"),
    ],
)
def test_a_malformed_order_is_refused_by_the_name_of_what_is_wrong(body: Any, said: str) -> None:
    client = FakeClient()
    response = Api(client)("POST", "/v1/evict", json=body)
    assert error_of(response) == (400, "bad_request")
    assert said in response.json()["error"]["message"]
    assert not client.calls


def test_a_form_from_another_web_page_is_no_order() -> None:
    """A page may have a browser POST text/plain anywhere without asking; JSON as text/plain must not pass."""
    client = FakeClient()
    response = Api(client)("POST", "/v1/evict", content=b'{"tiers": ["ram"]}', headers={"content-type": "text/plain"})
    assert error_of(response) == (400, "bad_request")
    assert "Content-Type: application/json" in response.json()["error"]["message"]
    assert not client.calls


def test_a_body_that_says_it_is_too_long_is_refused() -> None:
    client = FakeClient()
    response = Api(client)("POST", "/v1/evict", content=b"x" * (MAX_BODY_BYTES + 1))
    assert error_of(response) == (413, "too_long")
    assert not client.calls


def test_a_body_that_turns_out_too_long_is_refused() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 4096

    response = Api(FakeClient())("POST", "/v1/evict", content=endless(), headers={"content-type": "application/json"})
    assert error_of(response) == (413, "too_long")


@pytest.mark.parametrize(("path", "method", "status"), [("/nowhere", "GET", 404), ("/health", "PUT", 405)])
def test_unknown_paths_and_methods_answer_in_json(path: str, method: str, status: int) -> None:
    assert error_of(Api(FakeClient())(method, path))[0] == status


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (ProtocolError(ErrorCode.CONFLICT, "two sessions have this id"), 409),
        (ProtocolError(ErrorCode.BUSY, "busy"), 503),
        (ProtocolError(ErrorCode.VERSION, "another version"), 502),
    ],
)
def test_a_refusal_of_the_daemon_keeps_its_code(fault: ProtocolError, status: int) -> None:
    client = FakeClient()
    client.fault = fault
    assert error_of(Api(client)("GET", "/v1/stats")) == (status, fault.code)


def test_a_fault_nobody_foresaw_shows_no_inside() -> None:
    class Broken(FakeClient):
        def stats(self) -> dict[str, Any]:
            raise RuntimeError("the inside")

    response = Api(Broken())("GET", "/v1/stats")
    assert error_of(response) == (500, "internal")
    assert "inside" not in response.text


def test_a_request_that_another_sites_page_sends_is_refused() -> None:
    """A page can POST to 127.0.0.1 without asking first if it names no content type, and that was enough for
    /v1/evict with drop: any site that a browser on this machine visited could throw all KV away."""
    client = FakeClient(session())
    for origin in ("http://evil.example", "http://127.0.0.1:3000", "null"):
        response = Api(client)("POST", "/v1/evict", json={"tiers": ["ram"]}, headers={"origin": origin})
        assert error_of(response) == (403, "forbidden_origin")
    own = {"origin": "http://127.0.0.1:8200"}
    assert Api(client)("POST", "/v1/evict", json={"tiers": ["ram"]}, headers=own).status_code == 200


def test_a_host_name_that_is_not_ours_is_refused() -> None:
    client = FakeClient(session())
    for host in ("evil.example", "127.0.0.1.evil.example", ""):
        assert error_of(Api(client)("GET", "/v1/sessions", headers={"host": host})) == (403, "forbidden_host")
    for host in ("localhost:8200", "127.0.0.1", "[::1]:8200"):
        assert Api(client)("GET", "/v1/sessions", headers={"host": host}).status_code == 200


def test_with_a_token_everything_but_health_needs_it(token_file: Path) -> None:
    api = Api(FakeClient(), HttpConfig(host="0.0.0.0", token_file=str(token_file)))
    assert api("GET", "/health", headers={"host": "anything"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/stats", "/metrics", "/v1/sessions", "/openapi.json", "/nowhere"])
@pytest.mark.parametrize(
    "authorization", [None, TOKEN, "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "ünïcode"]
)
def test_a_wrong_token_opens_nothing(token_file: Path, path: str, authorization: str | None) -> None:
    client = FakeClient()
    headers = {} if authorization is None else {"authorization": authorization.encode()}
    response = Api(client, HttpConfig(token_file=str(token_file)))("GET", path, headers=headers)
    assert error_of(response) == (401, "unauthorized")
    assert response.headers["www-authenticate"] == "Bearer"
    assert not client.calls


def test_the_right_token_opens_it_under_any_host_name(token_file: Path) -> None:
    api = Api(FakeClient(), HttpConfig(token_file=str(token_file)))
    response = api("GET", "/v1/stats", headers={"authorization": f"Bearer {TOKEN}", "host": "kvstore.example"})
    assert response.status_code == 200


@pytest.mark.parametrize("content", [b"", b"short", b"two words of sixteen characters", b"\xff" * 20, None])
def test_a_token_file_that_is_no_use_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"http\.token_file") as caught:
        Api(FakeClient(), HttpConfig(token_file=str(path)))
    assert str(path) in str(caught.value)
    assert "short" not in str(caught.value)


# ---------------------------------------------------------------- the process


@contextlib.contextmanager
def process(settings: ApiSettings) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The API as the daemon starts it, and its address as it logs it."""
    command = [sys.executable, "-m", "kvstore.api"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as api:
        try:
            assert api.stdin is not None
            assert api.stderr is not None
            api.stdin.write(msgspec.json.encode(settings).decode())
            api.stdin.close()
            line = next(line for line in api.stderr if "HTTP API on" in line)
            yield api, line.split()[-1]
        finally:
            api.kill()


def test_the_process_says_where_it_listens_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    settings = ApiSettings(str(tmp_path), HttpConfig(port=0), parent=os.getpid())
    with process(settings) as (api, address):
        response = httpx.get(f"{address}/health", timeout=20)
        assert error_of(response) == (503, "daemon_unreachable")
        assert "server" not in response.headers
        api.send_signal(signal.SIGTERM)
        assert api.wait(20) == 0


def test_a_taken_port_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with process(ApiSettings(str(tmp_path), HttpConfig(port=0))) as (_, address):
        port = int(address.rpartition(":")[2])
        settings = msgspec.json.encode(ApiSettings(str(tmp_path), HttpConfig(port=port)))
        second = subprocess.run(
            [sys.executable, "-m", "kvstore.api"], input=settings, capture_output=True, timeout=60, check=False
        )
    assert second.returncode == 2
    assert b"http.port" in second.stderr


def test_the_process_does_not_outlive_the_one_that_started_it(tmp_path: Path) -> None:
    """A daemon killed by SIGKILL must not leave a port taken."""
    starter = (
        "import os, subprocess, sys, time\n"
        "settings = sys.stdin.read().replace('\"parent\":0', f'\"parent\":{os.getpid()}')\n"
        "api = subprocess.Popen([sys.executable, '-m', 'kvstore.api'], stdin=subprocess.PIPE, text=True)\n"
        "api.stdin.write(settings)\n"
        "api.stdin.close()\n"
        "time.sleep(600)\n"
    )
    settings = msgspec.json.encode(ApiSettings(str(tmp_path), HttpConfig(port=0))).decode()
    command = [sys.executable, "-c", starter]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stderr is not None
        try:
            parent.stdin.write(settings)
            parent.stdin.close()
            next(line for line in parent.stderr if "HTTP API on" in line)
        finally:
            parent.kill()
        # The API holds the other end of this pipe, so that it ends only when the API has.
        parent.stderr.read()
