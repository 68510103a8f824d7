"""Charts as SVG, drawn by matplotlib for the width of a phone.

Colors refer to the variables of the page's style sheet, so that they follow a dark theme.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

from specdec_jax.measure.reporting.markup import tag

_BASELINE = "autoregressive: 1"
_WIDTH = 340  # in CSS pixels, which equal matplotlib's points in the written files

# Colours of the page's light theme: name of the CSS variable -> colour.
_THEME = {
  "ink": "#1b1f24",
  "soft": "#59626d",
  "line": "#d5dae0",
  "page": "#ffffff",
  "blue": "#0067a3",
  "orange": "#ad4700",
  "green": "#00734f",
  "blue-bed": "#dcedf9",
}
_STYLE: dict[Any, Any] = {
  "font.size": 12,
  "text.color": _THEME["ink"],
  "text.parse_math": False,
  "axes.edgecolor": _THEME["line"],
  "axes.labelcolor": _THEME["soft"],
  "axes.titlecolor": _THEME["soft"],
  "axes.titlelocation": "left",
  "axes.titlesize": 12,
  "legend.fontsize": 12,
  "legend.columnspacing": 1,
  "legend.handlelength": 1.5,
  "axes.grid": True,
  "axes.grid.axis": "y",
  "axes.axisbelow": True,
  "axes.spines.left": False,
  "axes.spines.right": False,
  "axes.spines.top": False,
  "grid.color": _THEME["line"],
  "xtick.color": _THEME["line"],
  "xtick.labelcolor": _THEME["soft"],
  "ytick.color": _THEME["line"],
  "ytick.labelcolor": _THEME["soft"],
  "svg.fonttype": "none",  # text remains text
}


class Curve(NamedTuple):
  """A curve of a line chart.

  Attributes:
    name: label of the curve.
    colour: "blue", "orange" or "green".
    line: line style of matplotlib. Points of a solid line are filled.
    points: pairs (x, y), such as (gamma, speedup), in ascending order of x.
  """

  name: str
  colour: str
  line: str
  points: Sequence[tuple[int, float]]


def line_charts(
  charts: Mapping[str, Sequence[Curve]], y_label: str, x_label: str, log2: bool = False
) -> list[Markup]:
  """Return line charts whose axes have the same ranges, so that the charts can be compared.

  Later curves are drawn over earlier ones. A dotted line at 1 marks autoregressive decoding. The
  legend gives the highest value of each curve.

  Args:
    charts: curves of each chart, by the heading of the chart. Curves are not empty.
    y_label: label of the y axis, which starts at 0.
    x_label: label of the x axis. Descriptions of the charts use its first word as the name of x.
    log2: whether the x axis is logarithmic (base 2). It then starts at 1, otherwise at 0.
  """
  points = [point for curves in charts.values() for curve in curves for point in curve.points]
  xs = sorted({x for x, _ in points})
  highest = max([1.0, *(y for _, y in points)])

  def draw(axes: Axes, curves: Sequence[Curve]) -> None:
    axes.set_title(y_label)
    axes.set_xlabel(x_label)
    if log2:
      axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(2) if log2 else MaxNLocator(9, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set_xlim(1 if log2 else 0, xs[-1])
    axes.set_ylim(0, 1.05 * highest)
    axes.axhline(1, color=_THEME["ink"], linestyle=":", linewidth=1, label=_BASELINE)
    for curve in curves:
      colour = _THEME[curve.colour]
      axes.plot(
        *zip(*curve.points),
        color=colour,
        linestyle=curve.line,
        linewidth=2,
        marker="o",
        markerfacecolor=colour if curve.line == "-" else _THEME["page"],
        clip_on=False,
        label=_label(curve),
      )
    _legend(axes)

  x_name = x_label.split()[0]
  figures = []
  for heading, curves in charts.items():
    descriptions = (
      f"{curve.name} " + ", ".join(f"{y:.2f} at {x_name} {x}" for x, y in curve.points)
      for curve in curves
    )
    description = f"{y_label}: {'; '.join(descriptions)}"
    labels = [_BASELINE, *map(_label, curves)]
    legend_rows = math.ceil(len(labels) / _legend_columns(labels))
    height = 210 + 18 * legend_rows  # the axes have the same height in all charts
    figures.append(_figure(heading, description, height, partial(draw, curves=curves)))
  return figures


def acceptance_chart(
  heading: str,
  shares: Sequence[float | None],
  pooled: float | None,
  counts: Sequence[int | None],
) -> Markup:
  """Return a bar chart of the acceptance rate at each position in a round.

  Args:
    heading: heading of the chart.
    shares: acceptance rate at each position; None where no draft token was verified.
    pooled: acceptance rate over all positions, drawn as a dotted line; None for no line.
    counts: number of draft tokens from which each rate was computed. It is shown next to the rate
      unless it is None or 0.
  """

  def draw(axes: Axes) -> None:
    values = [share or 0.0 for share in shares]
    labels = [
      _percent(share) + (f" of {count}" if count else "")
      for share, count in zip(shares, counts, strict=True)
    ]
    _bars(axes, values, labels, height=0.8)
    axes.set_yticks(range(len(shares)), [str(i) for i in range(1, len(shares) + 1)])
    axes.set_ylabel("draft token")
    axes.set_xlim(0, 1)
    if pooled is not None:
      axes.axvline(pooled, color=_THEME["ink"], linestyle=":", label=f"all: {_percent(pooled)}")
      _legend(axes)

  description = "; ".join(f"draft token {i} {_percent(share)}" for i, share in enumerate(shares, 1))
  return _figure(heading, f"Acceptance rate: {description}", 60 + 24 * len(shares), draw)


def bar_chart(heading: str, label: str, values: Sequence[tuple[str, float]]) -> Markup:
  """Return a chart with a bar for each (name, value), and a line at 1 for the baseline."""

  def draw(axes: Axes) -> None:
    speeds = [value for _, value in values]
    _bars(axes, speeds, [f"{value:.2f}" for value in speeds], height=0.4)
    for i, (name, _) in enumerate(values):  # above its bar, so that a long name has room
      axes.text(0, i - 0.25, name, va="bottom")
    axes.set_yticks([])
    axes.set_ylim(len(values) - 0.5, -0.9)
    axes.set_title(label)
    axes.axvline(1, color=_THEME["ink"], linestyle=":", zorder=0)

  description = "; ".join(f"{name} {value:.2f}" for name, value in values)
  return _figure(heading, f"{label}: {description}", 40 + 40 * len(values), draw)


def _bars(axes: Axes, values: Sequence[float], labels: Sequence[str], height: float) -> None:
  """Draw horizontal bars at y = 0, 1, ..., from the top down, each with a label at its end."""
  fill, edge = _THEME["blue-bed"], _THEME["blue"]
  bars = axes.barh(range(len(values)), values, height, color=fill, edgecolor=edge)
  background = {"facecolor": _THEME["page"], "edgecolor": "none", "pad": 1}
  axes.bar_label(bars, labels, padding=4, bbox=background)
  axes.margins(y=0.01)
  axes.invert_yaxis()
  axes.grid(visible=False)
  axes.set_xticks([])
  axes.spines["bottom"].set_visible(False)


def _legend(axes: Axes) -> None:
  """Put a legend below the axes, in two columns if its labels are short."""
  labels = axes.get_legend_handles_labels()[1]
  columns = _legend_columns(labels)
  axes.figure.legend(loc="outside lower center", ncols=columns, frameon=False)


def _legend_columns(labels: Sequence[str]) -> int:
  return 2 if max(map(len, labels)) <= 18 else 1


def _label(curve: Curve) -> str:
  return f"{curve.name}: {max(y for _, y in curve.points):.2f}"


def _percent(share: float | None) -> str:
  return "-" if share is None else f"{share:.0%}"


def _figure(heading: str, description: str, height: float, draw: Callable[[Axes], None]) -> Markup:
  """Return a figure with a heading, and with a description for screen readers.

  Args:
    heading: heading of the figure.
    description: text that screen readers read instead of the chart.
    height: height in CSS pixels.
    draw: function that draws on the axes.
  """
  # Identifiers that derive from the content are unique in the page, and the same in each run.
  with rc_context(_STYLE | {"svg.hashsalt": heading + description}):
    figure = Figure(figsize=(_WIDTH / 72, height / 72), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.subplots()
    axes.patch.set_visible(False)
    draw(axes)
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=no_metadata)
  svg = file.getvalue()
  svg = svg[svg.index("<svg") :]
  svg = re.sub(r' (xmlns(:xlink)?="[^"]*"|id="[\w.]+_\d+")', "", svg)  # HTML does not need them
  for name, colour in _THEME.items():
    svg = svg.replace(colour, f"var(--{name})")
  drawing = tag("div", Markup(svg), role="img", aria_label=description)
  return tag("figure", tag("h3", heading), drawing)
