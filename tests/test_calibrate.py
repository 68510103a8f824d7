"""Test gamma and tree = 'auto': predictions for batches, the choice, and runs with the choice."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_pair
from tiny import autoregressive_decode

from specdec_jax.commands.translate import translate
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import Tree, branching, chain, given_tree
from specdec_jax.errors import InputError
from specdec_jax.measure import calibrate
from specdec_jax.measure.calibrate import (
  auto_tree,
  cache_key,
  choose,
  choose_tree,
  get_or_compute,
  resolve_gammas,
)
from specdec_jax.measure.costs import Costs
from specdec_jax.theory import best_tree, expected_rounds, text_improvement, tree_rates, tree_tokens

GREEDY = Sampling(0.0)
SETTINGS = DecodeSettings(GREEDY, max_new_tokens=12)
TEXTS = tiny_pair.SENTENCES[:4]
LENGTHS = [[17], [12], [30]]


def costs(c=0.05, v_slope=0.03, fixed=0.1, start=2.0):
  """Return costs at gamma 3 and 10: drafting takes `fixed` + c gamma, and v is 1 + v_slope
  gamma."""
  return {
    g: Costs(1e-3, 1e-3 * (c + fixed / g), 9e-4, 1e-4 + 1e-3 * v_slope * g, 1e-3 * start, 5e-4)
    for g in (3, 10)
  }


# The prediction for a batch, which ends with its slowest row.


def simulated_rounds(alpha, gamma, lengths, samples=20_000):
  rng = np.random.default_rng(0)
  rounds = np.zeros((samples, len(lengths)), int)
  left = np.tile(lengths, (samples, 1))
  while (left > 0).any():
    n = np.cumprod(rng.random((*left.shape, gamma)) < alpha, axis=-1).sum(axis=-1)
    rounds += left > 0
    left -= n + 1
  return rounds.max(axis=1)


@pytest.mark.parametrize("alpha, gamma", [(0.8, 5), (0.5, 1), (0.9, 10)])
@pytest.mark.parametrize("lengths", [[17], [3, 20, 11, 20]], ids=str)
def test_rounds_of_a_batch_are_those_of_its_slowest_row(alpha, gamma, lengths):
  drawn = simulated_rounds(alpha, gamma, lengths)
  error = 5 * drawn.std() / np.sqrt(len(drawn))
  assert expected_rounds(alpha, gamma, lengths) == pytest.approx(drawn.mean(), abs=error)
  assert expected_rounds(alpha, gamma, max(lengths)) < drawn.mean() - error or len(lengths) == 1


def test_batch_without_rejections_takes_as_long_as_its_longest_row():
  assert expected_rounds(1.0, 4, [3, 20, 11]) == 4
  assert expected_rounds(0.0, 4, [3, 20, 11]) == 20
  plain_costs = dict(c=0.1, verify_cost=1.2, target_start=2.0, draft_start=0.5)
  got = text_improvement(1.0, 4, lengths=[[3, 20, 11], [5, 1]], **plain_costs)
  assert got == pytest.approx((20 + 5 + 2 * 2) / (2 * 2.5 + (4 + 1) * (4 * 0.1 + 1.2)))


# The choice of gamma.


def test_costs_are_interpolated_linearly():
  c, v = choose(0.8, costs(c=0.05, v_slope=0.03, fixed=0.1), LENGTHS)[2:4]
  for g in range(1, 11):
    assert g * c[g] == pytest.approx(0.1 + 0.05 * g)
    assert v[g] == pytest.approx(1 + 0.03 * g)
  assert len(v) == 11 and (c[0], v[0]) == (0.0, 1.0)


def test_interpolated_draft_cost_is_not_negative():
  c = choose(0.8, costs(c=0.05, v_slope=0.03, fixed=-0.3), LENGTHS).c
  assert min(c) == 0.0 and c[10] == pytest.approx((0.5 - 0.3) / 10)
  noisy = choose(0.8, costs(c=0.0, fixed=-0.3), LENGTHS)
  assert "c 0.000 (below the noise of the timing), v(" in str(noisy)


def test_chosen_gamma_is_the_fastest_and_grows_with_alpha():
  chosen = []
  for alpha in (0.0, 0.1, 0.4, 0.6, 0.8, 0.9, 0.99):
    found = choose(alpha, costs(), LENGTHS)
    gains = [
      text_improvement(alpha, g, 0.05 + 0.1 / g, 1 + 0.03 * g, LENGTHS, 2.0, 0.5)
      for g in range(1, 11)
    ]
    assert found.speedups == pytest.approx((1.0, *gains))
    assert found.gamma == (np.argmax(gains) + 1 if max(gains) >= calibrate.LEAST_GAIN else 0)
    chosen.append(found.gamma)
  assert chosen == sorted(chosen) and chosen[0] == chosen[1] == 0
  assert len(set(chosen)) > 4 and chosen[-1] == 9


def test_autoregressive_decoding_is_chosen_if_verification_or_drafting_is_expensive():
  assert choose(0.8, costs(), LENGTHS).gamma > 0
  for dear in (costs(v_slope=0.9), costs(c=0.9), costs(fixed=3.0)):
    found = choose(0.8, dear, LENGTHS)
    assert found.gamma == 0 and found.speedups[found.best_draft] == max(found.speedups[1:]) < 1
    assert str(found).startswith("autoregressive decoding, gamma 0, was chosen: alpha 0.80")


def test_explanation_of_the_choice():
  found = choose(0.8, costs(), LENGTHS)
  g = found.gamma
  assert str(found) == (
    f"gamma {g} was chosen: alpha 0.80, c {found.c[g]:.3f}, v({g}) {found.v[g]:.2f}; predicted "
    f"speedup {found.speedups[g - 1]:.2f} at gamma {g - 1}, {found.speedups[g]:.2f} at gamma {g}, "
    f"{found.speedups[g + 1]:.2f} at gamma {g + 1}"
  )
  assert str(found._replace(tried=1.239)) == f"{found}; tried, 1.24 at gamma {g}"


@pytest.mark.parametrize("tried, chosen", [(1.04, True), (0.97, False)])
def test_small_predicted_gain_is_confirmed_by_a_trial(monkeypatch, tried, chosen):
  """In simulated times, speculation is `tried` times as fast, and its predicted speedup is 1.08."""
  small = choose(0.8, costs(v_slope=0.3), LENGTHS)._replace(gamma=2, speedups=(1.0, 1.05, 1.08))
  monkeypatch.setattr(calibrate, "choose", lambda *args: small)
  monkeypatch.setattr(calibrate, "measure_costs", lambda *args: [[]])
  monkeypatch.setattr(calibrate, "GAMMAS", (1, 2))

  def clock(calls, repeats):
    return ([1.0, 1 / tried], [call() for call in calls])

  monkeypatch.setattr(calibrate, "interleaved_medians", clock)
  found = calibrate.calibrate(tiny_pair.pair(), TEXTS, DecodeSettings(GREEDY, 4, 12))
  assert found.tried == pytest.approx(tried) and found.gamma == (2 if chosen else 0)


# The choice of a tree.


def tree_costs(level, draft_token, row, start=0.0):
  """Return costs at 4, 16 and 64 nodes, given those of a drafted level, a draft token and a row."""
  trees = [branching(3), branching(3, 2, 1), Tree([0] * 20 + [1] * 43)]
  return {
    tree: Costs(
      target_step=1e-3,
      draft_step=1e-3 * (level * tree.depth + draft_token * tree.num_draft_tokens) / tree.depth,
      verify=9e-4,
      accept=1e-4 + 1e-3 * row * tree.num_draft_tokens,
      target_start=1e-3 * start,
      draft_start=0.0,
    )
    for tree in trees
  }


LONG = [[600]]  # a text so long that its last round does not matter


def test_rates_of_a_tree_are_the_acceptance_rates_of_its_levels():
  """For a long text, the formula gives tokens per round divided by the time of a round."""
  assert tree_rates(chain(3), [0.7, 0.2]) == pytest.approx([0.7] * 3)
  tree = Tree([0, 0, 1, 1, 2])
  assert tree_rates(tree, [0.6, 0.2]) == pytest.approx([0.8, (0.36 + 0.12 + 0.12) / 0.8])
  assert tree_rates(Tree([0, 0, 1]), [0.0, 0.0]) == [0.0, 0.0]
  got = text_improvement(tree_rates(tree, [0.6, 0.2]), 2, 0.1, 1.3, LONG)
  assert got == pytest.approx(tree_tokens(tree, [0.6, 0.2]) / (2 * 0.1 + 1.3), rel=1e-2)
  assert expected_rounds([0.6], 1, 3) == expected_rounds(0.6, 1, 3) == pytest.approx(2.16)


def test_rounds_with_different_rates_by_hand():
  """With rates 1/2 and 1, a round emits 1 or 3 tokens, so 3 tokens take 1, 2 or 3 rounds."""
  assert expected_rounds([0.5, 1.0], 2, 3) == pytest.approx(0.5 + 0.5 * (1 + 0.5 * 1 + 0.5 * 2))


@pytest.mark.parametrize(
  "level, tree, speedup", [(0.1, (0, 0, 1), 2 / 1.2), (0.5, (0, 0), 1.75 / 1.5)]
)
def test_expensive_levels_make_a_shallow_tree(monkeypatch, level, tree, speedup):
  """With rates 1/2 and 1/4 of ranks 0 and 1, two children give 1.75 tokens, and a grandchild 2."""
  monkeypatch.setattr(calibrate, "NODES", (4,))
  monkeypatch.setattr(calibrate, "DEPTH", 2)
  found = choose_tree([0.5, 0.25], tree_costs(level, 0.0, 0.0), LONG)
  assert found.tree == Tree(tree)
  assert found.speedup == pytest.approx(speedup, rel=1e-2)
  assert found.drafting == pytest.approx(level * found.tree.depth) and found.v == 1


RANKS = [0.8, 0.1, 0.04]


def test_wide_tree_is_faster_than_a_chain_only_if_rows_are_cheap():
  """If a level costs 0.05 steps and rows are free, a chain with gamma 8 emits 4.33 tokens in 1.4
  steps. If a row costs 0.2 steps, a chain with gamma 3 emits 2.952 tokens in 1.75 steps."""
  flat = choose_tree(RANKS, tree_costs(0.05, 0.0, 0.0), LONG)
  plain = choose(RANKS[0], costs(c=0.05, v_slope=0.0, fixed=0.0, start=0.0), LONG)
  assert flat.tree.num_nodes == 64 and flat.tree.width > 1
  assert max(plain.speedups) == pytest.approx(4.329 / 1.4, rel=1e-2)
  assert flat.speedup > 1.2 * max(plain.speedups)
  steep = choose_tree(RANKS, tree_costs(0.05, 0.0, 0.2), LONG)
  chained = choose(RANKS[0], costs(c=0.05, v_slope=0.2, fixed=0.0, start=0.0), LONG)
  assert chained.gamma == 3
  assert max(chained.speedups) == pytest.approx(2.952 / 1.75, rel=1e-2)
  assert 1 < steep.speedup < 0.9 * max(chained.speedups)


def test_costs_of_trees_are_interpolated():
  """The texts include short ones, for which the prefill matters."""
  found = choose_tree(RANKS, tree_costs(0.05, 0.002, 0.01, start=2.0), LENGTHS)
  n, depth = found.tree.num_nodes, found.tree.depth
  assert found.drafting == pytest.approx(0.05 * depth + 0.002 * (n - 1))
  assert found.v == pytest.approx(1 + 0.01 * (n - 1))
  for nodes in calibrate.NODES:
    for most in (2, 5, 10):
      tree = best_tree(RANKS, nodes, most)
      if not tree.is_chain:
        c = 0.05 + 0.002 * tree.num_draft_tokens / tree.depth
        v = 1 + 0.01 * tree.num_draft_tokens
        rates = tree_rates(tree, RANKS)
        other = text_improvement(rates, tree.depth, c, v, LENGTHS, 2.0)
        assert other <= found.speedup + 1e-9
  free = choose_tree(RANKS, tree_costs(-0.1, -0.01, 0.0), LENGTHS)  # as noise may make it
  assert free.drafting == 0.0


@pytest.mark.parametrize("tried, taken", [(1.04, True), (0.97, False), (None, False)])
def test_tree_is_chosen_if_it_was_faster_when_tried(tried, taken):
  found = choose(0.8, costs(), LENGTHS)
  best = choose_tree(RANKS, tree_costs(0.05, 0.0, 0.0), LENGTHS)._replace(tried=tried)
  said = str(both := found._replace(branching=best))
  assert both.tree == (best.tree if taken else chain(found.gamma))
  head = "a tree of 64 nodes" if taken else f"gamma {found.gamma}"
  assert said.startswith(f"{head} was chosen: alpha 0.80, c ")
  assert (
    f"; the best tree, 64 nodes of depth {best.tree.depth}, has a predicted speedup of " in said
  )
  assert said.endswith(
    "acceptance of children of rank 0, 1, 2: 0.80, 0.10, 0.04"
    + ("" if tried is None else f"; tried, {tried:.2f} times as fast as the chain")
  )


# The runs that use the choice.


def auto(monkeypatch, alpha, **dear):
  """Replace the measurements of a calibration."""
  made = choose(alpha, costs(**dear), LENGTHS)
  monkeypatch.setattr(calibrate, "calibrate", lambda *args, **settings: made)
  monkeypatch.setattr(calibrate, "get_or_compute", lambda find, *rest, **more: (find(), ""))
  return made


def test_auto_is_resolved_and_numbers_are_kept(monkeypatch, capsys):
  found = auto(monkeypatch, 0.8)
  assert auto_tree(None, TEXTS, SETTINGS, False) == chain(found.gamma) and found.gamma > 0
  assert capsys.readouterr().out == f"{found}.\n"
  assert auto_tree(None, [], SETTINGS, True) == chain(0)
  assert capsys.readouterr().out == ""
  assert given_tree(7, None) == chain(7)
  assert given_tree(7, [0, 0]) == branching(2)
  assert given_tree(0, None) == chain(0)
  for both in (("auto", None), (7, "auto"), ("auto", "auto")):
    assert given_tree(*both) is None
  for bad in (-1, 2.5, "fast"):
    with pytest.raises(InputError, match=f"gamma is {bad!r}"):
      given_tree(bad, None)


@pytest.mark.parametrize(
  "gamma, tree, sentence",
  [
    ("auto", [0, 0], r"gamma is 'auto' and tree is \[0, 0\]: a tree leaves no gamma to choose"),
    (5, [3], r"A tree has parents \(3,\); they must be in ascending order"),
    (5, [0, -1], r"A tree has parents \(0, -1\)"),
    (5, [], "the number of a tree's draft tokens is 0; it must be a whole number, from 1"),
    (5, [0] * 10**6, "a tree of 1000001 nodes would take at least .* GB; ask for less"),
  ],
  ids=["no gamma to choose", "no parent", "negative", "empty", "huge"],
)
def test_invalid_trees_raise(gamma, tree, sentence):
  with pytest.raises(InputError, match=sentence):
    given_tree(gamma, tree)


def test_auto_among_several_gammas(monkeypatch, capsys):
  found = auto(monkeypatch, 0.8)
  settings = None, TEXTS, [SETTINGS, dataclasses.replace(SETTINGS, sampling=Sampling())]
  assert resolve_gammas((3, "auto"), *settings) == sorted({3, found.gamma})
  assert resolve_gammas("auto", *settings) == [found.gamma]
  said = capsys.readouterr().out
  assert f"temperature 0: {found}." in said and f"temperature 1: {found}." in said
  found = auto(monkeypatch, 0.0)
  assert resolve_gammas(["auto"], *settings) == [found.best_draft] and found.gamma == 0
  assert f"gamma {found.best_draft} is measured instead." in capsys.readouterr().out
  assert resolve_gammas((5, 7), *settings) == [5, 7] and capsys.readouterr().out == ""


def test_calibration_is_cached_until_a_setting_changes(cache):
  chosen = choose(0.8, costs(), LENGTHS)
  tree = Tree((0, 0, 2), greedy_siblings=True)
  best = calibrate.Branching(tree, ((0.8,), (0.2, 0.7)), 0.5, 1.5, 1.3, 1.1)
  finds, on = [chosen, chosen._replace(branching=best), chosen._replace(gamma=0)], dict(a=1)

  def find():
    return finds.pop(0)

  def keep(num_texts=3, **more):
    return get_or_compute(find, lambda: on | more, num_texts=num_texts)

  assert keep() == (chosen, "")
  found, since = keep(2)
  assert found == chosen and "with 3 texts" in since and str(cache) in since and len(finds) == 2
  assert keep(b=2)[0].branching == best and keep(b=2)[0].tree == best.tree and len(finds) == 1
  assert keep(4)[0].gamma == 0 == keep(4)[0].gamma and not finds  # more texts: measured again
  for path in (cache / "calibrations").iterdir():
    path.write_text(path.read_text()[:-9])  # a damaged file is replaced
  finds.append(chosen)
  assert keep() == (chosen, "") and keep()[0] == chosen and not finds
  jax.config.update("jax_compilation_cache_dir", None)
  finds.append(chosen)
  assert keep() == (chosen, "") and not finds


def test_settings_that_a_calibration_depends_on():
  pair, other = (tiny_pair.pair(draft, max_source_tokens=48) for draft in ("near", "random"))

  def on(pair=pair, texts=TEXTS, branching=False, **changes):
    return json.dumps(cache_key(pair, texts, dataclasses.replace(SETTINGS, **changes), branching))

  assert on() == on() == on(texts=TEXTS[1:])
  trained = jax.tree.map(lambda x: x * 1.01, pair.target.params)
  others = [
    on(pair=tiny_pair.changed(pair, params=trained)),
    on(pair=other),
    on(texts=TEXTS[:1]),
    on(sampling=Sampling(1.0)),
    on(batch_size=2),
    on(branching=True),
  ]
  assert len({on(), *others}) == 7


def test_gamma_0_decodes_autoregressively():
  pair = tiny_pair.pair()
  decoded = pair.generate(TEXTS, gamma=0, temperature=1.0, max_new_tokens=12, batch_size=4, seed=3)
  settings = dict(max_new_tokens=12, sampling=Sampling())
  own = autoregressive_decode(
    pair.target.model, pair.target.params, pair.prompt(TEXTS), row_keys(3, 0, 4), **settings
  )
  for output, tokens, length in zip(decoded, own.tokens, own.lengths, strict=True):
    np.testing.assert_array_equal(output.tokens, tokens[:length])
  assert decoded[0].rounds.draft_tokens.shape[-1] == 0


def translated(tmp_path, pair, tree):
  """Return the lines that the command writes for TEXTS at temperature 0."""
  (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in TEXTS))
  files = str(tmp_path / "in.txt"), str(tmp_path / "out.txt")
  translate(pair, *files, GenerationConfig(max_new_tokens=12), batch_size=2, tree=tree)
  return (tmp_path / "out.txt").read_text().splitlines()


def plain_lines(pair):
  return [*map(str, pair.generate(TEXTS, gamma=0, max_new_tokens=12, batch_size=2))]


def test_given_tree_has_the_output_of_autoregressive_decoding(tmp_path):
  pair = tiny_pair.pair()
  assert translated(tmp_path, pair, [0, 0, 1]) == plain_lines(pair)


@pytest.fixture
def trees_are_fast(monkeypatch):
  """In simulated times, drafting and further rows are free, and the tree takes 0.8 of the chain's
  time. A tree of 128 nodes, for which there is not enough memory, is neither timed nor chosen."""
  small = dict(GAMMAS=(1, 2), TREES=((4, 2), (128, 4)), NUM_TEXTS=2, SURE_GAIN=0.0)
  for name, value in (small | dict(NODES=(4, 128), DEPTH=2)).items():
    monkeypatch.setattr(calibrate, name, value)
  monkeypatch.setattr(calibrate._Calibrator, "fits", lambda self, tree: tree.num_nodes < 128)

  def clock(calls, repeats):
    return [1.0, 0.8], [call() for call in calls]  # decoding both ways

  def costs(pairs, trees, *args):
    return [[Costs(1.0, 0.0, 0.5, 0.5, 0.0, 0.0) for _ in trees]]

  monkeypatch.setattr(calibrate, "measure_costs", costs)
  monkeypatch.setattr(calibrate, "interleaved_medians", clock)
  monkeypatch.setattr(calibrate, "get_or_compute", lambda find, *rest, **more: (find(), ""))


@pytest.mark.slow
def test_auto_chooses_and_tries_a_tree(tmp_path, trees_are_fast, capsys):
  pair = tiny_pair.gpt_pair()
  assert translated(tmp_path, pair, "auto") == plain_lines(pair)
  said = " ".join(capsys.readouterr().err.split())
  assert said.startswith("a tree of 4 nodes was chosen: alpha ")
  assert "; tried, 1.25 times as fast as the chain." in said
  assert "; the best tree, 4 nodes of depth 2, has a predicted speedup of " in said


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.1, -0.1])
def test_auto_chooses_siblings_that_are_accepted_more_often(monkeypatch, trees_are_fast, gain):
  """With `gain`, a second greedy sibling is accepted so much more often than the first of two."""

  def acceptance(pair, prompts, outputs, sampling, width, lenience, greedy_siblings):
    if greedy_siblings and width > 1:
      return np.array([0.1, 0.6 + gain, 0.05, 0.05])[:width]
    return np.array([0.6, 0.1, 0.05, 0.05, 0.01, 0.01, 0.01, 0.01])[:width]

  monkeypatch.setattr(calibrate, "positional_acceptance", acceptance)
  settings = DecodeSettings(Sampling(), 2, 12)
  found = calibrate.calibrate(tiny_pair.pair("near"), TEXTS, settings, branching=True)
  greedy, sampled = Tree((0, 0, 2), greedy_siblings=True), Tree((0, 0, 1))
  assert found.branching.tree == (greedy if gain > 0 else sampled)
  assert ("acceptance of greedy siblings of rank 0" in str(found)) == (gain > 0)
