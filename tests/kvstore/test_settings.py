import dataclasses
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from kvstore.config import Config, RamConfig
from kvstore.core.errors import ConfigError
from kvstore.settings import Loaded, describe, load


def from_text(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> Loaded:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    return load(path, environ or {})


# ---------------------------------------------------------------- where values come from


def test_without_file_and_environment_everything_is_a_default() -> None:
    loaded = load(environ={"HOME": "/home/someone"})
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.config.ram.size_bytes == 1 << 30
    assert loaded.config.ssd.path == "/home/someone/.cache/kvstore/ssd"
    assert loaded.config.daemon.drain_deadline_s == 10.0
    assert not loaded.config.s3.enabled


def test_folders_follow_the_xdg_variables() -> None:
    config = load(environ={"XDG_RUNTIME_DIR": "/run/user/7", "XDG_CACHE_HOME": "/c"}).config
    assert config.daemon.run_dir == "/run/user/7/kvstore"
    assert config.ssd.path == "/c/kvstore/ssd"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command ended with a traceback, even where a folder for caches was named."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        load(environ={})
    assert load(environ={"XDG_CACHE_HOME": "/c"}).config.ssd.path == "/c/kvstore/ssd"


def test_a_file_sets_sizes_and_durations_as_people_write_them(tmp_path: Path) -> None:
    text = '[ram]\nsize = "8GiB"\nprefault = false\n[ssd]\nmin_free_bytes = 0\n[sessions]\nttl = "12h"\n'
    config = from_text(tmp_path, text).config
    assert config.ram.size_bytes == 8 << 30
    assert config.ram.prefault is False
    assert config.ssd.min_free_bytes == 0
    assert config.sessions.ttl_s == 43200.0


def test_the_environment_wins_over_the_file_and_the_command_line_over_both(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text('[ram]\nsize = "1MiB"\n[daemon]\nrun_dir = "/a"\nlog_level = "debug"\n')
    environ = {"KVSTORE_RAM_SIZE": "2MiB", "KVSTORE_DAEMON_RUN_DIR": "/b", "KVSTORE_CONFIG": str(path)}
    loaded = load(environ=environ, run_dir=Path("/c"))
    assert loaded.config.ram.size_bytes == 2 << 20
    assert loaded.config.daemon.run_dir == "/c"
    assert loaded.origins["ram", "size"] == "KVSTORE_RAM_SIZE"
    assert loaded.origins["daemon", "run_dir"] == "--run-dir"
    assert loaded.origins["daemon", "log_level"] == str(path)


def test_a_variable_may_hold_any_type_as_text() -> None:
    environ = {
        "KVSTORE_SSD_ENABLED": "no",
        "KVSTORE_HTTP_PORT": "0",
        "KVSTORE_RAM_LOW_WATERMARK": "0.5",
        "KVSTORE_DAEMON_DRAIN_DEADLINE": "250ms",
        "KVSTORE_S3_SSE": "",
    }
    config = load(environ=environ).config
    assert (config.ssd.enabled, config.http.port, config.ram.low_watermark) == (False, 0, 0.5)
    assert config.daemon.drain_deadline_s == 0.25


def test_relative_paths_start_at_the_file_that_holds_them(tmp_path: Path) -> None:
    config = from_text(tmp_path, '[ssd]\npath = "data/../ssd"\n[http]\ntoken_file = "~/token"\n').config
    assert config.ssd.path == str(tmp_path / "ssd")
    assert config.http.token_file == str(Path.home() / "token")


def test_a_list_of_files_is_a_list_in_toml_and_separated_by_colons_in_a_variable(tmp_path: Path) -> None:
    text = '[encryption]\nold_key_files = ["a", "/b"]\n'
    assert from_text(tmp_path, text).config.encryption.old_key_files == (str(tmp_path / "a"), "/b")
    assert load(environ={"KVSTORE_ENCRYPTION_OLD_KEY_FILES": "/a:/b"}).config.encryption.old_key_files == ("/a", "/b")
    assert load(environ={"KVSTORE_ENCRYPTION_OLD_KEY_FILES": ""}).config.encryption.old_key_files == ()
    for wrong in ('"/a"', "[1]"):
        with pytest.raises(ConfigError, match=r"encryption\.old_key_files cannot be"):
            from_text(tmp_path, f"[encryption]\nold_key_files = {wrong}\n")


def test_a_key_in_the_environment_is_no_setting_and_shown_nowhere() -> None:
    loaded = load(environ={"KVSTORE_ENCRYPTION_KEY": "hunter2"})
    assert "hunter2" not in f"{loaded!r} {describe(loaded)!r}"


def test_what_kubernetes_puts_into_the_environment_for_a_service_is_no_setting() -> None:
    load(
        environ={
            "KVSTORE_SERVICE_HOST": "10.0.0.1",
            "KVSTORE_SERVICE_PORT_HTTP": "8200",
            "KVSTORE_PORT": "tcp://10.0.0.1:8200",
            "KVSTORE_PORT_8200_TCP_ADDR": "10.0.0.1",
        }
    )


# ---------------------------------------------------------------- what is refused, and how


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[ramm]\n", "unknown section 'ramm'; did you mean ram?"),
        ("[ram]\nsiez = 1\n", "unknown key ram.siez; did you mean ram.size?"),
        ("[ram]\nmax_bytes = 1\n", "unknown key ram.max_bytes; did you mean ssd.max_bytes?"),
        ('[s3]\nsecret_key = "hunter2"\n', "unknown key s3.secret_key; did you mean s3.secret_key_file?"),
        ("size = 1\n", "unknown key 'size'; did you mean ram.size?"),
        ("[sessions]\nx = 1\n", "[sessions] knows ttl, max_sessions, max_tokens_per_session"),
        ("ram = 1\n", "ram is a section"),
        ("[ram]\nsize = true\n", 'ram.size cannot be True; example: size = "8GiB"'),
        ('[ram]\nsize = "8G"\n', "ram.size cannot be '8G'; example: size = \"8GiB\""),
        ("[ram]\nsize = 0\n", "ram.size cannot be 0"),
        ("[ram]\nprefault = 1\n", "ram.prefault cannot be 1; example: prefault = true"),
        ("[ram]\nhigh_watermark = 1.5\n", "ram.high_watermark cannot be 1.5"),
        ("[ram]\nhigh_watermark = nan\n", "ram.high_watermark cannot be nan"),
        ('[http]\nport = "8200"\n', "http.port cannot be '8200'; example: port = 8200"),
        ("[http]\nport = 65536\n", "http.port cannot be 65536"),
        ("[ssd]\npath = 3\n", "ssd.path cannot be 3"),
        ('[ssd]\npath = ""\n', "ssd.path cannot be ''"),
        ('[daemon]\nlog_level = "loud"\n', '"debug" or'),
        ("[ram\n", "is no TOML"),
        ("[ram]\nsize = 64GiB\n", 'in quotes: size = "8GiB"'),
    ],
)
def test_a_fault_in_the_file_names_the_file_the_key_and_what_would_be_right(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, text)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "kvstore.toml"))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("KVSTORE_RAM_SIZ", "1", "did you mean KVSTORE_RAM_SIZE?"),
        ("KVSTORE_RAM_SIZE", "lots", "KVSTORE_RAM_SIZE: ram.size cannot be 'lots'"),
        ("KVSTORE_HTTP_PORT", "http", "http.port cannot be 'http'; example: port = 8200"),
        ("KVSTORE_SSD_ENABLED", "maybe", "ssd.enabled cannot be 'maybe'"),
        ("KVSTORE_S3_THREADS", "0", "s3.threads cannot be 0"),
    ],
)
def test_a_fault_in_the_environment_names_the_variable(variable: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={variable: value})
    assert said in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load(tmp_path / "nowhere.toml", {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "binary.toml", {})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"KVSTORE_RAM_LOW_WATERMARK": "0.95"}, "low_watermark must be below"),
        ({"KVSTORE_SSD_MAX_BYTES": "1MiB"}, "segment_bytes is larger than"),
        ({"KVSTORE_HTTP_HOST": "0.0.0.0"}, "http.token_file"),
        ({"KVSTORE_HTTP_HOST": "::"}, "http.token_file"),
        ({"KVSTORE_HTTP_HOST": "pod-1"}, "http.token_file"),
        ({"KVSTORE_DAEMON_RUN_DIR": "/" + "x" * 100}, "run_dir is too long"),
        ({"KVSTORE_S3_BUCKET": "ab"}, "at least 3"),
        ({"KVSTORE_S3_BUCKET": "abc", "KVSTORE_S3_PREFIX": "/a"}, "s3.prefix"),
        ({"KVSTORE_S3_BUCKET": "abc", "KVSTORE_S3_ACCESS_KEY_FILE": "/a"}, "belong together"),
        ({"KVSTORE_S3_BUCKET": "abc", "KVSTORE_S3_SSE_KMS_KEY_ID": "k"}, "aws:kms"),
        ({"KVSTORE_S3_BUCKET": "abc", "KVSTORE_S3_ENDPOINT": "s3.example:8333"}, "example: http://"),
        ({"KVSTORE_S3_BUCKET": "abc", "KVSTORE_S3_ENDPOINT": "http://me:hunter2@s3"}, "contains credentials"),
    ],
)
def test_settings_that_do_not_hold_together_are_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ)
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_address_needs_no_token(host: str) -> None:
    load(environ={"KVSTORE_HTTP_HOST": host})


def test_what_is_switched_off_is_not_checked() -> None:
    load(environ={"KVSTORE_HTTP_HOST": "0.0.0.0", "KVSTORE_HTTP_ENABLED": "false"})
    load(environ={"KVSTORE_SSD_MAX_BYTES": "1MiB", "KVSTORE_SSD_ENABLED": "false"})


# ---------------------------------------------------------------- what becomes of it


def test_what_is_described_reads_back_as_the_same(tmp_path: Path) -> None:
    text = '[ram]\nsize = "1000MB"\n[s3]\nbucket = "a\\"b"\n[sessions]\nttl = "90s"\n'
    loaded = from_text(tmp_path, text + '[encryption]\nold_key_files = ["/a", "/b"]\n')
    sections: dict[str, list[str]] = {}
    for section, key, value, _ in describe(loaded):
        sections.setdefault(section, []).append(f"{key} = {value}")
    text = "\n".join(line for section, lines in sections.items() for line in [f"[{section}]", *lines])
    expected = {"daemon", "ram", "ssd", "s3", "encryption", "sessions", "prefetch", "http", "events"}
    assert set(tomllib.loads(text)) == expected
    assert from_text(tmp_path, text).config == loaded.config


def test_the_manual_lists_every_key_with_its_default() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = [line.split("|")[1:3] for line in manual.splitlines() if line.startswith("| `")]
    listed = {name: default.strip(" `") for names, default in rows for name in re.findall(r"`([\w.]+)`", names)}
    described = describe(load(environ={}))
    assert list(listed) == [f"{section}.{key}" for section, key, _, _ in described]
    for section, key, value, _ in described:
        if (section, key) not in {("daemon", "run_dir"), ("ssd", "path")}:  # these depend on who asks
            assert listed[f"{section}.{key}"] == value.strip('"')


def test_sections_travel_as_json(tmp_path: Path) -> None:
    config = from_text(tmp_path, '[ram]\nsize = "3MiB"\n').config
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config
    assert msgspec.json.decode(msgspec.json.encode(config.ram), type=RamConfig) == config.ram


def test_a_loaded_configuration_cannot_be_changed() -> None:
    loaded = load(environ={})
    with pytest.raises(AttributeError):
        loaded.config.ram.size_bytes = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.config = Config()  # type: ignore[misc]


# ---------------------------------------------------------------- events


def events(tmp_path: Path, **settings: str) -> Config:
    lines = [f'{key} = "{value}"' for key, value in settings.items()]
    return from_text(tmp_path, "\n".join(["[events]", *lines])).config


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "ipc:///run/kvstore/events"])
def test_events_may_be_read_on_this_machine(tmp_path: Path, endpoint: str) -> None:
    assert events(tmp_path, endpoint=endpoint).events.endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://10.0.0.7:5557"])
@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_events_are_not_shown_to_other_machines_without_keys(tmp_path: Path, endpoint: str, key: str) -> None:
    """They tell which prompts are cached, with their token ids."""
    settings = {"endpoint": "tcp://127.0.0.1:5557", key: endpoint}
    with pytest.raises(ConfigError, match=rf"events\.{key} .* other machines"):
        events(tmp_path, **settings)
    keys = {"curve_secret_key_file": "/secret", "curve_clients_file": "/clients"}
    assert events(tmp_path, **settings, **keys).events.curve_clients_file == "/clients"


def test_one_of_the_two_key_files_is_not_enough(tmp_path: Path) -> None:
    """A server without a list of clients lets everybody in who knows its public key."""
    with pytest.raises(ConfigError, match="belong together"):
        events(tmp_path, endpoint="tcp://*:5557", curve_secret_key_file="/secret")


def test_events_may_be_brought_to_a_router_that_listens(tmp_path: Path) -> None:
    text = '[events]\nendpoint = "tcp://indexer:5557"\nconnect = true\n'
    assert from_text(tmp_path, text).config.events.connect
    with pytest.raises(ConfigError, match=r"events\.replay_endpoint .* other machines"):
        from_text(tmp_path, text + 'replay_endpoint = "tcp://*:5558"\n')
    with pytest.raises(ConfigError, match="without CURVE"):
        from_text(tmp_path, text + 'curve_secret_key_file = "/a"\ncurve_clients_file = "/b"\n')


@pytest.mark.parametrize("endpoint", ["5557", "http://127.0.0.1:5557", "tcp://127.0.0.1", "ipc://relative", "tcp://:1"])
def test_an_address_of_events_that_is_none_is_refused(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        events(tmp_path, endpoint=endpoint)
