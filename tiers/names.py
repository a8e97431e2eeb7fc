"""What a record may be called, in every record store."""

from typing import Final

# LMDB's limit for a key is 511, and S3's 1024 after escaping, which may double a name.
MAX_NAME_BYTES: Final = 500


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is '/'-separated parts of printable ASCII, none of them empty, '.' or '..'."""
    if not name or len(name) > MAX_NAME_BYTES or not (name.isascii() and name.isprintable()):
        raise ValueError(f"a record's name has 1 to {MAX_NAME_BYTES} printable ASCII characters: {name[:80]!r}")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"a record's name has no empty, '.' or '..' part: {name[:80]!r}")
