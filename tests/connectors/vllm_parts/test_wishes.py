import pytest

from kvstore.connectors.vllm_parts.wishes import UNKNOWN_HINT, Wishes, of_salt, read


def test_a_session_and_its_hints_are_read() -> None:
    hints = {"expect_followup": True, "ttl": 60, "pin": False, "priority": -2}
    wishes, wrong = read({"session_id": "chat-1", "hints": hints})
    assert wishes == Wishes("chat-1", expect_followup=True, ttl_s=60.0, pin=False, priority=-2)
    assert wrong == []
    assert wishes.has_hints


def test_a_session_alone_has_no_hints() -> None:
    wishes, _ = read({"session_id": "chat-1"})
    assert not wishes.has_hints


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}])
def test_without_any_of_it_there_are_no_wishes(params: object) -> None:
    assert read(params) == (Wishes(), [])


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ("text", "kv_transfer_params"),
        ({"session_id": 7}, "session_id"),
        ({"session_id": "x" * 201}, "session_id"),
        ({"session_id": "a\nb"}, "session_id"),
        ({"hints": [1]}, "hints"),
        ({"hints": {"ttl": float("inf")}}, "hints.ttl"),
        ({"hints": {"ttl": 1e9}}, "hints.ttl"),
        ({"hints": {"expect_followup": True, "end": True}}, "hints.end"),
        ({"hints": {"priority": 3}}, "hints.priority"),
        ({"hints": {"pin": 1}}, "hints.pin"),
        ({"hints": {"ttl": 10**400}}, "hints.ttl"),
        ({"hints": {"ttl": float("nan")}}, "hints.ttl"),
        ({"hints": {"ttl": -1}}, "hints.ttl"),
        ({"hints": {"priority": -(10**400)}}, "hints.priority"),
        ({"hints": {"priority": float("nan")}}, "hints.priority"),
        ({"hints": {"priority": True}}, "hints.priority"),
        ({"hints": {"unheard_of": True}}, UNKNOWN_HINT),
        ({"hints": {7: True, "x" * 1_000_000: 1}}, UNKNOWN_HINT),
    ],
)
def test_what_is_of_no_use_is_named_and_left_out(params: object, named: str) -> None:
    assert read(params) == (Wishes(), [named])


def test_as_many_unknown_hints_as_a_client_likes_are_one_name() -> None:
    """Each was named and counted, on the thread that schedules everybody's steps."""
    _, wrong = read({"hints": {f"hint-{number}": True for number in range(10_000)}})
    assert wrong == [UNKNOWN_HINT]


def test_clients_with_other_salts_have_other_sessions_though_they_name_the_same() -> None:
    """Who named another client's session overwrote its record, so that its blocks were kept no longer."""
    wishes, longest = Wishes("chat", pin=True), Wishes("x" * 200)
    names = {of_salt(wishes, salt).session_id for salt in ("", "a", "b")}
    assert len(names) == 3 and "chat" in names
    assert of_salt(wishes, "a").pin and of_salt(wishes, "a") == of_salt(wishes, "a")
    assert of_salt(Wishes("b"), "a").session_id != of_salt(Wishes(""), "ab").session_id
    assert len(of_salt(longest, "a").session_id) == 200
    assert read({"session_id": of_salt(longest, "a").session_id})[1] == []
