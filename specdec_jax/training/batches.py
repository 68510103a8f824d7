"""Sentence pairs as padded batches of like length, in an order fixed by (seed, epoch)."""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from specdec_jax.data.vocabulary import padded
from specdec_jax.errors import InputError

# Longest side of a pair, in tokens with EOS -> the padded length of its batch. Narrow steps
# where most captions lie: padding to 32 where sentences average 15 tokens wastes half the work.
BUCKETS = (8, 11, 14, 16, 18, 20, 22, 24, 27, 30, 34, 40, 50, 66, 96, 128)


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Encoded sentence pairs, each side a list of token ids that ends in EOS.

  Attributes:
    sources: token ids.
    targets: token ids.
    teacher: for each pair, what a teacher thinks of each target position: its likeliest tokens
      [T, k] and their probabilities [T, k]; None to learn from the targets alone.
  """

  sources: list[list[int]]
  targets: list[list[int]]
  teacher: list[tuple[np.ndarray, np.ndarray]] | None = None

  def __post_init__(self):
    if len(self.sources) != len(self.targets):
      raise InputError(
        f"{len(self.sources)} source lines but {len(self.targets)} target lines; "
        "a parallel text has one target line for each source line."
      )

  def __len__(self) -> int:
    return len(self.sources)


class Batch(NamedTuple):
  """Pairs padded with 0 to one length L.

  Attributes:
    source: [B, L].
    targets: [B, L].
    labels: tokens to learn at each position, [B, L, k]; the target itself without a teacher.
    weights: their probabilities, [B, L, k].
  """

  source: np.ndarray
  targets: np.ndarray
  labels: np.ndarray
  weights: np.ndarray


def epoch_batches(
  pairs: Pairs, tokens_per_batch: int, seed: int, epoch: int, multiple: int = 1
) -> list[tuple[int, np.ndarray]]:
  """All pairs of one epoch as (padded length, indices [B]) in a shuffled order.

  B is tokens_per_batch // length, so every batch costs about the same, and then a number that
  `multiple`, of devices, divides; what does not fill a batch is topped up with other pairs of its
  bucket, so that each bucket is one shape.
  """
  if not len(pairs):
    return []
  rng = np.random.default_rng((seed, epoch))
  longest = np.array([max(len(s), len(t)) for s, t in zip(pairs.sources, pairs.targets)])
  if (too_long := int((longest > BUCKETS[-1]).sum())) and epoch == 0:
    warnings.warn(f"{too_long} pairs are longer than {BUCKETS[-1]} tokens; left out.", stacklevel=2)
  lower, batches = 0, []
  for length in BUCKETS:
    members = np.flatnonzero((longest > lower) & (longest <= length))
    lower = length
    if not len(members):
      continue
    size = multiple * max(1, tokens_per_batch // length // multiple)
    missing = -len(members) % size
    order = np.concatenate([rng.permutation(members), rng.choice(members, missing)])
    batches += [(length, chunk) for chunk in order.reshape(-1, size)]
  return [batches[i] for i in rng.permutation(len(batches))]


def arrays(pairs: Pairs, batches: list[tuple[int, np.ndarray]]) -> Iterator[Batch]:
  """The arrays of each batch that `epoch_batches` chose."""
  for length, indices in batches:
    source = padded([pairs.sources[i] for i in indices], length)
    targets = padded([pairs.targets[i] for i in indices], length)
    labels, weights = targets[..., None], (targets[..., None] > 0).astype(np.float32)
    if pairs.teacher is not None:
      k = pairs.teacher[0][0].shape[-1]
      labels, weights = np.zeros((*targets.shape, k), np.int32), np.zeros((*targets.shape, k), "f4")
      for row, i in enumerate(indices):
        tokens, probs = pairs.teacher[i]
        labels[row, : len(tokens)], weights[row, : len(probs)] = tokens, probs
    yield Batch(source, targets, labels, weights)
