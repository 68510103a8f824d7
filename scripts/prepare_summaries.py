"""Write articles and sentences extracted from them, to train and test a model that summarizes:

python scripts/prepare_summaries.py --data data --output runs/summaries/data

The data sets cnn_dm and scitldr are too small to learn to write summaries. The targets are
therefore sentences of the article, those that overlap most with its reference summary. Articles are
cut at 260 words. Training text also has later parts of the articles.
"""

import argparse
import json
import pathlib
import random
from collections.abc import Iterator

from experiments.summaries.extracts import extract, first_sentences, sentences
from specdec_jax.atomic_files import atomic_write
from specdec_jax.data.text import read_lines

MAX_WORDS = 260
NUM_PARTS = 5  # of a training article
NUM_VALID, NUM_TEST = 50, 100  # the last articles of the validation split
CNN_DM = "cnn_dm/cnn_dm.{}.jsonl.gz"
_MARKS = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\n": " "})


def plain(text: str) -> str:
  """Return a text with ASCII characters only."""
  text = text.translate(_MARKS).replace("(CNN)", "(CNN) ").replace(" .", ".")
  return " ".join(text.encode("ascii", "ignore").decode().split())


def rows(data: str, name: str) -> list[dict]:
  return [json.loads(line) for line in read_lines(f"{data}/{name}")]


def examples(article: str, summary: str, num_parts: int) -> Iterator[tuple[str, str, str]]:
  """Yield parts of an article with the sentences extracted from them and the reference summary."""
  every, rng = sentences(plain(article)), random.Random(article)
  starts = [0, *sorted(rng.sample(range(1, len(every)), min(num_parts, len(every)) - 1))]
  for start in starts:
    part = first_sentences(every[start:], MAX_WORDS)
    if chosen := extract(part, summary):
      yield " ".join(part), " ".join(chosen), summary


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--data", default="data", help="folder with the data sets")
  parser.add_argument("--output", default="runs/summaries/data", help="folder to write")
  args = parser.parse_args()
  train = rows(args.data, CNN_DM.format("train100_eileenfeng"))
  train += rows(args.data, CNN_DM.format("train200_desixmimi"))[len(train) :]
  validation = rows(args.data, CNN_DM.format("validation500"))
  train += validation[: -NUM_VALID - NUM_TEST]
  parts: dict[str, list[tuple[str, str, str]]] = {"train": [], "valid": [], "test": []}
  for name, num_parts, articles in (
    ("train", NUM_PARTS, train),
    ("valid", 1, validation[-NUM_VALID - NUM_TEST : -NUM_TEST]),
    ("test", 1, validation[-NUM_TEST:]),
  ):
    for row in articles:
      summary = plain(row["highlights"])
      parts[name] += examples(row["article"], summary, num_parts)
  for row in rows(args.data, "scitldr/SciTLDR-A.train.jsonl.gz"):
    parts["train"] += examples(" ".join(row["source"]), plain(row["target"][0]), 1)
  output = pathlib.Path(args.output)
  output.mkdir(parents=True, exist_ok=True)
  for name, of_part in parts.items():
    for side, lines in zip(("source", "target", "summary"), zip(*of_part)):
      with atomic_write(output / f"{name}.{side}") as file:
        file.writelines(f"{line}\n" for line in lines)
    print(f"{name}: {len(of_part)} articles")


if __name__ == "__main__":
  main()
