"""What a draft learns from: more sources, and what a teacher thinks of each target token."""

import collections
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from rich.progress import track

from specdec_jax.errors import InputError
from specdec_jax.training.batches import Batch, Pairs, arrays, epoch_batches
from specdec_jax.training.objectives import teacher_forced
from specdec_jax.writing import written


def recombined(lines: list[str], count: int, seed: int = 0) -> list[str]:
  """`count` new sentences that begin as one line and end as another, joined at two shared words.

  A teacher can be asked about any source, so these cost no text: with 29,000 captions alone, a
  draft learns them by heart.

  Raises:
    InputError: the lines share too few word pairs for so many new sentences.
  """
  rng = np.random.default_rng(seed)
  words = [line.split() for line in lines]
  places = collections.defaultdict(list)  # of each pair of neighbours, but at the start of a line
  for line, row in enumerate(words):
    for at in range(1, len(row) - 1):
      places[row[at], row[at + 1]].append((line, at))
  known: set[str] = set(lines)
  new: list[str] = []
  for _ in range(20 * count):
    if len(new) == count:
      break
    first = words[rng.integers(len(words))]
    if len(first) < 3:
      continue
    at = rng.integers(1, len(first) - 1)
    joints = places[first[at], first[at + 1]]
    line, other = joints[rng.integers(len(joints))]
    sentence = " ".join(first[:at] + words[line][other:])
    if sentence not in known:
      known.add(sentence)
      new.append(sentence)
  if len(new) < count:
    raise InputError(f"These {len(lines)} lines recombine to {len(new)} new ones, not {count}.")
  return new


def teacher_opinions(
  teacher: nn.Module,
  params,
  pairs: Pairs,
  k: int = 16,
  tokens_per_batch: int = 1152,
  tail: bool = False,
  rows: jax.sharding.Sharding | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """A teacher's k likeliest tokens [T, k] at each target position, and their probabilities.

  With `tail` one column more: the text's own token, whose weight is 1 if it is none of the k, else
  0. Where the teacher drew the text, that stands for all other tokens in proportion: on average,
  what is learnt is the teacher's whole distribution. `rows` says where those of a batch lie.
  """

  @jax.jit
  def likeliest(params, batch: Batch):
    probs, tokens = jax.lax.top_k(jax.nn.softmax(teacher_forced(teacher, params, batch)), k)
    if not tail:
      return probs, tokens
    own = batch.targets[..., None]
    is_other = (tokens != own).all(axis=-1, keepdims=True)
    with_own = lambda most, last: jnp.concatenate([most, last.astype(most.dtype)], axis=-1)
    return with_own(probs, is_other), with_own(tokens, own)

  none = 0, k + tail  # of pairs left out
  opinions = [(np.zeros(none, np.int32), np.zeros(none, np.float16))] * len(pairs)
  over = 1 if rows is None else rows.num_devices
  batches = epoch_batches(pairs, tokens_per_batch, 0, 0, multiple=over)
  for (_, indices), batch in zip(track(batches, "teacher", transient=True), arrays(pairs, batches)):
    probs, tokens = map(np.asarray, likeliest(params, jax.device_put(batch, rows)))
    for row, i in enumerate(indices):
      length = len(pairs.targets[i])
      opinions[i] = tokens[row, :length].astype(np.int32), probs[row, :length].astype(np.float16)
  return opinions


def save_pairs(path: pathlib.Path, pairs: Pairs) -> None:
  """Write pairs with a teacher's opinions to one .npz file, whole or not at all."""
  flat = lambda rows: np.concatenate([np.asarray(row) for row in rows])
  lengths = lambda rows: np.array([len(row) for row in rows])
  if pairs.teacher is None:
    raise InputError("There are no opinions of a teacher to save with the pairs.")
  tokens, probs = zip(*pairs.teacher)
  with written(path, "wb") as file:
    np.savez(
      file,
      sources=flat(pairs.sources),
      source_lengths=lengths(pairs.sources),
      targets=flat(pairs.targets),
      target_lengths=lengths(pairs.targets),
      tokens=flat(tokens),
      probs=flat(probs),
      opinion_lengths=lengths(tokens),
    )


def load_pairs(path: pathlib.Path) -> Pairs:
  """What `save_pairs` wrote."""
  with np.load(path) as file:
    split = lambda name, lengths: np.split(file[name], np.cumsum(file[lengths])[:-1])
    lists = lambda *names: [row.tolist() for row in split(*names)]
    return Pairs(
      lists("sources", "source_lengths"),
      lists("targets", "target_lengths"),
      [*zip(split("tokens", "opinion_lengths"), split("probs", "opinion_lengths"))],
    )
