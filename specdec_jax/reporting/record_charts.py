"""Records as charts: speedup against gamma, acceptance lengths, acceptance by position."""

import math
from collections.abc import Callable, Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.charts import Curve, acceptance_chart, bar_chart, line_charts
from specdec_jax.reporting.markup import Markup, join, tag
from specdec_jax.reporting.tables import sampling_text


def _points(
  series: Sequence[Record], value: Callable[[Record], float | None]
) -> list[tuple[int, float]]:
  """(gamma, value) of the records that have the value."""
  pairs = ((r.gamma, value(r)) for r in series)
  return [(gamma, v) for gamma, v in pairs if v is not None and math.isfinite(v)]


def _predicted(r: Record) -> float | None:
  return (
    r.predicted_measured_cost if r.predicted_finite_length is None else r.predicted_finite_length
  )


def speedup_charts(series: dict[str, list[Record]]) -> Markup:
  charts = {}
  for name, of in series.items():
    curves = (
      Curve("Thm 8", "theorem8", _points(of, lambda r: r.predicted_theorem8)),
      Curve("predicted", "predicted", _points(of, _predicted)),
      Curve("measured", "measured", _points(of, lambda r: r.speedup)),
    )
    if curves := [curve for curve in curves if curve.points]:
      charts[name] = curves
  named = "speedup over plain decoding", "gamma (guesses a round)"
  return _figures(
    line_charts(charts, *named),
    "The number at a curve is its highest. "
    "Thm 8 (dotted) predicts from alpha and c, and takes a pass over gamma + 1 tokens to cost no "
    "more than one over a single token; predicted (dashed) has all costs as they were measured.",
  )


def length_charts(records: Sequence[Record]) -> Markup:
  """A chart for each sampling, in which each verifier has a curve of chains and one of trees."""
  rules = [*dict.fromkeys(r.verifier for r in records)]
  charts = {}
  for sampling in dict.fromkeys(map(sampling_text, records)):
    curves = []
    for kind in "chains", "trees", "dynamic trees":
      style = kind.split()[0]
      for verifier in rules:
        points = sorted(
          (r.num_nodes, r.tokens_per_round)
          for r in records
          if (sampling_text(r), r.verifier) == (sampling, verifier)
          and f"{r.kind}s" == kind
          and r.tokens_per_round is not None
        )
        name = kind if len(rules) == 1 else f"{kind}, {verifier.removesuffix('Verifier')}"
        if points:
          curves.append(Curve(name, style if verifier == rules[0] else f"{style} other", points))
    if curves:
      charts[f"Temperature {sampling}"] = curves
  named = "acceptance length: tokens a pass of the target", "nodes (the newest token counted)"
  return _figures(
    line_charts(charts, *named, math.log2),
    "A pass of the target reads all nodes of a round; of one node it is plain decoding.",
  )


def draft_charts(records: Sequence[Record]) -> Markup:
  """For each temperature the speed with each draft, the fastest first."""
  charts = []
  for temperature in sorted({r.temperature for r in records}):
    of = [r for r in records if r.temperature == temperature and r.speedup is not None]
    usual = of[0].verifier if of else ""
    named = [
      (r.draft + ("" if r.verifier == usual else f", {r.verifier}"), r.speedup or 0.0) for r in of
    ]
    named.sort(key=lambda pair: -pair[1])
    charts.append(bar_chart(f"Temperature {temperature:g}", "measured speedup", named))
  return _figures(charts, "The line is plain decoding of the same target.")


def acceptance_charts(series: dict[str, list[Record]]) -> Markup:
  """Of each series the record of the most guesses that has it."""
  figures = []
  for name, of in series.items():
    for r, shares in [(r, r.acceptance_by_position) for r in of if r.acceptance_by_position][-1:]:
      name = f"{name}, gamma {r.gamma}, {r.rounds or '-'} rounds"
      figures.append(acceptance_chart(name, shares, r.acceptance_rate))
  return _figures(
    figures,
    "Of the rounds in which all earlier guesses were accepted, the share that accepted this one. "
    "The theory takes it to be the same at every position. The dotted line is the share of all "
    "guesses judged in these rounds; alpha, in the table, is what to expect of one at every "
    "position of the target's own text (Corollary 6), and differs from it a little.",
  )


def _figures(figures: Sequence[Markup], note: str) -> Markup:
  if not figures:
    return join()
  return join(tag("div", *figures, class_="figures"), tag("p", note, class_="note"))
