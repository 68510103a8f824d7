"""Draw the two pictures of the README: rounds of a text, and measured against predicted speed.

python -m experiments.figures.pictures    # writes both to docs/_static

They are SVG texts with their own background, in the colors of the reader's light or dark theme.
"""

import html
import math
import pathlib
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from experiments.lib import script
from specdec_jax import load_pair
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.rounds import Round
from specdec_jax.data.text import read_lines
from specdec_jax.measure.records import Record, read

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "_static"
WIDTH = 480  # narrow, so that texts are legible on a phone
CHARACTER = 8.4  # width in the fixed-width font
# Colors that colour-blind readers can distinguish (Okabe and Ito), in the order of the legend.
COLORS = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999"
STYLE = """
text { font: 14px sans-serif; fill: #1f2328 } .page { fill: #fff }
.soft { fill: #59636e; font-size: 12px } .line { stroke: #59636e }
.token { font-family: monospace }
.accepted { fill: #dafbe1 } .rejected { fill: #ffdfd3 } .added { fill: #cfe8ff }
.strike { stroke: #a40e26; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .page { fill: #0d1117 } .soft { fill: #b1bac4 } .line { stroke: #b1bac4 }
  .accepted { fill: #0f5323 } .rejected { fill: #7d2a12 } .added { fill: #0c4a80 }
  .strike { stroke: #ffb1a3 }
}"""


def picture(title: str, height: float, shapes: Iterable[str]) -> str:
  """Return an SVG text of shapes below a title."""
  return "\n".join(
    [
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">',
      f"<title>{html.escape(title)}</title>\n<style>{STYLE}\n</style>",
      f'<rect class="page" width="{WIDTH}" height="{height:g}" rx="6"/>',
      text(16, 26, title, "font-weight='bold'"),
      *shapes,
      "</svg>\n",
    ]
  )


def text(x: float, y: float, words: str, more: str = "") -> str:
  return f'<text x="{x:g}" y="{y:g}" {more}>{html.escape(words)}</text>'


def token(x: float, y: float, piece: str, kind: str) -> str:
  """Return a token on the tint of its kind; the fixed width does not depend on the font."""
  width = CHARACTER * len(piece)
  size = f"textLength='{width:g}' lengthAdjust='spacingAndGlyphs' class='token'"
  box = (
    f'<rect class="{kind}" x="{x - 2:g}" y="{y - 15:g}" width="{width + 4:g}" height="20" rx="3"/>'
  )
  line = f'<path class="strike" d="M{x:g} {y - 4:g}h{width:g}"/>' if kind == "rejected" else ""
  return box + text(x, y, piece, size) + line


def rounds_picture(source: str, output: str, rounds: Sequence[Round], gamma: int) -> str:
  """Draw the tokens of each round as accepted, rejected, or added by the target."""
  count = sum(len(each.emitted) for each in rounds)
  title = f"{count} tokens from {len(rounds)} target passes instead of {count}"
  shapes, y = [], 46
  for name, words in (("Source", source), ("Output", output)):
    for line in textwrap.wrap(f"{name}: {words}", 72):
      shapes.append(text(16, y, line, "class='soft'"))
      y += 17
  y += 14
  for number, each in enumerate(rounds, 1):
    kinds = {
      "accepted": each.accepted,
      "rejected": () if each.rejected is None else (each.rejected,),
      "added": () if each.target_token is None else (each.target_token,),
    }
    shapes.append(text(16, y, f"{number}", "class='soft'"))
    x = 36.0
    for kind, pieces in kinds.items():
      for piece in pieces:
        word = piece.strip()
        x += 6 if piece != word and x > 36 else 0
        shapes.append(token(x, y, word, kind))
        x += CHARACTER * len(word) + 5
    counts = ", ".join(f"{len(pieces)} {kind}" for kind, pieces in kinds.items() if pieces)
    shapes.append(text(36, y + 19, counts, "class='soft'"))
    y += 48
  x = 16.0
  for kind in ("accepted", "rejected", "added"):
    words = "added by the target" if kind == "added" else kind
    shapes.append(token(x, y, words, kind))
    x += CHARACTER * len(words) + 12
  note = f"In a round, the draft proposes {gamma} tokens, and one target pass verifies all of them."
  return picture(title, y + 42, [*shapes, text(16, y + 26, note, "class='soft'")])


def speeds_picture(records: Sequence[Record]) -> str:
  """Draw the measured speed of each record against its predicted speed, by processor."""
  pairs = [(r.predicted, r.times.speedup, _processor(r)) for r in records]
  points = [(x, y, name) for x, y, name in pairs if x and y]
  counts = Counter(name for *_, name in points)
  names = sorted(counts, key=lambda name: (-counts[name], name))
  low, high, left, top, side = 0.18, 4.0, 56, 44, 400

  def place(x: float, y: float) -> tuple[float, float]:
    across, up = (side * math.log(v / low) / math.log(high / low) for v in (x, y))
    return left + across, top + side - up

  shapes = [f'<path class="line" fill="none" d="M{left} {top}v{side}h{side}"/>']
  for tick in (0.25, 0.5, 1, 2, 4):
    x, y = place(tick, tick)
    shapes.append(text(x, top + side + 18, f"{tick:g}", "class='soft' text-anchor='middle'"))
    shapes.append(text(left - 8, y + 4, f"{tick:g}", "class='soft' text-anchor='end'"))
    grid = f"M{x:.1f} {top}v{side}M{left} {y:.1f}h{side}"
    shapes.append(f'<path class="line" opacity=".2" d="{grid}"/>')
  shapes.append(
    f'<path class="line" stroke-dasharray="5 4" d="M{left} {top + side}L{left + side} {top}"/>'
  )
  for predicted, measured, name in points:
    x, y = place(predicted, measured)
    color = COLORS[names.index(name)]
    shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}" fill-opacity=".8"/>')
  y = top + side + 38
  axis = "predicted speed / autoregressive decoding (both axes logarithmic)"
  shapes.append(text(left, y, axis, "class='soft'"))
  shapes.append(text(18, 250, "measured speed", "class='soft' transform='rotate(-90 18 250)'"))
  for i, name in enumerate(names):
    y += 20
    shapes.append(f'<circle cx="{left + 4}" cy="{y - 4}" r="5" fill="{COLORS[i]}"/>')
    shapes.append(text(left + 16, y, f"{name}: {counts[name]} records", "class='soft'"))
  errors = [abs(measured / predicted - 1) for predicted, measured, _ in points]
  half, most = np.percentile(errors, [50, 90])
  note = f"Dashed: both agree. Half of the points are within {half:.0%}, 90% within {most:.0%}."
  shapes.append(text(16, y + 26, note, "class='soft'"))
  title = f"Measured against predicted speed: {len(points)} records"
  return picture(title, y + 42, shapes)


def _processor(r: Record) -> str:
  name = r.machine.processor or "a CPU without a recorded name"
  return re.sub(r"\(R\)| Processor|, AVX-512", "", name)  # so that a line of the legend fits


def pictures() -> dict[str, str]:
  """Return both pictures by file name: a sentence of the quickstart, and all records."""
  source, gamma = read_lines(ROOT / "gin/tasks/sentences.txt")[7], 5  # the sentence of Figure 1
  (output,) = load_pair().generate([source], gamma=gamma, max_new_tokens=64)
  return {
    "rounds.svg": rounds_picture(source, output.text, output.round_texts, gamma),
    "predicted.svg": speeds_picture(all_records()),
  }


def all_records() -> list[Record]:
  """Return the records of all studies; files of other formats do not begin with a record."""
  files = sorted((ROOT / "experiments").glob("*/*.jsonl"))
  return [r for file in files if file.read_bytes().startswith(b'{"models"') for r in read(file)]


def main() -> None:
  for name, content in pictures().items():
    with atomic_write(FOLDER / name) as file:
      file.write(content)


if __name__ == "__main__":
  script.run(main)
