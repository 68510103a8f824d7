"""The paper's Figures 1 to 5 and a sweep over gamma, from theory, records or a decoded text."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Patch, Rectangle

from experiments.figures.drawing import (
  BLUE,
  GREEN,
  GREY,
  NORMAL,
  ORANGE,
  PURPLE,
  RED,
  SKY,
  SMALL,
  YELLOW,
  labelled_line,
  new_figure,
  shades,
)
from experiments.paper.paper_tables import PaperRow
from specdec_jax import theory
from specdec_jax.errors import InputError, require_count
from specdec_jax.measure.records import Record, key
from specdec_jax.measure.reporting.rounds import Round
from specdec_jax.measure.reporting.tables import sampling_text

# Kind of a token -> its colour, and its name in the legend. The target's token is only a correction
# if a draft token was rejected.
KINDS = {"accepted": GREEN, "rejected": RED, "corrected": BLUE}
_LEGEND = {"accepted": "accepted", "rejected": "rejected", "corrected": "the target's token"}


# From theory.


def tokens_figure(gammas: Sequence[int] = (1, 3, 5, 7)):
  """Draw Figure 2: tokens per round (Equation 1) against alpha, for finite and infinite gamma."""
  figure, (axes,) = new_figure(["expected tokens per round"])
  alphas = np.linspace(0, 1, 201)
  for gamma, shade in zip(gammas, shades(len(gammas))):
    tokens = theory.expected_tokens(alphas, gamma)
    labelled_line(axes, alphas, tokens, f"γ = {gamma}", shade)
  top = max(gammas) + 2.5
  below = alphas[theory.oracle_improvement(alphas) <= top]
  labelled_line(axes, below, theory.oracle_improvement(below), "γ = ∞", "black", linestyle="--")
  axes.set(xlim=(0, 1), ylim=(0, top))
  return figure


def gamma_figure(costs: Sequence[float] = (0.02, 0.04, 0.11)):
  """Draw Figure 3: the best gamma (Section 3.5) against alpha, by default for each c of Table 4."""
  figure, (axes,) = new_figure(["best γ"])
  alphas = np.linspace(0, 0.95, 381)
  for c, shade in zip(costs, shades(len(costs))):
    best = [theory.best_gamma(float(alpha), c, most=50) for alpha in alphas]
    labelled_line(axes, alphas, best, f"c = {c:g}", shade, drawstyle="steps-mid")
  axes.set(xlim=(0, 0.95), ylim=(0, None))
  return figure


def operations_figure(table_1: Sequence[PaperRow]):
  """Draw Figure 4: speed and operations (Theorems 8 and 10) against alpha, for c = c-hat = 0.

  Args:
    table_1: rows of Table 1 (`paper.load_table`). Each gamma has a curve, and the printed values
      are points.
  """
  figure, (speed, operations) = new_figure(
    ["speed / autoregressive decoding", "operations / autoregressive decoding"]
  )
  alphas = np.linspace(0, 1, 201)
  gammas = sorted({int(row["gamma"]) for row in table_1})
  for gamma, shade in zip(gammas, shades(len(gammas))):
    for axes, values, label_at, name in (
      (speed, theory.walltime_improvement(alphas, gamma, 0), None, "speed"),
      (operations, theory.operations_factor(alphas, gamma, 0), 30, "operations"),
    ):
      labelled_line(axes, alphas, values, f"γ = {gamma}", shade, label_at)
      rows = [row for row in table_1 if row["gamma"] == gamma]
      xs, ys = [row["alpha"] for row in rows], [row[name] for row in rows]
      axes.plot(xs, ys, "o", color=shade, markeredgecolor="white", zorder=3)
  for axes in (speed, operations):
    axes.set(xlim=(0, 1), ylim=(0, None))
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
  (points,) = speed.plot([], [], "o", color=GREY, label="printed in Table 1")
  speed.legend(handles=[points], loc="upper left", frameon=False, fontsize=SMALL)
  return figure


# From records.


def timeline_figure(records: Iterable[Record], num_tokens: int = 20):
  """Draw Figure 5: forward passes that decode `num_tokens` tokens, as wide as their measured times.

  The first row is autoregressive decoding. One row per gamma follows. The rows show the first
  record with an acceptance length and measured times of target, draft and verification, and the
  records that differ from it only in gamma.

  Args:
    records: records of measurements.
    num_tokens: number of tokens that each row decodes. It is rounded up to whole rounds of the
      measured acceptance length.

  Raises:
    InputError: no record has all of these values, or num_tokens is less than 1.
  """
  require_count("num_tokens", num_tokens)
  needed = ("target_prefill_ms", "draft_prefill_ms", "target_step_ms", "draft_step_ms", "verify_ms")
  groups = _by_gamma(records, (*needed, "tokens_per_round"))
  group = next(iter(groups.values()))
  typical = {name: statistics.median(getattr(r, name) for r in group) for name in needed}
  rows = [("autoregressive", [("target's encoder", typical["target_prefill_ms"])])]
  rows[0][1].extend([("target", typical["target_step_ms"])] * num_tokens)
  for r in group:
    num_rounds = math.ceil(num_tokens / r.tokens_per_round)
    prefill = [("target's encoder", r.target_prefill_ms), ("draft's encoder", r.draft_prefill_ms)]
    round_ = [*[("draft", r.draft_step_ms)] * r.gamma, ("target", r.verify_ms + (r.accept_ms or 0))]
    rows.append((f"γ = {r.gamma}", [*prefill, *round_ * num_rounds]))
  title = f"{num_tokens} tokens at temperature {sampling_text(group[0])}; {_setting_text(group[0])}"
  return _draw_timeline(rows, title)


def _draw_timeline(rows: Sequence[tuple[str, list[tuple[str, float]]]], title: str):
  """Draw labeled rows of consecutive blocks, each given as (kind, milliseconds)."""
  colours = {
    "target's encoder": YELLOW,
    "draft's encoder": ORANGE,
    "draft": SKY,
    "target": PURPLE,
  }
  figure, (axes,) = new_figure([""], width=9, height=0.55 * len(rows) + 1.1)
  for y, (_, blocks) in enumerate(rows):
    # A draft step (Definition 7) is a difference of times, which noise can make negative.
    widths = np.maximum([ms for _, ms in blocks], 0)
    lefts = np.cumsum(widths) - widths
    axes.barh(
      y,
      widths,
      left=lefts,
      height=0.62,
      color=[colours[kind] for kind, _ in blocks],
      edgecolor="white",
      linewidth=0.5,
    )
    passes = sum(kind == "target" for kind, _ in blocks)
    axes.annotate(
      f"{widths.sum():.3g} ms, {passes} passes",
      (widths.sum(), y),
      (5, 0),
      textcoords="offset points",
      va="center",
      fontsize=SMALL,
    )
  axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=NORMAL)
  axes.invert_yaxis()
  axes.tick_params(left=False)
  axes.spines["left"].set_visible(False)
  axes.set_xlabel("milliseconds", fontsize=NORMAL)
  axes.set_title(title, fontsize=NORMAL, loc="left", pad=26)
  axes.legend(
    handles=[Patch(color=colour, label=kind) for kind, colour in colours.items()],
    loc="lower left",
    bbox_to_anchor=(0, 1),
    ncols=len(colours),
    frameon=False,
    fontsize=SMALL,
    borderaxespad=0,
    handlelength=1,
  )
  return figure


def sweep_figure(records: Iterable[Record]):
  """Draw measured and predicted speed against gamma, with one panel per set of other settings.

  Raises:
    InputError: no record has all required values.
  """
  groups = _by_gamma(records, ("speedup", "predicted_theorem8", "predicted_measured_cost"))
  y_labels = ["speed / autoregressive", *[""] * (len(groups) - 1)]
  figure, panels = new_figure(y_labels, share_y=True)
  for axes, group in zip(panels, groups.values()):
    gammas = [r.gamma for r in group]
    predicted = [r.predicted_finite_length for r in group]
    if None in predicted:
      predicted = [r.predicted_measured_cost for r in group]
    theorem_8 = [r.predicted_theorem8 for r in group]
    axes.plot(gammas, theorem_8, "^--", color=GREY, label="Theorem 8: v = 1, long texts")
    axes.plot(gammas, predicted, "s:", color=ORANGE, label="predicted with measured costs")
    axes.plot(gammas, [r.speedup for r in group], "o-", color=BLUE, label="measured")
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(xlabel="γ", xticks=gammas, ylim=(0, None))
    simulated = " (simulated)" if group[0].acceptance == "simulated" else ""
    axes.set_title(
      f"{group[0].draft}{simulated}, temperature {sampling_text(group[0])}", fontsize=NORMAL
    )
  handles, _ = panels[0].get_legend_handles_labels()
  figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=SMALL)
  figure.suptitle(_setting_text(next(iter(groups.values()))[0]), fontsize=SMALL, color=GREY)
  return figure


def _by_gamma(records: Iterable[Record], needed: Sequence[str]) -> dict[tuple, list[Any]]:
  """Group records that agree in all settings except gamma, and sort each group by gamma.

  Args:
    records: records. If several have the same setting, the last one is used.
    needed: fields that must not be None in a record.

  Raises:
    InputError: no record has all these fields.
  """
  latest = {key(r): r for r in records if all(getattr(r, name) is not None for name in needed)}
  if not latest:
    raise InputError(f"No record has all of {', '.join(needed)}; give a file of measured speed.")
  groups: dict[tuple, list[Any]] = {}  # not Record: its needed fields are not None
  for r in sorted(latest.values(), key=lambda r: r.gamma):
    groups.setdefault(key(dataclasses.replace(r, gamma=0)), []).append(r)
  order = [key(dataclasses.replace(r, gamma=0)) for r in latest.values()]
  return {group_key: groups[group_key] for group_key in dict.fromkeys(order)}


def _setting_text(r: Record) -> str:
  """Describe the setting of a figure."""
  return f"{r.subject}, {r.num_examples} texts, batch {r.batch_size}, {r.dtype}, {r.device}"


# From a decoded text.


def trace_figure(rounds: Sequence[Round], title: str = ""):
  """Draw Figure 1: one line per round, whose colors mark accepted, rejected and target tokens."""
  lines = [
    [
      *((piece, "accepted") for piece in r.accepted),
      *([] if r.rejected is None else [(r.rejected, "rejected")]),
      *([] if r.target_token is None else [(r.target_token, "corrected")]),
    ]
    for r in rounds
  ]
  # In a fixed-width font, the position of a piece is a number of characters.
  em, line_height = 0.602 * NORMAL / 72, 0.32
  longest = max(sum(len(piece) for piece, _ in pieces) for pieces in lines)
  columns = max(longest, len(title), 40) + 4
  figure, (axes,) = new_figure([""], width=columns * em, height=(len(rounds) + 2.2) * line_height)
  figure.set_layout_engine("none")
  axes.set_position((0, 0, 1, 1))
  axes.set(xlim=(-4, columns - 4), ylim=(len(rounds) + 0.7, -1.5))
  axes.axis("off")
  font = {"family": "monospace", "va": "center_baseline", "fontsize": NORMAL}
  axes.text(0, -1, title, color="black", **font)
  for y, pieces in enumerate(lines):
    axes.text(-1.2, y, f"{y + 1}", color=GREY, ha="right", **font)
    x = len(pieces[0][0].lstrip()) - len(pieces[0][0])  # the first word starts at 0
    for piece, kind in pieces:
      _draw_piece(axes, x, y, piece, kind, font)
      x += len(piece)
  x = 0
  for kind, name in _LEGEND.items():
    _draw_piece(axes, x, len(rounds) + 0.2, name, kind, font)
    x += len(name) + 2
  return figure


def _draw_piece(axes, x: float, y: float, piece: str, kind: str, font: dict) -> None:
  word = piece.lstrip()
  x += len(piece) - len(word)
  tint = Rectangle((x + 0.05, y - 0.38), len(word) - 0.1, 0.76, color=KINDS[kind], alpha=0.16, lw=0)
  axes.add_patch(tint)
  axes.text(
    x, y, word, color=KINDS[kind], weight="bold" if kind == "corrected" else "normal", **font
  )
  if kind == "rejected":  # readers without colour see the line
    axes.plot([x, x + len(word)], [y, y], color=KINDS[kind], linewidth=1.2)
