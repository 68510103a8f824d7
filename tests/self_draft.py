"""Decoding at temperature 0 with the target as its own draft, so that the outcome is known.

In each round, the target's tokens are placed on one path of the tree, and different tokens on the
other nodes. The whole path must be accepted.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.core.context import Context
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, chain
from specdec_jax.core.types import DraftSpec, Outcome, Proposal
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.exactness.paths import batches, plans_of
from specdec_jax.pair import Pair


@dataclasses.dataclass(frozen=True)
class PathDraft(ModelDraft):
  """A draft that places the next tokens from its model on one path, and others on other nodes.

  The path changes from round to round and from row to row.
  """

  def init(self, params: Any, context: Context, hidden: Array) -> Any:
    return super().init(params, context, hidden), jnp.arange(len(context.tokens))

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    (cache, plan), plans = state, plans_of(self.tree)
    chain_draft = ModelDraft(self.model, self.sampling, chain(self.tree.depth), self.options)
    (text, *_), cache = chain_draft.propose(params, cache, context, rng)
    tokens = plans.tokens(plan, text, self.model.vocab_size)
    shape = plans.shape(plan, self.tree)
    dynamic = shape if isinstance(shape, DynamicTree) else None
    return Proposal(tokens, tree=dynamic), (cache, (plan + 1) % len(plans.lengths))

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return state


def rounds_of_self_draft(
  pair: Pair,
  texts: Sequence[str],
  tree: AnyTree,
  batch_size: int,
  max_new_tokens: int,
  by_paths: bool = False,
  processors: Processors = (),
) -> tuple[int, int]:
  """Count the rounds of argmax decoding with the target as its own draft.

  Every round must accept the whole path of first children, so faults that cost speed without
  changing the output, such as a lost bonus token, show as additional rounds. With `by_paths`, which
  a dynamic tree requires, the target's tokens are on the path to each leaf in turn (`PathDraft`).

  Returns:
    The number of rounds, and the smallest possible number of rounds, summed over all texts.
  """
  draft = functools.partial(PathDraft if by_paths else ModelDraft, pair.target.model)
  self_pair = pair.with_draft(DraftSpec(pair.target.name, draft, pair.target.params))
  decode = self_pair.decode_fn(Sampling(temperature=0.0), tree, processors=processors)
  if by_paths:
    lengths = plans_of(tree).lengths
  else:
    assert isinstance(tree, Tree)
    first = [ancestors[1:] @ tree.ranks == 0 for ancestors in tree.ancestors]
    lengths = tree.depths[np.flatnonzero(first)[-1:]]

  def fewest_rounds(row: int, length: int) -> int:
    emitted = np.cumsum(np.resize(np.roll(lengths, -row % len(lengths)) + 1, max_new_tokens))
    return 1 + int(np.searchsorted(emitted, length))

  rounds = fewest = 0
  settings = DecodeSettings(Sampling(), batch_size)
  for first_row, prompt, keys in batches(pair, texts, settings):
    if (count := min(batch_size, len(texts) - first_row)) <= 0:
      break
    decoded = decode(prompt, keys, max_new_tokens=max_new_tokens)
    rounds += int((decoded.rounds.num_emitted[:, :count] > 0).sum())
    fewest += sum(map(fewest_rounds, range(count), np.asarray(decoded.lengths).tolist()))
  return rounds, fewest
