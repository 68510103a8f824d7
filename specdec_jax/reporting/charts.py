"""Charts as SVG in units that are CSS pixels on a phone; the page's style sheet colours them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from specdec_jax.reporting.markup import Markup, tag

_WIDTH = 340


class Curve(NamedTuple):
  """A line of a chart.

  Attributes:
    name: what a reader calls it.
    kind: class that the style sheet knows.
    points: (x, y), x ascending: gamma and speedup, say.
  """

  name: str
  kind: str
  points: Sequence[tuple[int, float]]


def line_charts(
  charts: Mapping[str, Sequence[Curve]],
  up: str,
  across: str,
  scale: Callable[[float], float] = float,
) -> list[Markup]:
  """Charts with one scale, so that they can be compared: curves, later ones over earlier ones, and
  a line at 1, which is plain decoding. A curve is named at its end, with its highest value.

  Args:
    charts: by their headings, curves to draw, at whole numbers x, none empty.
    up: what y is, which begins at 0.
    across: what x is, in a word, and what that is in others.
    scale: of x, which begins where this is 0.
  """
  points = [point for curves in charts.values() for curve in curves for point in curve.points]
  xs = sorted({at for at, _ in points})
  highest = max([1.0, *(value for _, value in points)])
  return [_lines(name, of, up, across, scale, xs, highest) for name, of in charts.items()]


def _lines(
  heading: str,
  curves: Sequence[Curve],
  up: str,
  across: str,
  scale: Callable[[float], float],
  xs: Sequence[int],
  highest: float,
) -> Markup:
  left, right, top, bottom = 30, 220, 30, 190
  step = _step(highest)
  ceiling = step * math.ceil(highest / step)

  def x(at: float) -> float:
    return left + scale(at) / scale(xs[-1]) * (right - left - 10)

  def y(value: float) -> float:
    return bottom - value / ceiling * (bottom - top)

  parts = [_text(0, 14, up, "soft")]
  for i in range(round(ceiling / step) + 1):
    parts.append(_level(left, right, y(i * step)))
    parts.append(_text(left - 6, y(i * step) + 4, f"{i * step:g}", "soft end"))
  named: list[int] = []
  for at in xs:
    if not named or x(at) - x(named[-1]) > 20:  # nearer names would run into each other
      named.append(at)
  parts += [_text(x(at), bottom + 16, at, "soft middle") for at in named]
  parts.append(_text((left + right) / 2, bottom + 34, across, "soft middle"))
  parts.append(_level(left, right, y(1), "one"))
  labels = [(y(1), "plain decoding: 1", "soft")]
  for name, kind, points in curves:
    dots = [(x(at), y(value)) for at, value in points]
    parts.append(tag("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in dots), class_=kind))
    parts += [tag("circle", cx=a, cy=b, r=4, class_=kind) for a, b in dots]
    labels.append((dots[-1][1], f"{name}: {max(value for _, value in points):.2f}", kind))
  labels.sort()
  heights = _apart([height for height, *_ in labels], 15, bottom)
  parts += [_text(right + 6, h + 4, words, kind) for h, (_, words, kind) in zip(heights, labels)]
  said = (
    f"{curve.name} " + ", ".join(f"{y:.2f} at {across.split()[0]} {x}" for x, y in curve.points)
    for curve in curves
  )
  return _figure(heading, f"{up}: {'; '.join(said)}", 230, parts)


def acceptance_chart(heading: str, shares: Sequence[float | None], pooled: float | None) -> Markup:
  """A bar for each guess of a round, as long as its share; a line at the share of all guesses."""
  left, right, first, row = 30, 240, 26, 24
  parts = [_text(0, 14, "guess", "soft")]
  for i, share in enumerate(shares):
    place = dict(x=left, y=first + row * i, height=row - 6)
    base = first + row * i + 14
    parts += [
      _text(left - 8, base, i + 1, "end"),
      tag("rect", **place, width=right - left, class_="track"),
      tag("rect", **place, width=(right - left) * (share or 0.0), class_="bar"),
      _text(right + 8, base, _percent(share)),
    ]
  height = first + row * len(shares)
  if pooled is not None:
    at = left + (right - left) * pooled
    parts.append(tag("line", x1=at, x2=at, y1=20, y2=height - 4, class_="one"))
    parts.append(_text(at, 14, f"together {_percent(pooled)}", "middle"))
  said = "; ".join(f"guess {i} {_percent(share)}" for i, share in enumerate(shares, 1))
  return _figure(heading, f"Share accepted: {said}", height, parts)


def bar_chart(heading: str, what: str, values: Sequence[tuple[str, float]]) -> Markup:
  """A bar for each name, above it, as long as its value; a line at 1, which is plain decoding."""
  left, right, first, row = 0, 290, 26, 40
  longest = max([1.0, *(value for _, value in values)])
  width = lambda value: (right - left) * value / longest
  parts = [_text(0, 14, what, "soft")]
  for i, (name, value) in enumerate(values):
    top = first + row * i
    parts += [
      _text(left, top + 14, name),
      tag("rect", x=left, y=top + 18, height=14, width=width(value), class_="bar"),
      _text(left + width(value) + 6, top + 30, f"{value:.2f}"),
    ]
  height = first + row * len(values)
  at = left + width(1.0)
  parts.append(tag("line", x1=at, x2=at, y1=20, y2=height, class_="one"))
  said = "; ".join(f"{name} {value:.2f}" for name, value in values)
  return _figure(heading, f"{what}: {said}", height, parts)


def _percent(share: float | None) -> str:
  return "-" if share is None else f"{share:.0%}"


def _figure(heading: str, said: str, height: int, parts: Sequence[Markup]) -> Markup:
  """A drawing, and what a screen reader says in its place."""
  drawing = tag("svg", *parts, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=said)
  return tag("figure", tag("h3", heading), drawing)


def _text(x: float, y: float, words: object, class_: str | None = None) -> Markup:
  return tag("text", words, x=x, y=y, class_=class_)


def _level(left: float, right: float, y: float, class_: str | None = None) -> Markup:
  return tag("line", x1=left, x2=right, y1=y, y2=y, class_=class_)


def _step(top: float) -> float:
  """Distance of grid lines, 1, 2 or 5 times a power of ten, so that at most five lead to `top`."""
  power = 10 ** math.floor(math.log10(top / 5))
  return next(m * power for m in (1, 2, 5, 10) if m * power * 5 >= top)


def _apart(heights: Sequence[float], gap: float, most: float) -> list[float]:
  """Ascending heights moved apart to at least `gap`, none past `most`."""
  out: list[float] = []
  for height in heights:
    out.append(max(height, out[-1] + gap) if out else height)
  for i in reversed(range(len(out))):
    out[i] = min(out[i], most if i == len(out) - 1 else out[i + 1] - gap)
  return out
