"""HTML report of records and rounds: predicted and measured speedups, and texts round by round.

The report is one self-contained file that makes no network requests. Without JavaScript it shows
the same content.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jinja2

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.measure.records import BUNDLED, Record, key
from specdec_jax.measure.reporting.columns import cell, headings, legend, range_text
from specdec_jax.measure.reporting.markup import Markup, join, scrollable, tag
from specdec_jax.measure.reporting.record_charts import acceptance_charts, speedup_charts
from specdec_jax.measure.reporting.speeds import ROOFLINE
from specdec_jax.measure.reporting.stepper import Example, stepper
from specdec_jax.measure.reporting.tables import Table, legend_lines


class Section(NamedTuple):
  """Section of a page. A section with an empty body is left out.

  Attributes:
    heading: heading of the section; '' for no heading.
    body: content of the section.
    folded: whether the content is hidden until the reader opens it.
  """

  heading: str
  body: Markup
  folded: bool = False


def write_report(
  path: str | os.PathLike, records: Sequence[Record], examples: Sequence[Example], title: str
) -> None:
  """Write the page of `report` to a file, atomically.

  Raises:
    OSError: the file cannot be written.
  """
  with atomic_write(path) as file:
    file.write(report(records, examples, title))


def report(records: Sequence[Record], examples: Sequence[Example], title: str) -> str:
  """Return a page with results, tables, charts, and rounds to step through.

  Args:
    records: one or more records. If several records have the same setting, the last one is used.
    examples: decoded texts with their rounds.
    title: title of the page.
  """
  records = [*{key(r): r for r in records}.values()]
  series = _series(records)
  return page(
    title,
    records,
    Section(
      "", tag("ul", *(_result(name, group) for name, group in series.items()), class_="results")
    ),
    Section("Measured settings", _speeds(records, series.values())),
    Section("Speedup against gamma", speedup_charts(series)),
    Section("Acceptance by position in the round", acceptance_charts(series)),
    Section("Round by round", stepper(examples)),
    Section("Bytes over bandwidth", _roofline(records, series.values()), folded=True),
  )


def page(title: str, records: Sequence[Record], *sections: Section) -> str:
  """Return a page with the given sections, the settings that all records share, and versions."""
  versions = {
    f"specdec_jax {r.specdec_version}, commit {r.commit or '-'}, jax {r.jax_version or '-'}, "
    f"{(r.date or '-')[:10]}"
    for r in records
  }
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader("specdec_jax.measure", "reporting"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
  )
  return environment.get_template("report.html").render(
    title=title,
    settings=_shared(records, _MAIN),
    sections=[section for section in sections if section.body],
    other_settings=_shared(records, _OTHER),
    versions=sorted(versions),
  )


# Settings and results.

# All settings except temperature and gamma: attribute of the record -> label. The settings of _MAIN
# are at the top of the page, those of _OTHER at its end.
_MAIN = {
  "task": "task",
  "target": "target",
  "target_path": "target checkpoint",
  "draft": "draft",
  "draft_path": "draft checkpoint",
  "num_examples": "texts",
  "batch_size": "batch",
  "device": "device",
  "dtype": "dtype",
  "acceptance": "acceptance",
}
_OTHER = {
  "top_k": "top-k",
  "top_p": "top-p",
  "lenience": "lenience",
  "baseline": "baseline",
  "max_new_tokens": "limit in tokens",
  "seed": "seed",
  "inputs_sha256": "SHA-256 of the texts",
  "kernels": "kernels",
  "verifier": "verifier",
  "tree": "proposal",
}


def _value(record: Record, name: str) -> str:
  value = getattr(record, name)
  if name == "tree":
    if value:
      return _tree_text(value)
    return "chain" if record.kind == "chain" else f"{record.kind} of {record.num_nodes} nodes"
  if name in ("target_path", "draft_path") and value:
    return value.removeprefix(BUNDLED)
  return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _tree_text(parents: Sequence[int]) -> str:
  """Describe a tree by the number of its nodes at each depth."""
  depths = [0]
  for parent in parents:
    depths.append(depths[parent] + 1)
  return f"tree of {len(depths)} nodes ({'-'.join(map(str, Counter(depths).values()))})"


def _varying(records: Sequence[Record]) -> dict[str, str]:
  """Return name -> label of each setting in `_MAIN` or `_OTHER` in which the records differ."""
  labels = _MAIN | _OTHER
  return {
    name: label for name, label in labels.items() if len({_value(r, name) for r in records}) > 1
  }


def _shared(records: Sequence[Record], labels: dict[str, str]) -> dict[str, str]:
  """Return label -> value of the settings in `labels` that all records share and that have one."""
  varying = _varying(records)
  values = {name: _value(records[0], name) for name in labels if name not in varying}
  return {labels[name]: value for name, value in values.items() if value != "-"}


def _series(records: Sequence[Record]) -> dict[str, list[Record]]:
  """Group records that differ only in gamma, and sort each group by gamma.

  Returns:
    Groups of records, by a description of the settings that distinguish the group from others.
  """
  series: dict[str, list[Record]] = {}
  varying = _varying(records)
  for r in records:
    settings = (f", {label} {_value(r, name)}" for name, label in varying.items())
    series.setdefault("".join((f"Temperature {r.temperature:g}", *settings)), []).append(r)
  return {name: sorted(group, key=lambda r: r.gamma) for name, group in series.items()}


def _result(name: str, series: Sequence[Record]) -> Markup:
  """Return a list item: the best speedup of a series, and whether outputs equal the baseline's."""
  differing = [str(r.gamma) for r in series if r.identical is False]
  if differing:
    exactness = f"the output DIFFERS at gamma {', '.join(differing)}"
  elif all(r.identical for r in series):
    exactness = "the output is identical, token for token"
  elif series[0].temperature:
    exactness = "samples are not compared token for token"
  else:
    exactness = "not every output was compared with autoregressive decoding"
  speed: Markup | str = "no speedup was measured"
  kind = "differs" if differing else None
  if measured := [(r.speedup, r) for r in series if r.speedup is not None]:
    speedup, best = max(measured, key=lambda pair: pair[0])
    # The best repeat of another gamma is at least as fast as the worst repeat of the best gamma.
    similar = [str(r.gamma) for _, r in measured if r is not best and _overlap(r, best)]
    setting = f"gamma {best.gamma}{range_text(best)}"
    setting += f"; the range of gamma {' and '.join(similar)} overlaps" if similar else ""
    slower = "" if speedup >= 1 else ", slower than without speculation"
    kind = kind or ("slower" if slower else None)
    speed = join(
      tag("b", f"{speedup:.2f}×"),
      f" the speed of autoregressive decoding at best ({setting}){slower}",
    )
  return tag(
    "li",
    f"{name}: ",
    speed,
    f"; {exactness}.",
    class_=kind,
  )


def _overlap(other: Record, best: Record) -> bool:
  other_range, best_range = other.speedup_range, best.speedup_range
  return other_range is not None and best_range is not None and other_range[1] >= best_range[0]


# The most important columns come first, because a phone shows only these without scrolling.
_COLUMNS = ("temperature", "gamma", "speedup_range", "identical")
_OTHER_COLUMNS = ("tokens_per_s", "baseline_tokens_per_s", "alpha", "c", "v", "theorem8")
_OTHER_COLUMNS += ("predicted", "length")


def _speeds(records: Sequence[Record], series: Iterable[Sequence[Record]]) -> Markup:
  quality = () if all(r.quality is None for r in records) else ("quality",)
  return _table(records, series, (*_COLUMNS, *quality, *_OTHER_COLUMNS))


def _table(
  records: Sequence[Record], series: Iterable[Sequence[Record]], columns: Sequence[str]
) -> Markup:
  varying = _varying(records)
  bodies = [
    [
      [*(_value(r, name) for name in varying), *(cell(column, r) for column in columns)]
      for r in group
    ]
    for group in series
  ]
  return _grid([*varying.values(), *headings(columns)], bodies, legend_lines(legend(columns)))


def html_table(table: Table) -> Markup:
  """Return a table without its title, followed by its legend and its notes as a list."""
  return _grid(table.columns, [table.rows], [*legend_lines(table.legend), *table.notes])


def _grid(
  columns: Iterable[str], bodies: Iterable[Iterable[Iterable[str]]], notes: Sequence[str]
) -> Markup:
  """Return a table, followed by a list of notes; each body of the table consists of rows."""
  headings = (tag("th", name, scope="col") for name in columns)
  rows = ((tag("tr", *(tag("td", cell) for cell in row)) for row in body) for body in bodies)
  table = tag("table", tag("thead", tag("tr", *headings)), *(tag("tbody", *body) for body in rows))
  return join(
    tag("p", "Scroll the table for more columns →", class_="more", aria_hidden="true"),
    scrollable("Table of measured settings", table),
    tag("ul", *(tag("li", note) for note in notes), class_="note"),
  )


def _roofline(records: Sequence[Record], series: Iterable[Sequence[Record]]) -> Markup:
  if all(r.memory_gb_per_s is None for r in records):
    return join()
  return _table(records, series, ROOFLINE)
