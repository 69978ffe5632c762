"""Draws what was measured: latency distributions, and throughput and open requests over time, as one PNG (or SVG, PDF).

Needs matplotlib, of the extra `bench`. Uses figures directly and never the global pyplot state, so that it works
without a display and beside other users of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from diptych.bench.measure import CaseResult, RequestRecord, open_requests_timeline, output_timeline
from diptych.errors import ConfigError

# Values further apart than this are told apart on a logarithmic axis only.
_LOG_RATIO = 20.0


def draw(results: Sequence[CaseResult], title: str, path: Path) -> None:
    """Write the figure; the file's ending says in which format. Raises: ConfigError if it cannot be written."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    (ttft, itl), (rate, open_requests) = figure.subplots(2, 2)
    _draw_distribution(ttft, "time to first token", results, _ttft)
    _draw_distribution(itl, "inter-token latency", results, lambda record: record.itl_s)
    _draw_timelines(rate, open_requests, results)
    if len(results) > 1:
        figure.legend(handles=rate.get_lines(), loc="outside lower center", ncols=len(results))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot {path}: {error}") from error


def _ttft(record: RequestRecord) -> list[float]:
    return [] if record.ttft_s is None else [record.ttft_s]


def _draw_distribution(
    axes: Axes, name: str, results: Sequence[CaseResult], values_of: Callable[[RequestRecord], list[float]]
) -> None:
    """The share of values that are at most so large; of a single case, its percentiles in the title."""
    low, high = np.inf, 0.0
    for index, result in enumerate(results):
        values = np.sort([1000.0 * value for record in result.completed for value in values_of(record)])
        if not values.size:
            continue
        low, high = min(low, float(values[0])), max(high, float(values[-1]))
        shares = np.arange(values.size + 1) / values.size
        axes.step(np.concatenate((values[:1], values)), shares, where="post", color=f"C{index}")
        if len(results) == 1:
            at = np.percentile(values, (50, 90, 99))
            name += (
                "".join(f", p{percent} {value:.4g}" for percent, value in zip((50, 90, 99), at, strict=True)) + " ms"
            )
            for value in at:
                axes.axvline(float(value), color="0.6", linestyle=":", linewidth=1)
    if low > 0 and _LOG_RATIO * low < high:
        axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    _label(axes, name, "ms", "share that took at most so long")


def _draw_timelines(rate: Axes, open_requests: Axes, results: Sequence[CaseResult]) -> None:
    for index, result in enumerate(results):
        records = result.rounds[0].records
        rate.step(*output_timeline(records), where="mid", color=f"C{index}", label=result.case.name)
        open_requests.step(*open_requests_timeline(records), where="post", color=f"C{index}")
    rate.set_ylim(bottom=0)
    open_requests.set_ylim(bottom=0)
    open_requests.yaxis.set_major_locator(MaxNLocator(integer=True))
    _label(rate, "output, first round", "s", "tok/s")
    _label(open_requests, "open requests, first round", "s", "requests")


def _label(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, alpha=0.3)
