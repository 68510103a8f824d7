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
from specdec_jax.checkpoints.load import load_model
from specdec_jax.contrib.k_seq import KSeqVerifier
from specdec_jax.core.counts import (
  acceptance_by_position,
  acceptance_rate,
  identical,
  num_rounds,
  num_tokens,
)
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import DynamicTree, chain
from specdec_jax.core.types import DecodeResult, Rounds, Verification
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.lossy import TypicalVerifier
from specdec_jax.data.quality import quality
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.errors import InputError
from specdec_jax.measure import costs as costing
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
  Looped,
  Parts,
  Starts,
  interleaved_medians,
  measure_costs,
  round_calls,
  round_costs,
)
from specdec_jax.measure.records import settings_to_measure
from specdec_jax.measure.roofline import matmul_operations, operations_ratio
from specdec_jax.measure.speed import Speed, measure_speed, own_baseline, speed_steps
from specdec_jax.measure.sweep import measure_missing
from specdec_jax.measure.tables import BUDGET, legend, records_table
from specdec_jax.models.families import for_decoding
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.t5 import T5Model
from specdec_jax.random_models import random_pair

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
  ratios = np.divide(q, p, out=np.full_like(p, np.inf), where=p > 0)
  np.testing.assert_allclose(rejection, ratios.min(axis=-1), atol=1e-3)
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
      of_draft_token = np.take_along_axis(p, q.argmax(axis=-1)[..., None], axis=-1)[..., 0]
      want = of_draft_token >= lenience * p.max(axis=-1)
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
    got = alphas[name] = measure_alpha(tiny_pair.pair(name), [prompt], [output], RANDOM)
    assert 0 <= got.alpha_low <= got.alpha <= got.alpha_high <= 1 + 1e-6
  assert alphas["random"].alpha < alphas["near"].alpha < alphas["target"].alpha
  assert alphas["target"].alpha_low == pytest.approx(1, abs=1e-5)


def test_alpha_covers_exactly_the_generated_tokens():
  """Some rows of two batches ended early; tokens past their ends are excluded."""
  pair = tiny_pair.pair()
  prompt, output = decoded(RANDOM)
  lengths = np.array([[3, 10, 1], [7, 2, 2]])
  batches = [output._replace(lengths=row) for row in lengths]
  beta, _ = acceptance_and_change(*logits_and_q(pair, prompt, output.tokens, RANDOM), RANDOM)
  rows = zip([*beta, *beta], lengths.ravel(), strict=True)
  want = np.concatenate([row[:n] for row, n in rows])
  measured = measure_alpha(pair, [prompt] * 2, batches, RANDOM)
  assert measured.alpha == pytest.approx(want.mean()) and measured.num_tokens == lengths.sum()


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


# Counts.


def rounds_of(rows, gamma, limit):
  """Return a result whose rows have these rounds, each (tokens, n, next token, num_emitted)."""
  most = max(map(len, rows))
  draft_tokens = np.zeros((most, len(rows), gamma), int)
  rest = np.zeros((3, most, len(rows)), int)
  tokens = np.zeros((len(rows), limit), int)
  lengths = np.zeros(len(rows), int)
  for b, row in enumerate(rows):
    text = []
    for r, (x, n, next_token, emitted) in enumerate(row):
      draft_tokens[r, b], rest[:, r, b] = x, (n, next_token, emitted)
      text += [*x[:n], next_token][:emitted]
    tokens[b, : len(text)], lengths[b] = text, len(text)
  return DecodeResult(
    tokens, lengths, Rounds(draft_tokens, *rest), np.array(most), -np.ones(len(lengths), int)
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
  """Counts of several batches are totals. Rounds of a finished row are not counted."""
  accepted, rejected = (3 + 1) + 2 + 0 + (2 + 0 + 2), 1 + 0 + 1 + (1 + 1 + 0)
  assert num_tokens([HAND_MADE]) == 6 + 2 + 1 + 6 and num_rounds([HAND_MADE]) == 2 + 1 + 1 + 3
  assert acceptance_rate([HAND_MADE]) == pytest.approx(accepted / (accepted + rejected))
  assert acceptance_by_position([HAND_MADE] * 2) == pytest.approx([5 / 7, 4 / 5, 1 / 2])
  other = rounds_of([[([5, 6], 0, 7, 1), ([5, 6], 2, 7, 3), ([5, 6], 2, 7, 0)]], gamma=2, limit=6)
  assert num_tokens([HAND_MADE, other]) == 15 + 4 and num_rounds([HAND_MADE, other]) == 7 + 2
  rate = acceptance_rate([HAND_MADE, other])
  assert rate == pytest.approx((accepted + 2) / (accepted + rejected + 2 + 1))
  refused = rounds_of([[([5, 6], 0, 7, 1)]], gamma=2, limit=2)
  assert acceptance_by_position([refused]) == [0.0, None]  # the second was not verified
  assert acceptance_rate([rounds_of([[([], 0, 5, 1)]], gamma=0, limit=2)]) == 0.0
  changed = HAND_MADE._replace(tokens=HAND_MADE.tokens + 1)
  assert identical([HAND_MADE], [HAND_MADE]) and not identical(
    [HAND_MADE] * 2, [HAND_MADE, changed]
  )


def test_speedup_is_the_ratio_of_totals():
  """It is not the mean of the speedups of parts. Its range contains it, and medians of single
  texts may be faster than every whole repeat."""
  plain = [HAND_MADE._replace(lengths=np.array([n])) for n in (10, 30)]
  ours = [HAND_MADE._replace(lengths=np.array([10, 5])), HAND_MADE._replace(lengths=np.array([45]))]
  ratios = {3: np.array([2.0, 2.5, 1.5]), 5: np.array([2.0]), 7: np.array([1.0, 0.9])}
  seconds = {3: 10.0, 5: 40.0, 7: 16.0}
  speed = Speed(plain, {3: ours, 5: plain, 7: plain}, 20.0, seconds, {}, ratios)
  assert [speed.speedup(gamma) for gamma in (3, 5, 7)] == pytest.approx([3.0, 0.5, 1.25])
  assert speed.spread(3) == pytest.approx((60 / 40 * 1.5, 60 / 40 * 2.5))
  assert speed.spread(7) == pytest.approx((0.9, 1.25))
  assert speed.spread(5) == (None, None)  # a single repeat


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


def test_costs_are_differences_between_calls():
  """A call takes 5 s, plus 1.5 s per autoregressive step, 2 s per draft step, 3 s per target pass
  and 1 s per verification."""

  def looped(seconds):
    return Looped(5.0, 5.0 + CHAIN * seconds)

  rounds = [looped(gamma * 2.0 + 4.0) for gamma in (2, 4)]
  parts = Parts(looped(1.5), [looped(4.0)] * 2, rounds, [looped(1.0)] * 2)
  for costs in round_costs(Starts(7.0, 9.0), parts, (2, 4)):
    assert costs == pytest.approx(Costs(1.5, 2.0, 3.0, 1.0, 7.0, 2.0))


def test_round_time_excludes_the_prefill():
  """Two batches of 3 and 2 rounds took 1.6 s in total, each after a prefill of 0.1 s."""
  speed = Speed([], {3: [HAND_MADE, HAND_MADE]}, 1.0, {3: 1.6}, {3: COSTS}, {})
  assert int(HAND_MADE.num_rounds) == 3
  assert speed.round_s(3) == pytest.approx((1.6 - 2 * 0.1) / 6)


@pytest.mark.slow
def test_costs_are_those_of_real_rounds(monkeypatch):
  """Calls run 0 and CHAIN autoregressive steps, and rounds of gamma 3 without and with drafting."""
  called = []

  def call_once(calls, repeats):
    called.extend(jax.tree.map(lambda call: call(), calls))
    return jax.tree.map(lambda call: 1.0, calls), None

  monkeypatch.setattr(costing, "interleaved_medians", call_once)
  pair = tiny_pair.pair("target")
  prompt = pair.prompt(TEXTS[:2])
  (costs,) = measure_costs([pair], [chain(3)], prompt, RANDOM, max_new_tokens=4 * CHAIN)
  assert costs == [Costs(0, 0, 0, 0, 1.0, 0)]
  ((_, parts),) = called
  rounds = [parts.step, parts.undrafted[0], parts.drafted[0]]
  assert [[int(state.num_rounds[0]) for state in part] for part in rounds] == [[0, CHAIN]] * 3
  emitted = [part.chain.length - part.chain.prompt_length for part in rounds]
  assert (emitted[0] == CHAIN).all()
  # The target as its own draft is never rejected.
  assert (emitted[2] == CHAIN * 4).all()


def shapes(calls):
  return jax.tree.map(jax.eval_shape, calls)


@pytest.mark.slow
@pytest.mark.parametrize(
  "verifier",
  [
    BlockVerifier,
    KSeqVerifier,
    TypicalVerifier,
  ],
)
def test_parts_of_rounds_can_be_timed_with_each_verifier(verifier):
  """Verifiers that need draft tokens are not used in autoregressive steps."""
  pair = dataclasses.replace(tiny_pair.pair(), verifier=verifier)
  drafts = [pair.draft.build(GREEDY, chain(gamma)) for gamma in (1, 3)]
  ends = shapes(round_calls(pair, drafts, pair.prompt(TEXTS[:1]), GREEDY, LIMIT))
  for part, has_draft in ((ends.undrafted, False), (ends.drafted, True)):
    assert [each.chain.rounds.shape[-1] for each in part] == [1 + 3, 3 + 3]  # and three numbers
    assert all((each.chain.draft_state != ()) == has_draft for each in part)
  assert ends.step.chain.rounds.shape[-1] == 3
  assert all(isinstance(each.chain, Verification) for each in ends.accept)


def test_rounds_of_a_dynamic_tree_can_be_timed():
  pair = tiny_pair.pair()
  draft = pair.draft.build(GREEDY, DynamicTree(6, 3))
  ends = shapes(round_calls(pair, [draft], pair.prompt(TEXTS[:1]), GREEDY, LIMIT))
  for part in ends.undrafted, ends.drafted:  # draft tokens, their parents, a path and three numbers
    assert part[0].none.rounds.shape[-1] == 6 + 6 + 3 + 3
  assert ends.accept[0].none.path.shape == (1, 3)


@pytest.mark.parametrize("num_texts, least, most", [(3, 3, 3), (100, 24, 48)])
def test_timed_prompts_are_spread_evenly_over_the_texts(monkeypatch, num_texts, least, most):
  timed = []

  def no_time(calls, repeats):
    timed.append(calls["parts"] is not None)
    seconds = jax.tree.map(lambda call: np.ones(repeats), calls)
    return seconds, jax.tree.map(lambda call: HAND_MADE, calls)

  monkeypatch.setattr(speeds, "interleaved_seconds", no_time)
  pair = tiny_pair.pair()
  prompts, baseline = [pair.prompt(TEXTS[:1])] * num_texts, own_baseline(pair)
  measure_speed(pair, prompts, [2], SETTINGS, 1, baseline)
  assert len(timed) == num_texts and least <= sum(timed) <= most
  assert len(set(np.diff(np.flatnonzero(timed)))) == 1 and timed[0]


def pair_of(target_layers, draft_layers, kernels="xla"):
  """Return a pair of T5s that differ only in depth, wide enough for matmuls to dominate."""
  models = []
  for layers in (target_layers, draft_layers):
    cfg = tiny.config(vocab_size=512, layers=layers, emb_dim=128, mlp_dim=256)
    cfg, params = for_decoding(cfg, tiny_pair.random_params(cfg, 0))
    params = params if kernels == "xla" else tiny.packed(params)
    models += [T5Model(cfg.with_layout(kernels=kernels)), params]
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
    pair_of(4, 1), draft=lambda sampling, tree, options=None: PromptLookupDraft(512, tree, 3)
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

  calls = {"a": lambda: call("a"), "b": lambda: call("b")}
  medians, results = interleaved_medians(calls, repeats=3)
  assert sorted(order[:2]) == sorted(order[2:4]) == sorted(order[4:6]) == ["a", "b"]
  assert order[2:4] == order[6:8] != order[4:6]
  assert {name: order[int(result) - 1] for name, result in results.items()} == {"a": "a", "b": "b"}
  assert min(map(int, results.values())) >= 7 and min(medians.values()) >= 0


# Records.


@pytest.fixture(scope="module")
def results(tmp_path_factory):
  """Return the file of a greedy run with a random draft."""
  path = records.results_path(tmp_path_factory.mktemp("measure"))
  with pytest.MonkeyPatch.context() as patch:  # parts of a round are too short to be timed
    tiny.know_costs(patch)
    measure_it(path, references=tiny_pair.SENTENCES[: len(TEXTS)], repeats=2)
  return path


@pytest.fixture
def quick(monkeypatch):
  """Skip timing the parts of a round, which the tests of costs above do for real models."""
  tiny.know_costs(monkeypatch)


def measure_it(path, draft="random", settings=SETTINGS, **changes):
  pair = changes.pop("pair", None) or tiny_pair.pair(draft)
  arguments = dict(texts=TEXTS, gammas=[2], repeats=1, settings=[settings]) | changes
  return measure_missing(path, speed_steps(pair, **arguments))


def not_measured(record):
  """Return the results that are None, except those of other experiments."""
  others = "tokens_per_round_low", "tokens_per_round_high", "auc", "ties"
  others += "speedup_low", "speedup_high"  # if there are several repeats
  others += "metric", "quality", "baseline_quality"  # if there are references
  values = vars(record.outputs) | vars(record.times)
  return {name for name, value in values.items() if value is None} - {*others}


PREDICTIONS = {"predicted_theorem8", "predicted_measured_cost", "predicted_finite_length"}


@pytest.mark.slow
def test_record_has_every_field(results):
  (record,) = records.read(results)
  allowed = {"beta_lag1"}  # if beta never varies
  assert not_measured(record) <= allowed
  assert record.times.speedup_low <= record.times.speedup <= record.times.speedup_high
  models, settings = record.models, record.settings
  assert (settings.task, models.target, models.draft) == ("tiny", "target", "random")
  assert (settings.temperature, settings.gamma, settings.batch_size) == (0.0, 2, 1)
  assert (settings.num_examples, settings.repeats, models.dtype) == (len(TEXTS), 2, "float32")
  assert settings.distinct_texts == len({*TEXTS})
  assert record.machine.platform == "cpu" and record.origin.seconds > 0


@pytest.mark.slow
def test_quality_is_recorded_with_that_of_autoregressive_decoding(results, tmp_path):
  (record,) = records.read(results)
  outputs = record.outputs
  assert outputs.metric == "BLEU" and outputs.quality == outputs.baseline_quality
  with pytest.raises(InputError, match=f"{len(TEXTS)} texts but 1 references"):
    measure_it(tmp_path / "r.jsonl", references=["ein Hund"])
  with pytest.raises(InputError, match="metric is 'METEOR'; it must be one of BLEU, ROUGE-1"):
    measure_it(tmp_path / "r.jsonl", references=TEXTS, metric="METEOR")


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
def test_another_baseline_is_another_setting(results, tmp_path, quick):
  """Predictions are relative to our autoregressive decoding and do not apply to other baselines."""
  theirs = own_baseline(tiny_pair.pair("random"))._replace(name="theirs")
  (own,) = records.read(results)
  path = records.results_path(tmp_path)
  (record,) = measure_it(path, baseline=theirs)
  assert records.missing(path, [record, own]) == [own]
  assert record.settings.baseline == "theirs" and record.outputs.identical
  assert record.times.speedup > 0
  assert not_measured(record) - {"beta_lag1"} == PREDICTIONS


def test_numbers_of_a_record_are_consistent(results):
  (r,) = records.read(results)
  outputs, times, gamma = r.outputs, r.times, r.settings.gamma
  assert outputs.identical is True and outputs.alpha < 0.5 and outputs.tokens_per_round < 2
  assert 0 <= outputs.alpha_low <= outputs.alpha <= outputs.alpha_high <= 1
  assert 0 <= outputs.acceptance_rate <= 1
  assert 0 < outputs.rounds <= outputs.num_tokens <= LIMIT * len(TEXTS)
  assert times.target_prefill_ms > 0
  parts = gamma * times.draft_step_ms + times.verify_ms + times.accept_ms + times.unaccounted_ms
  assert times.round_ms == pytest.approx(parts)
  assert outputs.tokens_per_round == pytest.approx(outputs.num_tokens / outputs.rounds)
  assert times.c == pytest.approx(times.draft_step_ms / times.target_step_ms)
  v = (times.verify_ms + times.accept_ms) / times.target_step_ms
  assert times.verify_cost == pytest.approx(v)
  by_theorem = theory.operations_factor(outputs.alpha, gamma, times.operations_ratio)
  assert times.operations_factor == pytest.approx(float(by_theorem))
  assert times.memory_gb_per_s > 0
  assert times.verify_mb > times.target_step_mb > times.draft_step_mb > 0
  tokens_a_pass = 1e-3 * times.baseline_tokens_per_s * times.baseline_pass_ms
  assert tokens_a_pass == pytest.approx(1)  # one text at a time
  rates = times.speculative_tokens_per_s / times.baseline_tokens_per_s
  assert times.speedup == pytest.approx(rates)


def test_budget_of_a_round_is_shown(results):
  (r,) = records.read(results)
  times = dict(draft_step_ms=0.5, verify_ms=4.0, accept_ms=0.25, unaccounted_ms=-0.75)
  r = r.replace(gamma=2, round_ms=4.5, operations_ratio=None, **times)
  shown = records_table("a title", [r], BUDGET)
  cells = dict(zip(shown.columns, shown.rows[0]))
  parts = [cells[f"{name}, ms"] for name in ("draft", "verify", "accept", "unaccounted", "round")]
  assert parts == ["2 x 0.50", "4.00", "0.25", "-0.75", "4.50"] and cells["c-hat"] == "-"
  assert {*legend(BUDGET)} == {*cells} - {"temperature", "gamma"}


@pytest.fixture
def asked(monkeypatch):
  """Return the gammas that would be measured, without measuring them."""
  gammas = []

  def note(pair, prompts, settings, wanted, speed):
    gammas.extend(setting.settings.gamma for setting in wanted)
    return []

  monkeypatch.setattr(speeds, "measure_speed", lambda *args: None)
  monkeypatch.setattr(speeds, "_records", note)
  return gammas


def test_second_run_measures_only_what_is_missing(results, asked):
  before = results.read_bytes()
  assert measure_it(results, repeats=2) == records.read(results) and asked == []
  again = measure_it(results, gammas=[1, 2, 3], repeats=2)
  assert [r.settings.gamma for r in again] == [2] and asked == [1, 3]
  assert results.read_bytes() == before


@pytest.mark.parametrize(
  "change",
  [
    dict(texts=TEXTS[::-1]),
    dict(settings=dataclasses.replace(SETTINGS, max_new_tokens=4)),
    dict(repeats=1),
  ],
  ids=["texts", "max_new_tokens", "repeats"],
)
def test_run_on_other_texts_or_with_other_repeats_is_another_setting(results, asked, change):
  """Records of other texts, shorter outputs or another number of repeats must not be reused."""
  assert measure_it(results, **dict(repeats=2) | change) == [] and asked == [2]


@pytest.mark.slow
def test_batches_and_samples_have_no_comparison(tmp_path, quick):
  settings = dataclasses.replace(SETTINGS, sampling=RANDOM, batch_size=3)
  path = records.results_path(tmp_path)
  (record,) = measure_it(path, draft="target", settings=settings)
  assert not_measured(record) == {"identical"}
  # The target as its own draft: every draft token is accepted.
  assert record.outputs.alpha == pytest.approx(1, abs=1e-5) and record.outputs.acceptance_rate == 1
  times = record.times
  v, c = times.verify_cost, times.c
  assert times.predicted_theorem8 == pytest.approx(3 / (1 + 2 * c), rel=1e-4)
  assert times.predicted_measured_cost == pytest.approx(3 / (v + 2 * c), rel=1e-4)


@pytest.mark.slow
def test_prediction_for_another_verifier_has_its_own_acceptance(tmp_path, quick):
  """Alpha is the acceptance rate of Algorithm 1, so there is none."""
  pair = dataclasses.replace(tiny_pair.pair(), verifier=BlockVerifier)
  settings = dataclasses.replace(SETTINGS, sampling=RANDOM)
  (record,) = measure_it(records.results_path(tmp_path), pair=pair, settings=settings)
  outputs, times = record.outputs, record.times
  assert outputs.alpha is times.predicted_theorem8 is times.predicted_finite_length is None
  predicted = outputs.tokens_per_round / (2 * times.c + times.verify_cost)
  assert times.predicted_measured_cost == pytest.approx(predicted)


@pytest.mark.slow
def test_noisy_costs_give_no_prediction(tmp_path, quick):
  """The drafted round took less time than the round without drafting."""
  parts = speeds.round_calls()
  noisy = parts._replace(drafted=parts.accept, accept=parts.drafted)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(speeds, "round_calls", lambda *args: noisy)
    (record,) = measure_it(records.results_path(tmp_path))
  missing = {"c", "draft_step_ms", "verify_cost", "unaccounted_ms"} | PREDICTIONS
  assert missing <= not_measured(record)
  assert record.times.speedup > 0 and record.outputs.alpha is not None


@pytest.mark.slow
def test_simulated_acceptance_is_recorded_as_such(tmp_path, quick):
  real = tiny_pair.pair()
  target = SimulatedModel(real.target.model, 0.6, real.vocabulary.eos_id)
  pair = tiny_pair.changed(real, model=target)
  settings = DecodeSettings(GREEDY, batch_size=8, max_new_tokens=32)
  path = records.results_path(tmp_path)
  texts = tiny_pair.SENTENCES[:8]
  (r,) = measure_it(path, pair=pair, texts=texts, settings=settings, gammas=[3])
  outputs = r.outputs
  assert (r.models.simulated, outputs.alpha, outputs.identical) == (True, 0.6, None)
  assert outputs.alpha_low is outputs.alpha_high is outputs.beta_lag1 is None
  assert outputs.num_tokens == 8 * 32 and r.times.speedup > 0
  assert r.times.predicted_finite_length > 0
  # About 200 draft tokens were verified: 4 standard errors.
  assert outputs.acceptance_rate == pytest.approx(0.6, abs=4 * np.sqrt(0.6 * 0.4 / 150))


@pytest.mark.slow
def test_another_alpha_is_another_setting():
  (one,), (other,) = (
    settings_to_measure(random_pair("tiny", "tiny", alpha), TEXTS, [SETTINGS], [3])
    for alpha in (0.6, 0.7)
  )
  assert one.key != other.key


def test_empty_lists_raise(tmp_path):
  for changes in (dict(texts=[]), dict(settings=[]), dict(gammas=[])):
    arguments = dict(texts=TEXTS, settings=[SETTINGS], gammas=[2]) | changes
    with pytest.raises(InputError, match="nothing to measure"):
      speed_steps(tiny_pair.pair(), **arguments)
