"""Distillation data: texts, outputs of a target, and the target's top-k distribution per token."""

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from rich.progress import track

from specdec_jax.beams import BeamSearcher, NullBeamDraft
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.identity import described, params_digest, require_same
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.types import DecodeResult, Model, Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import PAD_ID, Vocabulary, padded
from specdec_jax.errors import InputError
from specdec_jax.load import load_model
from specdec_jax.models.families import Config, model_of, module_of
from specdec_jax.models.partitioning import PartitionedModel, make_mesh, param_shardings
from specdec_jax.train.batches import Batch, ParallelText, epoch_batches, padded_batches
from specdec_jax.train.objectives import teacher_forced

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
  def model(self) -> Model:
    """The target as a `Model` that is sharded across the mesh."""
    return PartitionedModel(model_of(self.config), self.mesh)

  @property
  def batch_sharding(self) -> NamedSharding:
    """Sharding of the rows of a batch."""
    return NamedSharding(self.mesh, PartitionSpec("data"))

  def distillation_data(
    self,
    path: pathlib.Path,
    data: str,
    sources: list[str] | None,
    targets: list[str],
    samples: int = 0,
    new_sources: int = 0,
    tail: bool = False,
    writer: tuple[Model, Any] | None = None,
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
      writer: model and parameters that sample the outputs; by default those of the teacher.
    """
    contents = [pathlib.Path(data, name).read_bytes() for name in (*(sources or ()), *targets)]
    values: dict[str, Any] = dict(sources=sources, targets=targets, samples=samples)
    values |= dict(new_sources=new_sources, tail=tail)
    values |= dict(texts=params_digest([np.frombuffer(x, "u1") for x in contents]))
    values |= dict(vocabulary=self.vocabulary.fingerprint(), target=params_digest(self.params))
    made_from = described(values | {"writer": writer and params_digest(writer[1])})
    if path.exists():
      text = ParallelText.load(path)
      advice = "name another file, or delete this one"
      require_same(text.made_from, made_from, f"{path} was made", advice)
      return text
    encode = self.vocabulary.encode
    text = parallel_text(self.vocabulary, data, sources, targets)
    if sources:
      lines = [line for file in sources for line in read_lines(f"{data}/{file}")]
      new, most = [*map(encode, spliced_sentences(lines, new_sources))], self.config.num_positions
      new = [row for row in new if most is None or len(row) <= most]
    else:
      new = [encode("")] * new_sources
    for seed, prompts in enumerate([*[text.sources] * samples, new]):
      outputs = self.outputs(prompts, Sampling(), seed, writer)
      text = ParallelText([*text.sources, *prompts], [*text.targets, *outputs])
    topk = teacher_topk(
      self.config, self.params, text, tail=tail, batch_sharding=self.batch_sharding
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(text, teacher=topk, made_from=made_from).save(path)
    return ParallelText.load(path)

  def validation_pairs(self, data: str, valid_source: str | None) -> ParallelText:
    """Return validation sources and the target's argmax outputs for them.

    If `valid_source` is None, return texts that the target samples unconditionally.
    """
    sources, sampling = [self.vocabulary.encode("")] * NUM_SAMPLED_TEXTS, Sampling()
    if valid_source is not None:
      sources = encoded_lines(self.vocabulary, data, [valid_source])
      sampling = Sampling(temperature=0.0)
    return ParallelText(sources, self.outputs(sources, sampling, seed=-1))

  def outputs(
    self,
    sources: list[list[int]],
    sampling: Sampling = Sampling(temperature=0.0),
    seed: int = 0,
    writer: tuple[Model, Any] | None = None,
    num_beams: int | None = None,
  ) -> list[list[int]]:
    """Return the outputs of `model_outputs`, by default those of the teacher."""
    model, params = writer or (self.model, self.params)
    eos_id, pad_id = self.vocabulary.eos_id, self.vocabulary.pad_id
    return model_outputs(model, params, sources, eos_id, sampling, seed, num_beams, pad_id)


def open_teacher(path: str, vocabulary: Vocabulary, model_parallel: int) -> Teacher:
  """Load a checkpoint of any format as a teacher that is sharded across this host's devices."""
  mesh = make_mesh(model_parallel)
  shardings = functools.partial(param_shardings, mesh=mesh)
  model, params = load_model("target", open_checkpoint(path), vocabulary, shardings=shardings)
  return Teacher(vocabulary, model.config, params, mesh)


def teacher_topk(
  config: Config,
  params: Any,
  text: ParallelText,
  k: int = 16,
  tokens_per_batch: int = 1152,
  tail: bool = False,
  batch_sharding: Sharding | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Return the k most probable tokens of a teacher, with probabilities, at each target position.

  With `tail`, the target token is appended to the k tokens, with weight 0 if it is among them and 1
  otherwise. If the teacher sampled the targets, cross-entropy with these labels equals, in
  expectation, cross-entropy with the teacher's whole distribution.

  Returns:
    For each pair, tokens and their probabilities, both [T, k], or [T, k + 1] with `tail`. T is the
    number of target tokens, but 0 for a pair that is left out of the batches.
  """
  teacher = module_of(config)

  def most_probable(params: Any, batch: Batch) -> tuple[Array, Array]:
    probs, tokens = jax.lax.top_k(jax.nn.softmax(teacher_forced(teacher, params, batch)), k)
    if not tail:
      return tokens, probs
    text_token = batch.targets[..., None]
    is_other = (tokens != text_token).all(axis=-1, keepdims=True)
    probs = jnp.concatenate([probs, is_other.astype(probs.dtype)], axis=-1)
    return jnp.concatenate([tokens, text_token.astype(tokens.dtype)], axis=-1), probs

  empty = 0, k + tail  # shape for a pair that is left out
  topk = [(np.zeros(empty, np.int32), np.zeros(empty, np.float16))] * len(text)
  for i, (tokens, probs) in _by_pair(most_probable, params, text, tokens_per_batch, batch_sharding):
    topk[i] = tokens.astype(np.int32), probs.astype(np.float16)
  return topk


def residual_labels(
  drafts: Sequence[tuple[Config, Any]],
  text: ParallelText,
  tokens_per_batch: int = 1152,
  batch_sharding: Sharding | None = None,
) -> ParallelText:
  """Return the text with labels for the target's tokens that other drafts leave to a further one.

  The labels r are at first p, the distribution of the teacher in `text`. Each of the given drafts,
  in the order in which its tokens are tried, replaces r by max(0, r - s q), where q is its
  distribution and s is the sum of r over the labels, at first 1. So r becomes the residual
  distribution, times the probability that all of these drafts are rejected. A draft that is trained
  on r learns most where that is likely (boost-tuning, SpecInfer; Miao et al., 2024).

  Args:
    drafts: configuration and parameters of each draft.
  """
  assert text.teacher is not None
  modules = [module_of(config) for config, _ in drafts]

  def residual(params: Any, batch: Batch) -> Array:
    labels, mass = jnp.asarray(batch.weights), jnp.ones(())
    for draft, draft_params in zip(modules, params):
      q = jax.nn.softmax(teacher_forced(draft, draft_params, batch))
      q_labels = jnp.take_along_axis(q, batch.labels, axis=-1)
      labels = jnp.maximum(labels - mass * q_labels, 0)
      mass = labels.sum(axis=-1, keepdims=True)
    return labels

  teacher, params = list(text.teacher), [draft_params for _, draft_params in drafts]
  for i, weights in _by_pair(residual, params, text, tokens_per_batch, batch_sharding):
    teacher[i] = teacher[i][0], weights[: len(teacher[i][0])].astype(np.float16)
  return dataclasses.replace(text, teacher=teacher)


def _by_pair(
  compute: Callable[[Any, Batch], Any],
  params: Any,
  text: ParallelText,
  tokens_per_batch: int,
  batch_sharding: Sharding | None,
) -> Iterator[tuple[int, Any]]:
  """Yield the index in `text` and the rows [T, ...] of `compute(params, batch)` of each target."""
  num_devices = 1 if batch_sharding is None else batch_sharding.num_devices
  batches = epoch_batches(text, tokens_per_batch, seed=0, epoch=0, multiple=num_devices)
  compute = jax.jit(compute)
  padded = padded_batches(text, batches)
  for (_, indices), batch in zip(track(batches, "labels", transient=True), padded):
    outputs = jax.device_get(compute(params, jax.device_put(batch, batch_sharding)))
    for row, i in enumerate(indices):
      length = len(text.targets[i])
      yield i, jax.tree.map(lambda x: x[row, :length], outputs)  # noqa: B023


def spliced_sentences(lines: list[str], count: int, seed: int = 0) -> list[str]:
  """Return `count` new sentences, each of which joins the start of one line to the end of another.

  Two lines are joined where they share two neighboring words. A teacher can label any source, so
  the new sentences need no translation. They keep drafts from memorizing small corpora.

  Raises:
    InputError: the lines share too few word pairs.
  """
  rng = np.random.default_rng(seed)
  words = [line.split() for line in lines]
  # (word, next word) -> (line, position) of each occurrence that is not at the start of its line.
  occurrences = collections.defaultdict(list)
  for line, row in enumerate(words):
    for position in range(1, len(row) - 1):
      occurrences[row[position], row[position + 1]].append((line, position))
  seen: set[str] = set(lines)
  new: list[str] = []
  for _ in range(20 * count):
    if len(new) == count:
      break
    first = words[rng.integers(len(words))]
    if len(first) < 3:
      continue
    position = rng.integers(1, len(first) - 1)
    joints = occurrences[first[position], first[position + 1]]
    line, joint = joints[rng.integers(len(joints))]
    sentence = " ".join(first[:position] + words[line][joint:])
    if sentence not in seen:
      seen.add(sentence)
      new.append(sentence)
  if len(new) < count:
    raise InputError(
      f"These {len(lines)} lines can be spliced into {len(new)} new sentences, not {count}; "
      "lower new_sources."
    )
  return new


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
  lines = (line for file in targets for line in read_lines(f"{data}/{file}"))
  encoded_targets = [vocabulary.encode_output(line) for line in lines]
  if not sources:
    return ParallelText([vocabulary.encode("")] * len(encoded_targets), encoded_targets)
  rows, most = encoded_lines(vocabulary, data, sources), max_source_tokens
  if most is not None:
    rows = [row if len(row) <= most else row[: most - 1] + row[-1:] for row in rows]
  return ParallelText(rows, encoded_targets)


def encoded_lines(vocabulary: Vocabulary, data: str, files: list[str]) -> list[list[int]]:
  """Read the lines of text files in folder `data` and encode them."""
  return [vocabulary.encode(line) for file in files for line in read_lines(f"{data}/{file}")]


def require_positions(
  config: Config, vocabulary: Vocabulary, data: str, *files: str | None
) -> None:
  """Raise InputError if a line of text files has more tokens than a model has positions."""
  most = config.num_positions
  for file in files:
    rows = encoded_lines(vocabulary, data, [file] if most and file else [])
    longest = max(map(len, rows), default=0)
    if most and longest > most:
      raise InputError(
        f"A line of {file} has {longest} tokens, and the model has {most} positions; leave out "
        "longer lines."
      )


def model_outputs(
  model: Model,
  params: Any,
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
