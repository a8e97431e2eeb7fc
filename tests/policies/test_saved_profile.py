"""Measured costs are kept per model, device and host; what is damaged or of another machine is ignored, said once."""

import logging
import os
from pathlib import Path

import msgspec
import pytest

from kvstore.core.errors import ConfigError
from kvstore.core.outcome import TierKind
from policies.cost import PrefillCost, SavedCosts
from policies.saved_profile import SavedProfile, default_folder, load, read, save, saved_in

COSTS = SavedCosts((0.05, 3e-3, 2e-7, 0.02, 0.03), {TierKind.RAM: (1e-3, 5e-10), TierKind.S3: (0.05, 5e-9)})
BLANK = SavedProfile("org/Model-1B", "GPU 9, bfloat16", "host-a", 256, 16, 737_280, 0.0)
PROFILE = BLANK.with_costs(COSTS, 1000.0, "engine")


def test_what_was_saved_is_loaded_again(tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "folder", PROFILE)
    assert read(path) == load(path.parent, BLANK) == PROFILE
    assert PROFILE.costs == COSTS
    assert PROFILE.prefill == PrefillCost(256, 0.05, 3e-3, 2e-7)
    assert BLANK.prefill is None
    assert [each.name for each in path.parent.iterdir()] == [PROFILE.file_name]


@pytest.mark.parametrize("field", ["model", "device", "host"])
def test_another_model_device_or_host_has_a_file_of_its_own(tmp_path: Path, field: str) -> None:
    save(tmp_path, PROFILE)
    other = msgspec.structs.replace(BLANK, **{field: "another"})
    assert load(tmp_path, other) is None
    assert "/" not in PROFILE.file_name


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00\xff",
        b"[1, 2]",
        b'{"model": "m"}',
        msgspec.json.encode(msgspec.structs.replace(PROFILE, format="kvstore-costs-9")),
        msgspec.json.encode(msgspec.structs.replace(PROFILE, step=(-1.0, 1.0, 1.0, 1.0, 1.0))),
        msgspec.json.encode(msgspec.structs.replace(PROFILE, step=(0.0, 0.0, 0.0, 1.0, 1.0))),
        msgspec.json.encode(msgspec.structs.replace(PROFILE, step=(1e300, 1.0, 1.0, 1.0, 1.0))),
        msgspec.json.encode(msgspec.structs.replace(PROFILE, loads={"s3": (0.0, 0.0)})),
        msgspec.json.encode(msgspec.structs.replace(PROFILE, chunk_tokens=0)),
        msgspec.json.encode(msgspec.structs.replace(PROFILE, host="host-b")),
        b" " * 100_000,
    ],
)
def test_a_file_of_no_use_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    (tmp_path / PROFILE.file_name).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, BLANK) is None
    assert len(caplog.records) == 1


def test_a_folder_in_the_place_of_the_file_is_of_no_use_either(tmp_path: Path) -> None:
    (tmp_path / PROFILE.file_name).mkdir()
    assert load(tmp_path, BLANK) is None
    with pytest.raises(OSError, match="directory"):
        save(tmp_path, PROFILE)
    assert [each.name for each in tmp_path.iterdir()] == [PROFILE.file_name], "nothing half-written is left"


def test_a_tier_of_another_version_is_left_out(tmp_path: Path) -> None:
    path = save(tmp_path, msgspec.structs.replace(PROFILE, loads={"tape": (9.0, 1e-6), "s3": (0.05, 5e-9)}))
    assert read(path).costs.loads == {TierKind.S3: (0.05, 5e-9)}


def test_only_the_newest_files_are_kept(tmp_path: Path) -> None:
    for number in range(70):
        path = save(tmp_path, msgspec.structs.replace(PROFILE, model=f"model-{number}"))
        os.utime(path, (number, number))
    save(tmp_path, PROFILE)
    names = saved_in(tmp_path)
    assert len(names) == 64
    assert names[0].name == PROFILE.file_name
    assert not any(each.name.startswith("model-6-") for each in names)


def test_files_of_others_in_the_same_folder_stay(tmp_path: Path) -> None:
    """A user may name any folder for the profiles; the oldest JSON files in it were deleted."""
    theirs = [tmp_path / f"notes-{number}.json" for number in range(70)]
    for path in theirs:
        path.write_text("{}")
        os.utime(path, (1, 1))
    ours = save(tmp_path, PROFILE)
    assert all(path.exists() for path in theirs)
    assert saved_in(tmp_path) == [ours]


def test_the_state_folder_is_where_profiles_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_folder() == Path("/state/kvstore/costs")


def test_a_file_that_is_no_profile_says_why(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="model"):
        read(tmp_path / "x.json")


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    """The engine's start hung until somebody wrote to it."""
    os.mkfifo(tmp_path / PROFILE.file_name)
    assert load(tmp_path, BLANK) is None
    with pytest.raises(ConfigError, match="no file"):
        read(tmp_path / PROFILE.file_name)
    assert read(save(tmp_path, PROFILE)) == PROFILE


def test_what_a_writer_that_was_killed_has_left_is_cleared_away(tmp_path: Path) -> None:
    ours, fresh = (tmp_path / f".{PROFILE.file_name}.{name}.tmp" for name in ("abcd_123", "efgh5678"))
    theirs = tmp_path / ".abcd_123.tmp"
    for path in (ours, fresh, theirs):
        path.touch()
    for path in (ours, theirs):
        os.utime(path, (1, 1))
    path = save(tmp_path, PROFILE)
    assert set(tmp_path.iterdir()) == {path, fresh, theirs}, "others' files, and what may be being written, stay"


def test_what_is_left_has_a_name_by_which_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were killed just before the file comes into its place."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, PROFILE)
    (left,) = tmp_path.iterdir()
    os.utime(left, (1, 1))
    save(tmp_path, PROFILE)
    assert not left.exists()


def test_a_user_without_a_home_is_told_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="--profile-dir"):
        default_folder()
