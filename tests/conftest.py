"""What holds for every test: nothing may be left open, and GPU tests are skipped where there is no GPU."""

import gc
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import leaks

# Threads that were told to stop and sockets whose loop was closed get this long to be gone.
_SETTLE_S = 30.0
_FAILED = pytest.StashKey[bool]()

# On two shared cores neither a single example's time says anything, nor how long it took to make one up.
hypothesis.settings.register_profile(
    "kvstore", deadline=None, max_examples=50, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvstore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed or report.skipped:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(autouse=True, scope="session")
def nothing_is_kept_for_the_next_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines measure in tests is of no use to the user's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves a file, socket, thread, child process or mapping behind.

    A test that failed is not checked: its traceback keeps its objects alive.
    """
    before = leaks.look()
    yield
    if request.node.stash.get(_FAILED, False) or request.node.get_closest_marker("leaks"):
        return
    if not leaks.look().beyond(before):
        return
    gc.collect()
    deadline = time.monotonic() + _SETTLE_S
    while left := leaks.look().beyond(before):
        if time.monotonic() > deadline:
            pytest.fail("left open by this test:\n  " + "\n  ".join(left))
        time.sleep(0.02)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A folder in shared memory of this test's own, for regions; the test fails if anything is left in it."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    try:
        yield folder
        left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        assert not left, f"left in shared memory: {left}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return "GPU" in answer.stdout
