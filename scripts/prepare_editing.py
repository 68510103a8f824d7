"""Write sentences with errors and their corrections, to train the pair of the editing task:

python scripts/prepare_editing.py --data data --output runs/editing/data

Each sentence of the training text occurs several times, with different errors, and once in the text
that the draft is trained on. Captions, news and
short sentences are read from the folder `--data` (docs/data.md).
"""

import argparse
import pathlib
import random

from experiments.editing.corruptions import corrupt
from specdec_jax.atomic_files import atomic_write
from specdec_jax.data.text import read_lines

TRAIN = (
  "multi30k/train.en.gz",
  *(f"wmt_newstest_ende/newstest{year}.en.gz" for year in (2009, 2010, 2011, 2012, 2016, 2018)),
  "wmt_newstest_ende/news-test2008.en.gz",
  "wmt_newstest_ende/newstest2020.en.gz",
  "tatoeba_ende/tatoeba-test-v2021-08-07.en.gz",
)
VALID = ("multi30k/val.en.gz", "wmt_newstest_ende/newstest2013.en.gz")
TEST = ("multi30k/test_2016_flickr.en.gz", "wmt_newstest_ende/newstest2014.en.gz")
MIN_WORDS, MAX_WORDS, PER_FILE = 4, 36, 500


def sentences(data: str, names: tuple[str, ...]) -> list[list[str]]:
  """Return the sentences of each file that have a suitable length and ordinary characters."""

  def is_suitable(line: str) -> bool:
    ordinary = line.isascii() and line[:1].isupper() and line[-1:] in tuple(".!?")
    return ordinary and MIN_WORDS <= len(line.split()) <= MAX_WORDS

  files = ([" ".join(line.split()) for line in read_lines(f"{data}/{name}")] for name in names)
  return [[line for line in lines if is_suitable(line)] for lines in files]


def write(path: pathlib.Path, lines: list[str]) -> None:
  with atomic_write(path) as file:
    file.writelines(f"{line}\n" for line in lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--data", default="data", help="folder with the texts")
  parser.add_argument("--output", default="runs/editing/data", help="folder to write")
  parser.add_argument("--copies", type=int, default=3, help="occurrences of a training sentence")
  args = parser.parse_args()
  output = pathlib.Path(args.output)
  output.mkdir(parents=True, exist_ok=True)
  train = [line for lines in sentences(args.data, TRAIN) for line in lines]
  parts = {"train": train * args.copies}
  valid, test = ([lines[:PER_FILE] for lines in sentences(args.data, n)] for n in (VALID, TEST))
  parts["valid"] = [line for lines in valid for line in lines]
  parts["test"] = [line for lines in zip(*test) for line in lines]  # captions and news in turn
  for part, correct in parts.items():
    rng = random.Random(f"errors of {part}")
    corrupted = [corrupt(line, rng) for line in correct]
    for side, lines in (("source", corrupted), ("target", correct)):
      write(output / f"{part}.{side}", lines)
      if part == "train":
        write(output / f"draft.{side}", lines[: len(train)])
    unchanged = sum(map(str.__eq__, corrupted, correct))
    print(f"{part}: {len(correct)} sentences, {unchanged} of them without an error")


if __name__ == "__main__":
  main()
