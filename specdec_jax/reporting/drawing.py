"""What all figures share: colours, axes, labelled lines, and files of the same bytes.

matplotlib is imported when a figure is made, so that all else runs without it.
"""

import pathlib

import numpy as np

from specdec_jax.errors import InputError
from specdec_jax.writing import written

# Colours that colour-blind readers can tell apart (Okabe and Ito).
BLUE, SKY, GREEN, RED = "#0072B2", "#56B4E9", "#009E73", "#D55E00"
ORANGE, YELLOW, PURPLE, GREY = "#E69F00", "#F0E442", "#CC79A7", "#666666"
_FORMATS = (".png", ".svg", ".pdf")
SMALL, NORMAL = 9, 11  # points


def require_format(path: str | pathlib.Path) -> None:
  """Raise InputError unless `save` knows what the name ends in: .png, .svg or .pdf."""
  if pathlib.Path(path).suffix.lower() not in _FORMATS:
    raise InputError(f"output is '{path}'; its name must end in one of {', '.join(_FORMATS)}.")


def save(figure, path: str | pathlib.Path) -> None:
  """Write a figure as what the name ends in, whole or not at all.

  Raises:
    InputError: see `require_format`.
    OSError: the file cannot be written.
  """
  require_format(path)
  from matplotlib import rc_context

  # Hinting would round the width of a character to whole pixels, away from the tint behind it.
  # Names that are not drawn by chance, and no date: the same figure has the same bytes.
  with rc_context({"text.hinting": "none", "svg.hashsalt": "specdec_jax"}):
    with written(path, "wb") as file:
      kind = pathlib.Path(path).suffix[1:].lower()
      undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
      look = dict(dpi=200, bbox_inches="tight", facecolor="white")
      figure.savefig(file, format=kind, metadata=undated, **look)


def new_figure(
  *ylabels: str, width: float | None = None, height: float = 3.6, share_y: bool = False
):
  """A figure, and in it axes with these labels, at most three side by side."""
  try:
    from matplotlib.figure import Figure
  except ModuleNotFoundError as error:
    raise InputError(
      "Figures need matplotlib; install it with pip install 'specdec_jax[plots]'."
    ) from error
  columns = min(len(ylabels), 3)
  rows = -(-len(ylabels) // columns)
  # No pyplot: nothing global, and no display is looked for.
  figure = Figure(figsize=(width or 5.2 * columns, height * rows), layout="constrained")
  panels = figure.subplots(rows, columns, sharey=share_y, squeeze=False).flatten()
  for spare in panels[len(ylabels) :]:
    spare.remove()
  for axes, label in zip(panels, ylabels):
    axes.set_ylabel(label, fontsize=NORMAL)
    axes.set_xlabel("α", fontsize=NORMAL)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
  return figure, panels[: len(ylabels)]


def shades(count: int):
  """Colours for an ordered family of curves, dark to light."""
  from matplotlib import colormaps

  return colormaps["viridis"](np.linspace(0.05, 0.68, count))


def labelled_line(axes, x, y, label: str, colour, label_at: int | None = None, **style) -> None:
  """A line with its label right of its end, or on it, at an index."""
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
