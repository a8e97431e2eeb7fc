"""The README and the pages in docs/ name what is there: links, files, packages, commands, routes, settings, metrics."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from fastapi.routing import APIRoute

from kvstore.api import create_app
from kvstore.cli import app
from kvstore.client import Client
from kvstore.config import Config, HttpConfig
from kvstore.connectors.vllm_parts import stats

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SOURCES = ("benchmarks", "deploy", "docs", "engine", "kernels", "kvstore", "policies", "tests", "tests_vllm", "tiers")
# By section of the configuration, its keys as they are written.
SETTINGS = {
    section.name: {field.encode_name for field in msgspec.structs.fields(section.type)}
    for section in msgspec.structs.fields(Config)
}
# They name figures whose sections are called like those of the configuration.
OF_FIGURES = ("benchmarks.md", "stats.md")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def prose(page: Path) -> str:
    """The page without its fenced examples."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, no punctuation, a dash for each space."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_file(), target
        assert not anchor or anchor in anchors(linked), target


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(SOURCES)})/[\w./*-]*)`", prose(page))
    for name in named:
        assert any(ROOT.glob(name.rstrip("/"))), name


def test_the_architecture_names_every_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    page = (DOCS / "architecture.md").read_text("utf-8")
    for package in packages:
        assert package.count(".") > 1 or f"`{package.replace('.', '/')}/" in page, package


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Every `kvstore …` of the page: what is written, and its words."""
    text = page.read_text("utf-8")
    shown = re.findall(r"^(?:\$ )?(?:[A-Z_0-9]+=\S+ )*kvstore .*$", text, flags=re.MULTILINE)
    quoted = re.findall(r"`kvstore ([^`\n]*)`", prose(page))
    for line in [*(line[line.index("kvstore ") + 8 :] for line in shown), *quoted]:
        yield line, re.sub(r"\\\|.*?(?=\s|$)", "", line.partition(" #")[0]).split()


@each_page
def test_commands_and_their_options_exist(page: Path) -> None:
    for line, words in commands(page):
        command: Any = typer.main.get_command(app)
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, f"kvstore {line}"
            command = command.commands[words.pop(0)]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for option in (word.strip("[],") for word in words if word.strip("[").startswith("--")):
            assert option in known | {"--help"}, f"kvstore {line}"


def test_the_manual_lists_exactly_the_routes_of_the_api() -> None:
    rows = re.findall(r"^\| `(GET|POST|DELETE) (/[\w/]*)[^`]*` \|", (DOCS / "http.md").read_text("utf-8"), re.MULTILINE)

    def connect() -> Client:
        raise AssertionError("nothing is asked")

    routes = [route for route in create_app(connect, HttpConfig()).routes if isinstance(route, APIRoute)]
    served = {(method, re.sub(r"\{\w+\}", "ID", route.path)) for route in routes for method in route.methods}
    assert set(rows) == served


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OF_FIGURES], ids=lambda page: page.name)
def test_settings_that_are_named_exist(page: Path) -> None:
    for section, key in re.findall(rf"`({'|'.join(SETTINGS)})\.(?!py\b)(\w+)", page.read_text("utf-8")):
        assert key in SETTINGS[section], f"{section}.{key}"


def test_the_manual_lists_exactly_the_metrics_of_the_vllm_connector() -> None:
    told = set(re.findall(r"`vllm:kvstore_(\w+)", (DOCS / "vllm.md").read_text("utf-8")))
    counts = {f"{name}_total" for name in stats.COUNTS}
    assert told == counts | set(stats.LEVELS) | {f"{name}_seconds" for name in stats.SECONDS}
