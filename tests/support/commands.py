"""Commands run in the test's own process, with a client that answers from memory.

Import the fixtures `client` and `run` where commands are tested.
"""

import os
import sys
from collections.abc import Callable

import pytest

from kvstore import cli
from kvstore.commands import chat, evict, explain, sessions, stats
from tests.support.consoles import FakeClient, session

Run = Callable[..., "Ran"]


class Ran:
    """What one command left."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(session("a"), session("b", tenant="t", pinned=True, expires_s=2_000.0))


@pytest.fixture
def run(client: FakeClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, with a client that answers from memory."""
    for module in (stats, sessions, evict, explain, chat):
        monkeypatch.setattr(module, "connect", lambda *_: client)
    for variable in [name for name in os.environ if name.startswith("KVSTORE_")]:
        monkeypatch.delenv(variable)

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["kvstore", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else int(bool(code)), out, err)

    return run
