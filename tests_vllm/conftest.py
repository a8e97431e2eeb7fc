"""What the tests share: vLLM's environment, the models, daemons, engines, and the report at the end."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.smollm import default_model_folder
from kvstore.s3server import REGION, S3Server
from tests.support.daemons import DaemonProcess
from tests_vllm.engines import Engine
from tests_vllm.environment import CACHE, HERE, Environment, prepare
from tests_vllm.report import Report
from tests_vllm.sites import Site
from tests_vllm.tiny import write_llama

MakeDaemon = Callable[..., DaemonProcess]
MakeEngine = Callable[..., Engine]
_BUCKET = "kvstore-vllm"
# An engine takes a minute or two to start, on a machine that has something else to do as well.
_TEST_S = 900
_REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REPORT] = Report()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(_TEST_S))
    # What all the rest stands on goes first, and what is timed last, when no other engine starts any more.
    items.sort(key=lambda item: (item.path.stem != "test_tokens", item.path.stem == "test_speed"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    report = config.stash[_REPORT]
    if report.facts:
        path = CACHE / "report.json"
        report.write(path)
        terminalreporter.ensure_newline()
        report.show()
        terminalreporter.write_line(f"the figures are in {path.relative_to(CACHE.parents[1])}")


@pytest.fixture(scope="session")
def environment(report: Report) -> Environment:
    found = prepare()
    report.about["vllm"] = found.version
    return found


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    return pytestconfig.stash[_REPORT]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where daemons and engines keep what they have; logs stay for as long as pytest keeps its folders."""
    made = tmp_path_factory.mktemp("vllm")
    yield made
    for kept in ("ssd", "files", "tiny"):
        for path in made.rglob(kept):
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny(folder: Path) -> Path:
    return write_llama(folder / "tiny")


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M-Instruct, converted once."""
    return default_model_folder(CACHE)


@pytest.fixture(scope="session")
def make_daemon(folder: Path) -> Iterator[MakeDaemon]:
    """Starts daemons that are gone at the end of the run."""
    with contextlib.ExitStack() as stack:

        def make(name: str, **settings: object) -> DaemonProcess:
            daemon = DaemonProcess(folder / name, {"ssd_segment_bytes": "16MiB", **settings})
            stack.callback(daemon.close)
            daemon.start()
            return daemon

        yield make


@pytest.fixture(scope="session")
def bucket(folder: Path) -> Iterator[dict[str, object]]:
    """A daemon's settings for the bucket of a real S3 server."""
    with S3Server(folder / "s3", buckets=[_BUCKET]) as server:
        for name, secret in (("access", server.access_key), ("secret", server.secret_key)):
            (folder / name).write_text(secret)
            (folder / name).chmod(0o600)
        yield {
            "s3_bucket": _BUCKET,
            "s3_endpoint": server.endpoint,
            "s3_region": REGION,
            "s3_access_key_file": folder / "access",
            "s3_secret_key_file": folder / "secret",
        }


@pytest.fixture(scope="module")
def make_engine(environment: Environment, folder: Path) -> Iterator[MakeEngine]:
    """Starts engines that are gone at the end of the module; each begins to start at once."""
    with engines_in(environment, folder) as make:
        yield make


@contextlib.contextmanager
def engines_in(environment: Environment, folder: Path) -> Iterator[MakeEngine]:
    with contextlib.ExitStack() as stack:

        def make(name: str, model: Path, **options: Any) -> Engine:
            engine = Engine(environment, folder / f"{name}.log", model, **options)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture(scope="session")
def site(environment: Environment, folder: Path, tiny: Path, make_daemon: MakeDaemon) -> Iterator[Site]:
    """The tiny model in float32: a reference, a daemon, an engine that has stored, two that load."""
    with engines_in(environment, folder) as make:
        daemon = make_daemon("site", ram_size="96MiB", ssd_max_bytes="192MiB")
        yield Site(daemon, tiny, make)
