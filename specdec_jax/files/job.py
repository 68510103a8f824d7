"""Jobs of commands that resume: descriptions of everything that their outputs depend on.

A file next to the outputs has their job as a line of JSON. A later run adds to these outputs only
if it has the same job.

Weights are identified by a hash of the loaded parameters, not by the paths, sizes or times of
files: a pair may come from any function, and a file may be replaced at the same path. Whoever loads
the pair anyway computes the hash. For `decode` these are the workers, so that the process that
starts the pipeline needs neither memory for the pair nor an accelerator.
"""

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.identity import described, params_digest, require_same
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, chain, given_tree
from specdec_jax.data.text import open_file
from specdec_jax.errors import InputError, require_text
from specdec_jax.files.records import Record, json_line, source_of
from specdec_jax.generate import chosen_tree
from specdec_jax.pair import Pair

Job = dict[str, Any]  # a JSON object


def plan(
  pair: Pair,
  config: GenerationConfig,
  sample: Sequence[Record],
  earlier: Job | None,
  *,
  gamma: int | str | None,
  tree: Sequence[int] | str | None,
  batch_size: int,
  seed: int,
  prefix: str,
  lenience: float = 1.0,
  **others: Any,
) -> Job:
  """Return the job of a run, but for `identity`, with the tree of draft tokens (`tree_of`).

  Args:
    config: settings of generation, those of the checkpoint included.
    sample: sources that a calibration for 'auto' may decode.
    earlier: job of the run that is resumed, whose tree is used.
    others: other arguments that outputs depend on, and a hash of the sources.
  """
  require_text("prefix", prefix)
  if (config.num_return_sequences or 1) > 1:
    raise InputError("A line has one output; give num_return_sequences=1.")
  reasons: list[str] = []
  shape: AnyTree
  if earlier:
    shape, reasons = tree_of(earlier), [earlier["reason"]]
  elif (config.num_beams or 1) > 1:  # the steps that the draft searches ahead
    shape = given_tree(2 if gamma is None else gamma, None) or chain(1)
  else:
    texts = [*filter(pair.can_decode, (source_of(record, prefix) for record in sample))]
    shape = chosen_tree(
      pair, texts, gamma, tree, config, batch_size, seed, lenience, reasons.append
    )
  assert isinstance(shape, Tree)  # `tree` has parents or is 'auto'
  draft = pair.draft.build(config.sampling(), shape) if shape.num_draft_tokens else None
  arguments = dict(gamma=gamma, tree=tree, batch_size=batch_size, seed=seed, prefix=prefix)
  job = described({**arguments, "lenience": lenience, **others, **config.given(), "draft": draft})
  return job | dict(
    shape=shape.num_draft_tokens if shape.is_chain else [*shape.parents],
    greedy_siblings=shape.greedy_siblings,
    reason=" ".join(reasons),
  )


def tree_of(job: Job) -> Tree:
  """Return the tree of draft tokens of a job."""
  shape = job["shape"]
  return chain(shape) if isinstance(shape, int) else Tree(shape, (), job["greedy_siblings"])


def identity(pair: Pair) -> Job:
  """Return the part of a job that identifies a pair."""
  words = pair.vocabulary
  values = dict(
    dtype=pair.dtype,
    kernels=pair.kernels,
    max_source_tokens=pair.max_source_tokens,
    vocabulary=f"{words.fingerprint()} {words.encode('')}",  # '' has the source language's token
    verifier=pair.verifier_for(Sampling()),
    target=pair.target.model,
    target_weights=params_digest(pair.target.params),
    draft_weights=params_digest(pair.draft.params),
  )
  return described(values)


def records_digest(records: Iterable[Record]) -> str:
  """Return a hash of records, all of their fields included."""
  digest = hashlib.sha256()
  for record in records:
    digest.update(json_line(record).encode())
  return digest.hexdigest()[:16]


def read_job(line: bytes, path: str) -> Job:
  """Return the job that the first line of a file has, or raise InputError if it has none."""
  with contextlib.suppress(ValueError, KeyError, TypeError):
    job = json.loads(line)
    tree_of(job)
    return job
  advice = "delete the file, or choose another output"
  raise InputError(f"{path} does not begin with the job of a run of this version; {advice}.")


@contextlib.contextmanager
def exclusive(path: str, output: str) -> Iterator[IO[str]]:
  """Open a local file to append to it, or raise InputError if another run has it open like this.

  The run writes to `output`.
  """
  with open(path, "a", encoding="utf-8") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise InputError(f"another run is writing to {output}; wait for it to end.") from None
    except OSError:  # the file system has no locks
      pass
    yield file


def _read_lines(file: IO[str], path: str) -> tuple[Job | None, bytes]:
  """Return the job in a file that is open, and the lines after it; remove an incomplete line."""
  content = pathlib.Path(path).read_bytes()
  header, _, lines = content[: content.rfind(b"\n") + 1].partition(b"\n")
  earlier = read_job(header, path) if content else None
  file.truncate(len(header) + 1 + len(lines) if lines else 0)
  return earlier, lines


@contextlib.contextmanager
def open_log(folder: pathlib.Path, name: str, job: Job) -> Iterator[tuple[IO[str], list[Record]]]:
  """Open the log of a job that writes several files to a folder, and read its records so far.

  Raises:
    InputError: another run is writing to the folder, or the log has records of another job.
  """
  path = str(folder / name)
  with exclusive(path, str(folder)) as file:
    earlier, lines = _read_lines(file, path)
    if lines:
      advice = f"choose another folder, or delete {path} to write the files again"
      require_same(earlier or {}, job, f"{folder} has files of an earlier run", advice)
    else:
      file.write(json_line(job))
    yield file, [json.loads(line) for line in lines.splitlines()]


class OutputFile(NamedTuple):
  """Output that is open for writing, and the number of lines that it has of an earlier run."""

  file: IO[str]
  job: Job
  num_done: int = 0


@contextlib.contextmanager
def open_output(
  path: str, pair: Pair, planned: Callable[[Job | None], Job], is_resumable: bool
) -> Iterator[OutputFile]:
  """Open an output; '-' is standard output.

  A file is written to PATH.part, whose first line is the job. It becomes PATH when the context
  exits, and is compressed if PATH ends in .gz. If `is_resumable` is False, or the output is a
  device or a pipe, it is written directly.

  Args:
    planned: function of the job of the interrupted run, if any, that returns the result of `plan`.

  Raises:
    InputError: another run is writing to the file, or PATH.part is not of a run of this job.
  """
  is_special = os.path.exists(path) and not os.path.isfile(path)
  if path == "-" or is_special or not is_resumable or not os.path.basename(path):
    job = planned(None)  # an invalid run does not replace a file
    with contextlib.nullcontext(sys.stdout) if path == "-" else open_file(path, "wt") as file:
      yield OutputFile(file, job)
    return
  part = pathlib.Path(f"{os.path.realpath(path)}.part")
  with exclusive(str(part), path) as file:
    earlier, lines = _read_lines(file, str(part))
    try:
      job = planned(earlier if lines else None) | identity(pair)
      if lines:
        advice = "use the same one to resume it, or delete the file"
        require_same(earlier or {}, job, f"{part} has the lines of an interrupted run", advice)
      else:
        file.write(json_line(job))
      yield OutputFile(file, job, lines.count(b"\n"))
    except BaseException:
      file.flush()
      if part.read_bytes().count(b"\n") < 2:  # there is nothing to resume
        part.unlink()
      raise
    file.flush()
    decoded = part.read_bytes().partition(b"\n")[2]
    with atomic_write(path, "wb") as complete:
      complete.write(gzip.compress(decoded) if path.lower().endswith(".gz") else decoded)
    part.unlink()
