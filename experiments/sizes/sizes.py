"""Alpha and speed against the size of the draft model (Section 4.1, Tables 2 and 4):

python -m experiments.sizes.sizes experiments/sizes/speeds.jsonl   # draws sizes.svg beside it

Records are those of `specdec sizes`, one run per draft. A draft is named after its size, with its
seed if it has another one than 0.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from experiments.figures import figures
from experiments.lib import script
from experiments.lib.records import measured_with
from experiments.paper.paper import load_table
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.load import BUNDLED
from specdec_jax.measure.records import Record, read
from specdec_jax.measure.tables import Table, number_text
from specdec_jax.models.families import init_params

FOLDER = pathlib.Path(__file__).parent
PAPERS_SIZES = {"T5-small": 77e6, "T5-base": 250e6, "T5-large": 800e6}  # Section 4.1
PAPERS_TARGET = 11e9
Speed = Callable[[Record], float | None]
SPEEDS: dict[str, Speed] = {
  "Theorem 8": lambda r: r.times.predicted_theorem8,
  "measured costs": lambda r: r.predicted,
  "measured": lambda r: r.times.speedup,
}


class Size(NamedTuple):
  """Records of a draft at a temperature, one for each gamma."""

  name: str
  params: int
  temperature: float
  records: tuple[Record, ...]

  @property
  def share(self) -> float:
    """Parameters divided by those of the target."""
    return self.params / num_params(str(BUNDLED / "target"))

  def best(self, speed: str) -> Record:
    """Return the record of the gamma with the highest speed, by a key of `SPEEDS`."""
    return max(self.records, key=lambda r: SPEEDS[speed](r) or 0.0)


@functools.cache
def num_params(folder: str) -> int:
  """Return the number of parameters of a checkpoint."""
  config = open_checkpoint(folder).config
  params = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
  return sum(x.size for x in jax.tree.leaves(params))


def sizes_of(records: Sequence[Record]) -> list[Size]:
  """Return the records by temperature and draft, the smallest draft first."""
  found: dict[tuple[str, float], list[Record]] = {}
  for r in {r.key: r for r in records}.values():
    found.setdefault((r.models.draft_path or "", r.settings.temperature), []).append(r)
  sizes = [
    Size(pathlib.Path(path).name, num_params(str(FOLDER.parents[1] / path)), temperature, tuple(of))
    for (path, temperature), of in found.items()
  ]
  return sorted(sizes, key=lambda size: (size.temperature, size.params, size.name))


def sizes_table(records: Sequence[Record]) -> Table:
  """Return one row per temperature and draft, after the paper's rows for EnDe."""
  columns = "source|draft|parameters|of the target|temperature|alpha|MB per step|c|v|Theorem 8"
  columns += "|gamma there|predicted|gamma of it|measured|its gamma"
  costs = {(row["m_q"], row["temperature"]): row for row in load_table(4) if row["task"] == "EnDe"}
  rows, sizes = [], sizes_of(records)
  for row in (row for row in load_table(2) if row["task"] == "EnDe"):
    name = str(row["m_q"]).partition(" (")[0]
    params, cost = _papers_size(name), costs.get((row["m_q"], row["temperature"]))
    gamma = f"{row['gamma']:g}"
    rows.append(
      f"paper|{name}|{params / 1e6:.0f}M|{params / PAPERS_TARGET:.1%}|{row['temperature']:g}"
      f"|{row['alpha']:.2f}|-|{number_text(cost and cost['c'], '.2f')}|-"
      f"|{number_text(cost and cost['exp'], '.1f')}|{gamma}|-|-|{row['speed']:.1f}|{gamma}"
    )
  for size in sizes:
    best = {name: size.best(name) for name in SPEEDS}
    r = best["measured"]
    cells = [
      f"ours|{size.name}|{size.params / 1e6:.1f}M|{size.share:.1%}|{size.temperature:g}",
      *map(number_text, (r.outputs.alpha, r.times.draft_step_mb), (".3f", ".2f")),
      *map(number_text, (r.times.c, r.times.verify_cost), (".3f", ".2f")),
    ]
    for name, record in best.items():
      cells += [number_text(SPEEDS[name](record), ".2f"), str(record.settings.gamma)]
    rows.append("|".join(cells))
  notes = [
    "c and v: of the row's fastest gamma. Theorem 8: with the measured alpha and c, v = 1 and long "
    "texts. predicted: with v, prefill and the lengths of the texts. Each speed is that of the "
    "gamma beside it, the best of those measured.",
    *(best_sizes(temperature, sizes) for temperature in (0.0, 1.0)),
    measured_with(records),
  ]
  cells = tuple(tuple(row.split("|")) for row in rows)
  return Table("Sizes of the draft model", tuple(columns.split("|")), cells, tuple(notes))


def best_sizes(temperature: float, sizes: Sequence[Size]) -> str:
  """Return a sentence that names the best draft by each speed."""
  of = [size for size in sizes if size.temperature == temperature]
  if not of:
    return f"Temperature {temperature:g} was not measured."

  def best(speed: str) -> str:
    return max(of, key=lambda size: SPEEDS[speed](size.best(speed)) or 0.0).name

  found = ", ".join(f"{best(speed)} ({speed})" for speed in SPEEDS)
  return f"Fastest at temperature {temperature:g}: {found}."


def sizes_figure(records: Sequence[Record]):
  """Draw alpha, and the speed at each temperature, against the share of the target's parameters."""
  sizes = sizes_of(records)
  temperatures = sorted({size.temperature for size in sizes})
  speed_labels = ["speed / autoregressive"] * len(temperatures)
  figure, (first, *panels) = figures.new_figure(["α", *speed_labels], width=13)
  for temperature, color in zip(temperatures, (figures.BLUE, figures.ORANGE)):
    of = [size for size in sizes if size.temperature == temperature]
    alphas = [size.records[0].outputs.alpha for size in of]
    label = f"temperature {temperature:g}"
    first.plot([size.share for size in of], alphas, "o-", color=color, label=label)
    x, rows = _papers(temperature)
    label = f"the paper, temperature {temperature:g}"
    first.plot(x, [row["alpha"] for row in rows], "x--", color=color, label=label)
  for temperature, axes in zip(temperatures, panels):
    of = [size for size in sizes if size.temperature == temperature]
    styles = ("^--", figures.GREY), ("s:", figures.ORANGE), ("o-", figures.BLUE)
    for (name, speed), (style, color) in zip(SPEEDS.items(), styles):
      speeds = [speed(size.best(name)) for size in of]
      axes.plot([size.share for size in of], speeds, style, color=color, label=name)
    x, rows = _papers(temperature)
    axes.plot(x, [row["speed"] for row in rows], "x--", color="black", label="the paper, measured")
    axes.set_title(f"temperature {temperature:g}", fontsize=figures.NORMAL)
    axes.set_ylim(0, None)  # leaves room for the legend
  for axes in (first, *panels):
    axes.set_xscale("log")
    axes.set_xlabel("parameters of the draft / of the target", fontsize=figures.NORMAL)
    place = "lower right" if axes is first else "lower left"
    axes.legend(fontsize=figures.SMALL, frameon=False, loc=place)
  return figure


def _papers(temperature: float) -> tuple[list[float], list]:
  """Return shares of the target's parameters, and the paper's rows for EnDe."""
  rows = [
    row for row in load_table(2) if row["task"] == "EnDe" and row["temperature"] == temperature
  ]
  return [_papers_size(str(row["m_q"])) / PAPERS_TARGET for row in rows], rows


def _papers_size(name: str) -> float:
  return PAPERS_SIZES[name.partition(" (")[0]]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("records", type=pathlib.Path)
  path = parser.parse_args().records
  figures.save(sizes_figure(read(path)), path.parent / "sizes.svg")


if __name__ == "__main__":
  script.run(main)
