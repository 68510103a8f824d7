"""Rounds on tables: right verifiers and drafts pass, and small faults are found at the defaults."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from scipy import stats
from test_round_scores import q_of_the_eldest
from wrong_verifiers import FAULTS, Matching, SamplesAgain

from specdec_jax.commands import check as check_module
from specdec_jax.commands.check import check_exactness
from specdec_jax.contrib.k_seq import KSeqVerifier
from specdec_jax.contrib.merging import MergingVerifier
from specdec_jax.contrib.paths import PathsVerifier
from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import DynamicTree, Tree, branching, chain
from specdec_jax.core.types import DraftOptions
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.gumbel import GumbelVerifier
from specdec_jax.core.verify.rejection import RejectionVerifier
from specdec_jax.core.verify.tokens import TokenVerifier, accepted_path
from specdec_jax.errors import InputError
from specdec_jax.exactness import tables
from specdec_jax.exactness.checker import Setting, TableTest, table_row
from specdec_jax.exactness.tables import count_texts, draft_with_verifier, verifier_alone

CHAIN, TREE, DYNAMIC = check_module.ALONE
LEVEL = 3e-5  # of a setting in a default run, whose level is divided among its tokens
SMALL = 2**15  # rounds, for faults that are far larger than the smallest that is detected


def holds(counts, drifts=None, level=LEVEL):
  return table_row(
    TableTest(counts, drifts or {}, not drifts), Setting(Sampling(), CHAIN), level
  ).holds


# Right verifiers pass.


@pytest.mark.slow
def test_p_values_of_right_verifiers_are_uniform():
  """With q at other temperatures, unfiltered q, repeated siblings, and more: see random_tables."""
  found = [
    p_value
    for verifier, tree in ((TokenVerifier, CHAIN), (Matching, TREE), (BlockVerifier, TREE))
    for seed in range(17)
    for p_value in verifier_alone(verifier(Sampling(top_k=4)), tree, seed, 2**14).p_values
  ]
  assert len(found) == 204 and stats.kstest(found, "uniform").pvalue > 1e-3
  assert stats.kstest(np.square(found), "uniform").pvalue < 1e-3  # the test detects such a change


ALL = {
  "token": (TokenVerifier, DYNAMIC),
  "gumbel": (GumbelVerifier, DYNAMIC),
  "block": (BlockVerifier, TREE),
  "k-seq": (KSeqVerifier, TREE),
  "merging": (MergingVerifier, TREE),
  "paths": (PathsVerifier, TREE),
  "rejection": (RejectionVerifier, TREE),
  "matching": (Matching, TREE),
}


def test_token_verifier_passes():
  assert holds(verifier_alone(TokenVerifier(Sampling()), CHAIN, 0, SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_exact_verifiers_pass(name):
  verifier, tree = ALL[name]
  assert holds(verifier_alone(verifier(Sampling(0.7, top_p=0.9)), tree, 0, SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [TokenVerifier, BlockVerifier])
def test_exact_verifiers_pass_at_temperature_0(verifier):
  counts = verifier_alone(verifier(Sampling(temperature=0.0)), TREE, 0, 2**10)
  assert not counts.freedom.any() and holds(counts)


# Faults are found.

SUBTLE = {"q at temperature 0.95 in odd rows", "one uniform for two draft tokens"}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_wrong_verifiers_are_found(name):
  """Subtle faults need as many rounds as a default run has."""
  sampling = Sampling(top_p=0.9) if "top-p" in name else Sampling()
  verifier, tree = FAULTS[name](sampling), TREE if "sibling" in name else CHAIN
  num_rounds = None if name in SUBTLE else 2**16
  seeds = range(3)
  found = [not holds(verifier_alone(verifier, tree, seed, num_rounds)) for seed in seeds]
  assert all(found)


@pytest.mark.slow
def test_wrong_verifier_is_found_at_once(capsys):
  """The command stops before it checks the pair."""
  pair = dataclasses.replace(tiny_pair.pair("random"), verifier=SamplesAgain)
  with pytest.raises(SystemExit) as ended:
    check_exactness(pair, tiny_pair.SENTENCES[:4], [Sampling()], gammas=(3,), trees=(), dynamic=())
  said = capsys.readouterr().out
  assert ended.value.code == 1 and "FAIL  verifier alone" in said
  assert "0 of 1 checks hold" in said and "draft with verifier" not in said


# The draft of a pair.


def draft_tests(pair, tree, sampling=Sampling(), num_rounds=2**13, verifier=TokenVerifier):
  pair = dataclasses.replace(pair, verifier=verifier)
  prompt = pair.prompt(tiny_pair.SENTENCES[:32])
  return draft_with_verifier(pair.decoder(sampling, tree), pair.params, prompt, 0, num_rounds)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [chain(3), Tree((0, 0, 1, 1)), DynamicTree(5, 2)], ids=str)
def test_right_drafts_pass(tree):
  counts, drifts = draft_tests(tiny_pair.pair(), tree, Sampling(0.7, top_p=0.9))
  assert holds(counts, drifts) and counts.num_tokens[0] == 2**13
  assert bool(drifts) == isinstance(tree, Tree)


def cold_in_odd_rows(proposal):
  """Report q at temperature 0.95 in odd rows, for the same draft tokens."""
  q = distribution(jnp.log(proposal.q), Sampling(0.95))
  return proposal._replace(q=q.at[::2].set(proposal.q[::2]))


def without_improbable_tokens(proposal):
  """Leave out tokens because of what was sampled."""
  q_x = jnp.take_along_axis(proposal.q, proposal.tokens[..., None], axis=2)
  is_out = jnp.cumsum(q_x[..., 0] < 0.1, axis=1) > 0
  return proposal._replace(
    tokens=jnp.where(is_out, -1, proposal.tokens), q=jnp.where(is_out[..., None], 0, proposal.q)
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "change, tree, num_rounds",
  [
    (cold_in_odd_rows, chain(3), 2**15),
    (q_of_the_eldest, branching(2), 2**13),
    (without_improbable_tokens, chain(3), 2**13),
  ],
)
def test_wrong_q_of_a_draft_is_found(change, tree, num_rounds):
  pair = tiny_pair.pair()

  def draft(sampling, tree, options=DraftOptions()):
    good = pair.draft.build(sampling, tree, options)
    return tiny.ChangedDraft(good, lambda params, proposal: change(proposal))

  counts, drifts = draft_tests(tiny_pair.changed(pair, draft=draft), tree, num_rounds=num_rounds)
  assert not holds(counts, drifts)


# Trees that a verifier does not support.


@pytest.mark.slow
def test_default_tree_that_the_verifier_cannot_verify_is_left_out_with_the_reason(capsys):
  pair = dataclasses.replace(tiny_pair.pair(), verifier=Matching)
  assert not check_module._problem(pair, TREE, ["1"])
  assert "Error: " in check_module._problem(pair, DYNAMIC, ["1"])  # not an InputError
  check_exactness(
    pair, tiny_pair.SENTENCES[:2], [Sampling(0.0)], (2,), (2,), max_new_tokens=4, long_tokens=0
  )
  assert "dynamic tree 8/3 are left out: " in capsys.readouterr().out


def test_accepted_path_of_a_dynamic_tree_raises():
  with pytest.raises(InputError, match="accepted_path takes static trees"):
    accepted_path(DYNAMIC, jnp.ones((1, 6), bool))


# Statistics.


def test_texts_are_compared_token_by_token_up_to_eos():
  probs = np.full((tables.V + 1, tables.V, tables.V), 0.25)
  probs[..., 0] = 0.0
  texts = np.array([[1, 0], [2, 4], [3, 3], [4, 1]] * 100)  # EOS is 1, after which 0 does not count
  counts = count_texts(np.zeros(400, int), texts, probs)
  assert counts.num_impossible == 0 and counts.num_tokens.tolist() == [400, 300]
  assert counts.statistic[0] == 0 and counts.freedom.tolist() == [3, 9]
  assert counts.p_values[0] == 1 and counts.p_values[1] < 1e-6
  texts[1, 1] = 0
  counts = count_texts(np.zeros(400, int), texts, probs)
  assert counts.num_impossible == 1 and not counts.p_values.any()


def test_stated_detectable_error_is_detected_9_times_in_10():
  # 500 samples: the detected share has a standard error of 0.013.
  rng, num_rounds, level = np.random.default_rng(0), 20_000, 1e-4
  probs = np.full((tables.V + 1, tables.V, tables.V), 1 / tables.V)
  uniform = np.ones(4) / 4
  probs[..., :4], probs[..., 4] = uniform, 0.0

  def tested(p):
    texts = rng.choice(4, size=(num_rounds, 1), p=p) + 0
    return count_texts(np.zeros(num_rounds, int), texts, probs, eos_ids=())

  size = tested(uniform).detectable(level)
  moved = uniform + size * np.array([0.5, 0.5, -0.5, -0.5])  # total variation `size`
  assert 0.86 < np.mean([tested(moved).p_values[0] < level for _ in range(500)]) < 0.95
