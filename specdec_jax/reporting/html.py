"""Records and rounds as one HTML page: measured beside predicted, and what happened round by round.

The page is one file that asks nobody for anything; without JavaScript it shows all the same.
"""

import html
import math
import os
import pathlib
import string
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import NamedTuple

import numpy as np

from specdec_jax.errors import InputError
from specdec_jax.protocols import Decoded
from specdec_jax.records import Record, key
from specdec_jax.reporting import table


class Round(NamedTuple):
  """A round of one row, token by token, each as it reads inside a text.

  Attributes:
    accepted: guesses that entered the text.
    rejected: the guess after them, unless all were accepted or the text ended before it.
    unused: guesses behind: not judged after a rejected one, else past the end of the text.
    own: the target's own token, unless the text ended before it.
  """

  accepted: tuple[str, ...]
  rejected: str | None
  unused: tuple[str, ...]
  own: str | None

  @property
  def emitted(self) -> tuple[str, ...]:
    """The tokens that entered the text."""
    return self.accepted if self.own is None else (*self.accepted, self.own)


class Example(NamedTuple):
  """A text and how it came about.

  Attributes:
    source: what was decoded.
    translation: the output.
    temperature: 0 means argmax.
    rounds: of this text, first to last.
  """

  source: str
  translation: str
  temperature: float
  rounds: tuple[Round, ...]


def example(
  decoded: Decoded,
  row: int,
  source: str,
  translation: str,
  pieces: Callable[[Sequence[int]], list[str]],
  temperature: float,
) -> Example:
  """Row `row` of a `Decoded` on the host as an example.

  Args:
    decoded: on the host.
    row: which row of the batch.
    source: its source.
    translation: its output as text.
    pieces: token ids -> how each reads inside a text (`Vocabulary.pieces`).
    temperature: it was decoded with.
  """
  rounds = []
  guesses, num_accepted, next_token, num_emitted = (np.asarray(x)[:, row] for x in decoded.rounds)
  for r in np.flatnonzero(num_emitted):
    n, words = min(num_accepted[r], num_emitted[r]), pieces(guesses[r])
    goes_on = num_emitted[r] == num_accepted[r] + 1
    rejected = words[n] if goes_on and n < len(words) else None
    own = pieces([next_token[r]])[0] if goes_on else None
    unused = words[n if rejected is None else n + 1 :]
    rounds.append(Round(tuple(words[:n]), rejected, tuple(unused), own))
  return Example(source, translation, temperature, tuple(rounds))


def report(records: Sequence[Record], examples: Sequence[Example], title: str) -> str:
  """One self-contained page: results, table, charts, acceptance by position, rounds to step in.

  Of several records of one setting the last counts.

  Raises:
    InputError: there is no record.
  """
  if not records:
    raise InputError("There is nothing to report: no records were given.")
  records = [*{key(r): r for r in records}.values()]
  head, *rest = _settings(records)
  versions = {
    f"specdec_jax {r.specdec_version or '-'}, jax {r.jax_version or '-'}" for r in records
  }
  body = _join(
    head,
    _results(records),
    _section("Measured settings", _table(records)),
    _section("Speedup against gamma", _speedups(records)),
    _section("Acceptance by position in the round", _acceptance(records, examples)),
    _section("Round by round", _stepper(examples)),
  )
  page = resources.files("specdec_jax.reporting").joinpath("report.html").read_text("utf-8")
  return string.Template(page).substitute(
    title=html.escape(title), body=body, footer=_join(*rest, "; ".join(sorted(versions)))
  )


def write_report(
  path: str | os.PathLike, records: Sequence[Record], examples: Sequence[Example], title: str
) -> None:
  """Write `report` to a file, whole or not at all.

  Raises:
    InputError: there is no record, or the path is a folder.
    OSError: the file cannot be written.
  """
  page, path = report(records, examples, title), pathlib.Path(path)
  if path.is_dir():
    raise InputError(f"The report would go to '{path}', a folder; give the file to write.")
  part = path.with_name(f"{path.name}.part")
  try:
    part.write_text(page, encoding="utf-8")
    os.replace(part, path)
  finally:
    part.unlink(missing_ok=True)


# What was measured, and what came of it.

# Each setting but temperature and gamma, and what a reader calls it; the first line heads the page.
_MAIN = {"task": "task", "target": "target", "draft": "draft", "num_examples": "texts"}
_MAIN |= {"batch_size": "batch", "device_kind": "device", "platform": "platform", "dtype": "dtype"}
_OTHER = {"top_k": "top-k", "top_p": "top-p", "lenience": "lenience", "acceptance": "acceptance"}
_OTHER |= {"baseline": "baseline", "max_new_tokens": "limit in tokens", "seed": "seed"}
_OTHER |= {"inputs": "hash of the texts"}


def _value(record: Record, name: str) -> str:
  value = getattr(record, name)
  return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _varying(records: Sequence[Record]) -> dict[str, str]:
  """The settings in which records differ: what each must be shown with."""
  names = (_MAIN | _OTHER).items()
  return {name: label for name, label in names if len({_value(r, name) for r in records}) > 1}


def _settings(records: Sequence[Record]) -> list["_Markup"]:
  """The settings that all records share, in two lists: those that head the page, and the rest."""
  varying = _varying(records)
  return [
    _tag(
      "dl",
      *(
        _tag("div", _tag("dt", label), _tag("dd", _value(records[0], name)))
        for name, label in names.items()
        if name not in varying
      ),
      class_="settings",
    )
    for names in (_MAIN, _OTHER)
  ]


def _series(records: Sequence[Record]) -> dict[str, list[Record]]:
  """Records that differ in gamma only, by what tells them from the others; gamma ascending."""
  series: dict[str, list[Record]] = {}
  varying = _varying(records)
  for r in sorted(records, key=lambda r: r.gamma):
    others = (f", {label} {_value(r, name)}" for name, label in varying.items())
    series.setdefault("".join((f"temperature {r.temperature:g}", *others)), []).append(r)
  return dict(sorted(series.items(), key=lambda item: records.index(item[1][0])))


def _results(records: Sequence[Record]) -> "_Markup":
  """The sentence of each series: how fast at best, and whether the output is the same."""
  items = []
  for name, series in _series(records).items():
    differing = [r.gamma for r in series if r.identical is False]
    if differing:
      same = f"the output DIFFERS at gamma {', '.join(map(str, differing))}"
    elif all(r.identical for r in series):
      same = "the output is identical, token for token"
    elif series[0].temperature:
      same = "samples are not compared token for token"
    else:
      same = "not every output was compared with plain decoding's"
    baseline = "plain" if series[0].baseline == "own" else f"{series[0].baseline}'s"
    measured = _points(series, lambda r: r.speedup)
    if measured:
      gamma, best = max(measured, key=lambda point: point[1])
      slower = "" if best >= 1 else ", slower than without speculation"
      said = f" the speed of {baseline} decoding at best (gamma {gamma}){slower}; {same}"
      speed = _join(_tag("b", f"{best:.2f}×"), said)
    else:
      speed = _join(f"no speedup over {baseline} decoding was measured; {same}")
    simulated = " (acceptance: simulated)" if _simulated(series[0]) else ""
    heading = name[0].upper() + name[1:]
    items.append(
      _tag("li", f"{heading}: ", speed, f"{simulated}.", class_="differs" if differing else None)
    )
  return _tag("ul", *items, class_="results")


def _simulated(record: Record) -> bool:
  return record.acceptance != "measured"


def _table(records: Sequence[Record]) -> "_Markup":
  varying = _varying(records)
  headings = (_tag("th", name, scope="col") for name in (*varying.values(), *table.COLUMNS))
  bodies = []
  for series in _series(records).values():
    rows = []
    for r in series:
      cells = [_tag("td", _value(r, name)) for name in varying]
      for heading in table.COLUMNS:
        tagged = heading == "alpha" and _simulated(r)
        tag = _tag("span", "acceptance: simulated", class_="tag") if tagged else ""
        cells.append(_tag("td", table.cell(heading, r), tag))
      rows.append(_tag("tr", *cells))
    bodies.append(_tag("tbody", *rows))
  return _join(
    _tag(
      "div",
      _tag("table", _tag("thead", _tag("tr", *headings)), *bodies),
      class_="scroll",
      role="region",
      aria_label="Table of measured settings",
      tabindex=0,  # so that the keyboard can scroll it
    ),
    _tag("p", table.LEGEND, class_="note"),
  )


def _predicted(r: Record) -> float | None:
  return r.predicted_measured_cost if r.predicted_text is None else r.predicted_text


# Charts: SVG in units that are CSS pixels on a phone.

_CURVES: dict[str, tuple[str, Callable[[Record], float | None]]] = {
  "theorem8": ("Thm 8", lambda r: r.predicted_theorem8),
  "predicted": ("predicted", _predicted),
  "measured": ("measured", lambda r: r.speedup),  # last, so that it is drawn over the others
}


def _speedups(records: Sequence[Record]) -> "_Markup":
  figures = [_speedup_chart(name, series) for name, series in _series(records).items()]
  if not any(figures):
    return _join()
  return _join(
    _tag("div", *figures, class_="figures"),
    _tag(
      "p",
      "Thm 8 (dotted) predicts from alpha and c, and takes a pass over gamma + 1 tokens to cost no "
      "more than one over a single token; predicted (dashed) has all costs as they were measured.",
      class_="note",
    ),
  )


def _points(
  series: Sequence[Record], value: Callable[[Record], float | None]
) -> list[tuple[int, float]]:
  """(gamma, value) of the records that have the value."""
  pairs = ((r.gamma, value(r)) for r in series)
  return [(gamma, v) for gamma, v in pairs if v is not None and math.isfinite(v)]


def _speedup_chart(name: str, series: Sequence[Record]) -> "_Markup":
  """Speedup against gamma: measured, and by both predictions."""
  curves = {kind: _points(series, value) for kind, (_, value) in _CURVES.items()}
  points = [point for curve in curves.values() for point in curve]
  if not points:
    return _join()
  left, right, top, bottom = 30, 228, 30, 190
  gammas = sorted({gamma for gamma, _ in points})
  highest = max(1.0, *(value for _, value in points))
  step = _step(highest)
  ceiling = step * math.ceil(highest / step)

  def x(gamma):
    if len(gammas) == 1:
      return (left + right) / 2
    return left + 14 + (gamma - gammas[0]) / (gammas[-1] - gammas[0]) * (right - left - 24)

  def y(value):
    return bottom - value / ceiling * (bottom - top)

  parts = [_text(0, 14, "speedup over plain decoding", "soft")]
  for i in range(round(ceiling / step) + 1):
    parts.append(_tag("line", x1=left, x2=right, y1=y(i * step), y2=y(i * step)))
    parts.append(_text(left - 6, y(i * step) + 4, f"{i * step:g}", "soft end"))
  named = gammas[:: math.ceil(len(gammas) / 8)]  # more names would run into each other
  parts += [_text(x(gamma), bottom + 16, gamma, "soft middle") for gamma in named]
  parts.append(_text((left + right) / 2, bottom + 34, "gamma (guesses a round)", "soft middle"))
  parts.append(_tag("line", x1=left, x2=right, y1=y(1), y2=y(1), class_="one"))
  labels = [(y(1), "plain decoding 1", "soft")]
  for kind, curve in curves.items():
    dots = [(x(gamma), y(value)) for gamma, value in curve]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in dots)
    parts.append(_tag("polyline", points=path, class_=kind))
    for (a, b), (gamma, value) in zip(dots, curve):
      hint = _tag("title", f"{_CURVES[kind][0]}: {value:.2f} at gamma {gamma}")
      parts.append(_tag("circle", hint, cx=a, cy=b, r=4, class_=kind))
    if curve:
      labels.append((dots[-1][1], f"{_CURVES[kind][0]} {curve[-1][1]:.2f}", kind))
  labels.sort()
  heights = _apart([at for at, *_ in labels], 15, bottom)
  parts += [_text(right + 6, h + 4, text, kind) for h, (_, text, kind) in zip(heights, labels)]
  told = (
    f"{_CURVES[kind][0]} " + ", ".join(f"{value:.2f} at gamma {gamma}" for gamma, value in curve)
    for kind, curve in reversed(curves.items())
    if curve
  )
  return _figure(name, f"Speedup at {name}: {'; '.join(told)}", 340, 230, parts)


def by_position(rounds: Iterable[Round]) -> list[tuple[int, int]]:
  """For guess 1, 2, ... of a round: how often it was accepted, of how often it was judged.

  A guess is judged once those before it were accepted and the text goes on.
  """
  rounds = list(rounds)
  guesses = max(
    (len(r.accepted) + (r.rejected is not None) + len(r.unused) for r in rounds), default=0
  )
  counts = []
  for i in range(guesses):
    accepted = sum(len(r.accepted) > i for r in rounds)
    rejected = sum(len(r.accepted) == i and r.rejected is not None for r in rounds)
    counts.append((accepted, accepted + rejected))
  return counts


def _acceptance(records: Sequence[Record], examples: Sequence[Example]) -> "_Markup":
  """From the records of the most guesses that have it; else from the examples."""
  figures = []
  for name, series in _series(records).items():
    carried = [(r, r.acceptance_by_position) for r in series if r.acceptance_by_position]
    for r, shares in carried[-1:]:
      texts, rounds = _value(r, "num_examples"), _value(r, "rounds")
      name = f"{name}, gamma {r.gamma}, {texts} texts, {rounds} rounds"
      bars = [(share, _share(share)) for share in shares]
      figures.append(_position_chart(name, bars, r.acceptance_rate))
  if not figures:
    for temperature in dict.fromkeys(e.temperature for e in examples):
      figures.append(_example_positions(temperature, examples))
  if not any(figures):
    return _join()
  return _join(
    _tag("div", *figures, class_="figures"),
    _tag(
      "p",
      "Of the rounds in which all earlier guesses were accepted, the share that accepted this one. "
      "The theory takes it to be the same at every position; the dotted line is all together.",
      class_="note",
    ),
  )


def _example_positions(temperature: float, examples: Sequence[Example]) -> "_Markup":
  rounds = [r for e in examples if e.temperature == temperature for r in e.rounds]
  counts = by_position(rounds)
  accepted, judged = sum(n for n, _ in counts), sum(of for _, of in counts)
  if not judged:
    return _join()
  shares = [n / of if of else None for n, of in counts]
  bars = [(share, f"{_share(share)}, {n} of {of}") for share, (n, of) in zip(shares, counts)]
  name = f"temperature {temperature:g}, the {len(rounds)} rounds shown below"
  return _position_chart(name, bars, accepted / judged)


def _share(value: float | None) -> str:
  return "-" if value is None else f"{value:.0%}"


def _position_chart(
  name: str, bars: Sequence[tuple[float | None, str]], pooled: float | None
) -> "_Markup":
  """A bar for each guess of a round, its share and how that reads; a line at all guesses' share."""
  left, right, row = 30, 220, 24
  height = 26 + row * len(bars)
  parts = [_text(0, 14, "guess", "soft")]
  for i, (share, said) in enumerate(bars):
    top = 26 + row * i
    parts += [
      _text(left - 8, top + 14, i + 1, "end"),
      _tag("rect", x=left, y=top, width=right - left, height=row - 6, class_="track"),
      _tag(
        "rect", x=left, y=top, width=(right - left) * (share or 0), height=row - 6, class_="bar"
      ),
      _text(right + 8, top + 14, said),
    ]
  if pooled is not None:
    at = left + (right - left) * pooled
    parts.append(_tag("line", x1=at, x2=at, y1=20, y2=height - 4, class_="one"))
    parts.append(_text(at, 14, f"all {_share(pooled)}", "middle"))
  told = "; ".join(f"guess {i} {said}" for i, (_, said) in enumerate(bars, 1))
  return _figure(name, f"Share accepted at {name}: {told}", 340, height, parts)


def _figure(name: str, told: str, width: int, height: int, parts: list["_Markup"]) -> "_Markup":
  drawing = _tag("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=told)
  return _tag("figure", _tag("h3", name[0].upper() + name[1:]), drawing)


def _text(x: float, y: float, text: object, class_: str | None = None) -> "_Markup":
  return _tag("text", text, x=x, y=y, class_=class_)


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


# The rounds.


def _stepper(examples: Sequence[Example]) -> "_Markup":
  if not examples:
    return _join()
  told_apart = len({e.temperature for e in examples}) > 1
  options = []
  for i, e in enumerate(examples, 1):
    temperature = f" temperature {e.temperature:g}:" if told_apart else ""
    source = e.source if len(e.source) <= 70 else f"{e.source[:69]}…"
    options.append(_tag("option", f"{i}.{temperature} {source}"))
  controls = _tag(
    "div",
    _tag("label", "Text ", _tag("select", *options)),
    _tag("button", "← Previous", type="button", data_step=-1),
    _tag("output", aria_live="polite"),
    _tag("button", "Next →", type="button", data_step=1),
    class_="controls",
    hidden=True,  # until the script that they need runs
  )
  legend = _tag(
    "p",
    "A round is one pass of the target over the draft's guesses: ",
    *(_token(kind, mark, f" {name}") for kind, (mark, name, _) in _KINDS.items()),
    ". A guess is not judged behind a rejected one, nor past the end of the text. "
    "A token close to the one before it continues its word. The arrow keys step, too.",
    class_="note",
  )
  return _tag("div", legend, controls, *map(_article, examples), id="stepper")


# Class of a token -> its mark, what it is called, and what a screen reader says before such tokens.
_KINDS = {
  "accepted": ("✓", "accepted", "accepted: "),
  "rejected": ("✗", "rejected", "rejected: "),
  "unused": ("·", "not judged", "not judged: "),
  "own": ("+", "the target's own", ""),
}


def _article(example: Example) -> "_Markup":
  tokens = sum(len(r.emitted) for r in example.rounds)
  gamma = len(by_position(example.rounds))
  return _tag(
    "article",
    _tag("h3", example.source, dir="auto"),
    _tag("p", example.translation, dir="auto"),
    _tag(
      "p",
      f"{tokens} tokens from {len(example.rounds)} passes of the target; temperature "
      f"{example.temperature:g}, gamma {gamma}.",
      class_="note",
    ),
    _tag("ol", *_rounds(example.rounds), class_="rounds"),
  )


def _rounds(rounds: Sequence[Round]) -> Iterable["_Markup"]:
  so_far: list[str] = []
  for i, r in enumerate(rounds, 1):
    before, new = "".join(so_far), "".join(r.emitted)
    so_far += r.emitted
    space = " " if new.startswith(" ") else ""  # not underlined
    guesses = []
    for kind, tokens in ("accepted", r.accepted), ("rejected", (r.rejected,)), ("unused", r.unused):
      mark, _, said = _KINDS[kind]
      tokens = [_token(kind, mark, token) for token in tokens if token is not None]
      guesses += [_tag("span", said, class_="say"), *tokens] if tokens else []
    own = "nothing, the text has ended" if r.own is None else _token("own", "+", r.own)
    yield _tag(
      "li",
      _tag(
        "p",
        f"Round {i} of {len(rounds)}: {len(so_far)} tokens so far from {i} target "
        f"{'pass' if i == 1 else 'passes'}",
        class_="note",
      ),
      _tag("p", before, space, _tag("span", new.lstrip(" "), class_="now"), dir="auto"),
      _tag("p", _tag("span", "Draft", class_="who"), _tag("span", *guesses), class_="tokens"),
      _tag("p", _tag("span", "Target", class_="who"), _tag("span", own), class_="tokens"),
    )


def _token(kind: str, mark: str, token: str) -> "_Markup":
  starts_word = token.startswith(" ")
  return _tag(
    "span",
    _tag("b", mark, aria_hidden="true"),
    token.strip() or "␣",
    class_=f"token {kind}" if starts_word else f"token {kind} joined",
  )


# HTML.


class _Markup(str):
  """HTML; any other string is text, and escaped where it enters the page."""


def _join(*parts: object) -> _Markup:
  return _Markup("".join(p if isinstance(p, _Markup) else html.escape(str(p)) for p in parts))


def _tag(name: str, *inside: object, **attributes) -> _Markup:
  """An element; an attribute True stands alone, and a false one is left out, but for 0."""
  written = []
  for attribute, value in attributes.items():
    attribute = attribute.strip("_").replace("_", "-")
    value = f"{value:.1f}" if isinstance(value, float) else value
    if value is True:
      written.append(f" {attribute}")
    elif value or value == 0 and value is not False:
      written.append(f' {attribute}="{html.escape(str(value))}"')
  return _Markup(f"<{name}{''.join(written)}>{_join(*inside)}</{name}>")


def _section(heading: str, body: _Markup) -> _Markup:
  return _tag("section", _tag("h2", heading), body) if body else body
