"""Finds the keys that a worker encrypts with: in the files that the settings name, or in the environment.

The settings and a worker's start message hold paths only; each process that needs a key reads it itself.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstore.config import KEY_VARIABLE, EncryptionConfig
from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from tiers.keys import KeyRing


def load_keys(config: EncryptionConfig, environ: Mapping[str, str] | None = None) -> "KeyRing | None":
    """Return the keys, None where there is neither a key file nor a key in the environment.

    Raises ConfigError where a file cannot be read, is open to others, or holds no key.
    """
    text = (os.environ if environ is None else environ).get(KEY_VARIABLE, "")
    if config.key_file and text:
        raise ConfigError(f"encryption.key_file and {KEY_VARIABLE} are both set: leave one of them out")
    if not config.key_file and not text:
        if config.old_key_files:
            raise ConfigError("encryption.old_key_files needs a key to encrypt with: set encryption.key_file")
        return None
    # Imported here, so that a worker without encryption does not carry OpenSSL.
    from tiers.keys import KeyRing, parse_key, read_key_file

    key = read_key_file(config.key_file) if config.key_file else parse_key(os.fsencode(text), KEY_VARIABLE)
    old_keys = [read_key_file(path) for path in config.old_key_files]
    return KeyRing(key, old_keys, accepts_plain=config.accept_plain)


def without_key(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that needs no key."""
    return {name: value for name, value in environ.items() if name != KEY_VARIABLE}
