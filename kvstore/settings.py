"""Reads the configuration once: defaults, then the TOML file, then the environment; every fault names its key.

    [ram]                        KVSTORE_RAM_SIZE=8GiB
    size = "8GiB"

Covers: reading, naming unknown keys, parsing units, telling where each value came from.
Does not cover: what exists and what must hold, see `kvstore/config.py`.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstore import config as model
from kvstore.config import KEY_VARIABLE, Config
from kvstore.core.errors import ConfigError
from kvstore.core.units import format_duration, format_size, parse_duration, parse_size

ENV_PREFIX: Final = "KVSTORE_"
CONFIG_VARIABLE: Final = "KVSTORE_CONFIG"
_NO_SETTINGS = (CONFIG_VARIABLE, KEY_VARIABLE)
# A Kubernetes service named "kvstore" puts these into every pod of its namespace; they are no settings of ours.
_SERVICE_LINK = re.compile(r"KVSTORE_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)")
_FLAGS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and, for each (section, key), where its value came from: "default", a file or a variable."""

    config: Config
    origins: Mapping[Key, str]


def load(path: Path | None = None, environ: Mapping[str, str] | None = None, *, run_dir: Path | None = None) -> Loaded:
    """Read everything and check it. `path` None takes the file that $KVSTORE_CONFIG names, or no file.

    `run_dir`, from the command line, wins over file and environment.

    Raises ConfigError, whose message names the key, the value, and what would be right.
    """
    env = os.environ if environ is None else environ
    if path is None and env.get(CONFIG_VARIABLE):
        path = Path(env[CONFIG_VARIABLE])
    values: dict[Key, Any] = {
        ("daemon", "run_dir"): model.default_run_dir(env),
        ("ssd", "path"): model.default_ssd_path(env),
    }
    origins: dict[Key, str] = dict.fromkeys(_FIELDS, "default")
    if path is not None:
        for key, raw in _read_file(path).items():
            values[key] = _parse(key, raw, f"{path}", folder=path.absolute().parent)
            origins[key] = str(path)
    for variable, key in _variables(env).items():
        values[key] = _parse(key, env[variable], variable, folder=Path.cwd(), from_text=True)
        origins[key] = variable
    if run_dir is not None:
        values["daemon", "run_dir"] = str(run_dir.absolute())
        origins["daemon", "run_dir"] = "--run-dir"
    config = _build(values, origins)
    model.check(config)
    return Loaded(config, origins)


def describe(loaded: Loaded) -> list[tuple[str, str, str, str]]:
    """Return (section, key, value as TOML, origin) for every setting, in order; the values can be read back."""
    rows = []
    for (section, key), info in _FIELDS.items():
        value = getattr(getattr(loaded.config, section), info.name)
        rows.append((section, key, _as_toml(value, _unit(info)), loaded.origins[section, key]))
    return rows


def _fields() -> dict[Key, msgspec.structs.FieldInfo]:
    found = {}
    for section in msgspec.structs.fields(Config):
        for info in msgspec.structs.fields(section.type):
            found[section.encode_name, info.encode_name] = info
    return found


_FIELDS: Final = _fields()
_SECTIONS: Final = list(dict.fromkeys(section for section, _ in _FIELDS))
_VARIABLES: Final = {f"{ENV_PREFIX}{section}_{key}".upper(): (section, key) for section, key in _FIELDS}


def _read_file(path: Path) -> dict[Key, Any]:
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f'{path} is no TOML: {error}; texts and sizes are in quotes: size = "8GiB"') from None
    values: dict[Key, Any] = {}
    for section, body in document.items():
        if section not in _SECTIONS:
            raise ConfigError(f"{path}: unknown {_what(body)} {section!r}{_nearest(section, _hints(body))}")
        if not isinstance(body, dict):
            raise ConfigError(f"{path}: {section} is a section: write [{section}] on a line of its own")
        for key, value in body.items():
            if (section, key) not in _FIELDS:
                raise ConfigError(f"{path}: unknown key {section}.{key}{_nearest_key(section, key)}")
            values[section, key] = value
    return values


def _variables(env: Mapping[str, str]) -> dict[str, Key]:
    found = {}
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX) or variable in _NO_SETTINGS or _SERVICE_LINK.fullmatch(variable):
            continue
        if variable not in _VARIABLES:
            raise ConfigError(f"unknown environment variable {variable}{_nearest(variable, list(_VARIABLES))}")
        found[variable] = _VARIABLES[variable]
    return found


def _parse(key: Key, raw: Any, source: str, folder: Path, from_text: bool = False) -> Any:
    """Turn what was written into the field's own type; `folder` is what a relative path is relative to.

    `from_text` says that the source knows nothing but strings, so that "8" may be a number.
    """
    info = _FIELDS[key]
    unit = _unit(info)
    try:
        if unit == "flag":
            return _FLAGS[raw.strip().lower()] if from_text else _exactly(bool, raw)
        if unit == "bytes":
            return parse_size(raw) if isinstance(raw, str) else _exactly(int, raw)
        if unit == "seconds":
            return parse_duration(raw) if isinstance(raw, str) else _finite(_exactly((int, float), raw))
        if unit == "ratio":
            return _finite(raw if from_text else _exactly((int, float), raw))
        if unit == "count":
            return int(raw) if from_text else _exactly(int, raw)
        if unit == "paths":
            paths = [path for path in raw.split(os.pathsep) if path] if from_text else _exactly(list, raw)
            return tuple(_path(path, folder) for path in paths)
        text = str(_exactly(str, raw))
        if unit == "path" and text:
            return _path(text, folder)
        return text
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        why = "" if isinstance(error, KeyError) else f" ({error})"
        raise ConfigError(_wrong(key, raw, source) + why) from None


def _build(values: Mapping[Key, Any], origins: Mapping[Key, str]) -> Config:
    sections: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for (section, key), value in values.items():
        # One key at a time, so that a value out of range is reported with its key and source.
        try:
            msgspec.convert(value, _FIELDS[section, key].type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{_wrong((section, key), value, origins[section, key])} ({error})") from None
        sections[section][key] = value
    return msgspec.convert(sections, Config)


def _exactly(kind: type | tuple[type, ...], value: Any) -> Any:
    # bool is an int to Python, but `size = true` is a mistake.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{type(value).__name__} is the wrong type")
    return value


def _path(text: Any, folder: Path) -> str:
    return os.path.normpath(folder / Path(_exactly(str, text)).expanduser())


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("it must be finite")
    return number


def _wrong(key: Key, raw: Any, source: str) -> str:
    return f"{source}: {'.'.join(key)} cannot be {raw!r}; example: {key[1]} = {_example(_FIELDS[key])}"


def _unit(info: msgspec.structs.FieldInfo) -> str:
    return str(_extra(info).get("unit", "text"))


def _example(info: msgspec.structs.FieldInfo) -> str:
    described = msgspec.inspect.type_info(info.type)
    if isinstance(described, msgspec.inspect.LiteralType):
        return " or ".join(f'"{value}"' for value in described.values)
    return str(_extra(info).get("example", '"text"'))


def _extra(info: msgspec.structs.FieldInfo) -> Mapping[str, Any]:
    described = msgspec.inspect.type_info(info.type)
    return (described.extra or {}) if isinstance(described, msgspec.inspect.Metadata) else {}


def _as_toml(value: Any, unit: str) -> str:
    if unit == "bytes":
        return f'"{format_size(value)}"'
    if unit == "seconds":
        return f'"{format_duration(value)}"'
    # JSON's strings, numbers and booleans are TOML's too.
    return msgspec.json.encode(value).decode()


def _what(body: Any) -> str:
    return "section" if isinstance(body, dict) else "key"


def _hints(body: Any) -> list[str]:
    return list(_SECTIONS) if isinstance(body, dict) else [f"{section}.{key}" for section, key in _FIELDS]


def _nearest_key(section: str, key: str) -> str:
    own = [name for group, name in _FIELDS if group == section]
    close = difflib.get_close_matches(key, own, n=1)
    if close:
        return f"; did you mean {section}.{close[0]}?"
    elsewhere = [f"{group}.{name}" for group, name in _FIELDS if name == key]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; [{section}] knows {', '.join(own)}"


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    tails = [full for full in known if full.rpartition(".")[2] == name]
    return f"; did you mean {tails[0]}?" if tails else f"; known are {', '.join(known)}"
