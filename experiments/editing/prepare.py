"""Write sentences with errors and their corrections, to train the pair of the editing task:

python -m experiments.editing.prepare --data data --output runs/editing/data

A sentence gets between zero and a few errors of the kinds that people make: typing errors, missing,
doubled, swapped and confused words, wrong forms of words, casing and punctuation. The correct
sentence is the target of training, and the sentence with errors is its source.

Each sentence of the training text occurs several times, with different errors, and once in the text
that the draft is trained on. Captions, news and short sentences are read from the folder `--data`
(docs/data.md).
"""

import argparse
import pathlib
import random
import re
from collections.abc import Callable

from experiments.lib import script
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.data.text import read_lines

_ROWS = "qwertyuiop", "asdfghjkl", "zxcvbnm"

_NEIGHBORS = {
  letter: "".join(row[max(0, i - 1) : i] + row[i + 1 : i + 2])
  for row in _ROWS
  for i, letter in enumerate(row)
}

_CONFUSED = (
  *(("their", "there", "they're"), ("your", "you're"), ("its", "it's"), ("to", "too", "two")),
  *(("then", "than"), ("were", "where", "we're"), ("of", "off"), ("lose", "loose")),
  *(("affect", "effect"), ("who", "whom"), ("quiet", "quite"), ("whose", "who's"), ("by", "buy")),
  *(("a", "an", "the"), ("in", "on", "at"), ("for", "to", "of"), ("is", "are"), ("was", "were")),
  *(("has", "have"), ("this", "these"), ("that", "those"), ("do", "does"), ("much", "many")),
  *(("he", "him"), ("she", "her"), ("they", "them"), ("from", "of"), ("with", "by")),
)

_SETS_OF: dict[str, list[tuple[str, ...]]] = {}
for _words in _CONFUSED:
  for _word in _words:
    _SETS_OF.setdefault(_word, []).append(_words)

_DROPPED = {
  *("a", "an", "the", "of", "to", "in", "on", "at", "is", "are", "was", "were", "has", "have"),
  *("with", "for", "and", "that", "from", "be", "been"),
}

# A function that changes the word at a position of a list, and returns whether it did.
_Error = Callable[[list[str], int, random.Random], bool]

_WEIGHTS = 30, 14, 6, 5, 18, 12, 7, 8

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


def corrupt(sentence: str, rng: random.Random, mean_errors: float = 1.6) -> str:
  """Return a sentence with random errors; a tenth or more of the sentences stay as they are.

  Args:
    sentence: a correct sentence, with words that are separated by spaces.
    rng: random number generator.
    mean_errors: expected number of errors in a sentence of 16 words that does not stay as it is.
      Longer sentences get more errors, but at most one error per three words.
  """
  words = sentence.split(" ")
  if rng.random() < 0.1:
    return sentence
  expected = mean_errors * min(2.0, max(0.5, len(words) / 16))
  count = min(1 + _poisson(max(0.0, expected - 1), rng), max(1, len(words) // 3))
  for _ in range(count):
    for _ in range(10):  # an error may not apply to a word
      error = rng.choices(_ERRORS, _WEIGHTS)[0]
      if error(words, rng.randrange(len(words)), rng):
        break
  return " ".join(word for word in words if word)


def _poisson(mean: float, rng: random.Random) -> int:
  count, product = 0, rng.random()
  threshold = 2.718281828459045**-mean
  while product > threshold:
    count, product = count + 1, product * rng.random()
  return count


def _letters(word: str) -> list[int]:
  return [i for i, character in enumerate(word) if character.isalpha()]


def _typing_error(words: list[str], i: int, rng: random.Random) -> bool:
  """Swap two letters of `words[i]`, or drop, double or replace one; return whether it changed."""
  word, places = words[i], _letters(words[i])
  if len(places) < 3:
    return False
  at = rng.choice(places[:-1])
  kind = rng.randrange(4)
  if kind == 0:
    if word[at + 1 : at + 2].isalpha() and word[at] != word[at + 1]:
      words[i] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
  elif kind == 1:
    words[i] = word[:at] + word[at + 1 :]
  elif kind == 2:
    words[i] = word[:at] + word[at] + word[at:]
  else:
    near = _NEIGHBORS.get(word[at])
    if near:
      words[i] = word[:at] + rng.choice(near) + word[at + 1 :]
  return words[i] != word


def _missing_word(words: list[str], i: int, rng: random.Random) -> bool:
  if words[i] not in _DROPPED:
    return False
  del words[i]
  return True


def _doubled_word(words: list[str], i: int, rng: random.Random) -> bool:
  if not words[i].isalpha() or len(words[i]) > 5:
    return False
  words.insert(i, words[i])
  return True


def _swapped_words(words: list[str], i: int, rng: random.Random) -> bool:
  if i + 1 >= len(words) or not (words[i].isalpha() and words[i + 1].isalpha()):
    return False
  if words[i] == words[i + 1] or words[i][0].isupper():
    return False
  words[i], words[i + 1] = words[i + 1], words[i]
  return True


def _confused_word(words: list[str], i: int, rng: random.Random) -> bool:
  lower = words[i].lower()
  if lower not in _SETS_OF:
    return False
  other = rng.choice([word for word in rng.choice(_SETS_OF[lower]) if word != lower])
  words[i] = other.capitalize() if words[i][0].isupper() else other
  return True


def _wrong_form(words: list[str], i: int, rng: random.Random) -> bool:
  """Change the ending of a word: -s, -ed, -ing, -ly."""
  match = re.fullmatch(r"([A-Za-z]{3,}?)(s|ed|ing|ly)?([.,;:!?]?)", words[i])
  if not match:
    return False
  stem, ending, mark = match[1], match[2] or "", match[3]
  if ending == "":
    ending = rng.choice(["s", "s", "ed", "ing"])
  elif rng.random() < 0.6 or ending == "ly":
    ending = ""
  else:
    ending = rng.choice([other for other in ("s", "ed", "ing") if other != ending])
  words[i] = stem + ending + mark
  return True


def _wrong_case(words: list[str], i: int, rng: random.Random) -> bool:
  word = words[i]
  if not word or not word[0].isalpha() or word in ("I", "A"):
    return False
  if word[0].isupper():
    words[i] = word[0].lower() + word[1:]
  elif rng.random() < 0.3:
    words[i] = word[0].upper() + word[1:]
  return words[i] != word


def _wrong_mark(words: list[str], i: int, rng: random.Random) -> bool:
  """Drop the punctuation mark or apostrophe of a word (often the last word), or add a comma."""
  if rng.random() < 0.5:
    i = len(words) - 1
  word = words[i]
  if word[-1:] in tuple(".,;:!?") and len(word) > 1:
    words[i] = word[:-1]
  elif "'" in word:
    words[i] = word.replace("'", "")
  elif word.isalpha() and i + 1 < len(words):
    words[i] = word + ","
  return words[i] != word


_ERRORS: tuple[_Error, ...] = (
  *(_typing_error, _missing_word, _doubled_word, _swapped_words),
  *(_confused_word, _wrong_form, _wrong_case, _wrong_mark),
)


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
  script.run(main)
