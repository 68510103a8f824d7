"""Charts of records: speedup against gamma, and acceptance by position."""

import math
from collections.abc import Callable, Sequence

from specdec_jax.measure.records import Record
from specdec_jax.measure.reporting.charts import Curve, acceptance_chart, line_charts
from specdec_jax.measure.reporting.markup import Markup, join, tag

FEW = 100  # an acceptance rate of fewer draft tokens is shown with the number of draft tokens


def _points(
  series: Sequence[Record], value: Callable[[Record], float | None]
) -> list[tuple[int, float]]:
  """Return the pair (gamma, value) of each record that has a finite value."""
  points = ((r.gamma, value(r)) for r in series)
  return [(gamma, y) for gamma, y in points if y is not None and math.isfinite(y)]


def _predicted(r: Record) -> float | None:
  return (
    r.predicted_measured_cost if r.predicted_finite_length is None else r.predicted_finite_length
  )


def speedup_charts(series: dict[str, list[Record]]) -> Markup:
  """Return a chart of predicted and measured speedup against gamma for each series."""
  charts = {}
  for name, records in series.items():
    curves = (
      Curve("Theorem 8", "orange", ":", _points(records, lambda r: r.predicted_theorem8)),
      Curve("predicted", "green", "--", _points(records, _predicted)),
      Curve("measured", "blue", "-", _points(records, lambda r: r.speedup)),
    )
    if curves := [curve for curve in curves if curve.points]:
      charts[name] = curves
  return figures_with_note(
    line_charts(
      charts,
      y_label="speedup over autoregressive decoding",
      x_label="gamma (draft tokens per round)",
    ),
    "The legend gives the highest value of each curve. Theorem 8 (dotted) is predicted from alpha "
    "and c; it assumes that a forward pass over gamma + 1 tokens costs as much as one over one "
    "token. Predicted (dashed) uses all measured costs.",
  )


def acceptance_charts(series: dict[str, list[Record]]) -> Markup:
  """Return a chart of acceptance by position for each series in which it was recorded.

  A chart shows the record with the highest gamma among those that have it.
  """
  figures = []
  for name, records in series.items():
    by_position = [(r, r.acceptance_by_position) for r in records if r.acceptance_by_position]
    for r, shares in by_position[-1:]:
      heading = f"{name}, gamma {r.gamma}, {r.rounds or '-'} rounds"
      figures.append(acceptance_chart(heading, shares, r.acceptance_rate, _few(r)))
  return figures_with_note(
    figures,
    "Acceptance rate of each draft token, over the rounds in which all earlier draft tokens were "
    "accepted. The theory assumes that it is the same at every position. The dotted line is the "
    "acceptance rate of all verified draft tokens of these rounds. Alpha, in the table, is the "
    "expected acceptance rate over all positions of the target's text (Corollary 6) and differs "
    f"slightly. A rate of fewer than {FEW} draft tokens has their approximate number next to it.",
  )


def _few(r: Record) -> list[int | None]:
  """Estimate the number of verified draft tokens at each position; None if it is 0 or at least FEW.

  A draft token is verified if all earlier draft tokens of its round were accepted.
  """
  shares, count = r.acceptance_by_position or [], float(r.rounds or 0)
  counts: list[int | None] = []
  for share in shares:
    counts.append(round(count) if 0 < count < FEW else None)
    count *= share or 0.0
  return counts


def figures_with_note(figures: Sequence[Markup], note: str) -> Markup:
  """Return figures with a note below them, or nothing if there are no figures."""
  if not figures:
    return join()
  return join(tag("div", *figures, class_="figures"), tag("p", note, class_="note"))
