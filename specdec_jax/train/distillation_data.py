"""Distillation data: texts, outputs of a target, and the target's top-k distribution per token."""

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.progress import track

from specdec_jax.beams import BeamSearcher, NullBeamDraft
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.types import DecodeResult, Model, Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import PAD_ID, Vocabulary, padded
from specdec_jax.load import load_model
from specdec_jax.models.families import Config, model_of, module_of
from specdec_jax.models.partitioning import PartitionedModel, make_mesh, param_shardings
from specdec_jax.train.batches import ParallelText
from specdec_jax.train.distillation import (
  load_parallel_text,
  save_parallel_text,
  spliced_sentences,
  teacher_topk,
)

MAX_NEW_TOKENS = 96  # limit for each output
BATCH_SIZE = 64  # rows that are decoded together
NUM_SAMPLED_TEXTS = 512  # validation texts sampled from a decoder-only target


@dataclasses.dataclass(frozen=True)
class TrainingTexts:
  """Texts that a draft is trained on, before a teacher labels them.

  Attributes:
    data: folder of the text files.
    sources: names of the source files; None if the target is decoder-only.
    targets: names of the files with the translation of each source file. For a decoder-only target,
      names of text files.
    samples: number of outputs to sample for each source.
    new_sources: number of additional sources (`spliced_sentences`). One output is sampled for each
      of them. For a decoder-only target, number of texts to sample unconditionally.
  """

  data: str
  sources: list[str] | None
  targets: list[str]
  samples: int = 0
  new_sources: int = 0


class Teacher(NamedTuple):
  """Target whose distributions drafts are trained on.

  Attributes:
    vocabulary: vocabulary of the target.
    config: configuration of the target, with the layout that its parameters have.
    params: parameters of the target.
    mesh: mesh of the devices that the target runs on.
  """

  vocabulary: Vocabulary
  config: Config
  params: Any
  mesh: Mesh

  def distillation_data(
    self,
    path: pathlib.Path,
    texts: TrainingTexts,
    tail: bool = False,
    writer: tuple[Model, Any] | None = None,
  ) -> ParallelText:
    """Return texts with the teacher's top-k distributions, from a file that is created if missing.

    If the file exists, it is read whatever the other arguments are.

    Args:
      path: path of the file.
      texts: texts to label.
      tail: whether to append each token of a text to the teacher's top-k tokens at its position
        (`teacher_topk`).
      writer: model and parameters that sample the outputs; by default those of the teacher.
    """
    if not path.exists():
      text = self._with_samples(texts, writer or (self.model, self.params))
      topk = teacher_topk(
        module_of(self.config),
        self.params,
        text,
        tail=tail,
        batch_sharding=self.batch_sharding,
      )
      path.parent.mkdir(parents=True, exist_ok=True)
      save_parallel_text(path, dataclasses.replace(text, teacher=topk))
    return load_parallel_text(path)

  def beam_search_text(
    self, path: pathlib.Path, text: ParallelText, num_beams: int
  ) -> ParallelText:
    """Return sources with the outputs of beam search, from a file that is created if missing.

    This is sequence-level distillation (Kim and Rush, 2016). If the file exists, it is read
    whatever the other arguments are.

    Args:
      path: path of the file.
      text: pairs, of which only the sources are used.
      num_beams: number of beams of the search.
    """
    if not path.exists():
      eos_id = self.vocabulary.eos_id
      outputs = model_outputs(
        self.model,
        self.params,
        text.sources,
        eos_id,
        num_beams=num_beams,
        pad_id=self.vocabulary.pad_id,
      )
      path.parent.mkdir(parents=True, exist_ok=True)
      save_parallel_text(path, ParallelText(text.sources, outputs))
    return load_parallel_text(path)

  def _with_samples(self, texts: TrainingTexts, writer: tuple[Model, Any]) -> ParallelText:
    """Return the texts, followed by the outputs that `writer` samples."""
    vocabulary = self.vocabulary
    text = parallel_text(vocabulary, texts.data, texts.sources, texts.targets)
    if texts.sources:
      lines = [line for file in texts.sources for line in read_lines(f"{texts.data}/{file}")]
      new_sources = map(vocabulary.encode, spliced_sentences(lines, texts.new_sources))
    else:
      new_sources = [vocabulary.encode("")] * texts.new_sources
    model, params = writer
    for seed, sources in enumerate([*[text.sources] * texts.samples, [*new_sources]]):
      outputs = model_outputs(
        model,
        params,
        sources,
        vocabulary.eos_id,
        sampling=Sampling(),
        seed=seed,
        pad_id=vocabulary.pad_id,
      )
      text = ParallelText([*text.sources, *sources], [*text.targets, *outputs])
    return text

  def validation_pairs(self, data: str, valid_source: str | None) -> ParallelText:
    """Return validation sources and the target's argmax outputs for them.

    If `valid_source` is None, return texts that the target samples unconditionally.
    """
    if valid_source is None:
      sources = [self.vocabulary.encode("")] * NUM_SAMPLED_TEXTS
      return ParallelText(sources, self._outputs(sources, Sampling()))
    sources = encoded_lines(self.vocabulary, data, [valid_source])
    return ParallelText(sources, self._outputs(sources, Sampling(temperature=0.0)))

  @property
  def batch_sharding(self) -> NamedSharding:
    """Sharding of the rows of a batch."""
    return NamedSharding(self.mesh, PartitionSpec("data"))

  @property
  def model(self) -> Model:
    """The target as a `Model` that is sharded across the mesh."""
    return PartitionedModel(model_of(self.config), self.mesh)

  def _outputs(self, sources: list[list[int]], sampling: Sampling) -> list[list[int]]:
    eos_id = self.vocabulary.eos_id
    return model_outputs(
      self.model,
      self.params,
      sources,
      eos_id,
      sampling=sampling,
      seed=-1,
      pad_id=self.vocabulary.pad_id,
    )


def open_teacher(path: str, vocabulary: Vocabulary, model_parallel: int) -> Teacher:
  """Load a checkpoint of any format as a teacher that is sharded across the devices of this host.

  Each copy of the model is sharded across `model_parallel` devices, as in `TrainSettings`.
  """
  mesh = make_mesh(model_parallel)
  shardings = functools.partial(param_shardings, mesh=mesh)
  model, params = load_model("target", open_checkpoint(path), vocabulary, shardings=shardings)
  return Teacher(vocabulary, model.config, params, mesh)


def parallel_text(
  vocabulary: Vocabulary,
  data: str,
  sources: list[str] | None,
  targets: list[str],
  max_source_tokens: int | None = None,
) -> ParallelText:
  """Read and encode parallel text files; if `sources` is None, each source is the empty text.

  Sources with more than `max_source_tokens` tokens are truncated, but keep their EOS.
  """
  encoded_targets = encoded_lines(vocabulary, data, targets)
  if sources:
    rows, most = encoded_lines(vocabulary, data, sources), max_source_tokens
    if most is not None:
      rows = [row if len(row) <= most else row[: most - 1] + row[-1:] for row in rows]
    return ParallelText(rows, encoded_targets)
  return ParallelText([vocabulary.encode("")] * len(encoded_targets), encoded_targets)


def encoded_lines(vocabulary: Vocabulary, data: str, files: list[str]) -> list[list[int]]:
  """Read the lines of text files in folder `data` and encode them."""
  return [vocabulary.encode(line) for file in files for line in read_lines(f"{data}/{file}")]


def model_outputs(
  model: Model,
  params,
  sources: list[list[int]],
  eos_id: int | None = None,
  sampling: Sampling = Sampling(temperature=0.0),
  seed: int = 0,
  num_beams: int | None = None,
  pad_id: int = PAD_ID,
) -> list[list[int]]:
  """Decode sources without a draft; return the (at most MAX_NEW_TOKENS) ids of each output.

  With `num_beams`, the output is the best text of a beam search, and nothing is sampled.
  """
  order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
  outputs: list[list[int]] = [[]] * len(sources)
  decoder = Decoder(model, NullDraft(), TokenVerifier(sampling), eos_id)

  def decode(prompt: Array, rng: Array) -> DecodeResult:
    if num_beams is None:
      return decoder.run(Params(params), prompt, rng, max_new_tokens=MAX_NEW_TOKENS)
    searcher = BeamSearcher(model, NullBeamDraft(), num_beams, eos_id=eos_id)
    return searcher.run(Params(params), prompt, max_new_tokens=MAX_NEW_TOKENS).best()

  for start in track(range(0, len(order), BATCH_SIZE), "decoding", transient=True):
    indices = order[start : start + BATCH_SIZE]
    # The last batch is filled up, so that one program per prompt length is compiled.
    indices += [indices[-1]] * (BATCH_SIZE - len(indices))
    width = -(-max(len(sources[i]) for i in indices) // 16) * 16
    prompt = jnp.asarray(padded([sources[i] for i in indices], width, pad_id))
    result = decode(prompt, row_keys(seed, start, BATCH_SIZE))
    for i, row, length in zip(indices, np.asarray(result.tokens), np.asarray(result.lengths)):
      outputs[i] = row[:length].tolist()
  return outputs
