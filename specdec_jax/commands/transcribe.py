"""Transcription of audio files to text, subtitles or JSON."""

import collections
import contextlib
import hashlib
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from rich.console import Console

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.errors import InputError
from specdec_jax.files.job import identity, open_log, plan
from specdec_jax.files.records import json_line
from specdec_jax.generate import generation_config
from specdec_jax.measure.progress import Progress
from specdec_jax.pair import Pair
from specdec_jax.speech.audio import SAMPLE_RATE
from specdec_jax.speech.transcribe import Transcriber


def transcribe(
  pair: Pair,
  names: Sequence[str],
  format: Literal["txt", "srt", "vtt", "json"] = "txt",
  output_dir: str | None = None,
  language: str | None = None,
  task: Literal["transcribe", "translate"] | None = None,
  timestamps: bool | None = None,
  initial_prompt: str | None = None,
  condition_on_prev_tokens: bool = False,
  temperature: float | Sequence[float] | None = None,
  compression_ratio_threshold: float | None = None,
  logprob_threshold: float | None = None,
  no_speech_threshold: float | None = None,
  fallback: Literal["openai"] | None = None,
  gamma: int = 5,
  tree: Sequence[int] | None = None,
  batch_size: int = 1,
  seed: int = 0,
  generation: GenerationConfig | None = None,
) -> None:
  """Transcribe audio files. Other arguments are those of `speech.transcribe.Transcriber`.

  If a run with `output_dir` is interrupted, the same command resumes it: the hidden file
  .specdec-transcribe.FORMAT there has its job and a hash of each finished input.

  Args:
    names: audio files. One that cannot be read is reported, and others are transcribed.
    format: 'txt', 'srt', 'vtt' or 'json'; 'srt' and 'vtt' are subtitles, with timestamps.
    output_dir: folder of a file NAME.FORMAT for each audio file; by default, results are printed.
    language: code of the language, such as 'en'; by default, it is detected.
    generation: settings of generation; its fields are flags.

  Raises:
    InputError: an argument is invalid, `output_dir` has results of another job in this format, or,
      at the end, a file could not be read.
  """
  outputs, is_timed = [f"{pathlib.Path(x).stem}.{format}" for x in names], format in ("srt", "vtt")
  if pair.target.speech is None:
    raise InputError("the target reads no speech; give a Whisper, as --target openai/whisper-base.")
  if not names:
    raise InputError("no audio file is given; name one or more, as specdec transcribe talk.wav.")
  if is_timed and len(names) > 1 and output_dir is None:
    raise InputError(f"{format} for {len(names)} audio files needs output_dir; name a folder.")
  if output_dir is not None and (same := {x for x in outputs if outputs.count(x) > 1}):
    raise InputError(f"several audio files have the output {min(same)}; use a folder for each.")
  settings: dict[str, Any] = dict(language=language, task=task, timestamps=is_timed or timestamps)
  settings |= dict(initial_prompt=initial_prompt, gamma=gamma, tree=tree, batch_size=batch_size)
  settings |= dict(condition_on_prev_tokens=condition_on_prev_tokens, fallback=fallback, seed=seed)
  settings |= dict(compression_ratio_threshold=compression_ratio_threshold)
  settings |= dict(logprob_threshold=logprob_threshold, no_speech_threshold=no_speech_threshold)
  given = (generation or GenerationConfig()).given()
  transcriber = Transcriber(pair, temperature=temperature, generation=given, **settings)
  notes = Console(stderr=True, markup=False, soft_wrap=True)
  opened, totals = collections.deque[tuple[str, str, str]](), collections.Counter[str]()
  finished, seconds = dict[str, str](), dict[int, float]()  # hashes of inputs; progress of each
  since, folder = time.perf_counter(), pathlib.Path(output_dir or "")

  def read() -> Iterator[np.ndarray | None]:
    for name, output in zip(names, outputs):
      samples = None
      try:
        digest = hashlib.sha256(pathlib.Path(name).read_bytes()).hexdigest()
        if finished.get(output) != digest:
          samples = transcriber.read(name)
          opened.append((name, output, digest))
          totals["samples"] += len(samples)
      except FileNotFoundError:
        notes.print(f"error: There is no audio file at {name}.")
        totals["failed"] += 1
      except (InputError, OSError) as error:
        notes.print(f"error: {error}")
        totals["failed"] += 1
      bar.update(task_id, total=totals["samples"] / SAMPLE_RATE)  # of the files read so far
      yield samples

  def report(index: int, until: float, duration: float) -> None:
    seconds[index] = until
    bar.update(task_id, completed=sum(seconds.values()))

  with contextlib.ExitStack() as stack:
    if output_dir is not None:
      folder.mkdir(parents=True, exist_ok=True)
      config, _ = generation_config(pair, None, given)
      settings |= dict(temperatures=temperature, format=format, speech=pair.target.speech)
      job = plan(pair, config, (), None, prefix="", **settings) | identity(pair)
      log, done = stack.enter_context(open_log(folder, f".specdec-transcribe.{format}", job))
      finished |= {x["output"]: x["sha256"] for x in done if (folder / x["output"]).exists()}
      if finished:
        notes.print(f"resuming a run with {len(finished)} finished files.")
    bar = stack.enter_context(Progress(disable=output_dir is None and sys.stdout.isatty()))
    task_id = bar.add_task("seconds of audio", total=None)
    for transcript in transcriber.run(read(), report):
      name, output, digest = opened.popleft()
      content = transcript.formatted(format)
      if output_dir is None:
        print(f"{name}:\n" * (format == "txt" and len(names) > 1) + content, end="", flush=True)
      else:
        with atomic_write(folder / output) as file:
          file.write(content)
        log.write(json_line({"output": output, "sha256": digest}))
        log.flush()
      totals.update(transcript.counts)
  if totals["rounds"]:
    notes.print(
      f"{totals['samples'] / SAMPLE_RATE:.1f} s of audio in {time.perf_counter() - since:.1f} s "
      f"with compilation, {totals['tokens'] / totals['rounds']:.2f} tokens per round."
    )
  if totals["failed"]:
    raise InputError(f"{totals['failed']} of {len(names)} audio files were not transcribed.")
