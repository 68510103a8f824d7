"""Measure texts that the caller gives as drafts, on the bundled pair and on Whisper:

python -m experiments.given.given --data data --output runs/given
python -m experiments.given.given --corpus runs/speech/corpus --recordings data/speech \
  --draft experiments/speech/head --output runs/given

Each set of sources has texts that resemble the outputs more or less. All ways to decode a set run
in turn. A set that `results.jsonl` has already is not measured again.
"""

import argparse
import functools
import json
import pathlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.lib import script
from experiments.lib.records import lines, measured_on
from experiments.speech import published
from experiments.speech.speech import clips_of, recordings
from specdec_jax import load_pair
from specdec_jax.data.text import read_lines
from specdec_jax.measure.costs import interleaved_seconds, ratio_range, timed
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.records import results_path
from specdec_jax.measure.tables import MISSING, Table
from specdec_jax.pair import Pair
from specdec_jax.speech.transcribe import transcripts

NUM_TEXTS, NUM_GROWING, NUM_CLIPS = 64, 16, 20
WAYS = ("none", "pair", "given", "given, then pair")

Row = dict[str, Any]


class Texts(NamedTuple):
  """Sources, and a text for each that its output may have, or None."""

  name: str
  sources: Sequence[Any]
  drafts: Sequence[str | None]
  batch_size: int = 1


def changed(text: str, count: int, words: Sequence[str], rng: random.Random) -> str:
  """Return a text with `count` of its words replaced by others, or all of them if it is shorter."""
  parts = text.split()
  for place in rng.sample(range(len(parts)), min(count, len(parts))):
    parts[place] = rng.choice([word for word in words if word != parts[place]])
  return " ".join(parts)


def caption_sets(pair: Pair, sources: Sequence[str]) -> Iterator[Texts]:
  """Yield the sets of the bundled pair: captions, and drafts made from their own outputs."""
  rng = random.Random(0)
  outputs = [output.text for output in pair.generate(sources, gamma=0)]
  words = sorted({word for text in outputs for word in text.split()})
  others = [*outputs[1:], outputs[0]]
  yield Texts("the output itself", sources, outputs)
  for count in (1, 2, 4):
    edited = [changed(text, count, words, rng) for text in outputs]
    yield Texts(f"{count} word{'s' * (count > 1)} changed", sources, edited)
  halves = [
    " ".join(a.split()[: len(a.split()) // 2] + b.split()[len(b.split()) // 2 :])
    for a, b in zip(outputs, others)
  ]
  yield Texts("first half right", sources, halves)
  yield Texts("nothing right", sources, others)
  one = [text if i % 8 == 0 else None for i, text in enumerate(outputs)]
  yield Texts("one source of eight", sources, one, 8)
  growing = [
    " ".join(source.split()[:count])
    for source in sources[:NUM_GROWING]
    for count in range(1, len(source.split()) + 1)
  ]
  earlier = [output.text for output in pair.generate(growing, gamma=0)]
  starts = (len(text.split()) == 1 for text in growing)
  drafts = [None if is_first else text for is_first, text in zip(starts, [None, *earlier])]
  yield Texts("growing source", growing, drafts)


def generate(pair: Pair, texts: Texts, gamma: int, given: bool) -> list[tuple[list[int], int]]:
  """Return the tokens and the number of rounds of each output."""
  drafts = texts.drafts if given else None
  found = pair.generate(texts.sources, gamma=gamma, draft_texts=drafts, batch_size=texts.batch_size)
  return [(output.tokens.tolist(), len(output.rounds.num_emitted)) for output in found]


def transcribe(pair: Pair, texts: Texts, gamma: int, given: bool) -> list[tuple[list[int], int]]:
  """Return the tokens and the number of rounds of each transcript."""
  drafts = texts.drafts if given else ()
  settings = dict(language="en", gamma=gamma, batch_size=texts.batch_size, timestamps=False)
  found = transcripts(pair, texts.sources, drafts, **settings)
  return [
    (
      [token for output in each.outputs for token in output.tokens.tolist()],
      each.counts["rounds"],
    )
    for each in found
  ]


def speech_sets(corpus: pathlib.Path, folder: pathlib.Path) -> Iterator[tuple[Texts, float]]:
  """Yield clips with the transcripts of Whisper tiny.en, and the seconds that these took."""
  tiny = load_pair(published.folder("tiny.en"), "prompt_lookup")
  clips: dict[str, Any] = {"recordings": recordings(folder)}
  for name, of in (("windows", "test"), ("short", "test_short")):
    clips[name] = clips_of(corpus / of, NUM_CLIPS)
  for name, sounds in clips.items():
    how = functools.partial(transcripts, tiny, sounds, gamma=0, timestamps=False)
    [*how()]  # compiles
    seconds, found = timed(lambda how=how: [*map(str, how())])
    yield Texts(name, sounds, found), seconds


def measured(
  texts: Texts, pair: Pair, decode: Callable[..., Any], gamma: int, repeats: int, **fields: Any
) -> Iterator[Row]:
  """Yield a record for each way to decode a set."""
  settings = {"none": (0, False), "pair": (gamma, False)}
  settings |= {"given": (0, True), "given, then pair": (gamma, True)}
  calls = {way: functools.partial(decode, pair, texts, *settings[way]) for way in WAYS}
  seconds, results = interleaved_seconds(calls, repeats)
  first = [tokens for tokens, _ in results["none"]]
  for way in WAYS:
    outputs = [tokens for tokens, _ in results[way]]
    ratio = float(np.median(seconds["none"]) / np.median(seconds[way]))
    low, high = ratio_range(ratio, seconds["none"] / seconds[way])
    num_tokens, rounds = sum(map(len, outputs)), sum(count for _, count in results[way])
    yield dict(
      set=texts.name,
      target=pair.target.name,
      texts=len(texts.sources),
      distinct_texts=len({str(source) for source in texts.sources}),
      batch_size=texts.batch_size,
      way=way,
      gamma=settings[way][0],
      tokens=num_tokens,
      tokens_per_round=num_tokens / rounds,
      seconds=float(np.median(seconds[way])),
      speedup=ratio,
      speedup_low=low,
      speedup_high=high,
      to_pair=float(np.median(seconds["pair"]) / np.median(seconds[way])),
      differing=sum(a != b for a, b in zip(outputs, first, strict=True)),
      repeats=repeats,
      **fields,
      **provenance(),
    )


def _with_draft_time(row: Row, base: float) -> str:
  """Return the speedup if the time of another model for the texts counts too."""
  if "draft_seconds" not in row or "given" not in row["way"]:
    return MISSING
  return f"{base / (row['seconds'] + row['draft_seconds']):.2f}"


def given_table(rows: Sequence[Row]) -> Table:
  """Return a table with one row per set and way to decode."""
  cells = []
  base = {(row["set"], row["texts"]): row["seconds"] for row in rows if row["way"] == "none"}
  for row in rows:
    if row["way"] == "none":
      continue
    low, high = row["speedup_low"], row["speedup_high"]
    spread = "" if low is None else f" [{low:.2f},{high:.2f}]"
    cells.append(
      (
        f"{row['set']}, {row['texts']}",
        f"{row['batch_size']}",
        row["way"],
        f"{row['tokens_per_round']:.2f}",
        f"{row['speedup']:.2f}{spread}",
        f"{row['to_pair']:.2f}",
        _with_draft_time(row, base[row["set"], row["texts"]]),
        f"{row['differing']}",
      )
    )
  columns = "texts", "batch", "draft", "tokens per round", "speedup", "over the pair"
  columns += "with the text's time", "differ"
  first = rows[0]
  notes = (
    f"Temperature 0, {first['threads']} threads, medians of {first['repeats']} interleaved "
    f"repeats. {measured_on(rows)}",
  )
  return Table("Given texts as drafts", columns, tuple(cells), notes)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--data", help="folder with multi30k, for the bundled pair")
  parser.add_argument("--corpus", type=pathlib.Path, help="clips (experiments.speech.corpus)")
  parser.add_argument("--recordings", type=pathlib.Path, help="folder of recordings")
  parser.add_argument("--draft", help="draft head for Whisper base")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--output", default="runs/given", help="folder of results.jsonl")
  args = parser.parse_args()
  results = pathlib.Path(results_path(args.output))
  results.parent.mkdir(parents=True, exist_ok=True)
  done = {row["set"] for row in lines(results)} if results.exists() else set()

  def write(rows: Iterator[Row]) -> None:
    found = [*rows]
    with results.open("a") as file:
      file.writelines(f"{json.dumps(row)}\n" for row in found)
    for row in found:
      print({name: row[name] for name in ("set", "way", "tokens_per_round", "speedup")}, flush=True)

  if args.data:
    pair = load_pair()
    texts = read_lines(f"{args.data}/multi30k/test_2016_flickr.en.gz", NUM_TEXTS)
    for each in caption_sets(pair, texts):
      if each.name not in done:
        write(measured(each, pair, generate, 5, args.repeats))
  if args.corpus:
    pair = load_pair(published.folder("base"), args.draft, draft_weights="int8")
    for each, seconds in speech_sets(args.corpus, args.recordings):
      if each.name not in done:
        write(measured(each, pair, transcribe, 3, args.repeats, draft_seconds=seconds))


if __name__ == "__main__":
  script.run(main)
