"""Batches of parallel text: bucketed by length, padded, in an order fixed by (seed, epoch)."""

import dataclasses
import json
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.core.atomic_files import atomic_write
from specdec_jax.data.vocabulary import padded
from specdec_jax.errors import InputError

# Padded lengths of batches. A pair belongs to the first bucket that holds its longer side, in
# tokens with EOS. Steps are narrow where most captions lie: with sentences of 15 tokens on average,
# padding all of them to 32 would waste half of the work.
BUCKETS = (8, 11, 14, 16, 18, 20, 22, 24, 27, 30, 34, 40, 50, 66, 96, 128, 192, 256, 320, 384, 512)
PADDING = -1  # padding of batches
MAX_TARGET = 128  # longest padded targets, so that long sources do not widen them


@dataclasses.dataclass(frozen=True)
class ParallelText:
  """Encoded sentence pairs; each side is a list of token ids that ends with EOS.

  Attributes:
    teacher: for each pair, the k most probable tokens of a teacher at each target position and
      their probabilities, both [T, k]. None to learn from the targets alone.
    made_from: what the pairs were made from (`core.identity`).
  """

  sources: list[list[int]]
  targets: list[list[int]]
  teacher: list[tuple[np.ndarray, np.ndarray]] | None = None
  made_from: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if len(self.sources) != len(self.targets):
      raise InputError(
        f"{len(self.sources)} source lines but {len(self.targets)} target lines; "
        "a parallel text has one target line for each source line."
      )

  def __len__(self) -> int:
    return len(self.sources)

  def save(self, path: pathlib.Path) -> None:
    """Write the pairs, the teacher's distributions and `made_from` to one .npz file, atomically."""
    rows: dict[str, Sequence] = {"source": self.sources, "target": self.targets}
    arrays: dict[str, Any] = {f"{side}s": np.concatenate(rows[side]) for side in rows}
    arrays["made_from"] = np.array(json.dumps(self.made_from))
    if self.teacher is not None:
      tokens, probs = zip(*self.teacher)
      arrays |= {"tokens": np.concatenate(tokens), "probs": np.concatenate(probs)}
      rows["teacher"] = tokens
    arrays |= {f"{side}_lengths": np.array([*map(len, rows[side])]) for side in rows}
    with atomic_write(path, "wb") as file:
      np.savez(file, **arrays)

  @classmethod
  def load(cls, path: pathlib.Path) -> "ParallelText":
    """Read a file that `save` wrote."""
    with np.load(path) as file:

      def split(name: str, lengths: str) -> list[np.ndarray]:
        return np.split(file[name], np.cumsum(file[lengths])[:-1])

      sources = [row.tolist() for row in split("sources", "source_lengths")]
      targets = [row.tolist() for row in split("targets", "target_lengths")]
      made_from = json.loads(file["made_from"].item()) if "made_from" in file else {}
      if "tokens" not in file:
        return cls(sources, targets, None, made_from)
      tokens, probs = split("tokens", "teacher_lengths"), split("probs", "teacher_lengths")
      return cls(sources, targets, [*zip(tokens, probs)], made_from)


class Batch(NamedTuple):
  """Sentence pairs, padded with PADDING to common lengths S of sources and T of targets.

  Attributes:
    source: [B, S].
    targets: [B, T]; T is S, but at most MAX_TARGET.
    labels: [B, T, k], tokens to learn; without a teacher, the target token (k = 1).
    weights: [B, T, k], probabilities of the labels; 0 at padding.
  """

  source: np.ndarray
  targets: np.ndarray
  labels: np.ndarray
  weights: np.ndarray


def epoch_batches(
  text: ParallelText, tokens_per_batch: int, seed: int, epoch: int, multiple: int = 1
) -> list[tuple[int, np.ndarray]]:
  """Return the batches of one epoch, in shuffled order, as (padded length, pair indices [B]).

  The batch size of a bucket is `tokens_per_batch // length`, rounded down to a multiple of
  `multiple`, the number of devices that share the rows, but at least `multiple`. The last batch of
  a bucket is filled up with random pairs of the bucket, so that each bucket has one shape to
  compile. Pairs longer than the last bucket, or with targets longer than MAX_TARGET, are left out,
  with a warning in epoch 0.
  """
  if not len(text):
    return []
  rng = np.random.default_rng((seed, epoch))
  longer_side = np.array([max(len(s), len(t)) for s, t in zip(text.sources, text.targets)])
  longer_side[[len(t) > MAX_TARGET for t in text.targets]] = BUCKETS[-1] + 1
  if (too_long := int((longer_side > BUCKETS[-1]).sum())) and epoch == 0:
    warnings.warn(
      f"{too_long} pairs have a source of more than {BUCKETS[-1]} tokens or a target of more than "
      f"{MAX_TARGET}; left out.",
      stacklevel=2,
    )
  lower, batches = 0, []
  for length in BUCKETS:
    members = np.flatnonzero((longer_side > lower) & (longer_side <= length))
    lower = length
    if not len(members):
      continue
    size = multiple * max(1, tokens_per_batch // length // multiple)
    num_fill = -len(members) % size
    order = np.concatenate([rng.permutation(members), rng.choice(members, num_fill)])
    batches += [(length, indices) for indices in order.reshape(-1, size)]
  return [batches[i] for i in rng.permutation(len(batches))]


def padded_batches(text: ParallelText, batches: list[tuple[int, np.ndarray]]) -> Iterator[Batch]:
  """Yield the padded arrays of each batch from `epoch_batches`."""
  for length, indices in batches:
    source = padded([text.sources[i] for i in indices], length, PADDING)
    targets = padded([text.targets[i] for i in indices], min(length, MAX_TARGET), PADDING)
    labels = np.maximum(targets, 0)[..., None]
    weights = (targets[..., None] != PADDING).astype(np.float32)
    if text.teacher is not None:
      k = text.teacher[0][0].shape[-1]
      labels, weights = np.zeros((*targets.shape, k), np.int32), np.zeros((*targets.shape, k), "f4")
      for row, i in enumerate(indices):
        tokens, probs = text.teacher[i]
        labels[row, : len(tokens)], weights[row, : len(probs)] = tokens, probs
    yield Batch(source, targets, labels, weights)
