"""Write texts of CNN/DM, one per line, in the format of T5's inputs and outputs.

  python -m experiments.model_free_drafts.prepare [--data data] [--output runs/cnn_dm]

The data set realsumm gives `articles.txt`, `articles_tokenised.txt`, and `t5_11b.txt`, the
summaries of these articles by T5-11B. The data set cnn_dm gives `validation.txt`, articles of its
validation split, and `highlights.txt`, summaries of its training and validation articles. If the
folder `--data` has no files of cnn_dm, the first 200 training articles and the first 500 validation
articles are read through TFDS.
"""

import argparse
import json
import pathlib
import re

from experiments.lib import script
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.data.text import read_lines


def unmarked(text: str) -> str:
  """Remove realsumm's sentence marks <t> and </t>, which T5's inputs and outputs do not have."""
  return " ".join(re.sub(r"</?t>", " ", text).split())


def untokenised(text: str) -> str:
  """Undo the tokenization of realsumm's articles: attach punctuation to the neighboring words."""
  text = re.sub(r"`` | ''", '"', text)
  text = re.sub(r" ' (.+?) '(?= )", r" '\1'", text)
  text = text.replace("can not", "cannot")
  text = re.sub(r" (?=[,.;:?!)\]]|n't\b|'(?:s|m|d|ll|re|ve)\b|’ )", "", text)
  return re.sub(r"(?<=[(\[‘]) ", "", text)


def summary(highlights: str) -> str:
  """Format highlights like T5-11B's outputs: lower case, one line, each sentence ending in ' .'."""
  return re.sub(r"(?<! )\.$", " .", highlights.lower(), flags=re.MULTILINE).replace("\n", " ")


def articles(data: pathlib.Path, split: str, count: int) -> list[dict[str, str]]:
  """Return the first `count` articles of a split, with the fields 'article' and 'highlights'."""
  files = [*data.glob(f"cnn_dm/cnn_dm.{split}{count}*.jsonl.gz")]
  if files:
    return [json.loads(line) for line in read_lines(str(files[0]))]
  from specdec_jax.data import tasks  # imports TensorFlow

  sources, highlights = (
    tasks.sources("specdec_cnn_dm", split, count, side) for side in ("inputs", "targets")
  )
  return [
    {"article": source.removeprefix("summarize: "), "highlights": summary}
    for source, summary in zip(sources, highlights)
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("data"))
  parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/cnn_dm"))
  args = parser.parse_args()
  tokenised = [unmarked(line) for line in read_lines(f"{args.data}/realsumm/ptr_generator.src.txt")]
  train, validation = articles(args.data, "train", 200), articles(args.data, "validation", 500)
  texts = {
    "articles": map(untokenised, tokenised),
    "articles_tokenised": tokenised,
    "t5_11b": map(unmarked, read_lines(f"{args.data}/realsumm/t5.out_11B.txt")),
    "validation": (row["article"].replace("\n", " ") for row in validation),
    "highlights": (summary(row["highlights"]) for row in train + validation),
  }
  args.output.mkdir(parents=True, exist_ok=True)
  for name, lines in texts.items():
    path = args.output / f"{name}.txt"
    with atomic_write(path) as file:
      file.writelines(f"{line}\n" for line in lines)
    print(path)


if __name__ == "__main__":
  script.run(main)
