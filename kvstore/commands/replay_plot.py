"""Draws hit ratio over capacity, one line per policy. Needs matplotlib, which only the extra `plot` brings."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from kvstore.core.errors import ConfigError


def check_plot(path: Path) -> None:
    """Raise ConfigError where the plot could not be drawn, before the work it is drawn from."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'tiered-kvstore[plot]'")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot draws PNG files, so {path.name!r} should end in .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent}")


def plot_hit_ratios(path: Path, points: Sequence[tuple[str, int, float]], infinite: float) -> None:
    """Write the PNG. `points` are (policy, capacity in blocks, token hit ratio); `infinite` is drawn as a level line.

    Raises ConfigError where the file cannot be written.
    """
    # Here, since the command starts without it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(policy for policy, _, _ in points):
        line = sorted((capacity, 100 * ratio) for policy, capacity, ratio in points if policy == name)
        axes.plot([capacity for capacity, _ in line], [ratio for _, ratio in line], marker="o", label=name)
    axes.axhline(100 * infinite, linestyle=":", color="black", label="infinite")
    if min(capacity for _, capacity, _ in points) > 0:
        axes.set_xscale("log")
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("prompt tokens from the cache, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror or error}") from None
