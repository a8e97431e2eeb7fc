"""What the README shows does what it says, and what a daemon says is in the pages."""

import re
import runpy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.daemons import DaemonProcess
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_the_example_of_a_client_stores_a_prompt_and_then_fetches_it(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    """On a daemon that had nothing yet it ended with a ProtocolError."""
    daemon = make_daemon()
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    example = example.replace('"/tmp/kv"', repr(str(daemon.run_dir))).replace("33_554_432", "65_536")
    example = example.replace('name="my-engine"', f'name="my-engine", deadline_s={PATIENCE_S}')
    example = example.replace("deadline_s=0.5", f"deadline_s={PATIENCE_S}")
    script = tmp_path / "example.py"
    script.write_text(example, "utf-8")
    first, second = _run(script), _run(script)
    assert (first["stored"], first["fetched"]) == ([0, 1, 2, 3], {})
    assert (second["stored"], second["fetched"]) == ([], {i: bytes([i]) * 65_536 for i in range(4)})
    assert second["usable"] == dict.fromkeys(range(4), True)


def test_the_page_of_the_statistics_names_every_field(make_daemon: Callable[..., DaemonProcess]) -> None:
    page = (ROOT / "docs" / "stats.md").read_text("utf-8")
    named = {word for quoted in re.findall(r"`([^`\n]*)`", page) for word in re.findall(r"\w+", quoted)}
    assert set(_fields(make_daemon().stats())) <= named


def _fields(snapshot: Mapping[str, Any]) -> Iterator[str]:
    for name, value in snapshot.items():
        yield name
        if isinstance(value, Mapping):
            yield from _fields(value)


def _run(script: Path) -> dict[str, Any]:
    stored: list[int] = []
    fetched: dict[int, bytes] = {}

    def copy_out_of_hbm(block: int, view: memoryview) -> None:
        view[:] = bytes([block]) * len(view)
        stored.append(block)

    def copy_into_hbm(block: int, view: memoryview) -> None:
        fetched[block] = bytes(view)

    names: dict[str, Any] = {
        "token_ids": list(range(4 * 256 + 7)),
        "usable": {},
        "copy_into_hbm": copy_into_hbm,
        "copy_out_of_hbm": copy_out_of_hbm,
        "stored": stored,
        "fetched": fetched,
    }
    ran = runpy.run_path(str(script), names)
    ran["client"].close()
    return ran
