"""Guesses, acceptance and next tokens of exact rounds pass; 1% too much acceptance does not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from flax import struct
from jax import Array
from test_exactness import JudgedBy, bonus_of_the_guess_before, forgetful, judge_with

from specdec_jax.drafts.copy import CopyDraft
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.exactness import laws
from specdec_jax.exactness.drift import (
  Drift,
  Judged,
  detectable_bias,
  drifts,
  joined,
  of_acceptance,
)
from specdec_jax.protocols import Proposal, Verdict
from specdec_jax.rules.tokens import TokenRule
from specdec_jax.sampling import Sampling, row_keys
from specdec_jax.trees import Tree, branching, chain

V, GAMMA, EOS = 24, 2, 1
CHAIN, TREE, PAIRED = chain(GAMMA), Tree((0, 0, 0, 1, 1, 2, 4)), branching(2)
LEVEL = 1e-6  # of each comparison: a correct program fails it this often
COLD = Sampling(temperature=0.7)


# Models that are tables: the logits after each token. Nothing else is as quick.


@struct.dataclass
class TableCache:
  length: Array


@dataclasses.dataclass(frozen=True)
class TableModel:
  """Its parameters are logits [V, V]."""

  vocab_size: int = V
  eos_id: int = EOS

  def prompt_tokens(self, prompt):
    return jnp.zeros((len(prompt), 1), jnp.int32), jnp.ones(len(prompt), jnp.int32)

  def prefill(self, params, prompt, num_slots):
    return jnp.zeros((len(prompt), 1, 0)), TableCache(jnp.zeros(len(prompt), jnp.int32))

  def extend(self, params, cache, tokens, tree=None, first=0):
    return params[tokens], jnp.zeros((*tokens.shape, 0)), cache

  def commit(self, cache, length, tree=None, path=None):
    return TableCache(length)


def table_pair(noise: float, ends: bool = False, change=lambda proposal: proposal):
  """A draft `noise` away from its target, which nothing is compiled for yet.

  `change`: proposal -> proposal.
  """
  rng = np.random.default_rng(0)
  table = rng.normal(size=(V, V)).astype(np.float32)
  near = table + noise * rng.normal(size=(V, V)).astype(np.float32)
  if not ends:
    table[:, EOS] = near[:, EOS] = -1e9

  def draft(sampling, tree):
    good = ModelDraft(TableModel(), sampling, tree)
    return tiny.ChangedDraft(good, lambda params, proposal: change(proposal))

  return tiny_pair.pair()._replace(
    target=TableModel(), target_params=jnp.asarray(table), draft=draft, draft_params=near
  )


def judged(
  pair, sampling=COLD, num_guesses=30_000, rule=TokenRule, tree=CHAIN, rows=512, limit=64
) -> Judged:
  decode = laws.recorded(pair._replace(rule=rule), sampling, tree)
  return laws.judge_rounds(
    *(pair, tiny_pair.SENTENCES, sampling, decode, num_guesses, limit), seed=0, batch_size=rows
  )


def lowest(found: Judged, count=GAMMA) -> dict[str, float]:
  """Of each kind of law the least p-value, of any of the first `count` positions."""
  return {k: min(d.p_value for d in ds) for k, ds in drifts(found, count).items()}


# What is exact passes.


@pytest.mark.parametrize(
  "sampling, noise, num_guesses, bias",  # the bias is what they would have shown
  [(COLD, 0.06, 120_000, 0.01), (Sampling(top_p=0.7), 0.5, 30_000, 0.1)],
)
def test_exact_rounds_pass(sampling, noise, num_guesses, bias):
  found = judged(table_pair(noise, ends=noise == 0.5), sampling, num_guesses)
  guesses = found.at(*range(GAMMA))
  assert len(guesses.position) >= num_guesses and len(found.at(-1).position) > 3000
  assert all(p > LEVEL for p in lowest(found).values())
  assert detectable_bias(guesses, LEVEL) < bias and of_acceptance(guesses).p_value > LEVEL


def test_exact_rounds_of_a_draft_without_chance_pass():
  pair = table_pair(0)._replace(draft=lambda sampling, tree: CopyDraft(V, tree))
  found = judged(pair._replace(draft_params=()))
  assert 0 < found.accepted.mean() < 0.5 and found.guess_variance.max() == 0
  assert all(p > LEVEL for p in lowest(found).values())


def test_exact_rounds_of_a_tree_pass():
  found = judged(table_pair(0.5, ends=True), Sampling(top_k=12), 8000, tree=TREE, rows=128)
  assert laws.positions(TREE) == [0, 1, 2, 3, 4, 3, 5] and laws.positions(CHAIN) == [0, 1]
  assert all(len(found.at(place).position) > 100 for place in range(-1, 6))
  assert all(p > LEVEL for p in lowest(found, 6).values())
  assert detectable_bias(found.at(*range(6)), LEVEL) < 0.1


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_each_guess_is_scored_by_the_laws_of_its_own_round(tree):
  """Against a walk through the rounds, with EOS and the limit in the midst of some."""
  pair, sampling, limit = table_pair(noise=1.0, ends=True), Sampling(), 7
  prompt, keys = pair.prompt(tiny_pair.SENTENCES[:40]), row_keys(3, 0, 40)
  decode = laws.recorded(pair, sampling, tree)
  result, _ = decode(prompt, keys, max_new_tokens=limit)
  own = pair.decoder(sampling, tree)(prompt, keys, max_new_tokens=limit)
  jax.tree.map(np.testing.assert_array_equal, result, own)
  p, q = (np.exp(np.float64(x)) for x in (pair.target_params, pair.draft_params))
  p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
  rank = lambda law, x: law[law > law[x]].sum() + law[x] / 2 - 0.5
  paths = np.asarray(result.rounds.path if tree is TREE else [[[1, 2]] * 40] * limit)
  rows = []
  for row in range(40):
    newest = 0
    of_row = (np.asarray(x)[:, row] for x in result.rounds[:4])
    for guesses, n, token, emitted, path in zip(*of_row, paths[:, row]):
      path = [0, *path[:n]]
      for node in path[:emitted]:
        left, law, accepted = p[newest], q[newest].copy(), False
        children = [guess for guess, parent in enumerate(tree.parents) if parent == node]
        for guess in children:
          x, accepted = guesses[guess], guess + 1 in path
          law /= law.sum()
          scores = min(1, left[x] / law[x]), rank(law, x)
          left, was = np.maximum(left - law, 0), left
          left = left / left.sum() if left.any() else was
          final = 0.0 if accepted or guess < children[-1] else rank(left, token)
          rows.append((laws.positions(tree)[guess], accepted, *scores, final))
          if accepted:
            break
          law[x] = 0
        if not children:
          rows.append((-1, False, 1.0, 0.0, rank(left, token)))
        newest = x if accepted else token
  found = laws.judge_rounds(
    *(pair, tiny_pair.SENTENCES[:40], sampling, decode, 1, limit), seed=3, batch_size=40
  )
  fields = found.position, found.accepted, found.probability, found.guess, found.next
  for ours, by_hand in zip(fields, np.array(rows, float).T, strict=True):
    np.testing.assert_allclose(ours, by_hand, atol=3e-6)
  assert set(found.position) == {-1, *laws.positions(tree)}


# Injected faults.


ACCEPTANCE = {
  "1% too often": lambda u, q, p: u * q < 1.01 * p,
  "1% too rarely": lambda u, q, p: u * q < 0.99 * p,
}


@pytest.mark.parametrize("fault", ACCEPTANCE)
def test_a_bias_of_1_percent_in_acceptance_is_found(fault):
  rule = lambda sampling: JudgedBy(sampling, judge_with(ACCEPTANCE[fault]))
  found = judged(table_pair(noise=0.06), num_guesses=120_000, rule=rule).at(*range(GAMMA))
  assert detectable_bias(found, LEVEL) < 0.01
  assert of_acceptance(found).p_value < LEVEL


@pytest.mark.parametrize("fault", [judge_with(residual=lambda p, q: p), bonus_of_the_guess_before])
def test_faults_of_the_next_token_are_found(fault):
  found = lowest(judged(table_pair(0.5), rule=lambda sampling: JudgedBy(sampling, fault)))
  assert found["next tokens"] < LEVEL < min(found["all acceptance"], found["guesses"])


def test_a_draft_whose_q_forgets_the_temperature_is_found():
  found = lowest(judged(table_pair(0.5, change=lambda proposal: forgetful(proposal, 0.7))))
  assert found["guesses"] < LEVEL < min(found["all acceptance"], found["next tokens"])


def test_a_loop_that_judges_by_another_q_than_reported_is_found():
  def forgets(rng, x, q, p):
    return judge_with()(rng, x, forgetful(Proposal(x, q), 0.7).q, p)

  found = lowest(judged(table_pair(0.5), rule=lambda sampling: JudgedBy(sampling, forgets)))
  assert found["acceptance"] < LEVEL < found["guesses"]


def q_of_the_eldest(proposal):
  """Siblings drawn without replacement, with the q of those that are not."""
  eldest = jnp.asarray(PAIRED.children)[list(PAIRED.parents), 0]
  return proposal._replace(q=proposal.q[:, eldest])


@dataclasses.dataclass(frozen=True)
class YoungestFirst:
  """Siblings tried in another order than drawn."""

  sampling: Sampling
  exact = False

  def accept(self, rng, tree, proposal, logits):
    turned = Proposal(proposal.tokens[:, ::-1], proposal.q[:, ::-1])
    n, token, path = TokenRule(self.sampling).accept(
      rng, tree, turned, jnp.concatenate([logits[:, :1], logits[:, :0:-1]], axis=1)
    )
    return Verdict(n, token, jnp.where(path > 0, tree.num_nodes - path, 0))


@dataclasses.dataclass(frozen=True)
class Unadjusted(TokenRule):
  """Siblings judged by a q that forgets their elders."""

  def accept(self, rng, tree, proposal, logits):
    return super().accept(rng, tree, q_of_the_eldest(proposal), logits)


@pytest.mark.parametrize(
  "change, rule, found_by",
  [
    (q_of_the_eldest, TokenRule, {"guesses"}),
    (lambda proposal: proposal, Unadjusted, {"all acceptance", "acceptance"}),
    (lambda proposal: proposal, YoungestFirst, {"all acceptance", "acceptance"}),
    (lambda proposal: proposal, TokenRule, set()),
  ],
  ids=["reported q", "judged q", "order", "none"],
)
def test_faults_among_siblings_are_found(change, rule, found_by):
  pair = table_pair(1.0, change=change)
  found = lowest(judged(pair, Sampling(), 20_000, rule, PAIRED), 2)
  assert {law for law, p in found.items() if p < LEVEL} >= found_by, found
  assert found_by or min(found.values()) > LEVEL, found


# The statistics.


def test_a_rank_has_mean_0_and_the_variance_that_is_said():
  weights = np.random.default_rng(0).dirichlet(np.ones(7), size=5) * 3  # any scale
  law = weights / 3
  rank = lambda x: laws._rank(jnp.asarray(weights), jnp.full(5, x))
  ranks, variance = map(np.stack, zip(*map(rank, range(7))))
  np.testing.assert_allclose((law.T * ranks).sum(axis=0), 0, atol=1e-6)
  np.testing.assert_allclose((law.T * ranks**2).sum(axis=0), variance[0], atol=1e-6)
  assert laws._rank(jnp.zeros(7), jnp.array(3)) == (0, 0)  # nothing was drawn


def simulated(rng, a: np.ndarray, bias: float) -> Judged:
  """Guesses accepted with probability min(1, (1 + bias) a)."""
  nothing = np.zeros(len(a))
  accepted = (rng.random(len(a)) < (1 + bias) * a).astype(float)
  return Judged(nothing, accepted, a, nothing, nothing, nothing, nothing)


@pytest.mark.parametrize("n", [5, 300])
def test_the_level_holds_for_any_number_of_guesses(n):
  # 2,000 samples: the share below 0.1 has a standard error of 0.007.
  rng = np.random.default_rng(n)
  low = [of_acceptance(simulated(rng, rng.beta(3, 1, n), 0)).p_value < 0.1 for _ in range(2000)]
  assert np.mean(low) < 0.1


def test_a_bias_of_the_size_that_is_said_is_found_9_times_in_10():
  # 1,000 samples: the share found has a standard error of 0.01.
  rng = np.random.default_rng(0)
  a = rng.beta(3, 1, 3000)
  exact = simulated(rng, a, 0)
  bias = detectable_bias(exact, 1e-3)
  found = [of_acceptance(simulated(rng, a, bias)).p_value < 1e-3 for _ in range(1000)]
  assert 0.86 < np.mean(found) < 0.97
  assert detectable_bias(joined([exact] * 4), 1e-3) < bias / 1.9


def test_acceptance_without_chance_needs_no_variance():
  certain = np.ones(50)
  sure = simulated(np.random.default_rng(0), certain, 0)
  assert of_acceptance(sure).p_value == 1 and of_acceptance(sure).z == 0
  assert detectable_bias(sure, 1e-3) == np.inf  # p >= q: nothing can be accepted more often
  assert of_acceptance(sure._replace(accepted=0 * certain)).p_value < 1e-6


def test_the_critical_sum_is_that_of_the_level():
  drift = Drift(0.0, 400.0, 20.0)
  assert drift._replace(sum=drift.critical(1e-4)).p_value == pytest.approx(1e-4)
  assert drift._replace(sum=-drift.critical(1e-4)).p_value == pytest.approx(1e-4)
