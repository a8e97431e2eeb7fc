"""One virtual environment per peer under .cache/peers, from its pinned requirements, made anew when they change."""

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "peers"


def python_of(peer: str) -> Path:
    """Return the interpreter of the peer's environment, making that if need be; "" is the one we run in.

    Raises CalledProcessError where pip fails.
    """
    if not peer:
        return Path(sys.executable)
    requirements = HERE / f"requirements-{peer}.txt"
    folder = CACHE / peer
    stamp = folder / "made-from"
    digest = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    python = folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != digest:
        print(f"installing {peer} into {folder.relative_to(CACHE.parents[1])} ...", file=sys.stderr, flush=True)
        venv.create(folder, clear=True, with_pip=True)
        # Without a resolver: LMCache's own requirements bring CUDA packages of several GB.
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "-r", requirements], check=True, stdout=sys.stderr)
        stamp.write_text(digest)
    return python
