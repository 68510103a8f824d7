"""Outputs of speculation beside the target's own: token for token, in rounds, and as samples."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.decoding import require_finite
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.exactness.joint import Comparison, compare, cut_into_cells
from specdec_jax.exactness.ties import Divergence, first_divergences
from specdec_jax.measurement.alpha import teacher_forced_logits
from specdec_jax.pairs import Pair
from specdec_jax.protocols import Context, Decoded, Outcome, Proposal
from specdec_jax.sampling import Sampling, distribution, row_keys
from specdec_jax.trees import Tree, chain, take

Decode = Callable[..., Decoded]  # (prompt [B, P], keys [B], max_new_tokens=)
Cells = dict[tuple[int, ...], float]


def compare_argmax(
  pair: Pair,
  texts: Sequence[str],
  plain: Decode,
  speculative: Decode,
  block: int,
  batch_size: int,
  max_new_tokens: int,
) -> list[tuple[int, Divergence]]:
  """Numbers of the texts whose two argmax outputs differ, from 1, and where they part.

  `block` is the tokens that verification reads at a time: gamma + 1, or a tree's nodes.
  """
  found, prompts = [], pair.prompt(texts)
  for at in range(0, len(texts), batch_size):
    prompt, count = _batch(prompts, at, batch_size)
    keys = row_keys(0, at, batch_size)
    ours, own = (
      np.asarray(require_finite(decode(prompt, keys, max_new_tokens=max_new_tokens)).tokens)
      for decode in (speculative, plain)
    )
    parted = first_divergences(pair.target, pair.target_params, prompt, own, ours, block)
    found += [(at + d.row + 1, d) for d in parted if d.row < count]
  return found


@dataclasses.dataclass(frozen=True)
class PathDraft(ModelDraft):
  """Its model's next tokens down one path of a tree, to another leaf each round; beside that path
  other tokens. At temperature 0, with the target as its model, the whole path must stand.
  """

  def start(self, params: Any, context: Context, hidden: Array) -> Any:
    return super().start(params, context, hidden), 0

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    (cache, number), tree = state, self.tree
    own = ModelDraft(self.model, self.sampling, chain(tree.depth))
    (tokens, *_), cache = own.propose(params, cache, context, rng)
    on_path = jnp.asarray(tree.ancestors[leaves(tree), 1:])[number % len(leaves(tree))]
    along = take(tokens, tree.depths[1:] - 1)
    other = (along + 1 + jnp.asarray(tree.ranks)) % self.model.vocab_size
    return Proposal(jnp.where(on_path, along, other)), (cache, number + 1)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return state


def leaves(tree: Tree) -> np.ndarray:
  """The nodes without children."""
  return np.setdiff1d(np.arange(tree.num_nodes), tree.parents)


def rounds_of_self_draft(
  pair: Pair,
  texts: Sequence[str],
  tree: Tree,
  batch_size: int,
  max_new_tokens: int,
  by_paths: bool = False,
) -> tuple[int, int]:
  """Rounds that argmax takes with the target as its own draft, and the fewest possible.

  Every round must go down from eldest child to eldest child to the end, gamma + 1 tokens of a
  chain; what breaks this (a lost bonus token, a draft that falls a token behind) costs speed, and
  need not show in the output. `by_paths`, each leaf of the tree is where one round in turn must end
  (`PathDraft`), so that younger siblings stand too.
  """
  itself = functools.partial(PathDraft if by_paths else ModelDraft, pair.target)
  own = pair._replace(draft=itself, draft_params=pair.target_params)
  decode = own.decoder(Sampling(temperature=0.0), tree)
  eldest = [of_node[1:] @ tree.ranks == 0 for of_node in tree.ancestors]
  ends = leaves(tree) if by_paths else np.flatnonzero(eldest)[-1:]
  # Tokens that so many rounds can emit; the first that are enough are the fewest.
  most = np.cumsum(np.resize(tree.depths[ends] + 1, max_new_tokens))
  rounds = fewest = 0
  prompts = pair.prompt(texts)
  for at in range(0, len(texts), batch_size):
    prompt, count = _batch(prompts, at, batch_size)
    decoded = decode(prompt, row_keys(0, at, batch_size), max_new_tokens=max_new_tokens)
    rounds += int((decoded.rounds.num_emitted[:, :count] > 0).sum())
    fewest += int((1 + np.searchsorted(most, decoded.lengths[:count])).sum())
  return rounds, fewest


def cells_of(
  pair: Pair, texts: Sequence[str], sampling: Sampling, samples_per_text: int, num_tokens: int
) -> list[Cells]:
  """For each text the cells that its outputs' first tokens fall in, with exact probabilities."""
  eos_id = pair.vocabulary.eos_id

  def of(source: Array) -> Cells:
    exact = functools.partial(_exact_probs, pair, source, sampling)
    after = lambda prefixes: exact([(*prefix, eos_id) for prefix in prefixes])[:, -1]
    return cut_into_cells(after, samples_per_text, num_tokens, eos_id)

  return [of(source) for source in pair.prompt(texts)[:, None]]


def compare_samples(
  pair: Pair,
  texts: Sequence[str],
  sampling: Sampling,
  decode: Decode,
  batch_size: int,
  samples_per_text: int,
  num_tokens: int,
  seed: int,
  cells: Sequence[Cells] | None = None,
) -> Comparison:
  """First tokens of many outputs beside the target's exact joint distribution, over all texts.

  `cells` are those of `cells_of` the same settings, for who compares more than one decoding.
  """
  total, eos_id, prompts = Comparison(), pair.vocabulary.eos_id, pair.prompt(texts)
  cells = cells or cells_of(pair, texts, sampling, samples_per_text, num_tokens)
  for at in range(0, len(texts), batch_size):
    prompt, count = _batch(prompts, at, batch_size)
    keys = row_keys(seed, at * samples_per_text, batch_size * samples_per_text)
    draws = [
      jax.device_get(require_finite(decode(prompt, keys_of_draw, max_new_tokens=num_tokens)))
      for keys_of_draw in keys.reshape(samples_per_text, batch_size)
    ]
    for row in range(count):
      exact = functools.partial(_exact_probs, pair, prompt[row : row + 1], sampling)
      drawn = [tuple(d.tokens[row, : d.lengths[row]].tolist()) for d in draws]
      unique = sorted(set(drawn))
      is_possible = functools.partial(_is_possible, eos_id)
      filled = [(*text, *(eos_id,) * (num_tokens - len(text))) for text in unique]
      possible = dict(zip(unique, map(is_possible, unique, exact(filled))))
      total += compare(cells[at + row], drawn, sum(not possible[text] for text in drawn))
  return total


def _batch(prompts: Array, at: int, batch_size: int) -> tuple[Array, int]:
  """Rows at..at+batch_size-1, filled up with the first ones, and how many are new.

  All batches are as wide as the widest text, so each program is compiled once.
  """
  rows = np.arange(at, at + batch_size)
  return prompts[rows % len(prompts)], int((rows < len(prompts)).sum())


def _exact_probs(
  pair: Pair, source: Array, sampling: Sampling, texts: Sequence[Sequence[int]]
) -> np.ndarray:
  """The target's probabilities [N, T, V] before each token of N texts of length T."""
  rows = -(-len(texts) // 32) * 32  # few shapes, so few programs
  tokens = np.full((rows, len(texts[0])), pair.vocabulary.eos_id, np.int32)
  tokens[: len(texts)] = texts
  model, params = pair.target, pair.target_params
  sources = jnp.repeat(source, 32, axis=0)
  logits = (teacher_forced_logits(model, params, sources, c) for c in np.split(tokens, rows // 32))
  return np.concatenate([distribution(x, sampling) for x in logits])[: len(texts)]


def _is_possible(eos_id: int, text: tuple[int, ...], probs: np.ndarray) -> bool:
  """Whether the target can write this, given its probabilities [T, V] before each token.

  No token has probability 0, none follows EOS, and none is missing.
  """
  ends = len(text) == len(probs) or text[-1:] == (eos_id,)
  return bool(ends and eos_id not in text[:-1] and (probs[range(len(text)), text] > 0).all())
