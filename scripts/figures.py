"""Draw one of the paper's figures, a plot of speed against gamma, or a comparison of drafts.

python scripts/figures.py --figure 2 --output figure2.svg
python scripts/figures.py --figure 5 --records results.jsonl --output figure5.png
python scripts/figures.py --figure 1 --gin_file experiments/gpt_like/gpt_like.gin --temperature 1 \\
  --output figure1.svg
"""

import argparse
import pathlib

from experiments.figures import drawing, figures
from experiments.figures.drafts_figure import drafts_figure
from experiments.paper.paper import load_table
from specdec_jax.errors import InputError, require_count
from specdec_jax.measure.records import read
from specdec_jax.run import parse_gin
from specdec_jax.user_errors import ArgumentParser, format_error

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main() -> None:
  parser = ArgumentParser(__doc__.splitlines()[0])
  parser.add_argument("--figure", required=True, help="1 to 5, sweep or drafts")
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
  try:
    drawing.require_format(args.output)  # fail before the work
    drawing.save(draw(args), args.output)
  except Exception as error:
    sentence = format_error(error)
    if sentence is None:
      raise
    parser.exit(2, f"error: {sentence}\n")


def draw(args: argparse.Namespace):
  if args.figure in ("5", "sweep", "drafts"):
    if not args.records:
      raise InputError(f"Figure {args.figure} needs records; give files with --records.")
    records = [record for path in args.records for record in read(path)]
    if args.figure == "sweep":
      return figures.sweep_figure(records)
    if args.figure == "drafts":
      return drafts_figure(records)
    records = [record for record in records if record.temperature == args.temperature]
    if not records:
      raise InputError(f"No record is at temperature {args.temperature:g}; give --temperature.")
    return figures.timeline_figure(records, args.num_tokens)
  if args.figure == "1":
    return trace(args)
  if args.figure == "2":
    return figures.tokens_figure()
  if args.figure == "3":
    return figures.gamma_figure()
  if args.figure == "4":
    return figures.operations_figure(load_table(1, ROOT / "configs"))
  raise InputError(f"There is no figure {args.figure!r}; choose one of 1 to 5, sweep or drafts.")


def trace(args: argparse.Namespace):
  """Draw Figure 1 for a text decoded by the bundled pair, or by the pair that a gin file sets."""
  # These modules import jax, which the other figures do not need.
  import gin

  from experiments.figures.trace import trace

  require_count("gamma", args.gamma)
  parse_gin([str(ROOT / "gin" / "quickstart.gin"), *filter(None, [args.gin_file])], [], [])
  quickstart = gin.get_bindings("quickstart.quickstart")
  pair, text = quickstart["pair"], args.text
  if text is None:
    text = (
      "" if pair.continues else quickstart["sentences"][7]
    )  # some of its draft tokens are rejected
  return trace(pair, text, args.gamma, args.temperature, args.seed)


if __name__ == "__main__":
  main()
