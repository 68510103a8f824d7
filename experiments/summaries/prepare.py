"""Write articles and sentences extracted from them, to train and test a model that summarizes:

python -m experiments.summaries.prepare --data data --output runs/summaries/data

The data sets cnn_dm and scitldr are too small to learn to write summaries. The targets are
therefore sentences of the article, those that overlap most with its reference summary, selected by
a greedy search (Nallapati et al., 2017). Articles are cut at 260 words. Training text also has
later parts of the articles.
"""

import argparse
import collections
import json
import pathlib
import random
import re
from collections.abc import Iterator, Sequence

from experiments.lib import script
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.data.text import read_lines

_WORD = re.compile(r"\w+")

_END = re.compile(r"""(?<=[.!?])(?<!\b[A-Z]\.)(["')]?) +(?=["'(]?[A-Z0-9])""")

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


def sentences(text: str) -> list[str]:
  """Split a text into sentences, after a mark that a space and a capital letter or digit follow."""
  return [sentence for sentence in _END.sub(r"\1\n", text).split("\n") if sentence]


def first_sentences(parts: Sequence[str], max_words: int) -> list[str]:
  """Return the first sentences that together have at most `max_words` words."""
  chosen: list[str] = []
  for sentence in parts:
    max_words -= len(sentence.split())
    if max_words < 0:
      break
    chosen.append(sentence)
  return chosen


def extract(
  parts: Sequence[str], summary: str, max_sentences: int = 3, max_words: int = 64
) -> list[str]:
  """Return the sentences that summarize a text best, in the order of the text.

  Sentences are added one at a time, each time the one that raises the score most, until none does.
  The score is the F1 of words and of pairs of neighboring words with the reference summary, added.

  Args:
    parts: sentences of the text.
    summary: reference summary.
    max_sentences: maximum number of sentences.
    max_words: maximum number of words in total.
  """
  reference = _counts([summary])
  chosen: list[int] = []
  best = 0.0
  while len(chosen) < max_sentences:
    candidates = []
    for i in sorted({*range(len(parts))} - {*chosen}):
      candidate = sorted([*chosen, i])
      text = [parts[j] for j in candidate]
      if sum(len(sentence.split()) for sentence in text) <= max_words:
        candidates.append((_f1(_counts(text), reference), -i, candidate))
    if not candidates or (top := max(candidates))[0] <= best:
      break
    best, _, chosen = top
  return [parts[i] for i in chosen]


def _counts(texts: Sequence[str]) -> tuple[collections.Counter, collections.Counter]:
  """Return how often each word occurs, and each pair of neighboring words within a text."""
  words = [_WORD.findall(text.lower()) for text in texts]
  pairs = [pair for row in words for pair in zip(row, row[1:])]
  return collections.Counter(word for row in words for word in row), collections.Counter(pairs)


def _f1(found: Sequence[collections.Counter], wanted: Sequence[collections.Counter]) -> float:
  """Return the sum of the F1 scores of two lists of counts."""
  return sum(
    2 * (a & b).total() / total for a, b in zip(found, wanted) if (total := a.total() + b.total())
  )


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
  script.run(main)
