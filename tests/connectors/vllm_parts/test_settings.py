from pathlib import Path
from typing import Any

import pytest

from kvstore.connectors.vllm_parts.settings import parse
from kvstore.core.errors import ConfigError


def test_what_is_said_is_taken_and_the_rest_has_defaults() -> None:
    settings = parse({"run_dir": "/run/kv", "load": "sync", "verify": False, "deadline_s": 1, "tenant": "t"})
    assert settings.run_dir == Path("/run/kv")
    assert (settings.load, settings.verify, settings.deadline_s, settings.tenant) == ("sync", False, 1.0, "t")
    assert settings.plan == "auto"


def test_without_a_run_folder_the_daemons_own_default_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert parse({}).run_dir == Path("/run/user/7/kvstore")


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="'verifi'; did you mean 'verify'"):
        parse({"verifi": True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load", "later"),
        ("plan", ["auto"]),
        ("verify", "yes"),
        ("verify", 1),
        ("tenant", "a\nb"),
        ("run_dir", ""),
        ("num_loaders", 0),
        ("num_loaders", True),
        ("max_store_bytes", "1GiB"),
        ("deadline_s", -1),
        ("deadline_s", float("nan")),
        ("deadline_s", float("inf")),
        ("deadline_s", 10**400),
        ("hold_s", True),
    ],
)
def test_a_value_of_no_use_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be"):
        parse({name: value})
