"""The bounded in-process copy of recent sessions."""

from engine.sessions import LocalSessions
from kvstore.wire import ChatMessage


class Losses:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def message(num_tokens: int = 10) -> list[ChatMessage]:
    return [ChatMessage("user", "x", [1] * num_tokens)]


def test_the_least_recently_used_goes_first_and_unsaved_ones_last() -> None:
    losses = Losses()
    sessions = LocalSessions(losses, max_sessions=3)
    sessions.remember("", "unsaved", 0, message(), [], unsaved=True)
    for name in ("a", "b"):
        sessions.remember("", name, 1, message(), [], unsaved=False)
    sessions.get("", "a")
    sessions.remember("", "c", 1, message(), [], unsaved=False)
    assert sessions.get("", "b") is None
    assert [s.id for s in sessions.unsaved()] == ["unsaved"]
    for name in ("d", "e"):
        sessions.remember("", name, 1, message(), [], unsaved=True)
    assert losses.count == 0
    sessions.remember("", "f", 1, message(), [], unsaved=True)
    assert losses.count == 1
    assert sessions.get("", "unsaved") is None


def test_tokens_are_bounded_too_but_the_newest_stays() -> None:
    sessions = LocalSessions(Losses(), max_tokens=25)
    for name in ("a", "b"):
        sessions.remember("", name, 1, message(), [], unsaved=False)
    sessions.remember("", "big", 1, message(100), [], unsaved=False)
    assert len(sessions) == 1
    assert sessions.get("", "big") is not None
    sessions.forget("", "big")
    sessions.remember("", "c", 1, message(20), [], unsaved=False)
    sessions.remember("", "c", 2, message(22), [], unsaved=False)
    assert len(sessions) == 1, "a session's older state gives its tokens back"


def test_an_old_id_leads_to_the_fork_until_its_client_was_told() -> None:
    sessions = LocalSessions(Losses())
    first = sessions.remember("t", "s", 3, message(), [], unsaved=True)
    sessions.saved(first, "s~1", 1)
    assert sessions.resolve("t", "s") == "s~1"
    assert sessions.resolve("other", "s") == "s"
    assert sessions.get("t", "s~1") is first
    assert (first.revision, first.unsaved) == (1, False)
    first.unsaved = True
    sessions.saved(first, "s~2", 1)
    assert sessions.resolve("t", "s") == "s~2"
    sessions.told("t", "s")
    assert sessions.resolve("t", "s") == "s"


def test_fork_ids_are_new_and_do_not_pile_up() -> None:
    sessions = LocalSessions(Losses())
    one = sessions.fork_id("", "s~1234")
    assert one.startswith("s~")
    assert one.count("~") == 1
    assert len(sessions.fork_id("", "x" * 200)) <= 200
