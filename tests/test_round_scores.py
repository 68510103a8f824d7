"""Test that the scores of exact rounds pass, and that acceptance 1% too often is detected."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from test_exactness import JudgedBy, bonus_of_the_draft_token_before, forgetful, judge_with

from specdec_jax.core.decode import Decoder, DecodeSettings
from specdec_jax.core.sampling import Sampling, row_keys, sample, sample_logits
from specdec_jax.core.trees import Tree, branching, chain
from specdec_jax.core.types import Proposal, Verification, Verifier
from specdec_jax.core.verify import tokens
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts import model
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.exactness import martingale, paths, round_scores
from specdec_jax.exactness.martingale import (
  MIN_PROB,
  TOKEN_SCORES,
  Drift,
  RoundScores,
  Scores,
  acceptance_drift,
  between_rounds,
  detectable_bias,
  detectable_temperature,
  drifts,
  joined,
  token_drift,
  within_rounds,
)
from specdec_jax.exactness.tables import TableModel

pytestmark = pytest.mark.slow

V, GAMMA, EOS = 24, 2, 1
CHAIN, TREE, PAIRED = chain(GAMMA), Tree((0, 0, 0, 1, 1, 2, 4)), branching(2)
LEVEL = 1e-6  # significance level of each comparison: a correct program fails it this often
COLD = Sampling(temperature=0.7)


# Models that are tables are faster than any network.


class FromZero(TableModel):
  """Table model whose texts begin with token 0."""

  def prompt_tokens(self, prompt):
    return jnp.zeros((len(prompt), 1), jnp.int32), jnp.ones(len(prompt), jnp.int32)


def table_pair(noise: float, ends: bool = False, change=lambda proposal: proposal):
  """Return a pair of table models whose logits differ by `noise`, for which nothing is recompiled.

  The proposals of the draft are mapped by `change`.
  """
  rng = np.random.default_rng(0)
  table = rng.normal(size=(V, V)).astype(np.float32)
  near = table + noise * rng.normal(size=(V, V)).astype(np.float32)
  if not ends:
    table[:, EOS] = near[:, EOS] = -1e9

  def draft(sampling, tree, options):
    good = ModelDraft(FromZero(V), sampling, tree)
    return tiny.ChangedDraft(good, lambda params, proposal: change(proposal))

  # The logits depend on the last token only.
  params, near = (jnp.broadcast_to(x, (V + 1, V, V)) for x in (table, near))
  return tiny_pair.changed(
    tiny_pair.pair(), model=FromZero(V), params=params, draft=draft, draft_params=near
  )


def judged(
  pair,
  sampling=COLD,
  num_draft_tokens=30_000,
  verifier=TokenVerifier,
  tree=CHAIN,
  rows=512,
  limit=64,
) -> RoundScores:
  decode = round_scores.recorded(dataclasses.replace(pair, verifier=verifier), sampling, tree)
  settings = DecodeSettings(sampling, rows, limit)
  return round_scores.score_rounds(pair, tiny_pair.SENTENCES, decode, settings, num_draft_tokens)


def lowest(found: RoundScores, count=GAMMA) -> dict[str, float]:
  """Return the lowest p-value of each kind of score, over the first `count` positions."""
  return {k: min(d.p_value for d in ds) for k, ds in drifts(found, count).items()}


def log_drift(scores: Scores) -> Drift:
  return token_drift(scores, "log-probability")


# Exact rounds pass.


@pytest.mark.parametrize(
  "sampling, noise, num_draft_tokens, bias",  # the smallest bias that they would have detected
  [(COLD, 0.06, 120_000, 0.01), (Sampling(top_p=0.7), 0.5, 30_000, 0.1)],
)
def test_exact_rounds_pass(sampling, noise, num_draft_tokens, bias):
  found = judged(table_pair(noise, ends=noise == 0.5), sampling, num_draft_tokens)
  draft_tokens = found.at(*range(GAMMA))
  assert len(draft_tokens.position) >= num_draft_tokens and len(found.at(-1).position) > 3000
  assert all(p > LEVEL for p in lowest(found).values())
  assert (
    detectable_bias(draft_tokens, LEVEL) < bias and acceptance_drift(draft_tokens).p_value > LEVEL
  )
  certain = found.next.spread < 1e-7  # a token that was the only possible one has rank 0
  assert np.abs(found.next.rank[certain]).max() < 1e-3
  for kind in TOKEN_SCORES:
    assert min(token_drift(x, kind).p_value for x in (found.draft_token, found.next)) > LEVEL
  joint = [*within_rounds(found).values(), *between_rounds(found).values()]
  assert min(drift.p_value for drift in joint) > LEVEL
  assert 0.8 < np.std([drift.z for drift in joint]) < 1.2  # 128 of them


def test_exact_rounds_of_a_deterministic_draft_pass():
  def draft(sampling, tree, options):
    return PromptLookupDraft(V, tree)

  pair = tiny_pair.changed(table_pair(0), draft=draft)
  found = judged(tiny_pair.changed(pair, draft_params=()))
  assert 0 < found.accepted.mean() < 0.5 and found.draft_token.spread.max() == 0
  assert all(p > LEVEL for p in lowest(found).values())


def test_draft_tokens_that_were_not_proposed_do_not_count():
  def stops(proposal):
    made = jnp.arange(GAMMA) <= proposal.tokens[:, :1] % GAMMA  # 2nd: odd tokens only
    q = jnp.where(made[..., None], proposal.q, 0.0)
    return Proposal(jnp.where(made, proposal.tokens, -1), q)

  found = judged(table_pair(0.5, change=stops), num_draft_tokens=1)
  assert len(found.at(0).row) > 1.5 * len(found.at(1).row) > 0
  assert all(p > LEVEL for p in lowest(found).values())


def test_exact_rounds_of_a_tree_pass():
  found = judged(table_pair(0.5, ends=True), Sampling(top_k=12), 8000, tree=TREE, rows=128)
  assert round_scores.positions(TREE) == [0, 1, 2, 3, 4, 3, 5] and round_scores.positions(
    CHAIN
  ) == [0, 1]
  assert all(len(found.at(place).position) > 100 for place in range(-1, 6))
  assert all(p > LEVEL for p in lowest(found, 6).values())
  assert detectable_bias(found.at(*range(6)), LEVEL) < 0.1
  joint = [*within_rounds(found).values(), *between_rounds(found).values()]
  assert min(drift.p_value for drift in joint) > LEVEL


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_draft_tokens_are_scored_by_the_distributions_of_their_own_round(tree):
  """The scores equal those of a loop over the rounds, some of which contain EOS or the limit."""
  pair, sampling, limit = table_pair(noise=1.0, ends=True), Sampling(), 7
  prompt, keys = pair.prompt(tiny_pair.SENTENCES[:40]), row_keys(3, 0, 40)
  decode = round_scores.recorded(pair, sampling, tree)
  result, _ = decode(prompt, keys, max_new_tokens=limit)
  own = pair.decode_fn(sampling, tree)(prompt, keys, max_new_tokens=limit)
  jax.tree.map(np.testing.assert_array_equal, result, own)
  p, q = (np.exp(np.float64(x[0])) for x in (pair.target.params, pair.draft.params))
  p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))

  def score(probs, x):
    logs = np.log(np.maximum(probs, MIN_PROB))
    by_rank, by_place = probs[probs > probs[x]].sum(), probs[:x].sum()
    half = probs[x] / 2 - 0.5
    return by_rank + half, by_place + half, logs[x] - probs @ logs

  paths = np.asarray(result.rounds.path if tree is TREE else [[[1, 2]] * 40] * limit)
  rows = []
  for row in range(40):
    last, slot = 0, 0
    of_row = (np.asarray(x)[:, row] for x in result.rounds[:4])
    for draft_tokens, n, token, emitted, path in zip(*of_row, paths[:, row]):
      path, begin = [0, *path[:n]], slot
      for node in path[:emitted]:
        residual, q_left, accepted = p[last], q[last].copy(), False
        children = [
          draft_token for draft_token, parent in enumerate(tree.parents) if parent == node
        ]
        for draft_token in children:
          x, accepted = draft_tokens[draft_token], draft_token + 1 in path
          q_left /= q_left.sum()
          scores = min(1, residual[x] / q_left[x]), *score(q_left, x)
          residual, before = np.maximum(residual - q_left, 0), residual
          residual = residual / residual.sum() if residual.any() else before
          final = (0, 0, 0) if accepted or draft_token < children[-1] else score(residual, token)
          where = (
            row,
            slot,
            begin,
            draft_token - children[0],
            round_scores.positions(tree)[draft_token],
          )
          rows.append((*where, accepted, *scores, *final))
          if accepted:
            break
          q_left[x] = 0
        if not children:
          rows.append((row, slot, begin, 0, -1, False, 1, 0, 0, 0, *score(residual, token)))
        last, slot = x if accepted else token, slot + 1
  settings = DecodeSettings(sampling, 40, limit, seed=3)
  found = round_scores.score_rounds(pair, tiny_pair.SENTENCES[:40], decode, settings, 1)
  scores = ((x.rank, x.place, x.log) for x in (found.draft_token, found.next))
  fields = *found[:7], *itertools.chain(*scores)
  for ours, by_hand in zip(fields, np.array(rows, float).T, strict=True):
    np.testing.assert_allclose(ours, by_hand, atol=2e-5)
  assert set(found.position) == {-1, *round_scores.positions(tree)}


# Injected faults.


def test_acceptance_bias_of_1_percent_is_detected():
  def verifier(sampling):
    return JudgedBy(sampling, judge_with(accept=lambda u, q, p: u * q < 1.01 * p))

  found = judged(table_pair(noise=0.06), num_draft_tokens=120_000, verifier=verifier).at(
    *range(GAMMA)
  )
  assert detectable_bias(found, LEVEL) < 0.01
  assert acceptance_drift(found).p_value < LEVEL


@pytest.mark.parametrize(
  "fault", [judge_with(residual=lambda p, q: p), bonus_of_the_draft_token_before]
)
def test_faults_of_the_next_token_are_detected(fault):
  found = lowest(judged(table_pair(0.5), verifier=lambda sampling: JudgedBy(sampling, fault)))
  assert found["next tokens"] < LEVEL < min(found["all acceptance"], found["draft tokens"])


def test_draft_whose_q_omits_the_temperature_is_detected():
  found = lowest(judged(table_pair(0.5, change=lambda proposal: forgetful(proposal, 0.7))))
  assert found["draft tokens"] < LEVEL < min(found["all acceptance"], found["next tokens"])


def test_loop_that_verifies_with_another_q_than_reported_is_detected():
  def forgets(rng, x, q, p):
    return judge_with()(rng, x, forgetful(Proposal(x, q), 0.7).q, p)

  found = lowest(judged(table_pair(0.5), verifier=lambda sampling: JudgedBy(sampling, forgets)))
  assert found["acceptance"] < LEVEL < found["draft tokens"]


def q_of_the_eldest(proposal):
  """Sample siblings without replacement, and report q of sampling with replacement."""
  eldest = jnp.asarray(PAIRED.children)[list(PAIRED.parents), 0]
  return proposal._replace(q=proposal.q[:, eldest])


@dataclasses.dataclass(frozen=True)
class YoungestFirst(Verifier):
  """Verify siblings in a different order than the one in which they were sampled."""

  sampling: Sampling
  exact = False

  def verify(self, rng, tree, proposal, logits):
    turned = Proposal(proposal.tokens[:, ::-1], proposal.q[:, ::-1])
    n, token, path = TokenVerifier(self.sampling).verify(
      rng, tree, turned, jnp.concatenate([logits[:, :1], logits[:, :0:-1]], axis=1)
    )
    return Verification(n, token, jnp.where(path > 0, tree.num_nodes - path, 0))


@dataclasses.dataclass(frozen=True)
class Unadjusted(TokenVerifier):
  """Verify siblings with a q that ignores their earlier siblings."""

  def verify(self, rng, tree, proposal, logits):
    return super().verify(rng, tree, q_of_the_eldest(proposal), logits)


@pytest.mark.parametrize(
  "change, verifier, found_by",
  [
    (q_of_the_eldest, TokenVerifier, {"draft tokens"}),
    (lambda proposal: proposal, Unadjusted, {"all acceptance", "acceptance"}),
    (lambda proposal: proposal, YoungestFirst, {"all acceptance", "acceptance"}),
  ],
  ids=["reported q", "judged q", "order"],
)
def test_faults_among_siblings_are_detected(change, verifier, found_by):
  pair = table_pair(1.0, change=change)
  found = lowest(judged(pair, Sampling(), 20_000, verifier, PAIRED), 2)
  assert {law for law, p in found.items() if p < LEVEL} >= found_by, found


# Faults that leave the distribution of each single token almost or exactly right.


def test_draft_that_samples_at_another_temperature_than_it_reports_is_detected(monkeypatch):
  """The temperatures differ by 3%, so the mean total variation distance is below 0.01."""

  def colder(rng, logits, sampling, coupled=False):
    changed = dataclasses.replace(sampling, temperature=0.97 * sampling.temperature)
    return sample_logits(rng, logits, changed)[0], sample_logits(rng, logits, sampling)[1]

  monkeypatch.setattr(model, "sample_draft_token", colder)
  found = judged(table_pair(noise=0.5), num_draft_tokens=90_000)
  assert token_drift(found.draft_token, "log-probability").p_value < LEVEL
  assert detectable_temperature(log_drift(found.at(*range(GAMMA)).draft_token), LEVEL) < 0.03
  assert min(lowest(found)[kind] for kind in ("acceptance", "next tokens")) > LEVEL


def test_keys_that_repeat_after_8_tokens_are_detected(monkeypatch):
  class RepeatedKeys(Decoder):
    def round(self, params, state):
      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "fold_in", lambda key, n: fold_in(key, n % 8))
        return super().round(params, state)

  fold_in = jax.random.fold_in
  monkeypatch.setattr(round_scores, "Decoder", RepeatedKeys)
  found = judged(table_pair(noise=0.5), num_draft_tokens=1)
  far = {name for name, drift in between_rounds(found).items() if drift.p_value < LEVEL}
  eight = {
    f"{what} of rounds, by place, 8 tokens apart" for what in ("draft tokens", "next tokens")
  }
  assert eight <= far and not {name for name in far if " 7 tokens" in name}, far
  assert min(lowest(found).values()) > LEVEL  # each single token has the right distribution


def test_next_token_with_the_key_of_a_draft_token_is_detected():
  kept = []

  class Keeping(tiny.ChangedDraft):
    def propose(self, params, state, context, rng):
      kept[:] = [jax.vmap(lambda key: jax.random.split(key, GAMMA), out_axes=1)(rng)[0]]
      return self.draft.propose(params, state, context, rng)

  class OneKey(TokenVerifier):
    def verify(self, *args):
      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "sample", lambda _, weights: sample(kept[0], weights))
        return super().verify(*args)

  def draft(sampling, tree, options):
    return Keeping(ModelDraft(FromZero(V), sampling, tree), None)

  found = judged(
    tiny_pair.changed(table_pair(0.5), draft=draft), num_draft_tokens=1, verifier=OneKey
  )
  far = {name for name, drift in within_rounds(found).items() if drift.p_value < LEVEL}
  assert "next token with the round's first draft token, by place" in far
  assert min(p for kind, p in lowest(found).items() if "next" not in kind) > LEVEL


def test_rows_that_share_their_keys_are_detected(monkeypatch):
  monkeypatch.setattr(paths, "row_keys", lambda *args: row_keys(*args)[jnp.arange(args[2]) // 2])
  found = judged(table_pair(noise=0.5), num_draft_tokens=1)
  far = [name for name, drift in between_rounds(found).items() if drift.p_value < LEVEL]
  assert "draft tokens of rounds, by place, of neighboring outputs" in far
  assert not any("apart" in name for name in far)


# Statistics.


def test_scores_have_mean_0_and_the_stated_variance():
  rng = np.random.default_rng(0)
  law = rng.dirichlet(np.full(7, 1.0), size=5), rng.dirichlet(np.full(7, 0.1), size=5)
  law = np.concatenate([*law, np.zeros((1, 7))])  # the last one: nothing is sampled
  every = np.broadcast_to(np.arange(7), law.shape)
  score = jax.jit(jax.vmap(round_scores.token_scores, in_axes=(None, 1), out_axes=1))
  scores = Scores(*map(np.asarray, score(3 * law, every)))  # weights of any scale
  variances = scores.spread, scores.spread, scores.log_variance
  for values, variance in zip((scores.rank, scores.place, scores.log), variances):
    np.testing.assert_allclose((law * values).sum(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose((law * values**2).sum(axis=1), variance[:, 0], atol=2e-6)
  assert not any(x[-1].any() for x in scores)


def simulated(rng, a: np.ndarray, bias: float) -> RoundScores:
  """Accept draft tokens with probability min(1, (1 + bias) a)."""
  nothing = np.zeros(len(a))
  accepted = (rng.random(len(a)) < (1 + bias) * a).astype(float)
  none = Scores(*[nothing] * 5)
  return RoundScores(*[nothing] * 5, accepted, a, none, none)


@pytest.mark.parametrize("first_accepted", [0.0, 1.0])
def test_scores_of_two_acceptances_have_mean_0_and_are_at_most_1(first_accepted):
  for first, second in itertools.product([1e-6, 0.1, 0.5, 0.8, 1.0], repeat=2):
    probability, none, scores = np.array([first, second]), np.zeros(2), []
    for accepted in (0.0, 1.0):
      round_of_two = simulated(np.random.default_rng(0), probability, 0)._replace(
        position=np.arange(2), accepted=np.array([first_accepted, accepted]), row=none, start=none
      )
      (drift,) = martingale._acceptance_of_pairs(round_of_two).values()
      scores.append(drift.sum)
    assert np.abs(scores).max() <= 1 + 1e-9
    assert (1 - second) * scores[0] + second * scores[1] == pytest.approx(0, abs=1e-9)
    variance = (1 - second) * scores[0] ** 2 + second * scores[1] ** 2
    assert drift.variance == pytest.approx(variance, abs=1e-9)


@pytest.mark.parametrize("n", [5, 300])
def test_significance_level_holds_for_any_number_of_draft_tokens(n):
  # 2,000 samples: the share below 0.1 has a standard error of 0.007.
  rng = np.random.default_rng(n)
  low = [acceptance_drift(simulated(rng, rng.beta(3, 1, n), 0)).p_value < 0.1 for _ in range(2000)]
  assert np.mean(low) < 0.1


def test_stated_detectable_bias_is_detected_9_times_in_10():
  # 1,000 samples: the detected share has a standard error of 0.01.
  rng = np.random.default_rng(0)
  a = rng.beta(3, 1, 3000)
  exact = simulated(rng, a, 0)
  bias = detectable_bias(exact, 1e-3)
  found = [acceptance_drift(simulated(rng, a, bias)).p_value < 1e-3 for _ in range(1000)]
  assert 0.86 < np.mean(found) < 0.97
  assert detectable_bias(joined([exact] * 4), 1e-3) < bias / 1.9


def test_stated_detectable_temperature_is_detected_9_times_in_10():
  # 1,000 samples of 20,000 tokens: the detected share has a standard error of 0.01.
  rng = np.random.default_rng(0)
  law = rng.dirichlet(np.full(30, 0.3))
  scores = Scores(
    *(np.asarray(x) for x in round_scores.token_scores(jnp.tile(law, (30, 1)), np.arange(30)))
  )
  variance = 20_000 * float(scores.log_variance[0])
  every = Scores(*(np.repeat(x[:1], 20_000) for x in scores))
  bias = detectable_temperature(log_drift(every), 1e-3)
  tilted = law ** (1 / (1 - bias)) / (law ** (1 / (1 - bias))).sum()
  for probs, least, most in [(tilted, 0.85, 0.97), (law, 0, 2e-3)]:
    sums = rng.multinomial(20_000, probs, size=1000) @ np.float64(scores.log)
    found = [Drift(x, variance, -np.log(MIN_PROB)).p_value < 1e-3 for x in sums]
    assert least <= np.mean(found) <= most
  assert detectable_temperature(Drift(0.0, 0.0, 1.0), 1e-3) == np.inf


def test_scores_of_batches_add_up():
  parts = [Drift(1.0, 4.0, 0.5), Drift(-3.0, 5.0, 1.0)]
  assert parts[0].plus(parts[1]) == Drift(-2.0, 9.0, 1.0)


def test_deterministic_acceptance_needs_no_variance():
  certain = np.ones(50)
  sure = simulated(np.random.default_rng(0), certain, 0)
  assert acceptance_drift(sure).p_value == 1 and acceptance_drift(sure).z == 0
  assert detectable_bias(sure, 1e-3) == np.inf  # p >= q: nothing can be accepted more often
  assert acceptance_drift(sure._replace(accepted=0 * certain)).p_value < 1e-6


def test_critical_sum_is_that_of_the_significance_level():
  drift = Drift(0.0, 400.0, 20.0)
  assert drift._replace(sum=drift.critical(1e-4)).p_value == pytest.approx(1e-4)
  assert drift._replace(sum=-drift.critical(1e-4)).p_value == pytest.approx(1e-4)
