"""Test measurements of a pair: alpha, counts, costs and speedup, one record per setting."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from tiny import autoregressive_decode

from specdec_jax import theory
from specdec_jax.checkpoints.folder import load_model
from specdec_jax.core.counts import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
)
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import DynamicTree, chain
from specdec_jax.core.types import DecodeResult, Rounds, Verification
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.gumbel import GumbelVerifier
from specdec_jax.core.verify.k_seq import KSeqVerifier
from specdec_jax.core.verify.lossy import TopBetaVerifier, TypicalVerifier
from specdec_jax.core.verify.merging import MergingVerifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.quality import quality
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.errors import InputError
from specdec_jax.load import random_pair
from specdec_jax.measure import costs as costing
from specdec_jax.measure import measure as measuring
from specdec_jax.measure import records
from specdec_jax.measure import speed as speeds
from specdec_jax.measure.alpha import (
  acceptance_and_change,
  draft_probs,
  lag1_correlation,
  mean_with_interval,
  measure_alpha,
  rejection_sampling_rate,
  teacher_forced_logits,
)
from specdec_jax.measure.costs import (
  CHAIN,
  Costs,
  matmul_operations,
  measure_costs,
  operations_ratio,
  round_calls,
  round_costs,
)
from specdec_jax.measure.measure import References, measure, settings_to_measure
from specdec_jax.measure.reporting.speeds import budget_table, speed_table
from specdec_jax.measure.speed import Speed, Timing, measure_speed, own_baseline
from specdec_jax.measure.timing import interleaved_medians
from specdec_jax.models.families import for_decoding
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.t5 import T5Model

GREEDY, RANDOM = Sampling(0.0), Sampling(1.0)
TEXTS = [tiny_pair.SENTENCES[i] for i in (0, 14, 60)]
LIMIT = 10
SETTINGS = DecodeSettings(GREEDY, max_new_tokens=LIMIT)


# Alpha.


@functools.cache
def decoded(sampling):
  """Return texts of the target, and their prompts."""
  pair = tiny_pair.pair()
  prompt = pair.prompt(TEXTS)
  output = autoregressive_decode(
    pair.target.model,
    pair.target.params,
    prompt,
    row_keys(0, 0, len(TEXTS)),
    max_new_tokens=LIMIT,
    sampling=sampling,
  )
  return prompt, jax.device_get(output)


def probabilities(name, prompt, tokens, sampling):
  """Return probabilities from a teacher-forced pass of the model on disk, adjusted in numpy."""
  config, params = load_model(str(tiny_pair.folder() / name))
  inputs = np.pad(tokens[:, :-1], ((0, 0), (1, 0)))
  logits = tiny.teacher_forced(config)(params, np.asarray(prompt), inputs)
  return tiny.adjusted(logits, sampling.temperature, sampling.top_k, sampling.top_p)


@pytest.mark.slow
@pytest.mark.parametrize(
  "draft, sampling",
  [("near", RANDOM), ("near", Sampling(0.7, top_k=5, top_p=0.9)), ("near", GREEDY)]
  + [("random", RANDOM)],
  ids=str,
)
def test_beta_is_the_sum_of_the_smaller_probabilities(draft, sampling):
  pair = tiny_pair.pair(draft)
  prompt, output = decoded(RANDOM)
  got, change = acceptance_and_change(
    *logits_and_q(pair, prompt, output.tokens, sampling), sampling
  )
  p = probabilities("target", prompt, output.tokens, sampling)
  q = probabilities(draft, prompt, output.tokens, sampling)
  want = np.minimum(p, q).sum(axis=-1)
  assert got.shape == (len(TEXTS), LIMIT) and 0.02 < want.mean() < 0.98
  np.testing.assert_allclose(got, want, atol=1e-4)
  np.testing.assert_allclose(change, 0, atol=1e-5)  # without lenience nothing changes
  logits, own_q = logits_and_q(pair, prompt, output.tokens, sampling)
  rejection = np.asarray(rejection_sampling_rate(logits, own_q, sampling))
  np.testing.assert_allclose(rejection, theory.rejection_sampling_rate(p, q), atol=1e-3)
  assert (rejection <= np.asarray(got) + 1e-6).all()


def logits_and_q(pair, prompt, tokens, sampling):
  draft = pair.draft.build(sampling, chain(1))
  q = draft_probs(pair, draft, prompt, tokens)
  return teacher_forced_logits(pair.target.model, pair.target.params, prompt, tokens), q


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [RANDOM, GREEDY], ids=str)
def test_lenience_raises_acceptance_and_bounds_the_change(sampling):
  pair = tiny_pair.pair()
  prompt, output = decoded(RANDOM)
  p = probabilities("target", prompt, output.tokens, RANDOM)
  q = probabilities("near", prompt, output.tokens, sampling)
  logits = logits_and_q(pair, prompt, output.tokens, sampling)
  beta, change = {}, {}
  for lenience in (1.0, 0.5, 0.1):
    beta[lenience], change[lenience] = acceptance_and_change(*logits, sampling, lenience)
    if sampling == RANDOM:
      want = np.minimum(p / lenience, q).sum(axis=-1)
    else:  # p before the argmax, at the draft token
      of_guess = np.take_along_axis(p, q.argmax(axis=-1)[..., None], axis=-1)[..., 0]
      want = of_guess >= lenience * p.max(axis=-1)
    np.testing.assert_allclose(beta[lenience], want, atol=1e-4)
    # P(x) <= p(x) / l bounds the change; an argmax changes where its token would have been
    # rejected.
    most = 1 - lenience if sampling == RANDOM else beta[lenience] - beta[1.0]
    assert (change[lenience] <= most + 1e-5).all()
  means = [[x[lenience].mean() for lenience in (1.0, 0.5, 0.1)] for x in (beta, change)]
  assert all(a < b < c for a, b, c in means)


def test_alpha_is_a_probability_and_higher_for_better_drafts():
  prompt, output = decoded(RANDOM)
  alphas = {}
  for name in ("random", "near", "target"):
    alphas[name] = measure_alpha(tiny_pair.pair(name), [prompt], [output], RANDOM).alpha
    assert 0 <= alphas[name].low <= alphas[name].mean <= alphas[name].high <= 1 + 1e-6
  assert alphas["random"].mean < alphas["near"].mean < alphas["target"].mean
  assert alphas["target"].low == pytest.approx(1, abs=1e-5)


def test_alpha_covers_exactly_the_generated_tokens():
  """Some rows of two batches ended early; tokens past their ends are excluded."""
  pair = tiny_pair.pair()
  prompt, output = decoded(RANDOM)
  lengths = np.array([[3, 10, 1], [7, 2, 2]])
  batches = [output._replace(lengths=row) for row in lengths]
  beta, _ = acceptance_and_change(*logits_and_q(pair, prompt, output.tokens, RANDOM), RANDOM)
  rows = zip([*beta, *beta], lengths.ravel(), strict=True)
  want = np.concatenate([row[:n] for row, n in rows])
  alpha = measure_alpha(pair, [prompt] * 2, batches, RANDOM).alpha
  assert alpha.mean == pytest.approx(want.mean())


@pytest.mark.parametrize("stays", [0.0, 0.8])
def test_lag_1_correlation_is_that_of_the_chain(stays):
  """A value that is kept with probability r and otherwise sampled again has lag-1 correlation r.

  With 40,000 tokens the standard error is at most 0.005; the tolerance is 6 standard errors.
  """
  rng, rows = np.random.default_rng(0), []
  for _ in range(2000):
    row = [rng.random()]
    for keep in rng.random(19) < stays:
      row.append(row[-1] if keep else rng.random())
    rows.append(np.array(row))
  assert lag1_correlation(rows) == pytest.approx(stays, abs=0.03)
  assert np.isnan(lag1_correlation([np.ones(5)]))


def test_interval_covers_the_mean_about_95_times_in_100():
  """Tokens of a row are correlated, so an interval for independent tokens covers 5 times in 6.

  Of 300 samples of 40 rows, an interval that covers 93 times in 100 covers less than 262 once in
  10^4.
  """
  rng, covered, broken = np.random.default_rng(0), 0, 0
  for _ in range(300):
    rows = [(rng.random(rng.integers(5, 15)) < rate) * 1.0 for rate in rng.beta(4, 2, 40)]
    one = mean_with_interval(rows, resamples=400)
    assert one.low <= one.mean <= one.high
    covered += one.low <= 4 / 6 <= one.high
    one = mean_with_interval(list(np.concatenate(rows)[:, None]), resamples=400)
    broken += one.low <= 4 / 6 <= one.high
  assert broken < 262 <= covered < 300


def test_interval_is_determined_by_its_seed():
  rows = [np.random.default_rng(i).random(5) for i in range(10)]
  assert mean_with_interval(rows) == mean_with_interval(rows)
  assert mean_with_interval(rows, seed=1) != mean_with_interval(rows)
  assert mean_with_interval([np.ones(4)] * 3) == (1.0, 1.0, 1.0)


# Counts.


def rounds_of(rows, gamma, limit):
  """Return a result whose rows have these rounds, each (guesses, n, next token, tokens emitted)."""
  most = max(map(len, rows))
  guesses = np.zeros((most, len(rows), gamma), int)
  rest = np.zeros((3, most, len(rows)), int)
  tokens = np.zeros((len(rows), limit), int)
  lengths = np.zeros(len(rows), int)
  for b, row in enumerate(rows):
    text = []
    for r, (x, n, next_token, emitted) in enumerate(row):
      guesses[r, b], rest[:, r, b] = x, (n, next_token, emitted)
      text += [*x[:n], next_token][:emitted]
    tokens[b, : len(text)], lengths[b] = text, len(text)
  return DecodeResult(
    tokens, lengths, Rounds(guesses, *rest), np.array(most), -np.ones(len(lengths), int)
  )


# gamma 3, limit 6, EOS 1.
HAND_MADE = rounds_of(
  [
    # 3 accepted and a bonus token; 1 accepted, 1 rejected: 4 / 5.
    [([5, 6, 7], 3, 8, 4), ([9, 2, 3], 1, 4, 2)],
    # EOS is the second of 3 draft tokens that would all be accepted: 2 accepted; the third does not
    # count.
    [([5, 1, 7], 3, 8, 2)],
    # The first is rejected and replaced by EOS: 0 / 1.
    [([5, 6, 7], 0, 1, 1)],
    # 2 / 3, then the limit is reached after 2 of 3 accepted tokens, and later ones do not count: 2
    # / 2; then 1 more.
    [([5, 6, 7], 2, 8, 3), ([9, 2, 3], 0, 4, 1), ([9, 2, 3], 3, 4, 2)],
  ],
  gamma=3,
  limit=6,
)


def test_counts_of_rounds_by_hand():
  assert num_tokens([HAND_MADE]) == 6 + 2 + 1 + 6
  assert num_rounds([HAND_MADE]) == 2 + 1 + 1 + 3
  accepted, rejected = (3 + 1) + 2 + 0 + (2 + 0 + 2), 1 + 0 + 1 + (1 + 1 + 0)
  assert acceptance_rate([HAND_MADE]) == pytest.approx(accepted / (accepted + rejected))


def test_acceptance_by_position_by_hand():
  assert acceptance_by_position([HAND_MADE]) == pytest.approx([5 / 7, 4 / 5, 1 / 2])
  assert acceptance_by_position([HAND_MADE, HAND_MADE]) == acceptance_by_position([HAND_MADE])
  refused = rounds_of([[([5, 6], 0, 7, 1)]], gamma=2, limit=2)
  assert acceptance_by_position([refused]) == [0.0, None]  # the second was not verified


def test_counts_of_several_batches_are_totals():
  other = rounds_of([[([5, 6], 0, 7, 1), ([5, 6], 2, 7, 3)]], gamma=2, limit=6)
  assert num_tokens([HAND_MADE, other]) == 15 + 4
  assert num_rounds([HAND_MADE, other]) == 7 + 2
  assert acceptance_rate([HAND_MADE, other]) == pytest.approx((10 + 2) / (10 + 4 + 2 + 1))


def test_rounds_of_a_finished_row_are_not_counted():
  """Finished rows also have rounds while their neighbors run, but these rounds emit nothing."""
  busy = rounds_of([[([5, 6, 1], 3, 8, 3), ([5, 6, 7], 3, 8, 0)]], gamma=3, limit=6)
  assert (num_tokens([busy]), num_rounds([busy]), acceptance_rate([busy])) == (3, 1, 1.0)


def test_acceptance_rate_of_rounds_without_draft_tokens():
  assert acceptance_rate([rounds_of([[([], 0, 5, 1)]], gamma=0, limit=2)]) == 0.0


def test_identical():
  other = HAND_MADE._replace(tokens=HAND_MADE.tokens.copy())
  assert identical([HAND_MADE], [other])
  other.tokens[3, 5] += 1
  assert not identical([HAND_MADE], [other])
  assert not identical([HAND_MADE, HAND_MADE], [HAND_MADE, other])


RATIOS = {3: np.array([2.0, 2.5, 1.5])}  # seconds of each repeat


def test_speedup_is_the_ratio_of_totals():
  """The speedup is a ratio of tokens per second in total, not the mean of the speedups of parts."""
  plain = [
    HAND_MADE._replace(lengths=np.array([10])),
    HAND_MADE._replace(lengths=np.array([30])),
  ]
  ours = [HAND_MADE._replace(lengths=np.array([10, 5])), HAND_MADE._replace(lengths=np.array([45]))]
  speed = Speed(plain, {3: ours, 5: plain}, 20.0, {3: 10.0, 5: 40.0}, {}, RATIOS)
  assert speed.speedup(3) == pytest.approx((60 / 10) / (40 / 20))
  assert speed.speedup(5) == pytest.approx(0.5)
  assert speed.spread(3) == pytest.approx((60 / 40 * 1.5, 60 / 40 * 2.5))


def test_range_of_a_speedup_contains_it():
  """Medians of single texts may be faster than every whole repeat; a single repeat has no range."""
  ratios = {3: np.array([2.36, 2.63]), 5: np.array([2.0])}
  speed = Speed([HAND_MADE], {3: [HAND_MADE], 5: [HAND_MADE]}, 2.64, {3: 1.0, 5: 1.0}, {}, ratios)
  assert speed.spread(3) == pytest.approx((2.36, 2.64))
  assert speed.spread(5) == (None, None)


def test_key_of_a_text_does_not_depend_on_the_batch_size():
  def raw(keys):
    return jax.random.key_data(keys).tolist()

  whole = raw(row_keys(3, 0, 7))
  assert raw(row_keys(3, 0, 2)) + raw(row_keys(3, 2, 4)) + raw(row_keys(3, 6, 1)) == whole
  assert len({tuple(key) for seed in (3, 4) for key in raw(row_keys(seed, 0, 7))}) == 14


# Costs.


COSTS = Costs(
  target_step=0.010, draft_step=0.001, verify=0.014, accept=0.002, target_start=0.1, draft_start=0.0
)


def test_c_and_v_are_in_target_steps():
  assert COSTS.c == pytest.approx(0.1) and COSTS.v == pytest.approx(1.6)


def test_costs_are_differences_between_calls():
  """A call takes 5 s, plus 1.5 s per autoregressive step, 2 s per draft step, 3 s per target pass
  and 1 s per verification."""
  gammas, (step, draft, verify, accept) = (2, 4), (1.5, 2.0, 3.0, 1.0)
  undrafted = [verify + accept] * 2
  links = [step, *undrafted, *(gamma * draft + verify + accept for gamma in gammas), accept, accept]
  seconds = [5.0 + count * link for link in links for count in (0, CHAIN)]
  for costs in round_costs([7.0, 9.0], seconds, gammas):
    assert costs == pytest.approx(Costs(step, draft, verify, accept, 7.0, 2.0))


def test_round_time_excludes_the_prefill():
  """Two batches of 3 and 2 rounds took 1.6 s in total, each after a prefill of 0.1 s."""
  speed = Speed([], {3: [HAND_MADE, HAND_MADE]}, 1.0, {3: 1.6}, {3: COSTS}, {})
  assert int(HAND_MADE.num_rounds) == 3
  assert speed.round_s(3) == pytest.approx((1.6 - 2 * 0.1) / 6)


@pytest.mark.slow
def test_costs_are_those_of_real_rounds(monkeypatch):
  """Calls run 0 and CHAIN autoregressive steps, and rounds of gamma 3 without and with drafting."""
  ends = []

  def call_once(calls, repeats):
    ends.extend(call() for call in calls)
    return [*range(len(calls))], ends

  monkeypatch.setattr(costing, "interleaved_medians", call_once)
  pair = tiny_pair.pair("target")
  prompt = pair.prompt(TEXTS[:2])
  (costs,) = measure_costs(pair, [chain(3)], prompt, RANDOM, max_new_tokens=4 * CHAIN)
  assert (costs.target_start, costs.draft_start, costs.target_step) == (0, 1, 1 / CHAIN)
  rounds = ends[2:8]
  assert [int(state.num_rounds[0]) for state in rounds] == [0, CHAIN] * 3
  emitted = [state.length - state.prompt_length for state in rounds[1::2]]
  assert (emitted[0] == CHAIN).all()
  # The target as its own draft is never rejected.
  assert (emitted[2] == CHAIN * 4).all()


@pytest.mark.slow
@pytest.mark.parametrize(
  "verifier",
  [
    TokenVerifier,
    BlockVerifier,
    GumbelVerifier,
    KSeqVerifier,
    MergingVerifier,
    TopBetaVerifier,
    TypicalVerifier,
  ],
)
def test_order_of_calls_matches_the_order_of_costs(verifier):
  """Verifiers that need draft tokens are not used in autoregressive steps."""
  pair = dataclasses.replace(tiny_pair.pair(), verifier=verifier)
  drafts = [pair.draft.build(GREEDY, chain(gamma)) for gamma in (1, 3)]
  calls = round_calls(pair, drafts, pair.prompt(TEXTS[:1]), GREEDY, LIMIT)
  ends = [jax.eval_shape(call) for call in calls]
  gammas = [state.rounds.guesses.shape[-1] for state in ends[:10]]
  assert gammas == [0, 0, 1, 1, 3, 3, 1, 1, 3, 3]
  assert [state.draft_state == () for state in ends[:10]] == [True] * 6 + [False] * 4
  assert all(isinstance(verdict, Verification) for verdict in ends[10:]) and len(ends) == 14


def test_rounds_of_a_dynamic_tree_can_be_timed():
  pair = tiny_pair.pair()
  draft = pair.draft.build(GREEDY, DynamicTree(6, 3))
  calls = round_calls(pair, [draft], pair.prompt(TEXTS[:1]), GREEDY, LIMIT)
  ends = [jax.eval_shape(call) for call in calls]
  assert [state.rounds.guesses.shape[-1] for state in ends[2:6]] == [6] * 4
  assert ends[6].path.shape == (1, 3) and len(ends) == 8


@pytest.mark.parametrize("num_texts, least, most", [(3, 3, 3), (100, 24, 48)])
def test_timed_prompts_are_spread_evenly_over_the_texts(monkeypatch, num_texts, least, most):
  timed = []

  def no_time(calls, repeats):
    timed.append("part" in [call.args[0] for call in calls])
    return np.ones((repeats, len(calls))), [HAND_MADE] * len(calls)

  monkeypatch.setattr(speeds, "round_calls", lambda *args: ["part"] * 8)
  monkeypatch.setattr(speeds, "interleaved_seconds", no_time)
  pair = tiny_pair.pair()
  measure_speed(pair, [pair.prompt(TEXTS[:1])] * num_texts, [2], SETTINGS, Timing(repeats=1))
  assert len(timed) == num_texts and least <= sum(timed) <= most
  assert len(set(np.diff(np.flatnonzero(timed)))) == 1 and timed[0]


def pair_of(target_layers, draft_layers, kernels="xla"):
  """Return a pair of T5s that differ only in depth, wide enough for matmuls to dominate."""
  models = []
  for layers in (target_layers, draft_layers):
    cfg = tiny.config(vocab_size=512, layers=layers, emb_dim=128, mlp_dim=256)
    cfg, params = for_decoding(cfg, tiny_pair.random_params(cfg, 0))
    params = params if kernels == "xla" else tiny.packed(params)
    models += [T5Model(dataclasses.replace(cfg, kernels=kernels)), params]
  target, target_params, model, draft_params = models
  return tiny_pair.changed(
    tiny_pair.pair(),
    model=target,
    params=target_params,
    draft=functools.partial(ModelDraft, model),
    draft_params=draft_params,
  )


def operations_by_hand(layers, slots, source, mlp_dim=256, emb=128, heads=2, head=8, vocab=512):
  """Count two operations per weight and token, and two matmuls of attention; the MLP is gated."""
  width = heads * head
  weights = layers * (4 * emb * width + 2 * emb * width + 3 * emb * mlp_dim) + emb * vocab
  return 2 * weights + layers * 4 * width * (slots + source)


PROMPT = jnp.full((1, 8), 5)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xla", "skinny"])
def test_operations_equal_those_counted_by_hand(kernels):
  got = operations_ratio(pair_of(4, 1, kernels), PROMPT, RANDOM)
  assert got == pytest.approx(operations_by_hand(1, 4, 8) / operations_by_hand(4, 4, 8))


def test_draft_by_lookup_has_no_matmuls():
  pair = tiny_pair.changed(
    pair_of(4, 1), draft=lambda sampling, tree: PromptLookupDraft(512, tree, 3)
  )
  assert operations_ratio(pair, PROMPT, RANDOM) == 0


def test_loop_counts_once_per_iteration():
  x, w = jnp.ones((3, 4)), jnp.ones((4, 4))

  def count(f):
    return matmul_operations(jax.make_jaxpr(f)(x).jaxpr)

  assert count(lambda x: x @ w) == 2 * 3 * 4 * 4
  assert count(lambda x: jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)) == 5 * 96
  assert count(lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x)) == 192


def test_interleaved_calls_alternate_and_return_their_last_results():
  order = []

  def call(name):
    order.append(name)
    return jnp.asarray(len(order))

  medians, results = interleaved_medians([lambda: call("a"), lambda: call("b")], repeats=3)
  assert sorted(order[:2]) == sorted(order[2:4]) == sorted(order[4:6]) == ["a", "b"]
  assert order[2:4] == order[6:8] != order[4:6]
  assert [order[int(result) - 1] for result in results] == ["a", "b"]
  assert min(map(int, results)) >= 7 and len(medians) == 2 and min(medians) >= 0


# Records.


@pytest.fixture(scope="module")
def results(tmp_path_factory):
  """Return the file of a greedy run with a random draft."""
  with records.open_results(tmp_path_factory.mktemp("measure")) as path:
    references = References(tiny_pair.SENTENCES[: len(TEXTS)])
    measure_it(path, references=references, timing=Timing(repeats=2))
  return path


@pytest.fixture
def quick(monkeypatch):
  """Skip timing the parts of a round, which the tests of costs above do for real models."""
  tiny.know_costs(monkeypatch)


def measure_it(path, draft="random", settings=SETTINGS, **changes):
  arguments = dict(texts=TEXTS, gammas=[2], timing=Timing(repeats=1))
  pair = tiny_pair.pair(draft)
  return measure(pair, results=path, settings=[settings], **{**arguments, **changes})


def not_measured(record):
  """Return the fields that are None, except those of other experiments, trees and git checkouts."""
  others = "tokens_per_round_low", "tokens_per_round_high", "auc"
  others += "speedup_low", "speedup_high"  # if there are several repeats
  others += "metric", "quality", "baseline_quality"  # if there are references
  others += "beams", "draft_beams", "length_penalty", "ties"
  empty = [name for name, value in dataclasses.asdict(record).items() if value is None]
  return [
    name for name in empty if name not in (*others, "tree", "dynamic_nodes", "beam_nodes", "commit")
  ]


@pytest.mark.slow
def test_record_has_every_field(results):
  (record,) = records.read(results)
  assert set(not_measured(record)) <= {"beta_lag1"}  # there is none if beta never varies
  assert record.speedup_low <= record.speedup <= record.speedup_high
  assert (record.task, record.target, record.draft) == ("tiny", "target", "random")
  assert (record.temperature, record.gamma, record.batch_size) == (0.0, 2, 1)
  assert (record.num_examples, record.platform, record.dtype) == (len(TEXTS), "cpu", "float32")


@pytest.mark.slow
def test_quality_is_recorded_with_that_of_autoregressive_decoding(results, tmp_path):
  (record,) = records.read(results)
  assert record.metric == "BLEU" and record.quality == record.baseline_quality
  with pytest.raises(InputError, match=f"{len(TEXTS)} texts but 1 references"):
    measure_it(tmp_path / "r.jsonl", references=References(["ein Hund"]))
  with pytest.raises(InputError, match="metric is 'METEOR'; it must be one of BLEU, ROUGE-1"):
    measure_it(tmp_path / "r.jsonl", references=References(TEXTS, "METEOR"))


def test_qualities_by_hand():
  assert quality("BLEU", ["A man runs by the sea."], ["A man runs by the sea."]) == pytest.approx(
    100
  )
  assert 0 <= quality("BLEU", ["A man runs by the sea."], ["Two dogs sleep in a house."]) < 10
  pytest.importorskip("rouge_score")
  one, other = ["dogs run by the sea"], ["a dog runs far from the sea"]
  assert quality("ROUGE-1", one, other) == pytest.approx(100 * 2 * 4 / (5 + 7))  # stems count
  assert quality("ROUGE-2", one * 2, other + one) == pytest.approx(
    (100 * 2 * 2 / (4 + 6) + 100) / 2
  )
  assert quality("ROUGE-Lsum", ["b c\na"], ["a\nb c"]) == pytest.approx(100)


@pytest.mark.slow
def test_another_baseline_is_another_setting(results, tmp_path):
  """Predictions are relative to our autoregressive decoding and do not apply to other baselines."""
  theirs = own_baseline(tiny_pair.pair("random"))._replace(name="theirs")
  (own,) = records.read(results)
  with records.open_results(tmp_path) as path:
    (record,) = measure_it(path, timing=Timing(1, theirs))
    assert records.missing(path, [record, own]) == [own]
  assert record.baseline == "theirs" and record.identical and record.speedup > 0
  missing = {"predicted_theorem8", "predicted_measured_cost", "predicted_finite_length"}
  assert {*not_measured(record)} - {"beta_lag1"} == missing
  assert "over theirs" in str(speed_table([record]).title)


def test_greedy_output_with_a_random_draft_is_identical(results):
  (record,) = records.read(results)
  assert record.identical is True
  assert record.alpha < 0.5 and record.tokens_per_round < 2


def test_numbers_of_a_record_are_consistent(results):
  (r,) = records.read(results)
  assert 0 <= r.alpha_low <= r.alpha <= r.alpha_high <= 1
  assert 0 <= r.acceptance_rate <= 1
  assert 0 < r.rounds <= r.num_tokens <= LIMIT * len(TEXTS)
  # Times of a step and a round are differences, which noise may make negative for such small
  # models.
  assert min(r.target_prefill_ms, r.seconds) > 0
  parts = r.gamma * r.draft_step_ms + r.verify_ms + r.accept_ms + r.unaccounted_ms
  assert r.round_ms == pytest.approx(parts)
  assert r.tokens_per_round == pytest.approx(r.num_tokens / r.rounds)
  assert r.c == pytest.approx(r.draft_step_ms / r.target_step_ms)
  assert r.verify_cost == pytest.approx((r.verify_ms + r.accept_ms) / r.target_step_ms)
  by_theorem = theory.operations_factor(r.alpha, r.gamma, r.operations_ratio)
  assert r.operations_factor == pytest.approx(float(by_theorem))
  assert r.memory_gb_per_s > 0 and r.verify_mb > r.target_step_mb > r.draft_step_mb > 0
  tokens_a_pass = 1e-3 * r.baseline_tokens_per_s * r.baseline_pass_ms
  assert tokens_a_pass == pytest.approx(1)  # one text at a time
  by_theorem = theory.walltime_improvement(r.alpha, r.gamma, r.c)
  assert r.predicted_theorem8 == pytest.approx(float(by_theorem))
  assert r.speedup == pytest.approx(r.speculative_tokens_per_s / r.baseline_tokens_per_s)


def test_budget_of_a_round_is_shown(results):
  (r,) = records.read(results)
  r = dataclasses.replace(r, gamma=2, draft_step_ms=0.5, verify_ms=4.0, accept_ms=0.25)
  r = dataclasses.replace(r, unaccounted_ms=-0.75, round_ms=4.5, operations_ratio=None)
  shown = budget_table([r])
  cells = dict(zip(shown.columns, shown.rows[0]))
  parts = [cells[f"{name}, ms"] for name in ("draft", "verify", "accept", "unaccounted", "round")]
  assert parts == ["2 x 0.50", "4.00", "0.25", "-0.75", "4.50"] and cells["c-hat"] == "-"
  assert {*shown.legend} == {*cells} - {"temperature", "gamma"}


@pytest.fixture
def asked(monkeypatch):
  """Return the gammas that `measure` would measure, without measuring them."""
  gammas = []

  def note(pair, prompts, settings, timing, references, wanted, report):
    gammas.extend(setting.gamma for setting in wanted)
    return []

  monkeypatch.setattr(measuring, "_measure", note)
  return gammas


def test_second_run_measures_only_what_is_missing(results, asked):
  with open(results, "rb") as f:
    before = f.read()
  assert measure_it(results) == records.read(results) and asked == []
  assert [r.gamma for r in measure_it(results, gammas=[1, 2, 3])] == [2] and asked == [1, 3]
  with open(results, "rb") as f:
    assert f.read() == before


@pytest.mark.parametrize("change", ["texts", "max_new_tokens"])
def test_run_on_other_texts_is_another_setting(results, asked, change):
  """A record of other texts, or of texts truncated to a different length, must not be reused."""
  changes = dict(
    texts=dict(texts=TEXTS[::-1]),
    max_new_tokens=dict(settings=dataclasses.replace(SETTINGS, max_new_tokens=4)),
  )
  measure_it(results, **changes[change])
  assert asked == [2]


@pytest.mark.slow
def test_batches_and_samples_have_no_finite_length_prediction_or_comparison(tmp_path, quick):
  """The prediction is for one text at a time; sampled outputs are not compared."""
  with records.open_results(tmp_path) as path:
    settings = dataclasses.replace(SETTINGS, sampling=RANDOM, batch_size=3)
    (record,) = measure_it(path, draft="target", settings=settings)
  assert not_measured(record) == ["identical"]
  # The target as its own draft: every draft token is accepted.
  assert record.alpha == pytest.approx(1, abs=1e-5) and record.acceptance_rate == 1
  v, c = record.verify_cost, record.c
  assert record.predicted_theorem8 == pytest.approx(3 / (1 + 2 * c), rel=1e-4)
  assert record.predicted_measured_cost == pytest.approx(3 / (v + 2 * c), rel=1e-4)


@pytest.mark.slow
def test_simulated_acceptance_is_recorded_as_such(tmp_path, quick):
  real = tiny_pair.pair()
  target = SimulatedModel(real.target.model, 0.6, real.vocabulary.eos_id)
  pair = tiny_pair.changed(real, model=target)
  texts, results = tiny_pair.SENTENCES[:8], str(tmp_path / "results.jsonl")
  settings = DecodeSettings(GREEDY, batch_size=8, max_new_tokens=32)
  (r,) = measure(pair, texts, results, [settings], [3], Timing(repeats=1))
  assert (r.acceptance, r.alpha, r.identical) == ("simulated", 0.6, None)
  assert r.alpha_low is r.alpha_high is r.beta_lag1 is r.total_variation is None
  assert r.num_tokens == 8 * 32 and r.speedup > 0 and r.predicted_finite_length > 0
  # About 200 draft tokens were verified: 4 standard errors.
  assert r.acceptance_rate == pytest.approx(0.6, abs=4 * np.sqrt(0.6 * 0.4 / 150))


@pytest.mark.slow
def test_another_alpha_is_another_setting():
  one, other = (
    settings_to_measure(random_pair("tiny", "tiny", alpha), TEXTS, [SETTINGS], [3])
    for alpha in (0.6, 0.7)
  )
  assert [*map(records.key, one)] != [*map(records.key, other)]


def test_empty_lists_raise(tmp_path):
  for changes in (dict(texts=[]), dict(settings=[]), dict(gammas=[])):
    arguments = dict(texts=TEXTS, settings=[SETTINGS], gammas=[2])
    with pytest.raises(InputError, match="nothing to measure"):
      measure(tiny_pair.pair(), results=str(tmp_path / "r.jsonl"), **{**arguments, **changes})
