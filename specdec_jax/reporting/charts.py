"""Charts as SVG, in units of CSS pixels on a phone. The page's style sheet sets the colours."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from specdec_jax.reporting.markup import Markup, tag

_WIDTH = 340


class Curve(NamedTuple):
  """A curve of a line chart.

  Attributes:
    name: label of the curve.
    kind: CSS class of the curve.
    points: (x, y) in ascending order of x, such as gamma and speedup.
  """

  name: str
  kind: str
  points: Sequence[tuple[int, float]]


def line_charts(
  charts: Mapping[str, Sequence[Curve]],
  y_label: str,
  x_label: str,
  scale: Callable[[float], float] = float,
) -> list[Markup]:
  """Return line charts with a common scale, so that they can be compared.

  Later curves are drawn over earlier ones. A dotted line at 1 is autoregressive decoding. The label
  at the end of a curve has its name and its highest value.

  Args:
    charts: heading -> non-empty curves at integers x.
    y_label: label of the y axis, which starts at 0.
    x_label: label of the x axis. Its first word names x.
    scale: monotonic transformation of x. The axis starts where it is 0.
  """
  points = [point for curves in charts.values() for curve in curves for point in curve.points]
  xs = sorted({x for x, _ in points})
  highest = max([1.0, *(y for _, y in points)])
  return [
    _line_chart(heading, curves, y_label, x_label, scale, xs, highest)
    for heading, curves in charts.items()
  ]


def _line_chart(
  heading: str,
  curves: Sequence[Curve],
  y_label: str,
  x_label: str,
  scale: Callable[[float], float],
  xs: Sequence[int],
  highest: float,
) -> Markup:
  left, right, top, bottom = 30, 220, 30, 190
  step = _grid_step(highest)
  ceiling = step * math.ceil(highest / step)

  def to_x(value: float) -> float:
    return left + scale(value) / scale(xs[-1]) * (right - left - 10)

  def to_y(value: float) -> float:
    return bottom - value / ceiling * (bottom - top)

  parts = [_text(0, 14, y_label, "soft")]
  for i in range(round(ceiling / step) + 1):
    parts.append(_horizontal_line(left, right, to_y(i * step)))
    parts.append(_text(left - 6, to_y(i * step) + 4, f"{i * step:g}", "soft end"))
  ticks: list[int] = []
  for x in xs:
    if not ticks or to_x(x) - to_x(ticks[-1]) > 20:  # closer labels would overlap
      ticks.append(x)
  parts += [_text(to_x(x), bottom + 16, x, "soft middle") for x in ticks]
  parts.append(_text((left + right) / 2, bottom + 34, x_label, "soft middle"))
  parts.append(_horizontal_line(left, right, to_y(1), "one"))
  labels = [(to_y(1), "autoregressive: 1", "soft")]
  for name, kind, points in curves:
    dots = [(to_x(x), to_y(y)) for x, y in points]
    parts.append(tag("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in dots), class_=kind))
    parts += [tag("circle", cx=a, cy=b, r=4, class_=kind) for a, b in dots]
    labels.append((dots[-1][1], f"{name}: {max(y for _, y in points):.2f}", kind))
  labels.sort()
  heights = _spread_out([height for height, *_ in labels], 15, bottom)
  parts += [_text(right + 6, y + 4, label, kind) for y, (_, label, kind) in zip(heights, labels)]
  x_name = x_label.split()[0]
  descriptions = (
    f"{curve.name} " + ", ".join(f"{y:.2f} at {x_name} {x}" for x, y in curve.points)
    for curve in curves
  )
  return _figure(heading, f"{y_label}: {'; '.join(descriptions)}", 230, parts)


def acceptance_chart(
  heading: str,
  shares: Sequence[float | None],
  pooled: float | None,
  counts: Sequence[int | None],
) -> Markup:
  """Return a bar for the acceptance rate of each draft token, and a line at the pooled rate.

  Args:
    heading: heading of the chart.
    shares: acceptance rate by position; None if no draft token was verified there.
    pooled: acceptance rate of all positions; None if it is not known.
    counts: number of draft tokens behind each rate, shown next to it; None is not shown.
  """
  left, right, first, row = 30, 240, 26, 24
  parts = [_text(0, 14, "guess", "soft")]
  for i, (share, count) in enumerate(zip(shares, counts, strict=True)):
    box = dict(x=left, y=first + row * i, height=row - 6)
    baseline = first + row * i + 14
    parts += [
      _text(left - 8, baseline, i + 1, "end"),
      tag("rect", **box, width=right - left, class_="track"),
      tag("rect", **box, width=(right - left) * (share or 0.0), class_="bar"),
      _text(right + 8, baseline, _percent(share) + (f" of {count}" if count else "")),
    ]
  height = first + row * len(shares)
  if pooled is not None:
    x = left + (right - left) * pooled
    parts.append(tag("line", x1=x, x2=x, y1=20, y2=height - 4, class_="one"))
    parts.append(_text(x, 14, f"all {_percent(pooled)}", "middle"))
  description = "; ".join(f"guess {i} {_percent(share)}" for i, share in enumerate(shares, 1))
  return _figure(heading, f"Acceptance rate: {description}", height, parts)


def bar_chart(heading: str, label: str, values: Sequence[tuple[str, float]]) -> Markup:
  """Return a chart with a bar for each (name, value), and a line at 1 for the baseline."""
  left, right, first, row = 0, 290, 26, 40
  longest = max([1.0, *(value for _, value in values)])
  unit = (right - left) / longest
  parts = [_text(0, 14, label, "soft")]
  for i, (name, value) in enumerate(values):
    top = first + row * i
    parts += [
      _text(left, top + 14, name),
      tag("rect", x=left, y=top + 18, height=14, width=unit * value, class_="bar"),
      _text(left + unit * value + 6, top + 30, f"{value:.2f}"),
    ]
  height = first + row * len(values)
  x = left + unit
  parts.append(tag("line", x1=x, x2=x, y1=20, y2=height, class_="one"))
  description = "; ".join(f"{name} {value:.2f}" for name, value in values)
  return _figure(heading, f"{label}: {description}", height, parts)


def _percent(share: float | None) -> str:
  return "-" if share is None else f"{share:.0%}"


def _figure(heading: str, description: str, height: int, parts: Sequence[Markup]) -> Markup:
  """Return a figure with a heading, and with a description for screen readers."""
  drawing = tag("svg", *parts, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=description)
  return tag("figure", tag("h3", heading), drawing)


def _text(x: float, y: float, text: object, class_: str | None = None) -> Markup:
  return tag("text", text, x=x, y=y, class_=class_)


def _horizontal_line(left: float, right: float, y: float, class_: str | None = None) -> Markup:
  return tag("line", x1=left, x2=right, y1=y, y2=y, class_=class_)


def _grid_step(top: float) -> float:
  """Return 1, 2 or 5 times a power of ten, so that at most 5 grid lines reach up to `top`."""
  power = 10 ** math.floor(math.log10(top / 5))
  return next(m * power for m in (1, 2, 5, 10) if m * power * 5 >= top)


def _spread_out(heights: Sequence[float], gap: float, limit: float) -> list[float]:
  """Move ascending heights apart to a distance of at least `gap`, without exceeding `limit`."""
  out: list[float] = []
  for height in heights:
    out.append(max(height, out[-1] + gap) if out else height)
  for i in reversed(range(len(out))):
    out[i] = min(out[i], limit if i == len(out) - 1 else out[i + 1] - gap)
  return out
