"""Apache Beam pipeline of the command `decode`, and its model handler for `RunInference`.

Only this module imports apache_beam, which the extra `beam` installs.
"""

import functools
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.metrics import Metrics
from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineResult

from specdec_jax.core.identity import require_same
from specdec_jax.data.text import decoded_lines
from specdec_jax.errors import InputError
from specdec_jax.files import records
from specdec_jax.files.job import Job, identity
from specdec_jax.pair import Pair


class TextBlock(NamedTuple):
  """Consecutive texts; `first`, a multiple of the batch size, is the index of the first text."""

  first: int
  sources: list[dict[str, Any]]


DecodeFn = Callable[[TextBlock], list[dict]]


class SpeculativeModelHandler(ModelHandler[TextBlock, list[dict], DecodeFn]):
  """Model handler for `RunInference` that decodes each `TextBlock` speculatively.

  The prediction for a block has the record of each output (`files.records`). Its random keys depend
  only on the seed and the index of the text, and texts of different blocks are not decoded
  together, so the outputs do not depend on how a runner divides the blocks into bundles. The
  counters `texts`, `tokens`, `rounds`, `draft_tokens` and `accepted` have the namespace 'specdec'.
  """

  def __init__(self, load_pair: Callable[[], Pair], *, job: Job | None = None, **arguments: Any):
    """Initialize the handler; each worker process calls the picklable `load_pair` once.

    `arguments` are those of `files.records.decode_records`. If `job` is given, a pair that is not
    the pair of this job raises InputError.
    """
    super().__init__(max_batch_size=1)
    self._load_pair, self._job, self._arguments = load_pair, job, arguments

  def load_model(self) -> DecodeFn:
    pair = self._load_pair()
    if self._job is not None:
      now = identity(pair)
      before = {name: self._job.get(name) for name in now}
      advice = "all workers need the same checkpoints"
      require_same(before, now, "The job is of a pair", advice)
    return functools.partial(_decode_block, pair, self._arguments)

  def run_inference(
    self, batch: Sequence[TextBlock], model: DecodeFn, inference_args: Any = None
  ) -> Iterator[list[dict]]:
    for block in batch:
      decoded = model(block)
      for name, count in records.count_records(decoded).items():
        Metrics.counter("specdec", name).inc(count)
      yield decoded


def _decode_block(pair: Pair, arguments: dict[str, Any], block: TextBlock) -> list[dict]:
  decoded = records.decode_records(pair, block.sources, first=block.first, **arguments)
  return [record for record, _ in decoded]


def decode_shards(
  handler: SpeculativeModelHandler,
  shards: Sequence[tuple[str, str, int]],
  runner: str,
  options: Sequence[str] = (),
) -> PipelineResult:
  """Run a pipeline that decodes shards and writes their records.

  Args:
    shards: for each shard, the path of its texts, the path of its records, and the index of its
      first text in the data set.
    options: options of the pipeline, such as '--direct_num_workers=2'.

  Raises:
    InputError: Beam has no such runner.
  """
  pipeline = _pipeline(runner, options)
  _ = (
    pipeline
    | beam.Create(shards)
    | beam.Reshuffle()
    | beam.MapTuple(_read_block)
    | RunInference(KeyedModelHandler(handler))
    | beam.MapTuple(write_records)
  )
  result = pipeline.run()
  result.wait_until_finish()
  return result


def on_worker(
  function: Callable[[], dict], folder: str, runner: str, options: Sequence[str] = ()
) -> dict:
  """Return the result of a function, a JSON object, that one worker calls.

  Args:
    folder: folder for a temporary file, in a file system that all workers can access.

  Raises:
    InputError: the function has raised it, or Beam has no such runner.
  """
  path = f"{folder}/outputs-job.jsonl.{uuid.uuid4().hex[:8]}.part"
  pipeline = _pipeline(runner, options)
  _ = pipeline | beam.Create([path]) | beam.Map(_write_result, function)
  pipeline.run().wait_until_finish()
  (result,) = read_records(path)
  FileSystems.delete([path])
  if "error" in result:
    raise InputError(result["error"])
  return result


def _write_result(path: str, function: Callable[[], dict]) -> None:
  try:
    result = function()
  except InputError as error:  # its type would not survive in every runner
    result = {"error": str(error)}
  write_records(path, [result])


def _pipeline(runner: str, options: Sequence[str]) -> beam.Pipeline:
  # With this option, DirectRunner runs the pipeline itself. Otherwise it would first download and
  # start Prism, which ignores the options --direct_*.
  flags = [*options, "--allow_unsafe_triggers"] if runner == "DirectRunner" else [*options]
  try:
    return beam.Pipeline(options=PipelineOptions(flags, runner=runner))
  except (ValueError, ImportError) as error:
    raise InputError(f"runner is {runner!r}: {str(error).rstrip('.')}.") from error


def _read_block(texts_path: str, records_path: str, first: int) -> tuple[str, TextBlock]:
  return records_path, TextBlock(first, [*read_records(texts_path)])


def read_sources(pattern: str) -> list[dict[str, Any]]:
  """Return the records of all files that match a pattern, in the order of their paths.

  The files are those of `files.records`, in any file system that Beam knows.

  Raises:
    InputError: no file matches, or a file is not one of sources.
  """
  # Beam finds no local files by a pattern without a folder.
  if not (paths := match(pattern if "/" in pattern else f"./{pattern}")):
    raise InputError(f"There is no text file at {pattern}.")
  return [
    record
    for path in paths
    for record in records.read_records(decoded_lines(read_lines(path), path), path)
  ]


def match(pattern: str) -> list[str]:
  """Return the paths of all files that match a pattern, sorted."""
  (found,) = FileSystems.match([pattern])
  return sorted(file.path for file in found.metadata_list)


def make_folder(path: str) -> None:
  """Create a folder if it does not exist."""
  if not FileSystems.exists(path):
    FileSystems.mkdirs(path)


def delete(pattern: str) -> None:
  """Delete all files that match a pattern."""
  FileSystems.delete(match(pattern))


def read_lines(path: str) -> Iterator[bytes]:
  """Yield the lines of a file."""
  with FileSystems.open(path) as file:
    yield from iter(file.readline, b"")


def read_records(path: str) -> Iterator[dict]:
  """Yield the records of a file of JSON Lines."""
  yield from map(json.loads, read_lines(path))


def write_records(path: str, lines: Iterable[dict]) -> None:
  """Write a file of JSON Lines under a temporary name, and rename it when it is complete.

  Each attempt has its own temporary file, because a runner may retry a bundle while the first
  attempt is still running.
  """
  part = f"{path}.{uuid.uuid4().hex[:8]}.part"
  write_file(part, lines)
  FileSystems.rename([part], [path])


def write_file(path: str, lines: Iterable[dict]) -> None:
  """Write a file of JSON Lines."""
  with FileSystems.create(path) as file:
    for line in lines:
      file.write(records.json_line(line).encode())
