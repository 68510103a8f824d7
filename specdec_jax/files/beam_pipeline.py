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

from specdec_jax.core.trees import AnyTree
from specdec_jax.data.text import iter_sources
from specdec_jax.errors import InputError
from specdec_jax.generate import outputs
from specdec_jax.pair import Pair
from specdec_jax.serve.lines import count_records, output_record


class TextBlock(NamedTuple):
  """Consecutive texts; `first`, a multiple of the batch size, is the index of the first text."""

  first: int
  sources: list[dict[str, Any]]


DecodeFn = Callable[[TextBlock], list[dict]]


class SpeculativeModelHandler(ModelHandler[TextBlock, list[dict], DecodeFn]):
  """Model handler for `RunInference` that decodes each `TextBlock` speculatively.

  The prediction for a block has a record for each text (`lines.output_record`). Its random keys
  depend only on the seed and the index of the text, and texts of different blocks are not decoded
  together, so the outputs do not depend on how a runner divides the blocks into bundles. The
  counters `texts`, `tokens`, `rounds`, `draft_tokens` and `accepted` have the namespace 'specdec'.
  """

  def __init__(
    self, load_pair: Callable[[], Pair], tree: AnyTree, batch_size: int = 8, **arguments: Any
  ):
    """Initialize the handler; each worker process calls the picklable `load_pair` once.

    `arguments` are other arguments of `generate.outputs`.
    """
    super().__init__(max_batch_size=1)
    self._load_pair, self._arguments = load_pair, dict(arguments, tree=tree, batch_size=batch_size)

  def load_model(self) -> DecodeFn:
    pair = self._load_pair()
    pair.require_batch_size(self._arguments["batch_size"])
    return functools.partial(_decode_block, pair, self._arguments)

  def run_inference(
    self, batch: Sequence[TextBlock], model: DecodeFn, inference_args: Any = None
  ) -> Iterator[list[dict]]:
    for block in batch:
      records = model(block)
      for name, count in count_records(records).items():
        Metrics.counter("specdec", name).inc(count)
      yield records


def _decode_block(pair: Pair, arguments: dict[str, Any], block: TextBlock) -> list[dict]:
  lines = [each["source"] if pair.can_decode(each["source"]) else None for each in block.sources]
  found = outputs(pair, lines, first=block.first, **arguments)
  numbered = enumerate(zip(block.sources, found, strict=True), block.first)
  return [output_record(index, source, output) for index, (source, output) in numbered]


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
  # With this option, DirectRunner runs the pipeline itself. Otherwise it would first download and
  # start Prism, which ignores the options --direct_*.
  flags = [*options, "--allow_unsafe_triggers"] if runner == "DirectRunner" else [*options]
  try:
    pipeline = beam.Pipeline(options=PipelineOptions(flags, runner=runner))
  except (ValueError, ImportError) as error:
    raise InputError(f"runner is {runner!r}: {str(error).rstrip('.')}.") from error
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


def _read_block(texts_path: str, records_path: str, first: int) -> tuple[str, TextBlock]:
  return records_path, TextBlock(first, [*read_records(texts_path)])


def read_texts(pattern: str, prefix: str = "") -> list[dict[str, Any]]:
  """Return the sources of all files that match a pattern, in the order of their paths.

  The files are those of `data.text.read_sources`, in any file system that Beam knows.

  Raises:
    InputError: no file matches, or a file cannot be read as texts.
  """
  texts: list[dict[str, Any]] = []
  # Beam finds no local files by a pattern without a folder.
  if not (paths := match(pattern if "/" in pattern else f"./{pattern}")):
    raise InputError(f"There is no text file at {pattern}.")
  for path in paths:
    with FileSystems.open(path) as file:
      texts += iter_sources(iter(file.readline, b""), path, prefix)
  return texts


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


def read_records(path: str) -> Iterator[dict]:
  """Yield the records of a file of JSON Lines."""
  with FileSystems.open(path) as file:
    yield from map(json.loads, iter(file.readline, b""))


def write_records(path: str, records: Iterable[dict]) -> None:
  """Write a file of JSON Lines under a temporary name, and rename it when it is complete.

  Each attempt has its own temporary file, because a runner may retry a bundle while the first
  attempt is still running.
  """
  part = f"{path}.{uuid.uuid4().hex[:8]}.part"
  with FileSystems.create(part) as file:
    for record in records:
      file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
  FileSystems.rename([part], [path])
