"""Distillation data for a draft: additional sources, and top-k distributions of the teacher."""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from rich.progress import track

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.errors import InputError
from specdec_jax.train.batches import Batch, ParallelText, epoch_batches, padded_batches
from specdec_jax.train.objectives import teacher_forced


def spliced_sentences(lines: list[str], count: int, seed: int = 0) -> list[str]:
  """Return `count` new sentences, each of which joins the start of one line to the end of another.

  Two lines are joined where they share two neighboring words. A teacher can label any source, so
  the new sentences need no reference translation. They matter for small corpora: a draft that is
  trained on only 29,000 captions memorizes them.

  Args:
    lines: sentences to splice.
    count: number of new sentences.
    seed: random seed of the choice.

  Raises:
    InputError: 20 * `count` attempts gave fewer than `count` new sentences, because the lines share
      too few word pairs.
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
      f"These {len(lines)} lines can be spliced into {len(new)} new sentences, not {count}."
    )
  return new


def teacher_topk(
  teacher: nn.Module,
  params,
  text: ParallelText,
  k: int = 16,
  tokens_per_batch: int = 1152,
  tail: bool = False,
  batch_sharding: jax.sharding.Sharding | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Return the k most probable tokens of a teacher, with probabilities, at each target position.

  With `tail`, the target token itself is appended to the k tokens, and a weight is appended to
  their probabilities: 0 if the target token is among the k tokens, and 1 otherwise. If the teacher
  sampled the targets, this is an unbiased estimate of the rest of the distribution: in expectation,
  cross-entropy with these labels equals cross-entropy with the teacher's whole distribution.

  Args:
    teacher: Flax module of the teacher.
    params: parameters of the teacher.
    text: encoded sentence pairs.
    k: number of tokens at each position.
    tokens_per_batch: approximate number of source tokens in a batch, padding included.
    tail: whether to append the target token.
    batch_sharding: sharding of the rows of a batch; None for a single device.

  Returns:
    For each pair, tokens and their probabilities, both [T, k], or [T, k + 1] with `tail`. T is the
    number of target tokens, but 0 for a pair that is left out of the batches.
  """

  @jax.jit
  def most_probable(params, batch: Batch):
    probs, tokens = jax.lax.top_k(jax.nn.softmax(teacher_forced(teacher, params, batch)), k)
    if not tail:
      return probs, tokens
    text_token = batch.targets[..., None]
    is_other = (tokens != text_token).all(axis=-1, keepdims=True)
    probs = jnp.concatenate([probs, is_other.astype(probs.dtype)], axis=-1)
    return probs, jnp.concatenate([tokens, text_token.astype(tokens.dtype)], axis=-1)

  empty = 0, k + tail  # shape for a pair that is left out
  topk = [(np.zeros(empty, np.int32), np.zeros(empty, np.float16))] * len(text)
  num_devices = 1 if batch_sharding is None else batch_sharding.num_devices
  batches = epoch_batches(text, tokens_per_batch, seed=0, epoch=0, multiple=num_devices)
  padded = padded_batches(text, batches)
  for (_, indices), batch in zip(track(batches, "teacher", transient=True), padded):
    probs, tokens = most_probable(params, jax.device_put(batch, batch_sharding))
    probs, tokens = np.asarray(probs), np.asarray(tokens)
    for row, i in enumerate(indices):
      length = len(text.targets[i])
      topk[i] = tokens[row, :length].astype(np.int32), probs[row, :length].astype(np.float16)
  return topk


def residual_labels(
  module: nn.Module,
  params,
  text: ParallelText,
  tokens_per_batch: int = 1152,
  batch_sharding: jax.sharding.Sharding | None = None,
) -> ParallelText:
  """Return the text with labels max(0, p - q): what the target still needs after q is rejected.

  p is the distribution of the teacher in `text`, and q that of another draft. The labels of a
  position sum to about 1 - beta (Definition 3.1), so a draft that is trained on them learns most
  where the other draft is rejected (boost-tuning, SpecInfer; Miao et al., 2024). It also learns to
  propose other tokens than that draft.

  Args:
    module: Flax module of the other draft.
    params: parameters of the other draft.
    text: encoded sentence pairs with a teacher's distributions.
    tokens_per_batch: approximate number of source tokens in a batch, padding included.
    batch_sharding: sharding of the rows of a batch; None for a single device.

  Raises:
    InputError: the text has no teacher distributions.
  """
  if text.teacher is None:
    raise InputError("The sentence pairs have no teacher distributions to subtract from.")

  @jax.jit
  def residual(params, batch: Batch):
    q = jax.nn.softmax(teacher_forced(module, params, batch))
    return jnp.maximum(batch.weights - jnp.take_along_axis(q, batch.labels, axis=-1), 0)

  teacher = list(text.teacher)
  num_devices = 1 if batch_sharding is None else batch_sharding.num_devices
  batches = epoch_batches(text, tokens_per_batch, seed=0, epoch=0, multiple=num_devices)
  padded = padded_batches(text, batches)
  for (_, indices), batch in zip(track(batches, "residual", transient=True), padded):
    weights = np.asarray(residual(params, jax.device_put(batch, batch_sharding)))
    for row, i in enumerate(indices):
      tokens, _ = text.teacher[i]
      teacher[i] = tokens, weights[row, : len(tokens)].astype(np.float16)
  return dataclasses.replace(text, teacher=teacher)


def save_parallel_text(path: pathlib.Path, text: ParallelText) -> None:
  """Write sentence pairs, and a teacher's distributions if any, to one .npz file, atomically."""
  arrays: dict[str, Any] = {
    "sources": _concatenated(text.sources),
    "source_lengths": _lengths(text.sources),
    "targets": _concatenated(text.targets),
    "target_lengths": _lengths(text.targets),
  }
  if text.teacher is not None:
    tokens, probs = zip(*text.teacher)
    arrays |= {
      "tokens": _concatenated(tokens),
      "probs": _concatenated(probs),
      "opinion_lengths": _lengths(tokens),
    }
  with atomic_write(path, "wb") as file:
    np.savez(file, **arrays)


def load_parallel_text(path: pathlib.Path) -> ParallelText:
  """Read a file that `save_parallel_text` wrote."""
  with np.load(path) as file:

    def split(name: str, lengths: str) -> list[np.ndarray]:
      return np.split(file[name], np.cumsum(file[lengths])[:-1])

    sources = [row.tolist() for row in split("sources", "source_lengths")]
    targets = [row.tolist() for row in split("targets", "target_lengths")]
    if "tokens" not in file:
      return ParallelText(sources, targets)
    tokens, probs = split("tokens", "opinion_lengths"), split("probs", "opinion_lengths")
    return ParallelText(sources, targets, [*zip(tokens, probs)])


def _concatenated(rows: Sequence) -> np.ndarray:
  return np.concatenate([np.asarray(row) for row in rows])


def _lengths(rows: Sequence) -> np.ndarray:
  return np.array([len(row) for row in rows])
