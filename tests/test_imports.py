"""Holds the one direction of imports, by reading the sources; nothing is imported here.

kvstore.core ◄─ policies, tiers ◄─ kvstore.bucket ◄─ kvstore.worker ◄─ kvstore.store ◄─ kvstore.daemon, kvstore.api …
kernels ◄─ tiers.hbm ◄─ engine ─► kvstore.core, kvstore.wire, kvstore.client, policies, tiers.region
"""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "kernels", "kvstore", "policies", "tiers")

# Whose modules may import what of ours; the longest matching name decides. `-` takes a part out again.
INTERNAL = {
    "kernels": {"kernels"},
    "kvstore.core": {"kvstore.core"},
    "policies": {"policies", "kvstore.core"},
    "tiers": {"tiers", "kvstore.core", "-tiers.hbm"},
    "tiers.hbm": {"tiers", "kvstore.core", "kernels"},
    "kvstore.messages": {"kvstore.messages", "kvstore.core", "policies.decision"},
    "kvstore.wire": {"kvstore.core", "kvstore.messages"},
    "kvstore.frames": {"kvstore.core", "kvstore.wire"},
    "kvstore.cpu": set(),
    "kvstore.forking": set(),
    "kvstore.connection": {"kvstore.core", "kvstore.cpu", "kvstore.forking", "kvstore.frames", "kvstore.wire"},
    "kvstore.control_socket": {"kvstore.core", "kvstore.frames", "kvstore.wire"},
    "kvstore.attachment": {"kvstore.core", "kvstore.wire", "kvstore.forking", "kvstore.connection", "tiers.region"},
    "kvstore.stream": {"kvstore.core", "kvstore.wire", "kvstore.connection", "kvstore.attachment", "tiers.region"},
    "kvstore.client": {
        "kvstore.core",
        "kvstore.wire",
        "kvstore.connection",
        "kvstore.attachment",
        "kvstore.stream",
        "tiers.region",
    },
    "kvstore.region_pin": {"kvstore.core", "tiers.region"},
    "kvstore.session_record": {"kvstore.core", "kvstore.wire"},
    "kvstore.bucket": {"kvstore.bucket", "kvstore.core", "kvstore.session_record", "tiers", "-tiers.hbm"},
    "kvstore.worker": {
        "kvstore.worker",
        "kvstore.bucket",
        "kvstore.core",
        "kvstore.session_record",
        "kvstore.wire",
        "kvstore.config",
        "kvstore.process",
        "tiers",
        "-tiers.hbm",
    },
    "kvstore.events": {"kvstore.events", "kvstore.core", "kvstore.config", "kvstore.process"},
    "kvstore.connectors.weights": set(),
    "kvstore.connectors.sglang": {"kvstore.connectors.sglang_parts", "kvstore.connectors.weights", "kvstore.core"},
    "kvstore.connectors.sglang_parts": {
        "kvstore.connectors.sglang_parts",
        "kvstore.connectors.weights",
        "kvstore.client",
        "kvstore.config",
        "kvstore.core",
    },
    "kvstore.store": {
        "kvstore.store",
        "kvstore.events.changes",
        "kvstore.worker",
        "kvstore.bucket",
        "kvstore.core",
        "kvstore.session_record",
        "kvstore.wire",
        "kvstore.config",
        "kvstore.version",
        "policies",
        "tiers",
        "-tiers.hbm",
    },
    # Runs inside of vLLM: a client with a planner, not a part of the daemon.
    "kvstore.connectors.vllm": {"kvstore.connectors", "kvstore.core", "kvstore.client"},
    "kvstore.connectors.vllm_parts": {
        "kvstore.connectors.vllm_parts",
        "kvstore.connectors.weights",
        "kvstore.client",
        "kvstore.config",
        "kvstore.core",
        "kvstore.region_pin",
        "kvstore.wire",
        "policies",
        "tiers.pages",
    },
    # The GPU's copies, imported only where there is one.
    "kvstore.connectors.vllm_parts.device": {"kvstore.connectors.vllm_parts", "kvstore.core", "kernels"},
    "kvstore": {"kvstore", "policies", "tiers", "-tiers.hbm"},
    # Run by hand, and only where torch is.
    "kvstore.bench.paged": {"kvstore.bench", "kvstore.core", "tiers"},
    "engine": {
        "engine",
        "kernels",
        "kvstore.core",
        "kvstore.client",
        "kvstore.names",
        "kvstore.region_pin",
        "kvstore.wire",
        "policies",
        "tiers.hbm",
        "tiers.region",
    },
}
# Who alone may import these. The daemon's side has no torch: its container has neither GPU nor room for it.
RESERVED = {
    "torch": {
        "engine",
        "kernels",
        "tiers.hbm",
        "kvstore.bench.paged",
        "kvstore.connectors.sglang",
        "kvstore.connectors.vllm_parts.device",
    },
    "sglang": {"kvstore.connectors.sglang"},
    "triton": {"kernels"},
    "transformers": {"engine"},
    "tokenizers": {"engine"},
    "safetensors": {"engine"},
    "gguf": {"engine"},
    "boto3": {"tiers", "kvstore.s3server", "kvstore.bench.s3"},
    "lmdb": {"tiers"},
    "vllm": {"kvstore.connectors.vllm", "kvstore.connectors.vllm_parts.metrics"},
    "zmq": {"kvstore"},
    "fastapi": {"kvstore.api", "engine"},
}
# They run what they read.
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, *, at_run_time: bool = False) -> Iterator[str]:
    """Yield the module of every import in the file, also of those inside of functions.

    `at_run_time` leaves out what stands under `if TYPE_CHECKING`.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(_WithoutTyping().visit(tree) if at_run_time else tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


class _WithoutTyping(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.If | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def lies_in(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def may_import(importer: str, imported: str) -> bool:
    rule = INTERNAL[max((name for name in INTERNAL if lies_in(importer, {name})), key=len)]
    taken_out = {name[1:] for name in rule if name.startswith("-")}
    return lies_in(imported, rule) and not lies_in(imported, taken_out)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_place_allows(module: str) -> None:
    for imported in imports(MODULES[module]):
        if imported.partition(".")[0] in PACKAGES and imported not in PACKAGES:
            assert imported in MODULES, f"{module} imports {imported}, which does not exist"
            assert may_import(module, imported), f"{module} must not import {imported}"
        for reserved, owners in RESERVED.items():
            if lies_in(imported, {reserved}):
                assert lies_in(module, owners), f"{module} must not import {imported}; only {', '.join(owners)} may"
        assert not lies_in(imported, FORBIDDEN), f"{module} must not import {imported}"


# What is there wherever the engine is, and is no dependency of ours.
BROUGHT_BY_VLLM = {"huggingface_hub", "torch", "vllm"}
BROUGHT_BY_SGLANG = {"huggingface_hub", "sglang", "torch"}
# What the extra `plot` brings.
PLOTS = ("kvstore.commands.replay_plot", "kvstore.commands.calibrate_plot")


def test_everything_that_is_imported_is_a_declared_dependency() -> None:
    """What another dependency happens to bring along may be gone with its next release."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    base = {_canonical(requirement) for requirement in project["dependencies"]}
    engine = base | {_canonical(requirement) for requirement in project["optional-dependencies"]["engine"]}
    owners = importlib.metadata.packages_distributions()
    for module, path in MODULES.items():
        declared = engine if lies_in(module, {"engine", "kernels", "tiers.hbm", "kvstore.bench.paged"}) else base
        declared = declared | {"obstore"} if module in ("tiers.s3obstore", "tiers.s3obstores") else declared
        declared = declared | {"matplotlib"} if module in PLOTS else declared
        for top in {imported.partition(".")[0] for imported in imports(path, at_run_time=True)}:
            if lies_in(module, {"kvstore.connectors.vllm", "kvstore.connectors.vllm_parts"}) and top in BROUGHT_BY_VLLM:
                continue
            if module == "kvstore.connectors.sglang" and top in BROUGHT_BY_SGLANG:
                continue
            if top not in PACKAGES and top not in sys.stdlib_module_names:
                assert {_canonical(owner) for owner in owners[top]} & declared, f"{module} imports {top}"


def _canonical(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


@pytest.mark.parametrize("module", [module for module in MODULES if lies_in(module, {"kernels"})])
def test_kernels_need_torch_and_triton_alone(module: str) -> None:
    for imported in imports(MODULES[module]):
        top = imported.partition(".")[0]
        assert top in {"kernels", "torch", "triton"} or top in sys.stdlib_module_names, f"{module} imports {imported}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_run_that_came_as_text(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            assert name not in {"eval", "exec", "compile", "__import__"}, f"{module}:{node.lineno} calls {name}"
            shell = [keyword for keyword in node.keywords if keyword.arg == "shell"]
            assert not shell, f"{module}:{node.lineno} runs a shell"


@pytest.mark.parametrize("package", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_packages_are_empty_so_that_importing_one_module_loads_no_other(package: str) -> None:
    assert MODULES[package].read_text() == ""


def test_the_distribution_lists_exactly_the_packages_that_are_there() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    assert listed == sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("policies.plan", "kvstore.core.key", True),
        ("policies.plan", "kvstore.wire", False),
        ("policies.plan", "tiers.base", False),
        ("tiers.ssd", "tiers.hbm", False),
        ("tiers.ssd", "kernels.gather", False),
        ("tiers.hbm", "kernels.gather", True),
        ("kvstore.core.key", "kvstore.wire", False),
        ("kvstore.store.store", "kvstore.daemon", False),
        ("kvstore.store.link", "kvstore.worker.ops", True),
        ("kvstore.worker.main", "kvstore.store.catalog", False),
        ("kvstore.bucket.sweep", "kvstore.worker.ops", False),
        ("kvstore.connectors.vllm_parts.worker", "kvstore.client", True),
        ("kvstore.connectors.vllm_parts.worker", "engine.mover", False),
        ("kvstore.connectors.vllm_parts.worker", "kvstore.daemon", False),
        ("kvstore.daemon", "tiers.ram", True),
        ("kvstore.daemon", "tiers.hbm", False),
        ("kvstore.daemon", "engine.runner", False),
        ("engine.runner", "kvstore.client", True),
        ("engine.runner", "kvstore.daemon", False),
        ("engine.runner", "tiers.ram", False),
    ],
)
def test_the_rules_say_what_the_design_says(importer: str, imported: str, allowed: bool) -> None:
    assert may_import(importer, imported) is allowed
