"""vLLM's own tiering, with its file tier, as it runs on CPU (`native_spec.py`)."""

from pathlib import Path
from typing import Any


def with_native_tiering(folder: Path, primary_bytes: int) -> dict[str, Any]:
    """Return the `kv_transfer_config`: `primary_bytes` of shared memory before files in `folder`."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests_vllm.native_spec",
            "cpu_bytes_to_use": primary_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder), "n_read_threads": 4, "n_write_threads": 4}],
        },
    }


def files_bytes(folder: Path) -> int:
    """The bytes of all block files."""
    return sum(path.stat().st_size for path in folder.rglob("*.bin"))
