"""What is learnt from a target: texts, its own outputs, and what it thinks of each token."""

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.progress import track

from specdec_jax.core.decode import autoregressive_decode
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.types import Model
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import Vocabulary, padded
from specdec_jax.models.families import Config, model_of, module_of
from specdec_jax.pairs.load import load_for
from specdec_jax.partitioning import PartitionedModel, make_mesh, param_shardings
from specdec_jax.training.batches import Pairs
from specdec_jax.training.distillation import load_pairs, recombined, save_pairs, teacher_opinions


class Teacher(NamedTuple):
  """A target as those that learn from it see it.

  Attributes:
    words: its vocabulary. config: its shape, laid out for decoding. params: its parameters.
    mesh: of the devices that it is asked on.
  """

  words: Vocabulary
  config: Config
  params: Any
  mesh: Mesh

  def lessons(
    self,
    path: pathlib.Path,
    data: str,
    sources: list[str] | None,
    targets: list[str],
    samples: int,
    new_sources: int,
    tail: bool = False,
    writer: tuple[Model, Any] | None = None,
  ) -> Pairs:
    """Texts with its opinions, as `train.train_draft` says: from a file, made if there is none.

    What is drawn, `writer` draws: a model with its parameters; by default the target itself.
    """
    if not path.exists():
      words = self.words
      pairs = text_pairs(words, data, sources, targets)
      asked = [pairs.sources] * samples
      if sources:
        lines = [line for file in sources for line in read_lines(f"{data}/{file}")]
        asked.append([words.encode(line) for line in recombined(lines, new_sources)])
      else:
        asked.append([words.encode("")] * new_sources)
      model, params = writer or (self.model, self.params)
      for seed, texts in enumerate(asked):
        drawn = model_outputs(model, params, texts, words.eos_id, sampling=Sampling(), seed=seed)
        pairs = Pairs([*pairs.sources, *texts], [*pairs.targets, *drawn])
      rows = NamedSharding(self.mesh, PartitionSpec("data"))
      of_target = module_of(self.config), self.params
      opinions = teacher_opinions(*of_target, pairs, tail=tail, rows=rows)
      path.parent.mkdir(parents=True, exist_ok=True)
      save_pairs(path, dataclasses.replace(pairs, teacher=opinions))
    return load_pairs(path)

  def checks(self, data: str, valid_source: str | None) -> Pairs:
    """Validation texts with what it makes of them by argmax, or 512 texts that it draws."""
    if valid_source is None:
      texts = [self.words.encode("")] * 512
      return Pairs(texts, self.outputs(texts, Sampling()))
    texts = encoded(self.words, data, [valid_source])
    return Pairs(texts, self.outputs(texts, Sampling(temperature=0.0)))

  @property
  def model(self) -> Model:
    """It, as the loops know it."""
    return PartitionedModel(model_of(self.config), self.mesh)

  def outputs(self, texts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    eos_id = self.words.eos_id
    return model_outputs(self.model, self.params, texts, eos_id, sampling=sampling, seed=-1)


def open_teacher(path: str, words: Vocabulary, model_parallel: int) -> Teacher:
  """A checkpoint of any kind, over this host's devices as `TrainSettings` has it."""
  mesh = make_mesh(model_parallel)
  shardings = functools.partial(param_shardings, mesh=mesh)
  return Teacher(words, *load_for("target", path, words, shardings=shardings), mesh)


def text_pairs(
  words: Vocabulary, data: str, sources: list[str] | None, targets: list[str]
) -> Pairs:
  """Texts with their sources, or with nothing."""
  texts, nothing = encoded(words, data, targets), words.encode("")
  return Pairs(encoded(words, data, sources) if sources else [nothing] * len(texts), texts)


def encoded(words: Vocabulary, data: str, files: list[str]) -> list[list[int]]:
  return [words.encode(line) for file in files for line in read_lines(f"{data}/{file}")]


def model_outputs(
  model: Model,
  params,
  sources: list[list[int]],
  eos_id: int | None = None,
  batch_size: int = 64,
  sampling: Sampling = Sampling(temperature=0.0),
  seed: int = 0,
) -> list[list[int]]:
  """A model's own outputs for encoded sources, as token ids, in order; argmax unless told."""
  order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
  outputs: list[list[int]] = [[]] * len(sources)
  for at in track(range(0, len(order), batch_size), "decoding", transient=True):
    chunk = order[at : at + batch_size]
    chunk += [chunk[-1]] * (batch_size - len(chunk))  # one shape a length, also at the end
    width = -(-max(len(sources[i]) for i in chunk) // 16) * 16
    decoded = autoregressive_decode(
      model,
      params,
      jnp.asarray(padded([sources[i] for i in chunk], width)),
      row_keys(seed, at, batch_size),
      max_new_tokens=96,
      sampling=sampling,
      eos_id=eos_id,
    )
    for i, row, length in zip(chunk, np.asarray(decoded.tokens), np.asarray(decoded.lengths)):
      outputs[i] = row[:length].tolist()
  return outputs
