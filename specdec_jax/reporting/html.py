"""Records and rounds as one HTML page: measured beside predicted, and what happened round by round.

The page is one file that asks nobody for anything; without JavaScript it shows all the same.
"""

import html
import os
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources

from specdec_jax.records import Record, key
from specdec_jax.reporting import speeds
from specdec_jax.reporting.drafts import drafts_table
from specdec_jax.reporting.lengths import lengths_table
from specdec_jax.reporting.markup import Markup, join, scrolled, tag
from specdec_jax.reporting.record_charts import (
  acceptance_charts,
  draft_charts,
  length_charts,
  speedup_charts,
)
from specdec_jax.reporting.stepper import Example, stepper
from specdec_jax.writing import written


def write_report(
  path: str | os.PathLike, records: Sequence[Record], examples: Sequence[Example], title: str
) -> None:
  """Write `report` to a file, whole or not at all.

  Raises:
    OSError: the file cannot be written.
  """
  with written(path) as file:
    file.write(report(records, examples, title))


def report(records: Sequence[Record], examples: Sequence[Example], title: str) -> str:
  """One self-contained page: results, table, charts, acceptance by position, rounds to step in.

  Of several records of one setting the last counts; there is at least one.
  """
  records = [*{key(r): r for r in records}.values()]
  series = _series(records)
  return _page(
    title,
    records,
    tag("ul", *(_result(*item) for item in series.items()), class_="results"),
    _section("Measured settings", _speeds(records, series.values())),
    _section("Speedup against gamma", speedup_charts(series)),
    _section("Acceptance by position in the round", acceptance_charts(series)),
    _section("Bytes over bandwidth", _roofline(records, series.values())),
    _section("Round by round", stepper(examples)),
  )


def lengths_report(records: Sequence[Record], examples: Sequence[Example], title: str) -> str:
  """The same of acceptance lengths: a chart, `lengths_table`, which takes these, and rounds."""
  table = lengths_table(records)
  return _page(
    title,
    records,
    _section("Acceptance length against nodes", length_charts(records)),
    _section("Measured settings", _grid(table.columns, [table.rows], *table.notes)),
    _section("Round by round", stepper(examples)),
  )


def drafts_report(records: Sequence[Record], title: str) -> str:
  """The same of drafts beside each other: a chart of what they give, and `drafts_table`."""
  table = drafts_table(records)
  return _page(
    title,
    records,
    _section("Speed over plain decoding", draft_charts(records)),
    _section("Measured drafts", _grid(table.columns, [table.rows], *table.notes)),
  )


def _page(title: str, records: Sequence[Record], *parts: Markup) -> str:
  versions = {
    f"specdec_jax {r.specdec_version}, commit {r.commit or '-'}, jax {r.jax_version or '-'}, "
    f"{(r.date or '-')[:10]}"
    for r in records
  }
  page = resources.files("specdec_jax.reporting").joinpath("report.html").read_text("utf-8")
  return string.Template(page).substitute(
    title=html.escape(title),
    body=join(_shared(records, _MAIN), *parts),
    footer=join(_shared(records, _OTHER), "; ".join(sorted(versions))),
  )


def _section(heading: str, body: Markup) -> Markup:
  return tag("section", tag("h2", heading), body) if body else body


# What was measured, and what came of it.

# Each setting but temperature and gamma, and what a reader calls it; _MAIN heads the page.
_MAIN = {"task": "task", "target_label": "target", "draft_label": "draft"}
_MAIN |= {"num_examples": "texts"}
_MAIN |= {"batch_size": "batch", "device": "device", "dtype": "dtype"}
_MAIN |= {"acceptance": "acceptance"}
_OTHER = {"top_k": "top-k", "top_p": "top-p", "lenience": "lenience", "baseline": "baseline"}
_OTHER |= {
  "max_new_tokens": "limit in tokens",
  "seed": "seed",
  "inputs_sha256": "SHA-256 of the texts",
}
_OTHER |= {"kernels": "kernels", "verifier": "verifier", "tree": "guesses"}


def _value(record: Record, name: str) -> str:
  value = getattr(record, name)
  if name == "tree":
    return (
      _shape(value)
      if value
      else "chain"
      if record.kind == "chain"
      else (f"dynamic tree of {record.num_nodes} nodes")
    )
  return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _shape(parents: Sequence[int]) -> str:
  """A tree by its nodes at each depth."""
  depths = [0]
  for parent in parents:
    depths.append(depths[parent] + 1)
  return f"tree of {len(depths)} nodes ({'-'.join(map(str, Counter(depths).values()))})"


def _varying(records: Sequence[Record]) -> dict[str, str]:
  """The settings in which records differ: what each must be shown with."""
  names = (_MAIN | _OTHER).items()
  return {name: label for name, label in names if len({_value(r, name) for r in records}) > 1}


def _shared(records: Sequence[Record], names: dict[str, str]) -> Markup:
  """Those of the settings in which no two records differ."""
  varying = _varying(records)
  values = {name: _value(records[0], name) for name in names}
  shared = (
    tag("div", tag("dt", label), tag("dd", values[name]))
    for name, label in names.items()
    if name not in varying and values[name] != "-"
  )
  return tag("dl", *shared, class_="settings")


def _series(records: Sequence[Record]) -> dict[str, list[Record]]:
  """Records that differ in gamma only, by what tells them from the others; gamma ascending."""
  series: dict[str, list[Record]] = {}
  varying = _varying(records)
  for r in records:
    others = (f", {label} {_value(r, name)}" for name, label in varying.items())
    series.setdefault("".join((f"Temperature {r.temperature:g}", *others)), []).append(r)
  return {name: sorted(of, key=lambda r: r.gamma) for name, of in series.items()}


def _result(name: str, series: Sequence[Record]) -> Markup:
  """How fast a series is at best, and whether its output is plain decoding's, in a sentence."""
  differing = [str(r.gamma) for r in series if r.identical is False]
  if differing:
    same = f"the output DIFFERS at gamma {', '.join(differing)}"
  elif all(r.identical for r in series):
    same = "the output is identical, token for token"
  elif series[0].temperature:
    same = "samples are not compared token for token"
  else:
    same = "not every output was compared with plain decoding's"
  speed: Markup | str = "no speedup was measured"
  if measured := [(r.speedup, r) for r in series if r.speedup is not None]:
    speedup, best = max(measured, key=lambda each: each[0])
    # As fast, as far as repeats tell: in its best one was faster than this one in its worst.
    near = [str(r.gamma) for _, r in measured if r is not best and _overlap(r, best)]
    about = f"gamma {best.gamma}{_spread(best)}"
    about += f"; gamma {' and '.join(near)} cannot be told from it" if near else ""
    slower = "" if speedup >= 1 else ", slower than without speculation"
    speed = join(
      tag("b", f"{speedup:.2f}×"), f" the speed of plain decoding at best ({about}){slower}"
    )
  return tag(
    "li",
    *(f"{name}: ", speed, f"; {same}."),
    class_="differs" if differing else None,
  )


def _spread(r: Record) -> str:
  """The range of the speedup over the repeats, if there are several."""
  return "" if (of := r.speedup_range) is None else f" [{of[0]:.2f},{of[1]:.2f}]"


def _overlap(one: Record, best: Record) -> bool:
  one_range, best_range = one.speedup_range, best.speedup_range
  return one_range is not None and best_range is not None and one_range[1] >= best_range[0]


# What counts comes first: a phone shows no more of it without scrolling.
_COLUMNS: dict[str, Callable[[Record], str]] = {
  **{name: speeds.COLUMNS[name] for name in ("temp", "gamma")},
  "speedup": lambda r: f"{r.speedup:.2f}{_spread(r)}",
  "same": speeds.COLUMNS["same"],
  "tokens/s": lambda r: f"{r.speculative_tokens_per_s:.0f}",
  "plain": lambda r: f"{r.baseline_tokens_per_s:.0f}",
}
_COLUMNS |= {name: column for name, column in speeds.COLUMNS.items() if name not in _COLUMNS}
_LEGEND = (
  f"{speeds.LEGEND} In brackets behind a speedup: the lowest and the highest of it and of the "
  "same ratio in each repeat alone. "
  "tokens/s: by speculation; plain: by plain decoding."
)


def _speeds(records: Sequence[Record], series: Iterable[Sequence[Record]]) -> Markup:
  if all(r.quality is None for r in records):
    return _table(records, series, _COLUMNS, _LEGEND)
  first = {name: _COLUMNS[name] for name in ("temp", "gamma", "speedup", "same")}
  columns = first | speeds.QUALITY | _COLUMNS
  return _table(records, series, columns, _LEGEND + speeds.QUALITY_LEGEND)


def _table(
  records: Sequence[Record],
  series: Iterable[Sequence[Record]],
  columns: Mapping[str, Callable[[Record], str]],
  legend: str,
) -> Markup:
  varying = _varying(records)
  bodies = [
    [
      [
        *(_value(r, name) for name in varying),
        *(speeds.cell(column, r) for column in columns.values()),
      ]
      for r in of
    ]
    for of in series
  ]
  return _grid([*varying.values(), *columns], bodies, legend)


def _grid(columns: Iterable[str], bodies: Iterable[Iterable[Iterable[str]]], *notes: str) -> Markup:
  """A table of rows of cells, and what it means."""
  headings = (tag("th", name, scope="col") for name in columns)
  rows = ((tag("tr", *(tag("td", cell) for cell in row)) for row in body) for body in bodies)
  table = tag("table", tag("thead", tag("tr", *headings)), *(tag("tbody", *body) for body in rows))
  return join(
    scrolled("Table of measured settings", table),
    *(tag("p", note, class_="note") for note in notes),
  )


def _roofline(records: Sequence[Record], series: Iterable[Sequence[Record]]) -> Markup:
  if all(r.memory_gb_per_s is None for r in records):
    return join()
  return _table(records, series, speeds.ROOFLINE, speeds.ROOFLINE_LEGEND)
