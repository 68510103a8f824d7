"""Draw one of the paper's figures, a plot of speed against gamma, or a comparison of drafts.

python -m experiments.figures.figures --figure 2 --output figure2.svg
python -m experiments.figures.figures --figure 5 --records results.jsonl --output figure5.png
python -m experiments.figures.figures --figure 1 --gin_file experiments/gpt_like/gpt_like.gin \\
  --temperature 1 --output figure1.svg
"""

import argparse
import math
import operator
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import gin
import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from experiments.lib import script
from experiments.lib.records import sampling_text
from experiments.paper.paper import PaperRow, load_table
from specdec_jax import theory
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.rounds import Round
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.errors import InputError
from specdec_jax.generate import GenerateCall
from specdec_jax.measure.records import Record, read
from specdec_jax.pair import Pair
from specdec_jax.run import parse_gin

# Colours that colour-blind readers can distinguish (Okabe and Ito).
BLUE, SKY, GREEN, RED = "#0072B2", "#56B4E9", "#009E73", "#D55E00"
ORANGE, YELLOW, PURPLE, GREY = "#E69F00", "#F0E442", "#CC79A7", "#666666"
SMALL, NORMAL = 9, 11  # points

_Point = tuple[float, float]

_FORMATS = (".png", ".svg", ".pdf")

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
  """
  needed = ("target_prefill_ms", "draft_prefill_ms", "target_step_ms", "draft_step_ms", "verify_ms")
  groups = _by_gamma(records, (*(f"times.{name}" for name in needed), "outputs.tokens_per_round"))
  group = next(iter(groups.values()))
  typical = {name: statistics.median(getattr(r.times, name) for r in group) for name in needed}
  rows = [("autoregressive", [("target's encoder", typical["target_prefill_ms"])])]
  rows[0][1].extend([("target", typical["target_step_ms"])] * num_tokens)
  for r in group:
    gamma, times = r.settings.gamma, r.times
    num_rounds = math.ceil(num_tokens / r.outputs.tokens_per_round)
    blocks = [("target's encoder", times.target_prefill_ms)]
    blocks += [("draft's encoder", times.draft_prefill_ms)]
    target = "target", times.verify_ms + (times.accept_ms or 0)
    rows.append(
      (f"γ = {gamma}", blocks + [*[("draft", times.draft_step_ms)] * gamma, target] * num_rounds)
    )
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
  needed = "speedup", "predicted_theorem8", "predicted_measured_cost"
  groups = _by_gamma(records, [f"times.{name}" for name in needed])
  y_labels = ["speed / autoregressive", *[""] * (len(groups) - 1)]
  figure, panels = new_figure(y_labels, share_y=True)
  for axes, group in zip(panels, groups.values()):
    gammas = [r.settings.gamma for r in group]
    predicted = [r.times.predicted_finite_length for r in group]
    if None in predicted:
      predicted = [r.times.predicted_measured_cost for r in group]
    theorem_8 = [r.times.predicted_theorem8 for r in group]
    axes.plot(gammas, theorem_8, "^--", color=GREY, label="Theorem 8: v = 1, long texts")
    axes.plot(gammas, predicted, "s:", color=ORANGE, label="predicted with measured costs")
    axes.plot(gammas, [r.times.speedup for r in group], "o-", color=BLUE, label="measured")
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    axes.set(xlabel="γ", xticks=gammas, ylim=(0, None))
    simulated = " (simulated)" if group[0].models.simulated else ""
    axes.set_title(
      f"{group[0].models.draft}{simulated}, temperature {sampling_text(group[0])}", fontsize=NORMAL
    )
  handles, _ = panels[0].get_legend_handles_labels()
  figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=SMALL)
  figure.suptitle(_setting_text(next(iter(groups.values()))[0]), fontsize=SMALL, color=GREY)
  return figure


def _by_gamma(records: Iterable[Record], needed: Sequence[str]) -> dict[tuple, list[Any]]:
  """Group records that agree in all settings except gamma, and sort each group by gamma.

  Args:
    records: records. If several have the same setting, the last one is used.
    needed: paths of fields that must not be None in a record.

  Raises:
    InputError: no record has all these fields.
  """
  values = operator.attrgetter(*needed)
  latest = {r.key: r for r in records if None not in values(r)}
  if not latest:
    raise InputError(f"No record has all of {', '.join(needed)}; give a file of measured speed.")
  groups: dict[tuple, list[Any]] = {}  # not Record: its needed fields are not None
  for r in sorted(latest.values(), key=lambda r: r.settings.gamma):
    groups.setdefault(r.replace(gamma=0).key, []).append(r)
  order = [r.replace(gamma=0).key for r in latest.values()]
  return {group_key: groups[group_key] for group_key in dict.fromkeys(order)}


def _setting_text(r: Record) -> str:
  """Describe the setting of a figure."""
  texts = f"{r.settings.num_examples} texts, batch {r.settings.batch_size}"
  return f"{r.subject}, {texts}, {r.models.dtype}, {r.device}"


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


def save(figure, path: str | pathlib.Path) -> None:
  """Write a figure atomically, in the format that the ending of the file name gives."""
  # Without hinting, characters keep their exact width and stay on the tint behind them.
  # Without random names and without a date, the same figure has the same bytes.
  with rc_context({"text.hinting": "none", "svg.hashsalt": "specdec_jax"}):
    with atomic_write(path, "wb") as file:
      fmt = pathlib.Path(path).suffix[1:].lower()
      metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(fmt)
      style = dict(dpi=200, bbox_inches="tight", facecolor="white")
      figure.savefig(file, format=fmt, metadata=metadata, **style)


def new_figure(
  y_labels: Sequence[str],
  width: float | None = None,
  height: float = 3.6,
  share_y: bool = False,
):
  """Return a figure and its axes, one for each label of a y axis.

  Args:
    y_labels: labels of the y axes. At most three axes are in a row.
    width: width of the figure in inches; by default, it depends on the number of axes.
    height: height of a row in inches.
    share_y: whether all axes have the same y range.
  """
  columns = min(len(y_labels), 3)
  rows = -(-len(y_labels) // columns)
  # pyplot is not used, because it has global state and looks for a display.
  figure = Figure(figsize=(width or 5.2 * columns, height * rows), layout="constrained")
  panels = figure.subplots(rows, columns, sharey=share_y, squeeze=False).flatten()
  for spare in panels[len(y_labels) :]:
    spare.remove()
  for axes, label in zip(panels, y_labels):
    axes.set_ylabel(label, fontsize=NORMAL)
    axes.set_xlabel("α", fontsize=NORMAL)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
  return figure, panels[: len(y_labels)]


def shades(count: int):
  """Return colors for an ordered family of curves, from dark to light."""
  return colormaps["viridis"](np.linspace(0.05, 0.68, count))


def labelled_line(axes, x, y, label: str, colour, label_at: int | None = None, **style) -> None:
  """Draw a line with a label to the right of its end, or on the point with index `label_at`."""
  axes.plot(x, y, color=colour, linewidth=2, label=label, clip_on=False, **style)
  last = label_at is None
  axes.annotate(
    label,
    (x[-1], y[-1]) if last else (x[label_at], y[label_at]),
    (5, 0) if last else (0, 0),
    textcoords="offset points",
    ha="left" if last else "center",
    va="center",
    color=colour,
    fontsize=SMALL,
    bbox=None if last else {"facecolor": "white", "edgecolor": "none", "pad": 1},
    annotation_clip=False,
  )


def drafts_figure(records: Sequence[Record]):
  """Plot tokens per round against time per round, in one panel per temperature.

  Each point is a draft with a verifier. Time is in steps of autoregressive decoding. The slope of
  the line from the origin through a point is the speedup.
  """
  temperatures = sorted({r.settings.temperature for r in records})
  drafts = [*dict.fromkeys((r.models.draft, r.settings.verifier) for r in records)]
  labels = ["tokens per round"] * len(temperatures)
  figure, panels = new_figure(labels, width=6.0 * len(temperatures), height=6.5, share_y=True)
  for axes, temperature in zip(panels, temperatures):
    points = {
      (r.models.draft, r.settings.verifier): (length / speedup, length)
      for r in records
      if r.settings.temperature == temperature
      and (speedup := r.times.speedup)
      and (length := r.outputs.tokens_per_round)
    }
    right = 1.15 * max(cost for cost, _ in points.values())
    top = 1.1 * max(r.outputs.tokens_per_round for r in records if r.outputs.tokens_per_round)
    for speedup in (0.5, 1.0, 1.5, 2.0):
      end = min(right, top / speedup)
      style = dict(color=GREY, linewidth=1, linestyle="-" if speedup == 1 else ":", zorder=0)
      axes.plot([0, end], [0, end * speedup], **style)
      label = "autoregressive" if speedup == 1 else f"{speedup:g}x"
      style = dict(textcoords="offset points", fontsize=SMALL, color=GREY)
      axes.annotate(label, (end, end * speedup), (3, 3), annotation_clip=False, **style)
    ordered = [points.get(draft) for draft in drafts]
    for point in filter(None, ordered):
      axes.scatter(*point, color=BLUE, s=14)
    for numbers, point in _shared_labels(ordered, right / 20, top / 30):
      style = dict(textcoords="offset points", fontsize=SMALL, va="center")
      axes.annotate(", ".join(map(str, numbers)), point, (5, 0), **style)
    axes.set(xlim=(0, right), ylim=(0, top))
    axes.set_title(f"temperature {temperature:g}", pad=18)
    axes.set_xlabel("time per round / time per autoregressive step", fontsize=NORMAL)
  names = [
    f"{number} {draft}" + ("" if verifier == drafts[0][1] else f", {verifier}")
    for number, (draft, verifier) in enumerate(drafts, 1)
  ]
  handles = [figure.axes[0].plot([], [], alpha=0)[0] for _ in names]
  figure.legend(handles, names, loc="outside lower left", ncols=4, fontsize=SMALL, frameon=False)
  return figure


def _shared_labels(
  points: Sequence[_Point | None], width: float, height: float
) -> list[tuple[list[int], _Point]]:
  """Group points whose labels would overlap; a group has one label with their numbers (from 1).

  Args:
    points: point (x, y) of each draft, or None for a draft without a point.
    width: horizontal distance from which two labels do not overlap.
    height: vertical distance from which two labels do not overlap.

  Returns:
    (numbers, position) of each label. The position is that of the rightmost point.
  """
  labels: list[tuple[list[int], _Point]] = []
  from_left = sorted((point, number) for number, point in enumerate(points, 1) if point)
  for (x, y), number in from_left:
    for i, (numbers, (right, level)) in enumerate(labels):
      if x - right < width and abs(y - level) < height:
        labels[i] = [*numbers, number], (x, level)
        break
    else:
      labels.append(([number], (x, y)))
  return [(sorted(numbers), point) for numbers, point in labels]


def trace(pair: Pair, text: str, gamma: int = 7, temperature: float = 0.0, seed: int = 0):
  """Return a figure of the rounds in which a text is decoded.

  Args:
    pair: target and draft.
    text: the source; for a decoder-only pair, the text to continue.
    gamma: number of draft tokens per round.
    temperature: sampling temperature.
    seed: random seed.
  """
  settings = DecodeSettings(Sampling(temperature), max_new_tokens=64, seed=seed)
  call = GenerateCall.of(pair, settings, chain(gamma))
  ((output,),) = call.decode([pair.encode(text)], [0], None, size=1, seed=seed)
  rounds = output.round_texts
  count = f"{len(output.tokens)} tokens from {len(rounds)} target forward passes"
  title = f"{count}, γ = {gamma}, temperature {temperature:g}"
  if pair.continues and text:
    title += f", after '{text}'"
  return trace_figure(rounds, title)


def draw(args: argparse.Namespace):
  if args.figure == "1":
    return trace_of_gin_file(args)
  if args.figure == "2":
    return tokens_figure()
  if args.figure == "3":
    return gamma_figure()
  if args.figure == "4":
    return operations_figure(load_table(1))
  records = [record for path in args.records for record in read(path)]
  if args.figure == "sweep":
    return sweep_figure(records)
  if args.figure == "drafts":
    return drafts_figure(records)
  records = [r for r in records if r.settings.temperature == args.temperature]
  return timeline_figure(records, args.num_tokens)


def trace_of_gin_file(args: argparse.Namespace):
  """Draw Figure 1 for a text decoded by the bundled pair, or by the pair that a gin file sets."""
  parse_gin(["gin/quickstart.gin", *filter(None, [args.gin_file])], [], [])
  quickstart = gin.get_bindings("quickstart.quickstart")
  pair, text = quickstart["pair"], args.text
  if text is None:
    # Some draft tokens of this sentence are rejected.
    text = "" if pair.continues else quickstart["sentences"][7]
  return trace(pair, text, args.gamma, args.temperature, args.seed)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  figures = ("1", "2", "3", "4", "5", "sweep", "drafts")
  parser.add_argument("--figure", required=True, choices=figures)
  parser.add_argument("--output", required=True, help="a .png, .svg or .pdf file")
  parser.add_argument(
    "--records", nargs="+", default=[], help="record files for Figure 5, sweep and drafts"
  )
  parser.add_argument("--num_tokens", type=int, default=20, help="tokens per row in Figure 5")
  parser.add_argument(
    "--gin_file",
    help="gin file that sets the pair of Figure 1, such as experiments/gpt_like/gpt_like.gin",
  )
  parser.add_argument(
    "--text",
    help="input text of Figure 1; defaults to a sentence of the quick start, and to an empty "
    "prompt for a decoder-only pair",
  )
  parser.add_argument("--gamma", type=int, default=7, help="for Figure 1")
  parser.add_argument("--seed", type=int, default=0, help="for Figure 1")
  parser.add_argument("--temperature", type=float, default=0.0, help="for Figures 1 and 5")
  args = parser.parse_args()
  save(draw(args), args.output)


if __name__ == "__main__":
  script.run(main)
