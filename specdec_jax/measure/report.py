"""HTML page of records and rounds: predicted and measured speedups, and texts round by round.

The page is one self-contained file that makes no network requests. Without JavaScript it shows the
same content.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jinja2

from specdec_jax.core.rounds import Example
from specdec_jax.measure import tables
from specdec_jax.measure.records import Record
from specdec_jax.measure.tables import DETAILS, SETTINGS, Column, Table

FEW = 100  # an acceptance rate of fewer draft tokens is shown with the number of draft tokens

# The most important columns come first, because a phone shows only these without scrolling.
_COLUMNS = (tables.TEMPERATURE, tables.GAMMA, tables.SPEEDUP_RANGE, tables.IDENTICAL)
_OTHER_COLUMNS = (tables.TOKENS_PER_S, tables.BASELINE_TOKENS_PER_S, tables.ALPHA, tables.C)
_OTHER_COLUMNS += (tables.V, tables.THEOREM_8, tables.PREDICTED, tables.LENGTH)


class Bar(NamedTuple):
  """A bar of a chart."""

  label: str  # text before the bar
  value: float  # length of the bar
  text: str  # text after the bar
  kind: str = "measured"  # or "predicted" or "bound", which have other colors


class Chart(NamedTuple):
  """A bar chart. Charts of a section have a common scale."""

  heading: str
  bars: Sequence[Bar]  # from the top down
  mark: float | None = 1.0  # value at which a line is drawn; None for no line

  @property
  def longest(self) -> float:
    """Value of the longest bar, but at least 1."""
    return max([1.0, *(bar.value for bar in self.bars)])


class Section(NamedTuple):
  """Section of a page. A section without content is left out."""

  heading: str
  table: Table | None = None  # shown with its legend and notes
  charts: Sequence[Chart] = ()
  examples: Sequence[Example] = ()  # texts to step through round by round
  note: str = ""  # explanation below the charts
  folded: bool = False  # whether the content is hidden until the reader opens it


class Result(NamedTuple):
  """Sentence about a series of records, as on the top of a page."""

  series: str  # description of the series
  speedup: str  # best measured speedup, such as '1.52×'; '' if there is none
  text: str  # rest of the sentence
  kind: str  # 'differs' if an output differs from the baseline's, 'slower', or ''

  def __str__(self) -> str:
    return f"{self.series}: {f'{self.speedup} {self.text}'.strip()}."


def report(records: Sequence[Record], examples: Sequence[Example], title: str) -> str:
  """Return a page with results, tables, charts, and rounds to step through."""
  series = _series(records)
  records = [r for group in series.values() for r in group]
  columns = (*tables.with_quality(records, _COLUMNS), *_OTHER_COLUMNS)
  return page(
    title,
    records,
    [
      Section("Measured settings", _table(records, columns)),
      Section(
        "Speedup against gamma",
        charts=[_speedup_chart(name, group) for name, group in series.items()],
        note="The line at 1 is autoregressive decoding. Theorem 8 is predicted from alpha and c; "
        "it assumes that a forward pass over gamma + 1 tokens costs as much as one over one "
        "token. Predicted uses all measured costs.",
      ),
      Section(
        "Acceptance by position in the round",
        charts=[
          _acceptance_chart(f"{name}, gamma {r.settings.gamma}", r)
          for name, group in series.items()
          for r in [r for r in group if r.outputs.acceptance_by_position][-1:]
        ],
        note="Acceptance rate of each draft token, over the rounds in which all earlier draft "
        "tokens were accepted. The theory assumes that it is the same at every position. The line "
        "is the acceptance rate of all verified draft tokens of these rounds. Alpha, in the table, "
        "is the expected acceptance rate over all positions of the target's text (Corollary 6) and "
        f"differs slightly. A rate of fewer than {FEW} draft tokens has their approximate number.",
      ),
      Section("Round by round", examples=examples),
      *(
        Section(heading, _table(records, columns), folded=True)
        for heading, columns, measured in (
          ("Time of a round", tables.BUDGET, "round_ms"),
          ("Bytes over bandwidth", tables.ROOFLINE, "memory_gb_per_s"),
        )
        if any(getattr(r.times, measured) is not None for r in records)
      ),
    ],
    best_results(records),
  )


def best_results(records: Sequence[Record]) -> list[Result]:
  """Return the result of each series of records that differ only in gamma."""
  return [_result(name, group) for name, group in _series(records).items()]


def page(
  title: str, records: Sequence[Record], sections: Sequence[Section], results: Sequence[Result] = ()
) -> str:
  """Return a page with results and sections, the settings that all records share, and versions."""
  origins = [r.origin for r in records]
  versions = {
    f"specdec_jax {o.specdec_version or '-'}, commit {o.commit or '-'}, "
    f"jax {o.jax_version or '-'}, {(o.date or '-')[:10]}"
    for o in origins
  }
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader("specdec_jax", "measure"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  environment.filters["shorten"] = textwrap.shorten
  return environment.get_template("report.html").render(
    title=title,
    settings=tables.shared_and_varying(records, SETTINGS)[0],
    details=tables.shared_and_varying(records, DETAILS)[0],
    results=results,
    sections=[each for each in sections if each.table or each.charts or each.examples],
    versions=sorted(versions),
  )


def _table(records: Sequence[Record], columns: Sequence[Column]) -> Table:
  notes = [*tables.no_alpha(records), *tables.noise_notes(records)]
  return tables.settings_table(records, columns, notes, SETTINGS | DETAILS)


def _series(records: Sequence[Record]) -> Mapping[str, list[Record]]:
  """Group records that differ only in gamma by a description, and sort each group by gamma.

  If several records have the same setting, the last one is used.
  """
  records = [*{r.key: r for r in records}.values()]
  series: dict[str, list[Record]] = {}
  _, varying = tables.shared_and_varying(records, SETTINGS | DETAILS)
  for r in records:
    texts = (f"Temperature {r.settings.temperature:g}", *(text(r) for text in varying.values()))
    series.setdefault(", ".join(texts), []).append(r)
  return {name: sorted(group, key=lambda r: r.settings.gamma) for name, group in series.items()}


def _result(name: str, series: Sequence[Record]) -> Result:
  differing = [str(r.settings.gamma) for r in series if r.outputs.identical is False]
  if differing:
    exactness = f"the output DIFFERS at gamma {', '.join(differing)}"
  elif all(r.outputs.identical for r in series):
    exactness = "the output is identical, token for token"
  elif series[0].settings.temperature:
    exactness = "samples are not compared token for token"
  else:
    exactness = "not every output was compared with autoregressive decoding"
  kind = "differs" if differing else ""
  measured = [(r.times.speedup, r) for r in series if r.times.speedup is not None]
  if not measured:
    return Result(name, "", f"no speedup was measured; {exactness}", kind)
  speedup, best = max(measured, key=lambda pair: pair[0])
  # The best repeat of another gamma is at least as fast as the worst repeat of the best gamma.
  similar = [str(r.settings.gamma) for _, r in measured if r is not best and _overlap(r, best)]
  setting = f"gamma {best.settings.gamma}{tables.range_text(best)}"
  setting += f"; the range of gamma {' and '.join(similar)} overlaps" if similar else ""
  slower = "" if speedup >= 1 else ", slower than without speculation"
  text = f"the speed of autoregressive decoding at best ({setting}){slower}; {exactness}"
  return Result(name, f"{speedup:.2f}×", text, kind or ("slower" if slower else ""))


def _overlap(other: Record, best: Record) -> bool:
  other_range, best_range = other.speedup_range, best.speedup_range
  return other_range is not None and best_range is not None and other_range[1] >= best_range[0]


def _speedup_chart(name: str, series: Sequence[Record]) -> Chart:
  bars = [
    Bar(f"gamma {r.settings.gamma}, {label}", value, f"{value:.2f}", kind)
    for r in series
    for label, kind, value in (
      ("Theorem 8", "bound", r.times.predicted_theorem8),
      ("predicted", "predicted", r.predicted),
      ("measured", "measured", r.times.speedup),
    )
    if value is not None
  ]
  return Chart(name, bars)


def _acceptance_chart(heading: str, r: Record) -> Chart:
  bars, count = [], float(r.outputs.rounds or 0)  # number of verified draft tokens
  for i, share in enumerate(r.outputs.acceptance_by_position or (), 1):
    few = f" of {count:.0f}" if 0 < count < FEW else ""
    bars.append(Bar(f"draft token {i}", share or 0.0, tables.number_text(share, ".0%") + few))
    count *= share or 0.0
  rate = tables.number_text(r.outputs.acceptance_rate, ".0%")
  heading += f", {r.outputs.rounds or '-'} rounds, all: {rate}"
  return Chart(heading, bars, r.outputs.acceptance_rate)
