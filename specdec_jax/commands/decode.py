"""Decoding of a data set by an Apache Beam pipeline, on any runner of Beam.

The outputs are written in shards. A shard has the records of consecutive texts, which do not depend
on the runner or on its number of workers.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.identity import require_same
from specdec_jax.core.trees import given_tree
from specdec_jax.errors import InputError, require_count, require_seed, require_text
from specdec_jax.files.job import (
  Job,
  exclusive,
  identity,
  plan,
  read_job,
  records_digest,
  tree_of,
)
from specdec_jax.files.records import count_records, read_records
from specdec_jax.generate import generation_config
from specdec_jax.pair import Pair

CALIBRATION_TEXTS = 512  # number of texts from which a calibration for 'auto' chooses


def decode(
  load_pair: Callable[[], Pair],
  texts: str | Sequence[str],
  output_dir: str,
  runner: str = "DirectRunner",
  pipeline_options: Sequence[str] = (),
  num_shards: int = 8,
  prefix: str = "",
  num_texts: int | None = None,
  generation: GenerationConfig | None = None,
  gamma: int | Literal["auto"] = 5,
  batch_size: int = 8,
  seed: int = 0,
  lenience: float = 1.0,
  tree: Sequence[int] | Literal["auto"] | None = None,
) -> None:
  """Decode texts with an Apache Beam pipeline, and write the outputs in shards of JSON Lines.

  The shards are `outputs-00000-of-00008.jsonl` and so on, in the order of the texts, with the
  records of `files.records`. A text that is longer than the pair's limit is truncated. The output
  of an empty text is empty unless the target is decoder-only.

  The file `run.json` has the job of the run (`files.job`). If a run was interrupted, the same
  command decodes the texts of the missing shards. One worker loads the pair first, describes the
  job and chooses the tree of 'auto'. Every worker compares the pair that it loads with the job.

  Args:
    load_pair: picklable function that returns the pair. Workers call it; this process does not.
    texts: texts, or the path of a file of sources (`files.records`), or a pattern of such paths, as
      in 'gs://bucket/texts-*.jsonl.gz'.
    output_dir: folder of the outputs, in a file system that all workers can access.
    runner: name of a runner of Beam, such as 'FlinkRunner' or 'DataflowRunner'.
    pipeline_options: options of Beam and of the runner, such as '--direct_num_workers=2'.
    num_shards: number of output files. A worker decodes one shard at a time, and an interrupted
      shard is decoded again from its first text.
    prefix: text prepended to each line that is not blank, such as the prefix of a T5 task. It is
      not prepended if `texts` is a list.
    num_texts: maximum number of texts to decode; None for all.
    generation: settings of generation, without beams and with one output per text; its fields are
      flags. They take precedence over those of the checkpoint.
    gamma: draft tokens per round; 0 for autoregressive decoding; 'auto' chooses the fastest on a
      worker, once for all of them.
    batch_size: number of texts that a worker decodes together.
    lenience: lenience l of Appendix A.5; 1 is exact.
    tree: parents of a tree of draft tokens (`trees.Tree`), instead of a chain of gamma; 'auto'
      chooses the fastest tree or chain on a worker, once for all of them.

  Raises:
    InputError: an argument is invalid, Apache Beam is not installed, the folder has outputs of
      another job, or it is local and another run is writing to it.
  """
  require_seed(seed)
  require_text("prefix", prefix)
  generation = generation or GenerationConfig()
  counts = dict(batch_size=batch_size, num_shards=num_shards)
  for name, count in (counts | ({} if num_texts is None else {"num_texts": num_texts})).items():
    require_count(name, count)
  given_tree(gamma, tree)
  try:
    from specdec_jax.files import beam_pipeline
  except ModuleNotFoundError as error:
    if error.name != "apache_beam":
      raise
    raise InputError(
      "decode needs Apache Beam, which is not installed; run pip install 'specdec_jax[beam]' (in a "
      "checkout pip install -e '.[beam]'), or use translate on one host."
    ) from None
  folder = output_dir.rstrip("/") or output_dir or "."
  run_file = f"{folder}/run.json"
  if isinstance(texts, str):
    records = beam_pipeline.read_sources(texts)[:num_texts]
  else:
    records, prefix = [*read_records(texts[:num_texts], "texts")], ""
  arguments: dict[str, Any] = dict(gamma=gamma, tree=tree, batch_size=batch_size, seed=seed)
  arguments |= dict(prefix=prefix, lenience=lenience)
  others: dict[str, Any] = dict(num_shards=num_shards, sources=records_digest(records))
  sample = records[:: len(records) // CALIBRATION_TEXTS + 1] if "auto" in (gamma, tree) else []
  beam_pipeline.make_folder(folder)
  with exclusive(run_file, folder) if os.path.isdir(folder) else contextlib.nullcontext():
    finished = beam_pipeline.match(f"{folder}/outputs-*.jsonl")
    earlier = None  # a run without outputs does not bind the next run
    if finished:
      earlier = read_job(next(beam_pipeline.read_lines(run_file), b""), run_file)

    def planned() -> Job:
      pair = load_pair()
      config, _ = generation_config(pair, None, generation.given())
      if (config.num_beams or 1) > 1:
        raise InputError(f"num_beams is {config.num_beams}, and decode supports 1.")
      return plan(pair, config, sample, earlier, **arguments, **others) | identity(pair)

    job = beam_pipeline.on_worker(planned, folder, runner, pipeline_options)
    if earlier:
      advice = "choose another OUTPUT_DIR, or delete that folder"
      require_same(earlier, job, f"{run_file} is of a run", advice)
    else:
      beam_pipeline.write_file(run_file, [job])  # not renamed: the lock is on this file
    if job["reason"]:
      print(job["reason"])
    num_batches = -(-len(records) // batch_size)
    starts = [num_batches * i // num_shards * batch_size for i in range(num_shards)]
    paths = [f"{folder}/outputs-{i:05}-of-{num_shards:05}.jsonl" for i in range(num_shards)]
    missing = []
    for path, (first, stop) in zip(paths, itertools.pairwise([*starts, len(records)])):
      if path not in finished:
        missing.append((f"{path}.texts.part", path, first))
        beam_pipeline.write_records(missing[-1][0], records[first:stop])
    if missing:
      arguments |= dict(gamma=None, tree=tree_of(job), **generation.given())
      handler = beam_pipeline.SpeculativeModelHandler(load_pair, job=job, **arguments)
      beam_pipeline.decode_shards(handler, missing, runner, pipeline_options)
    beam_pipeline.delete(f"{folder}/outputs-*.jsonl.*.part")
  totals = count_records(record for path in paths for record in beam_pipeline.read_records(path))
  print(
    f"{totals['texts']} texts, {totals['tokens']} tokens, "
    f"{totals['tokens'] / max(1, totals['rounds']):.2f} tokens per target pass, acceptance rate "
    f"{totals['accepted'] / max(1, totals['draft_tokens']):.3f}: {folder}"
  )
