"""HTML pages of the comparison of drafts and of the comparison of trees."""

from collections.abc import Sequence

from experiments.record_tables import drafts_table, lengths_table
from specdec_jax.measure.records import Record
from specdec_jax.measure.reporting.charts import Curve, bar_chart, line_charts
from specdec_jax.measure.reporting.html import Section, html_table, page
from specdec_jax.measure.reporting.markup import Markup
from specdec_jax.measure.reporting.record_charts import figures_with_note
from specdec_jax.measure.reporting.stepper import Example, stepper
from specdec_jax.measure.reporting.tables import sampling_text


def lengths_report(records: Sequence[Record], examples: Sequence[Example], title: str) -> str:
  """Return an HTML page with a chart and a table of acceptance lengths, and with decoded rounds."""
  table = lengths_table(records)
  return page(
    title,
    records,
    Section("Acceptance length against nodes", length_charts(records)),
    Section("Measured settings", html_table(table)),
    Section("Round by round", stepper(examples)),
  )


def drafts_report(records: Sequence[Record], title: str) -> str:
  """Return an HTML page with a chart of the speedups of drafts, and with `drafts_table`."""
  table = drafts_table(records)
  return page(
    title,
    records,
    Section("Speedup over autoregressive decoding", draft_charts(records)),
    Section("Measured drafts", html_table(table)),
  )


def length_charts(records: Sequence[Record]) -> Markup:
  """Return one chart per sampling method, with a curve for each kind of proposal and verifier."""
  verifiers = [*dict.fromkeys(r.verifier for r in records)]
  charts = {}
  for sampling in dict.fromkeys(map(sampling_text, records)):
    curves = []
    for kind, colour in ("chains", "orange"), ("trees", "blue"), ("dynamic trees", "green"):
      for verifier in verifiers:
        points = sorted(
          (r.num_nodes, r.tokens_per_round)
          for r in records
          if (sampling_text(r), r.verifier) == (sampling, verifier)
          and f"{r.kind}s" == kind
          and r.tokens_per_round is not None
        )
        name = kind if len(verifiers) == 1 else f"{kind}, {verifier.removesuffix('Verifier')}"
        if points:
          curves.append(Curve(name, colour, "-" if verifier == verifiers[0] else "--", points))
    if curves:
      charts[f"Temperature {sampling}"] = curves
  return figures_with_note(
    line_charts(
      charts,
      y_label="acceptance length: tokens per target pass",
      x_label="nodes (last committed token included)",
      log2=True,
    ),
    "One target forward pass verifies all nodes of a round. With one node it is autoregressive "
    "decoding.",
  )


def draft_charts(records: Sequence[Record]) -> Markup:
  """Return one chart per temperature, with the speedup of each draft, fastest first."""
  charts = []
  for temperature in sorted({r.temperature for r in records}):
    measured = [r for r in records if r.temperature == temperature and r.speedup is not None]
    default = measured[0].verifier if measured else ""
    speedups = [
      (r.draft + ("" if r.verifier == default else f", {r.verifier}"), r.speedup or 0.0)
      for r in measured
    ]
    speedups.sort(key=lambda pair: -pair[1])
    charts.append(bar_chart(f"Temperature {temperature:g}", "measured speedup", speedups))
  return figures_with_note(charts, "The dotted line is autoregressive decoding of the same target.")
