"""Test the proposals of hierarchical drafts whose levels are trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import stats
from test_verifiers import ATOL, by_tokens, emitted, enumerated, exact, tables, without_replacement

from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import branching, chain
from specdec_jax.core.types import DraftOptions
from specdec_jax.drafts.hierarchical import HierarchicalDraft, chain_with_siblings
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.models.t5 import T5Model

V, ROWS = 6, 2048
MODEL = T5Model(tiny.config(vocab_size=V, layers=1))
PARAMS = tiny.params(MODEL.config, 2, peak=0.9)
SOURCE = jnp.asarray(tiny.sources(MODEL.config, 0, 1))


def test_tree_of_siblings():
  assert chain_with_siblings(3, 1) == chain(3)
  assert chain_with_siblings(3, 2).parents == (0, 0, 1, 1, 3, 3)
  assert chain_with_siblings(1, 3) == branching(3)


def test_siblings_keep_the_targets_distribution():
  tree = chain_with_siblings(2, 2)
  p, q = tables(0, tree.depth), tables(100, tree.depth)
  joint, _ = emitted(tree, p, enumerated(tree, q, without_replacement), by_tokens)
  np.testing.assert_allclose(joint, exact(p), atol=ATOL)


@functools.cache
def proposed(sampling: Sampling):
  """Return tokens and q of ROWS proposals at the start of one text."""
  inner = ModelDraft(MODEL, sampling, branching(2, 2), DraftOptions(reread=4))
  draft = HierarchicalDraft(MODEL, inner, sampling, chain_with_siblings(3, 2))
  params = PARAMS, tiny.near(PARAMS, 5, 0.3)
  rows = ROWS if not sampling.is_argmax else 1
  tokens, length = jnp.zeros((rows, 12), jnp.int32), jnp.ones(rows, jnp.int32)
  hidden = jnp.zeros((rows, MODEL.config.emb_dim))
  prompt = jnp.repeat(SOURCE, rows, axis=0)
  context = Context(prompt, tokens, length, None, hidden, length, length + 10)

  @jax.jit
  def propose(context: Context):
    state = draft.init(params, context, hidden[:, None])
    return draft.propose(params, state, context, jax.random.split(jax.random.key(0), rows))[0]

  proposal = propose(context)
  return np.asarray(proposal.tokens), None if proposal.q is None else np.asarray(proposal.q)


def model_logits(tokens: np.ndarray) -> np.ndarray:
  """Return the logits [B, D, V] of the model before each of the tokens of a chain."""
  inputs = jnp.pad(jnp.asarray(tokens[:, :-1]), ((0, 0), (1, 0)))
  prompt = jnp.repeat(SOURCE, len(tokens), axis=0)
  _, cache = MODEL.prefill(PARAMS, prompt, 8)
  return np.asarray(MODEL.extend(PARAMS, cache, inputs)[0])


@pytest.mark.slow
def test_q_is_the_distribution_of_each_token(sampling=Sampling()):
  """q is compared with the model's distribution, and the tokens are samples from q."""
  tokens, q = proposed(sampling)
  first, sibling = tokens[:, ::2], tokens[:, 1::2]
  p = np.asarray(tiny.adjusted(model_logits(first)))
  np.testing.assert_allclose(q[:, ::2], p, atol=1e-5)
  assert (first != sibling).all()
  is_first = first[..., None] == np.arange(V)
  rest = np.where(is_first, 0, p)
  np.testing.assert_allclose(q[:, 1::2], rest / rest.sum(axis=-1, keepdims=True), atol=1e-5)
  # Probability transform: the cumulative q below the token, with noise, is uniform.
  rng = np.random.default_rng(0)
  below = np.where(np.arange(V) < tokens[..., None], q, 0).sum(axis=-1)
  at = np.take_along_axis(q, tokens[..., None], axis=-1)[..., 0]
  uniform = below + at * rng.random(at.shape)
  for node in range(tokens.shape[1]):
    assert stats.kstest(uniform[:, node], "uniform").pvalue > tiny.LEVEL


@pytest.mark.slow
def test_tokens_at_temperature_0_are_the_most_probable():
  tokens, q = proposed(Sampling(0.0))
  best = np.argsort(-model_logits(tokens[:, ::2]), axis=-1)
  assert q is None
  np.testing.assert_array_equal(tokens, best[..., :2].reshape(1, -1))
