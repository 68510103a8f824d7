"""Target that writes and labels the texts on which drafts are trained."""

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.progress import track

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.core.decode import DecodeSettings, NullDraft, num_positions
from specdec_jax.core.identity import described, params_digest, require_same
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DraftSpec, Loaded, Model
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.generate import GenerateCall
from specdec_jax.load import load_with_layout
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.layout import for_device
from specdec_jax.models.partitioning import PartitionedModel, make_mesh, param_shardings
from specdec_jax.pair import Pair
from specdec_jax.train.batches import ParallelText
from specdec_jax.train.distillation import (
  encoded_lines,
  parallel_text,
  spliced_sentences,
  teacher_topk,
)

MAX_NEW_TOKENS = 96  # limit for each output
BATCH_SIZE = 64  # rows that are decoded together
NUM_SAMPLED_TEXTS = 512  # validation texts sampled from a decoder-only target


class Teacher(NamedTuple):
  """Target whose distributions drafts are trained on.

  `config` has the layout of `params`, which are sharded across `mesh`.
  """

  vocabulary: Vocabulary
  config: Config
  params: Any
  mesh: Mesh

  @property
  def pair(self) -> Pair:
    """The target, sharded across the mesh, as a pair without a draft."""
    model = PartitionedModel(model_of(self.config), self.mesh)
    return without_draft(model, self.params, self.vocabulary)

  @property
  def batch_sharding(self) -> NamedSharding:
    """Sharding of the rows of a batch."""
    return NamedSharding(self.mesh, PartitionSpec("data"))

  def distillation_data(
    self,
    path: str,
    data: str,
    sources: list[str] | None,
    targets: list[str],
    samples: int = 0,
    new_sources: int = 0,
    tail: bool = False,
    writer: Pair | None = None,
  ) -> ParallelText:
    """Return texts with the teacher's top-k distributions, from a file that is created if missing.

    The texts are the references, `samples` outputs for each source, and one output for each of
    `new_sources` spliced sentences (for a decoder-only target, `new_sources` texts sampled
    unconditionally). A file that was made with other arguments or models raises InputError.

    Args:
      data: folder of the text files.
      sources: names of the source files; None if the target is decoder-only.
      targets: names of the files with the translation of each source file, or of text files.
      tail: see `teacher_topk`.
      writer: pair whose target samples the outputs; by default that of the teacher.
    """
    file = pathlib.Path(path)
    contents = [pathlib.Path(data, name).read_bytes() for name in (*(sources or ()), *targets)]
    values: dict[str, Any] = dict(sources=sources, targets=targets, samples=samples)
    values |= dict(new_sources=new_sources, tail=tail)
    values |= dict(texts=params_digest([np.frombuffer(x, "u1") for x in contents]))
    values |= dict(vocabulary=self.vocabulary.fingerprint(), target=params_digest(self.params))
    made_from = described(values | {"writer": writer and params_digest(writer.target.params)})
    if file.exists():
      text = ParallelText.load(file)
      advice = "name another file, or delete this one"
      require_same(text.made_from, made_from, f"{file} was made", advice)
      return text
    encode = self.vocabulary.encode
    text = parallel_text(self.vocabulary, data, sources, targets)
    if sources:
      lines = [line for name in sources for line in read_lines(f"{data}/{name}")]
      new, most = [*map(encode, spliced_sentences(lines, new_sources))], self.config.num_positions
      new = [row for row in new if most is None or len(row) <= most]
    else:
      new = [encode("")] * new_sources
    for seed, prompts in enumerate([*[text.sources] * samples, new]):
      outputs = decode(writer or self.pair, prompts, Sampling(), seed)
      text = ParallelText([*text.sources, *prompts], [*text.targets, *outputs])
    topk = teacher_topk(
      self.config, self.params, text, tail=tail, batch_sharding=self.batch_sharding
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(text, teacher=topk, made_from=made_from).save(file)
    return ParallelText.load(file)

  def validation_pairs(self, data: str, valid_source: str | None) -> ParallelText:
    """Return validation sources and the target's argmax outputs for them.

    If `valid_source` is None, return texts that the target samples unconditionally.
    """
    sources, sampling = [self.vocabulary.encode("")] * NUM_SAMPLED_TEXTS, Sampling()
    if valid_source is not None:
      sources = encoded_lines(self.vocabulary, data, [valid_source])
      sampling = Sampling(temperature=0.0)
    return ParallelText(sources, decode(self.pair, sources, sampling, seed=-1))


def open_teacher(path: str, vocabulary: Vocabulary, model_parallel: int) -> Teacher:
  """Load a checkpoint of any format as a teacher that is sharded across this host's devices."""
  mesh = make_mesh(model_parallel)
  shardings = functools.partial(param_shardings, mesh=mesh)
  layout = for_device(kernels="xla")
  model, params = load_with_layout("target", open_checkpoint(path), vocabulary, layout, shardings)
  return Teacher(vocabulary, model.config, params, mesh)


def without_draft(model: Model, params: Any, vocabulary: Vocabulary) -> Pair:
  """Return a pair that can only decode autoregressively."""
  draft = DraftSpec("none", lambda *_: NullDraft())
  return Pair(Loaded("model", model, params, vocabulary), draft)


def decode(
  pair: Pair,
  sources: list[list[int]],
  sampling: Sampling = Sampling(temperature=0.0),
  seed: int = 0,
) -> list[list[int]]:
  """Decode sources without a draft; return the (at most MAX_NEW_TOKENS) ids of each output."""
  limit = min(MAX_NEW_TOKENS, num_positions(pair.target.model) or MAX_NEW_TOKENS)
  call = GenerateCall.of(pair, DecodeSettings(sampling, max_new_tokens=limit), chain(0))
  found = call.decode(sources, [*range(len(sources))], None, size=BATCH_SIZE, seed=seed)
  shown = track(found, "decoding", len(sources), transient=True)
  return [output.tokens.tolist() for (output,) in shown]
