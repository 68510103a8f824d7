"""Distillation data: texts, and the distributions of a teacher at their tokens."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding
from rich.progress import track

from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError
from specdec_jax.models.families import Config, module_of
from specdec_jax.train.batches import Batch, ParallelText, epoch_batches, padded_batches
from specdec_jax.train.objectives import teacher_forced


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
  for i, (tokens, probs) in by_pair(most_probable, params, text, tokens_per_batch, batch_sharding):
    topk[i] = tokens.astype(np.int32), probs.astype(np.float16)
  return topk


def by_pair(
  compute: Callable[[Any, Batch], Any],
  params: Any,
  text: ParallelText,
  tokens_per_batch: int = 1152,
  batch_sharding: Sharding | None = None,
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
