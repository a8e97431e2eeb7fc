"""Draws load against recompute time over prefix length, one line per tier. Needs matplotlib (the extra `plot`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.core.errors import ConfigError


def plot_times(
    path: Path,
    title: str,
    tokens: Sequence[int],
    recompute_s: Sequence[float],
    loads_s: Mapping[str, Sequence[float]],
    break_even: Mapping[str, int | None],
) -> None:
    """Write the PNG. `recompute_s[i]` and `loads_s[tier][i]` are for a prefix of `tokens[i]`.

    Raises ConfigError where the file cannot be written.
    """
    # Here, since the command starts without it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(tokens, recompute_s, color="black", label="recompute")
    for tier, seconds in loads_s.items():
        (line,) = axes.plot(tokens, seconds, label=f"load from {tier}")
        even = break_even.get(tier)
        if even is not None and tokens[0] <= even <= tokens[-1]:
            axes.axvline(even, color=line.get_color(), linestyle=":", linewidth=1)
            text = f"{tier}: from {even} tokens"
            axes.annotate(text, (even, axes.get_ylim()[0]), rotation=90, fontsize=8, va="bottom", ha="right")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("prefix, tokens")
    axes.set_ylabel("seconds")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror or error}") from None
