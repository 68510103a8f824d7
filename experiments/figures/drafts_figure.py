"""Figure that compares drafts: tokens per round against the cost of a round."""

from collections.abc import Sequence

from experiments.figures.drawing import BLUE, GREY, NORMAL, SMALL, new_figure
from specdec_jax.measure.records import Record

_Point = tuple[float, float]


def drafts_figure(records: Sequence[Record]):
  """Plot tokens per round against time per round, in one panel per temperature.

  Each point is a draft with a verifier. Time is in steps of autoregressive decoding. The slope of
  the line from the origin through a point is the speedup.
  """
  temperatures = sorted({r.temperature for r in records})
  drafts = [*dict.fromkeys((r.draft, r.verifier) for r in records)]
  labels = ["tokens per round"] * len(temperatures)
  figure, panels = new_figure(labels, width=6.0 * len(temperatures), height=6.5, share_y=True)
  for axes, temperature in zip(panels, temperatures):
    points = {
      (r.draft, r.verifier): (r.tokens_per_round / r.speedup, r.tokens_per_round)
      for r in records
      if r.temperature == temperature and r.speedup and r.tokens_per_round
    }
    right = 1.15 * max(cost for cost, _ in points.values())
    top = 1.1 * max(r.tokens_per_round for r in records if r.tokens_per_round)
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
