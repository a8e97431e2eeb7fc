"""What is shipped: the wheel in an environment without torch, the images, the compose file, make and CI."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.settings import load
from kvstore.version import VERSION
from tests.support.waiting import until

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
SOURCES = ("engine", "kernels", "kvstore", "policies", "tiers")


def check(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end; a failure shows what was printed."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources: setuptools leaves its build folder beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    # setuptools is one of the project's development tools, so nothing needs to be downloaded for building.
    check([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source], timeout=300)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that was empty before the wheel was installed into it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    check([*pip, wheel], timeout=900)
    return folder / "bin"


@contextlib.contextmanager
def daemon(command: Sequence[str | Path], environ: dict[str, str], run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A daemon that is ready; its log goes to a file, so that it never waits for a reader."""
    log = run_dir.with_name("daemon.log")
    with log.open("w") as stderr, subprocess.Popen(command, env=environ, stderr=stderr, text=True) as process:
        try:
            until(lambda: process.poll() is not None or "ready in" in log.read_text())
            assert process.poll() is None, log.read_text()
            yield process
        finally:
            process.kill()


def small(folder: Path, shm_dir: Path) -> dict[str, str]:
    """Settings of a daemon that takes little room and no fixed port, as environment variables."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "KVSTORE_DAEMON_RUN_DIR": str(folder / "run"),
        "KVSTORE_RAM_SIZE": "16MiB",
        "KVSTORE_RAM_SHM_DIR": str(shm_dir),
        "KVSTORE_SSD_MAX_BYTES": "64MiB",
        "KVSTORE_SSD_SEGMENT_BYTES": "8MiB",
        "KVSTORE_SSD_MIN_FREE_BYTES": "0",
        "KVSTORE_HTTP_PORT": "0",
    }


# ---------------------------------------------------------------- the wheel


def test_the_wheel_holds_our_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert wheel.name == f"tiered_kvstore-{VERSION}-py3-none-any.whl"
    assert {name.partition("/")[0] for name in names} == {*SOURCES, f"tiered_kvstore-{VERSION}.dist-info"}
    sources = {str(path.relative_to(ROOT)) for name in SOURCES for path in (ROOT / name).rglob("*.py")}
    # Another distribution's package of the same name may bring its own (setup.py).
    left_out = {f"{name}/__init__.py" for name in SOURCES if name != "kvstore"}
    assert {name for name in names if name.endswith(".py")} == sources - left_out
    assert "kvstore/py.typed" in names


# ---------------------------------------------------------------- beside Hugging Face's `kernels`

_THEIRS = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""
_LOOK = """
import sys
from transformers.utils.import_utils import is_kernels_available
assert is_kernels_available() is (sys.argv[1] == "theirs"), "transformers is wrong about Hugging Face's kernels"
import transformers.integrations.hub_kernels as hub  # imports from `kernels` where that is available
import kernels
if sys.argv[1] == "theirs":
    assert kernels.Device and hub.LayerRepository
import engine.scheduler, kernels.gather, policies.plan, tiers.ram
from kvstore.names import check_import_names
check_import_names()
for module in (engine.scheduler, kernels.gather, policies.plan, tiers.ram):
    assert module.__file__.startswith(sys.prefix), module.__file__
"""


def wheel_of_kernels(folder: Path, version: str) -> Path:
    """A distribution with the name and version of Hugging Face's, whose package gives whatever is imported from it."""
    path = folder / f"kernels-{version}-py3-none-any.whl"
    info = f"kernels-{version}.dist-info"
    files = {
        "kernels/__init__.py": _THEIRS,
        "kernels/layer/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("order", [("ours",), ("ours", "theirs"), ("theirs", "ours")], ids=" then ".join)
def test_the_wheel_breaks_nothing_of_transformers_and_of_its_kernels_package(
    wheel: Path, tmp_path: Path, order: tuple[str, ...]
) -> None:
    """transformers imports `kernels` where it finds it; pip overwrites what two wheels both bring."""
    import_utils = pytest.importorskip("transformers.utils.import_utils")
    wheels = {"ours": wheel, "theirs": wheel_of_kernels(tmp_path, import_utils.KERNELS_MIN_VERSION)}
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"]
    for which in order:
        check([*pip, "install", "--no-deps", "--no-index", wheels[which]], timeout=120)
    # What both need lies here already. After that, so that pip takes nothing there for installed.
    (site / "others.pth").write_text(f"{Path(import_utils.__file__).parents[2]}\n")
    check([python, "-I", "-c", _LOOK, order[-1] if len(order) == 1 else "theirs"], timeout=120, cwd=tmp_path)
    if "theirs" in order:
        (site / "others.pth").unlink()
        check([*pip, "uninstall", "--yes", "tiered-kvstore"], timeout=120)
        assert (site / "kernels" / "__init__.py").read_text() == _THEIRS


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it downloads the dependencies
def test_the_wheel_serves_from_an_environment_without_torch(installed: Path, tmp_path: Path, shm_dir: Path) -> None:
    has_torch = subprocess.run([installed / "python", "-c", "import torch"], capture_output=True, check=False)
    assert has_torch.returncode != 0, "torch came with the base dependencies"
    environ = small(tmp_path, shm_dir)
    with daemon([installed / "kvstore", "serve"], environ, tmp_path / "run") as serving:
        stats = json.loads(check([installed / "kvstore", "stats", "--json"], env=environ, timeout=60).stdout)
        assert stats["daemon"]["version"] == VERSION
        assert stats["tiers"]["ram"]["state"] == "ok"
        assert stats["tiers"]["ssd"]["state"] == "ok"
        listed = check([installed / "kvstore", "sessions", "list", "--json"], env=environ, timeout=60)
        assert json.loads(listed.stdout)["sessions"] == []
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0
    gone = subprocess.run([installed / "kvstore", "stats"], env=environ, capture_output=True, check=False, timeout=60)
    assert gone.returncode == 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_says_what_is_missing_where_there_is_no_engine(installed: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [installed / "kvstore", "demo"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 2
    assert "pip install '.[engine]'" in ran.stderr


def test_the_daemon_starts_where_torch_cannot_be_imported(tmp_path: Path, shm_dir: Path) -> None:
    """And so do its processes: a `torch` that fails to import stands first on their path."""
    poison = tmp_path / "poison"
    for name in ("torch", "triton", "transformers"):
        (poison / name).mkdir(parents=True)
        (poison / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')\n")
    environ = {**small(tmp_path, shm_dir), "PYTHONPATH": f"{poison}:{ROOT}"}
    command = [sys.executable, "-m", "kvstore"]
    proof = subprocess.run([sys.executable, "-c", "import torch"], env=environ, capture_output=True, check=False)
    assert b"torch was imported" in proof.stderr
    with daemon([*command, "serve"], environ, tmp_path / "run") as serving:
        check([*command, "stats"], env=environ, timeout=60)
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(60) == 0
    assert "was imported" not in (tmp_path / "daemon.log").read_text()


# ---------------------------------------------------------------- images and compose file


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_the_compose_file_follows_the_specification() -> None:
    check([BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", ROOT / "docker-compose.yml"])


def test_the_dockerfile_passes_the_linter() -> None:
    check([BIN / "hadolint", "--failure-threshold", "info", ROOT / "Dockerfile"])


def test_the_images_are_built_from_files_that_the_ignore_file_lets_through() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        word
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    assert copied == {*SOURCES, "pyproject.toml", "setup.py", "README.md"}
    assert copied <= allowed


def test_engine_and_sidecar_share_socket_and_memory_as_one_user(compose: dict[str, Any]) -> None:
    engine, sidecar = compose["services"]["engine"], compose["services"]["kvstore"]
    shared = set(engine["volumes"]) & set(sidecar["volumes"])
    assert shared == {"run:/run/kvstore", "shm:/run/kvstore-shm"}
    assert engine["user"] == sidecar["user"] == "10001:10001"
    for name in ("run", "shm"):
        assert compose["volumes"][name]["driver_opts"]["type"] == "tmpfs"
        assert "mode=0700" in compose["volumes"][name]["driver_opts"]["o"]


def test_the_sidecars_environment_is_one_that_the_daemon_accepts(compose: dict[str, Any]) -> None:
    in_image = dict(
        word.split("=", 1)
        for word in (ROOT / "Dockerfile").read_text().replace("\\\n", " ").split()
        if word.startswith("KVSTORE_")
    )
    config = load(environ={**in_image, **compose["services"]["kvstore"]["environment"]}).config
    assert config.s3.enabled
    assert (config.daemon.run_dir, config.ram.shm_dir) == ("/run/kvstore", "/run/kvstore-shm")
    assert config.ssd.path.startswith("/var/lib/kvstore")
    options = dict(part.partition("=")[::2] for part in compose["volumes"]["shm"]["driver_opts"]["o"].split(","))
    assert int(options["size"].removesuffix("m")) << 20 >= 2 * config.ram.size_bytes


def test_the_engine_knows_the_options_it_is_given(compose: dict[str, Any]) -> None:
    (in_image,) = [
        json.loads(line.removeprefix("CMD "))
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("CMD ") and "--run-dir" in line
    ]
    given = {word.partition("=")[0] for word in [*in_image, *compose["services"]["engine"]["command"]]}
    source = (ROOT / "engine" / "server.py").read_text()
    for option in (word for word in given if word.startswith("--")):
        assert f'"{option}"' in source or f"{option[2:].replace('-', '_')}: Annotated" in source, option


def test_no_container_is_closed_to_the_secrets_it_is_given(compose: dict[str, Any]) -> None:
    """Compose copies a secret from the environment into the container, and `up` ends with an error where that is
    read-only (docker/compose#12303, #12531): the file followed the specification and could not be started."""
    for service in compose["services"].values():
        assert not (service.get("read_only") and service.get("secrets"))


def test_no_port_is_open_to_other_machines_and_no_secret_is_written_down(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    s3 = compose["services"]["s3"]["environment"]
    assert s3["AWS_ACCESS_KEY_ID"].startswith("${S3_ACCESS_KEY:?")
    assert s3["AWS_SECRET_ACCESS_KEY"].startswith("${S3_SECRET_KEY:?")
    assert all(set(secret) == {"environment"} for secret in compose["secrets"].values())


# ---------------------------------------------------------------- make and CI


def test_the_versions_for_machines_without_a_gpu_fit_the_ranges_of_the_project() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        engine = tomllib.load(file)["project"]["optional-dependencies"]["engine"]
    ranges = {name.partition(">")[0].strip(): name for name in engine}
    pins = dict(line.split("==") for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if "==" in line)
    assert set(pins) == {"torch", "triton"}
    from packaging.requirements import Requirement

    for name, version in pins.items():
        assert Requirement(ranges[name]).specifier.contains(version)


def test_make_lists_its_targets() -> None:
    listed = check(["make", "--no-print-directory", "help"], cwd=ROOT).stdout
    assert {line.split()[1] for line in listed.splitlines()} >= {"setup", "demo", "test", "lint", "gpu-check", "clean"}


def test_make_names_the_package_that_is_missing(tmp_path: Path) -> None:
    """A fresh Debian has Python without its venv module."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexit 0\n')
    python.chmod(0o755)
    ran = subprocess.run(
        ["make", "setup", f"PYTHON={python}", f"VENV={tmp_path}/venv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert "apt-get install python3-venv" in ran.stderr


def test_ci_runs_what_developers_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    check(["bash", "-n", script])
    commands = [line for line in script.read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make lint", "make test"]
