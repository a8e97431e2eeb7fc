"""The keys that records are encrypted with at rest, and the cipher: AES-256-GCM.

A key file holds 32 bytes: raw, as 64 hex digits, or in base64. A key is known by its id, the first bytes of a hash, so
that a record of another key is told apart from a damaged one without trying. The newest key encrypts, all decrypt.

No nonce is used twice. Random 96-bit nonces are safe for about 2^32 messages of one key (NIST SP 800-38D, 8.3), which
many daemons with one key in one bucket could reach in years; so no message is encrypted with the key itself but
with a subkey (HKDF-SHA256 of the key and a random 128-bit salt) that one process draws for itself and leaves after
2^28 messages. A repeated nonce within one subkey is then less likely than 2^-40.
"""

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvstore.core.block import KEY_ID_BYTES, NONCE_BYTES, SALT_BYTES, Sealing
from kvstore.core.errors import ConfigError, CorruptBlock, WrongKey

KEY_BYTES: Final = 32
MESSAGES_PER_SUBKEY: Final = 1 << 28
# Subkeys of other processes that are kept at hand; each costs 20 µs to derive again.
_MAX_SUBKEYS = 1024
_MAX_FILE_BYTES = 4096
_HEX = re.compile(rb"[0-9A-Fa-f]{64}")


class KeyRing:
    """The keys of one process. Thread-safe. Shows nothing of them in `repr`, errors or logs."""

    def __init__(self, key: bytes, old_keys: Sequence[bytes] = (), *, accepts_plain: bool = False) -> None:
        """`key` encrypts; it and `old_keys` decrypt. All have KEY_BYTES bytes.

        `accepts_plain`: records that are not encrypted are read as well. Whoever can write to the medium can then put
        forged ones there, so it is for the time after encryption was switched on.
        """
        assert all(len(each) == KEY_BYTES for each in (key, *old_keys))
        self.accepts_plain = accepts_plain
        self.key_id = key_id(key)
        self._keys = {key_id(each): each for each in (*old_keys, key)}
        self._lock = threading.Lock()
        self._subkeys: OrderedDict[tuple[bytes, bytes], algorithms.AES] = OrderedDict()
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._num_drawn = 0

    def draw(self) -> Sealing:
        """Return what the next message is to be encrypted with; every call returns another."""
        with self._lock:
            if self._num_drawn == MESSAGES_PER_SUBKEY:
                self._salt, self._num_drawn = secrets.token_bytes(SALT_BYTES), 0
            self._num_drawn += 1
            salt = self._salt
        return Sealing(self.key_id, salt, secrets.token_bytes(NONCE_BYTES))

    def encrypt(self, sealing: Sealing, associated: bytes, data: bytes | memoryview, into: memoryview) -> bytes:
        """Put `data`, encrypted, into the equally long `into`, and return the tag."""
        context = Cipher(self._subkey(sealing), modes.GCM(sealing.nonce)).encryptor()
        context.authenticate_additional_data(associated)
        context.update_into(data, into)
        context.finalize()
        return context.tag

    def decrypt(
        self, sealing: Sealing, associated: bytes, tag: bytes, data: bytes | memoryview, into: memoryview
    ) -> None:
        """Put `data`, decrypted, into the equally long `into`, which may be the very same memory.

        Raises WrongKey where the key is not here, CorruptBlock where data, tag or `associated` is not what was
        encrypted; the content of `into` is then undefined.
        """
        context = Cipher(self._subkey(sealing), modes.GCM(sealing.nonce, tag)).decryptor()
        context.authenticate_additional_data(associated)
        context.update_into(data, into)
        try:
            context.finalize()
        except InvalidTag:
            raise CorruptBlock("the record does not match its authentication tag") from None

    def check(self, sealing: Sealing | None) -> None:
        """Raise WrongKey where something sealed like that (None: not encrypted) cannot be read."""
        if sealing is None and not self.accepts_plain:
            raise WrongKey("the record is not encrypted, as it must be since there is a key")
        if sealing is not None and sealing.key_id not in self._keys:
            raise WrongKey(f"the record was encrypted with another key, {sealing.key_id.hex()}")

    def _subkey(self, sealing: Sealing) -> algorithms.AES:
        self.check(sealing)
        name = (sealing.key_id, sealing.salt)
        with self._lock:
            subkey = self._subkeys.get(name)
            if subkey is not None:
                self._subkeys.move_to_end(name)
                return subkey
        derivation: Any = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=sealing.salt, info=b"kvstore subkey 1")
        subkey = algorithms.AES(derivation.derive(self._keys[sealing.key_id]))
        with self._lock:
            self._subkeys[name] = subkey
            if len(self._subkeys) > _MAX_SUBKEYS:
                self._subkeys.popitem(last=False)
        return subkey


def key_id(key: bytes) -> bytes:
    """Return the id of a key, which says nothing of the key itself."""
    return hmac.new(key, b"kvstore key id 1", hashlib.sha256).digest()[:KEY_ID_BYTES]


def read_key_file(path: str) -> bytes:
    """Return the key in a file. Raises ConfigError, which names the file and shows nothing of what is in it."""
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the encryption key file {path}: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"the encryption key file {path} is open to other users: chmod 600 {path}")
    return parse_key(data, f"the encryption key file {path}")


def parse_key(data: bytes, source: str) -> bytes:
    """Return the key that was written in one of the three ways. Raises ConfigError, which names only the `source`."""
    if len(data) == KEY_BYTES:
        return data
    text = data.strip()
    if _HEX.fullmatch(text):
        return bytes.fromhex(text.decode())
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{source} holds no key: {KEY_BYTES} bytes are needed, raw, as {2 * KEY_BYTES} hex digits or in base64 "
            "(openssl rand -hex 32 makes one)"
        )
    return key
