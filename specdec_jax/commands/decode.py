"""Decoding of a data set by an Apache Beam pipeline, on any runner of Beam.

The outputs are written in shards. A shard has the records of consecutive texts, which do not depend
on the runner or on its number of workers.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gin

from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.trees import AnyTree, Tree
from specdec_jax.errors import InputError, require_count, require_seed, shown
from specdec_jax.generate import chosen_tree, generation_config
from specdec_jax.measure.calibrate import given_tree
from specdec_jax.pair import Pair
from specdec_jax.serve.lines import count_records


class Macro:
  """Macro of the gin configuration, as a picklable function that returns its value.

  Another process parses the configuration when it first calls the function. The `repr` has all
  bindings that the value depends on.
  """

  def __init__(self, name: str):
    self._reference, self._config = f"{name}/gin.macro", gin.config_str()
    self._bindings: dict[str, dict] = {}
    references = [self._reference]
    for reference in references:
      if reference not in self._bindings:
        found = gin.get_bindings(reference, resolve_references=False)
        self._bindings[reference] = {key: repr(value) for key, value in sorted(found.items())}
        references += [each.scoped_selector for each in gin.config.iterate_references(found)]

  def __call__(self) -> Any:
    if not gin.config_is_locked():  # this process has not parsed the gin files
      gin.parse_config(self._config)
    return gin.get_configurable(self._reference)()

  def __repr__(self) -> str:
    return repr(self._bindings)


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

  The shards are `outputs-00000-of-00008.jsonl` and so on, in the order of the texts. They have the
  fields of `lines.output_record`. A text that is longer than the pair's limit is truncated.
  The output of an empty text is empty unless the target is decoder-only.

  The file `run.json` describes the run. If a run was interrupted, the same command decodes the
  texts of the missing shards.

  Args:
    load_pair: picklable function that returns the pair. Each worker process calls it once. Its
      `repr` identifies the pair in `run.json`.
    texts: texts, or the path of a text file or a .jsonl file (`text.read_sources`), or a pattern of
      such paths, as in 'gs://bucket/texts-*.jsonl.gz'.
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
    gamma: draft tokens per round; 0 for autoregressive decoding; 'auto' chooses the fastest on this
      machine, once for all workers.
    batch_size: number of texts that a worker decodes together.
    lenience: lenience l of Appendix A.5; 1 is exact.
    tree: parents of a tree of draft tokens (`trees.Tree`), instead of a chain of gamma; 'auto'
      chooses the fastest tree or chain on this machine, once for all workers.

  Raises:
    InputError: an argument is invalid, Apache Beam is not installed, or the folder has outputs of a
      run with different settings.
  """
  require_seed(seed)
  generation = generation or GenerationConfig()
  for name in ("num_beams", "num_return_sequences"):
    if (getattr(generation, name) or 1) > 1:
      raise InputError(f"{name} is {getattr(generation, name)}, and decode supports 1.")
  counts = dict(batch_size=batch_size, num_shards=num_shards)
  for name, count in (counts | ({} if num_texts is None else {"num_texts": num_texts})).items():
    require_count(name, count)
  fixed_tree = given_tree(gamma, tree)
  try:
    from specdec_jax.serve import beam_pipeline
  except ModuleNotFoundError as error:
    if error.name != "apache_beam":
      raise
    raise InputError(
      "decode needs Apache Beam, which is not installed; run pip install 'specdec_jax[beam]' (in a "
      "checkout pip install -e '.[beam]'), or use translate on one host."
    ) from None
  folder = output_dir.rstrip("/") or output_dir or "."
  run_file = f"{folder}/run.json"
  finished = beam_pipeline.match(f"{folder}/outputs-*.jsonl")
  if isinstance(texts, str):
    sources = beam_pipeline.read_texts(texts, prefix)[:num_texts]
  else:
    sources = [{"source": text} for text in texts[:num_texts]]
  lines = [each["source"] for each in sources]
  description = dict(
    pair=repr(load_pair),
    **generation.given(),
    gamma=gamma,
    tree=tree if tree in (None, "auto") else [*tree],
    lenience=lenience,
    batch_size=batch_size,
    seed=seed,
    num_shards=num_shards,
    num_texts=len(sources),
    inputs=hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12],
  )
  chosen: AnyTree | None = fixed_tree
  if finished:
    (run,) = beam_pipeline.read_records(run_file)
    for name in dict.fromkeys((*description, *run["settings"])):
      value = description.get(name)
      if (before := run["settings"].get(name)) != value:
        raise InputError(
          f"{run_file} is of a run with {name} {shown(before)}, and this one has "
          f"{shown(value)}; choose another OUTPUT_DIR, or delete that folder."
        )
    chosen = Tree(run["parents"], greedy_siblings=run.get("greedy_siblings", False))
  else:  # a run without outputs does not bind the next run
    if chosen is None:
      pair = load_pair()
      config, _ = generation_config(pair, None, generation.given())
      texts = [*filter(pair.can_decode, lines)]
      chosen = chosen_tree(pair, texts, gamma, tree, config, batch_size, seed, lenience, say=print)
    assert isinstance(chosen, Tree)  # `tree` has parents or is "auto"
    beam_pipeline.make_folder(folder)
    run = dict(
      settings=description, parents=[*chosen.parents], greedy_siblings=chosen.greedy_siblings
    )
    beam_pipeline.write_records(run_file, [run])
  num_batches = -(-len(sources) // batch_size)
  starts = [num_batches * i // num_shards * batch_size for i in range(num_shards)]
  paths = [f"{folder}/outputs-{i:05}-of-{num_shards:05}.jsonl" for i in range(num_shards)]
  missing = []
  for path, (first, stop) in zip(paths, itertools.pairwise([*starts, len(sources)])):
    if path not in finished:
      missing.append((f"{path}.texts.part", path, first))
      beam_pipeline.write_records(missing[-1][0], sources[first:stop])
  if missing:
    handler = beam_pipeline.SpeculativeModelHandler(
      load_pair, chosen, batch_size, seed=seed, lenience=lenience, **generation.given()
    )
    beam_pipeline.decode_shards(handler, missing, runner, pipeline_options)
  beam_pipeline.delete(f"{folder}/outputs-*.jsonl.*.part")
  totals = count_records(record for path in paths for record in beam_pipeline.read_records(path))
  print(
    f"{totals['texts']} texts, {totals['tokens']} tokens, "
    f"{totals['tokens'] / max(1, totals['rounds']):.2f} tokens per target pass, acceptance rate "
    f"{totals['accepted'] / max(1, totals['draft_tokens']):.3f}: {folder}"
  )
