"""Synthetic English speech, to train and test drafts of Whisper:

apt-get install espeak-ng
python -m experiments.speech.corpus --data data --output runs/speech/corpus

A window of 30 seconds has sentences that espeak-ng reads with one voice, speed and pitch. The
sentences are those of news, articles, captions and Tatoeba (docs/data.md). No sentence of a test
window is in a training window. An interrupted run resumes.
"""

import argparse
import io
import json
import os
import pathlib
import random
import re
import subprocess
import wave
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.signal import resample_poly

from experiments.lib import script
from experiments.summaries import prepare
from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.data.text import read_lines
from specdec_jax.errors import InputError

RATE = 16_000  # of Whisper, in samples per second
WINDOW = 30 * RATE

# espeak-ng ignores an unknown variant, and any variant of en-gb, which it knows as en. Whisper base
# transcribes these accents and variants better than others.
VOICES = tuple(
  f"{accent}+{variant}"
  for accent in ("en", "en-us", "en-us-nyc", "en-gb-x-rp")
  for variant in (
    *("f2", "f5", "Annie", "linda", "m1", "m2", "m3", "m4", "m5", "m7", "m8"),
    *("Alex", "Gene", "Diogo", "Hugo", "zac"),
  )
)
HELD_OUT = "en-us+f3", "en-gb-scotland+m6"  # voices of test windows only

FILES = (
  "lm1b_sample/*.tokens.gz",
  "multi30k/train.en.gz",
  "wmt_newstest_ende/*.en.gz",
  "tatoeba_ende/*.en.gz",
  "cnn_dm/*.jsonl.gz",
)
_WORD = re.compile(r"[A-Za-z0-9]+(?:['.,-][A-Za-z0-9]+)*[,;:.?!]?")  # without quotation marks


def sentences(data: str, files: Sequence[str] = FILES) -> list[str]:
  """Return the distinct sentences of 4 to 36 words that have letters, digits and marks only.

  Args:
    data: folder of the files.
    files: patterns of paths. A file of JSON lines has articles, and other files a text per line.
  """
  found: dict[str, None] = {}
  for path in (path for pattern in files for path in sorted(pathlib.Path(data).glob(pattern))):
    for line in read_lines(path):
      article = json.loads(line)["article"] if ".jsonl" in path.name else line
      for text in prepare.sentences(prepare.plain(article)):
        text = re.sub(r" (?=[,;:.?!]|n?'[a-z])", "", text)  # of tokenized texts
        words = text.split()
        ends = text[:1].isupper() and text[-1:] in (".", "?", "!")
        if ends and 4 <= len(words) <= 36 and all(map(_WORD.fullmatch, words)):
          found[text] = None
  return [*found]


def is_for_tests(sentence: str) -> bool:
  """Return True for one sentence in ten."""
  return zlib.crc32(sentence.encode()) % 10 == 0


def speak(text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
  """Return a text as speech of espeak-ng: int16 samples at RATE.

  Args:
    text: text to read.
    voice: name of a voice, and after a '+' that of a variant.
    speed: speed in words per minute.
    pitch: pitch from 0 to 99.
  """
  command = ["espeak-ng", "--stdin", "--stdout", "-v", voice, "-s", str(speed), "-p", str(pitch)]
  try:
    sound = subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout
  except FileNotFoundError as error:
    raise InputError("espeak-ng is not installed; try apt-get install espeak-ng.") from error
  with wave.open(io.BytesIO(sound)) as file:
    samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    samples = resample_poly(samples.astype(np.float32), RATE, file.getframerate())
  return np.clip(np.rint(samples), -(2**15), 2**15 - 1).astype(np.int16)


def make(
  out_dir: str | os.PathLike,
  num_windows: int,
  seed: int,
  texts: Sequence[str],
  voices: Sequence[str] = VOICES,
  seconds: tuple[float, float] = (26, 30),
) -> None:
  """Write windows of speech: `windows.npy` (int16 [num_windows, WINDOW]) and `windows.jsonl`.

  Each line of `windows.jsonl` has the sentences of a window, its voice, speed and pitch, and the
  duration of its speech, after which the window is silent. An interrupted call resumes, and gives
  the same files.

  Args:
    out_dir: folder to write.
    num_windows: number of windows.
    seed: seed of the order of sentences, and of voices, speeds, pitches and pauses.
    texts: sentences. None is read twice before all have been read.
    voices: voices of `speak`.
    seconds: least and greatest duration of the speech in a window. A sentence that would exceed the
      greatest one is left out.
  """
  folder = pathlib.Path(out_dir)
  folder.mkdir(parents=True, exist_ok=True)
  order = random.Random(seed).sample(texts, len(texts))
  settings = json.dumps([num_windows, seed, zlib.crc32("".join(order).encode()), voices, seconds])
  described, listed = folder / "settings.json", folder / "windows.jsonl"
  if described.exists() and described.read_text() != settings:
    raise InputError(f"{folder} has windows of other settings; delete it, or choose another.")
  described.write_text(settings)
  lines = listed.read_text().splitlines(keepends=True) if listed.exists() else []
  lines = [line for line in lines if line.endswith("\n")]
  with atomic_write(listed) as file:
    file.writelines(lines)
  position = json.loads(lines[-1])["position"] if lines else 0
  windows = np.lib.format.open_memmap(
    folder / "windows.npy", "r+" if lines else "w+", np.int16, (num_windows, WINDOW)
  )
  with listed.open("a", buffering=1) as file:
    for i in range(len(lines), num_windows):
      rng = random.Random(f"{seed} {i}")
      reader: dict[str, Any] = dict(
        voice=rng.choice(voices), speed=rng.randint(130, 220), pitch=rng.randint(30, 70)
      )
      window, spoken, end = np.zeros(WINDOW, np.int16), [], 0
      while end < seconds[0] * RATE:
        text = order[position % len(order)]
        position += 1
        sound = speak(text, **reader)
        start = end + int(rng.uniform(0.1, 0.6) * RATE)
        if start + len(sound) <= seconds[1] * RATE:
          end = start + len(sound)
          window[start:end] = sound
          spoken.append(text)
      windows[i] = window
      record = dict(texts=spoken, **reader, seconds=end / RATE, position=position)
      file.write(json.dumps(record) + "\n")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--data", default="data", help="folder with the texts")
  parser.add_argument("--output", default="runs/speech/corpus", help="folder to write")
  parser.add_argument("--windows", type=int, default=2000, help="number of training windows")
  args = parser.parse_args()
  texts = sentences(args.data)
  tests = [text for text in texts if is_for_tests(text)]
  train = [text for text in texts if not is_for_tests(text)]
  output = pathlib.Path(args.output)
  make(output / "train", args.windows, 0, train)
  make(output / "test", 120, 1, tests)
  make(output / "test_held_out", 60, 2, tests, HELD_OUT)
  make(output / "test_short", 60, 3, tests, seconds=(2, 8))


if __name__ == "__main__":
  script.run(main)
