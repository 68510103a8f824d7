"""Helpers for all figures: colors, axes, labeled lines, and reproducible files."""

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

from specdec_jax.atomic_files import atomic_write
from specdec_jax.errors import InputError

# Colours that colour-blind readers can distinguish (Okabe and Ito).
BLUE, SKY, GREEN, RED = "#0072B2", "#56B4E9", "#009E73", "#D55E00"
ORANGE, YELLOW, PURPLE, GREY = "#E69F00", "#F0E442", "#CC79A7", "#666666"
_FORMATS = (".png", ".svg", ".pdf")
SMALL, NORMAL = 9, 11  # points


def require_format(path: str | pathlib.Path) -> None:
  """Raise InputError unless the file name ends in .png, .svg or .pdf."""
  if pathlib.Path(path).suffix.lower() not in _FORMATS:
    raise InputError(f"output is '{path}'; its name must end in one of {', '.join(_FORMATS)}.")


def save(figure, path: str | pathlib.Path) -> None:
  """Write a figure atomically, in the format that the ending of the file name gives.

  Raises:
    InputError: the format is unknown (see `require_format`).
    OSError: the file cannot be written.
  """
  require_format(path)
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
