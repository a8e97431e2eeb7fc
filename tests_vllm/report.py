"""What the run showed: a table for people at its end, and JSON for programs."""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tests_vllm.tokens import Comparison

_WIDTH = 118


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure, and what was asked of it."""

    part: str
    what: str
    figure: str
    asked: str
    holds: bool


class Report:
    """Collects facts while the tests run. `compared` is the sum over all of them."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.compared = Comparison()
        self.about: dict[str, str] = {}
        self._started = time.monotonic()

    def fact(self, part: str, what: str, figure: str, asked: str, holds: bool) -> None:
        """Note it, then fail the test that calls where it does not hold."""
        self.facts.append(Fact(part, what, figure, asked, holds))
        assert holds, f"{part}: {what}: {figure}; asked was {asked}"

    def tokens(self, part: str, what: str, compared: Comparison) -> None:
        """Note a comparison; every answer must be the reference's, but for ties."""
        self.compared.merge(compared)
        self.fact(part, what, str(compared), "none differs", compared.differ == 0 and compared.tokens > 0)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        value = {
            "about": self.about | {"cores": str(os.cpu_count()), "machine": platform.machine()},
            "seconds": round(time.monotonic() - self._started, 1),
            "compared": asdict(self.compared),
            "facts": [asdict(fact) for fact in self.facts],
        }
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")

    def show(self) -> None:
        table = Table(title="vLLM with the sidecar", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("part", "what", "figure", "asked", ""):
            table.add_column(column, overflow="fold")
        for fact in self.facts:
            table.add_row(fact.part, fact.what, fact.figure, fact.asked, "ok" if fact.holds else "NO")
        console = Console(width=_WIDTH)
        console.print(table)
        console.print(f"compared: {self.compared}; {time.monotonic() - self._started:.0f} s", highlight=False)
