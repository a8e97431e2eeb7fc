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
    searched_tokens: int,
) -> None:
    """Write the PNG. `recompute_s[i]` and `loads_s[tier][i]` are for a prefix of `tokens[i]`. A
    tier without break-even has none up to `searched_tokens`.

    Raises ConfigError where the file cannot be written.
    """
    # Here, since the command starts without it.
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(tokens, recompute_s, color="black", label="recompute")
    for tier, seconds in loads_s.items():
        even = break_even.get(tier)
        pays = f"not faster up to {searched_tokens} tokens" if even is None else f"faster from {even} tokens on"
        (line,) = axes.plot(tokens, seconds, label=f"load from {tier}: {pays}")
        if even is not None and tokens[0] <= even <= tokens[-1]:
            axes.axvline(even, color=line.get_color(), linestyle=":", linewidth=1)
            at = min(range(len(tokens)), key=lambda i: abs(tokens[i] - even))
            axes.plot([even], [seconds[at]], marker="o", color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
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
