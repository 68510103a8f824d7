"""Drafts beside each other, as a picture: what a round gives against what it costs."""

from collections.abc import Sequence

from specdec_jax.records import Record
from specdec_jax.reporting.drawing import BLUE, GREY, NORMAL, SMALL, new_figure


def drafts_figure(records: Sequence[Record]):
  """What a round gives, tokens, against what it costs, in plain tokens, for each draft.

  A draft's speed is the one over the other; those of one speed lie on a line from the origin.
  """
  temperatures = sorted({r.temperature for r in records})
  drafts = [*dict.fromkeys((r.draft, r.verifier) for r in records)]
  labels = ["tokens of a round"] * len(temperatures)
  figure, panels = new_figure(*labels, width=6.0 * len(temperatures), height=6.5, share_y=True)
  for axes, temperature in zip(panels, temperatures):
    points = {
      (r.draft, r.verifier): (r.tokens_per_round / r.speedup, r.tokens_per_round)
      for r in records
      if r.temperature == temperature and r.speedup and r.tokens_per_round
    }
    right = 1.15 * max(cost for cost, _ in points.values())
    top = 1.1 * max(r.tokens_per_round for r in records if r.tokens_per_round)
    for speed in (0.5, 1.0, 1.5, 2.0):
      end = min(right, top / speed)
      style = dict(color=GREY, linewidth=1, linestyle="-" if speed == 1 else ":", zorder=0)
      axes.plot([0, end], [0, end * speed], **style)
      words = "plain" if speed == 1 else f"{speed:g}x"
      place = dict(textcoords="offset points", fontsize=SMALL, color=GREY)
      axes.annotate(words, (end, end * speed), (3, 3), annotation_clip=False, **place)
    for at in filter(None, map(points.get, drafts)):
      axes.scatter(*at, color=BLUE, s=14)
    for numbers, at in _shared_labels([*map(points.get, drafts)], right / 20, top / 30):
      place = dict(textcoords="offset points", fontsize=SMALL, va="center")
      axes.annotate(", ".join(map(str, numbers)), at, (5, 0), **place)
    axes.set(xlim=(0, right), ylim=(0, top))
    axes.set_title(f"temperature {temperature:g}", pad=18)
    axes.set_xlabel("time of a round / time of a plain token", fontsize=NORMAL)
  names = [
    f"{number} {draft}" + ("" if verifier == drafts[0][1] else f", {verifier}")
    for number, (draft, verifier) in enumerate(drafts, 1)
  ]
  handles = [figure.axes[0].plot([], [], alpha=0)[0] for _ in names]
  figure.legend(handles, names, loc="outside lower left", ncols=4, fontsize=SMALL, frameon=False)
  return figure


def _shared_labels(
  points: Sequence[tuple[float, float] | None], wide: float, high: float
) -> list[tuple[list[int], tuple[float, float]]]:
  """Numbers of points from 1, those too near each other for labels of their own together, and where
  to put them: at the rightmost."""
  found: list[tuple[list[int], tuple[float, float]]] = []
  in_order = sorted((at, number) for number, at in enumerate(points, 1) if at)
  for (x, y), number in in_order:
    for i, (numbers, (right, level)) in enumerate(found):
      if x - right < wide and abs(y - level) < high:
        found[i] = [*numbers, number], (x, level)
        break
    else:
      found.append(([number], (x, y)))
  return [(sorted(numbers), at) for numbers, at in found]
