"""gamma = 'auto': its prediction for batches, its choice, and the runs that take it."""

import numpy as np
import pytest
import tiny_pair

from specdec_jax.commands import decode, gamma
from specdec_jax.commands.translate import decode_lines
from specdec_jax.decoding import autoregressive_decode
from specdec_jax.errors import InputError
from specdec_jax.measurement import calibrate
from specdec_jax.measurement.calibrate import choose, resolve_gamma, resolve_gammas
from specdec_jax.measurement.costs import Costs
from specdec_jax.records import read
from specdec_jax.sampling import Sampling, row_keys
from specdec_jax.theory import expected_rounds, text_improvement

GREEDY = Sampling(0.0)
TEXTS = tiny_pair.SENTENCES[:4]
LENGTHS = [[17], [12], [30]]


def costs(c=0.05, v_slope=0.03, fixed=0.1, start=2.0):
  """At gamma 3 and 10: drafting takes `fixed` and c a guess, verification 1 and v_slope a guess."""
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


def test_a_batch_without_refusals_takes_as_long_as_its_longest_row():
  assert expected_rounds(1.0, 4, [3, 20, 11]) == 4
  assert expected_rounds(0.0, 4, [3, 20, 11]) == 20
  plain_costs = dict(c=0.1, verify_cost=1.2, target_start=2.0, draft_start=0.5)
  got = text_improvement(1.0, 4, lengths=[[3, 20, 11], [5, 1]], **plain_costs)
  assert got == pytest.approx((20 + 5 + 2 * 2) / (2 * 2.5 + (4 + 1) * (4 * 0.1 + 1.2)))


# The choice.


def test_costs_between_those_measured_lie_on_lines():
  c, v = choose(0.8, costs(c=0.05, v_slope=0.03, fixed=0.1), LENGTHS)[2:4]
  for g in range(1, 11):
    assert g * c[g] == pytest.approx(0.1 + 0.05 * g)
    assert v[g] == pytest.approx(1 + 0.03 * g)
  assert len(v) == 11 and (c[0], v[0]) == (0.0, 1.0)


def test_drafting_never_costs_less_than_nothing():
  c = choose(0.8, costs(c=0.05, v_slope=0.03, fixed=-0.3), LENGTHS).c
  assert min(c) == 0.0 and c[10] == pytest.approx((0.5 - 0.3) / 10)


def test_the_gamma_chosen_is_the_best_and_grows_with_alpha():
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


def test_plain_decoding_is_chosen_where_verification_or_drafting_is_dear():
  assert choose(0.8, costs(), LENGTHS).gamma > 0
  for dear in (costs(v_slope=0.9), costs(c=0.9), costs(fixed=3.0)):
    found = choose(0.8, dear, LENGTHS)
    assert found.gamma == 0 and found.speedups[found.best_draft] == max(found.speedups[1:]) < 1
    assert str(found).startswith("plain decoding, gamma 0, was chosen: alpha 0.80")


def test_the_choice_says_why():
  found = choose(0.8, costs(), LENGTHS)
  g = found.gamma
  assert str(found) == (
    f"gamma {g} was chosen: alpha 0.80, c {found.c[g]:.3f}, v({g}) {found.v[g]:.2f}; predicted "
    f"speedup {found.speedups[g - 1]:.2f} at gamma {g - 1}, {found.speedups[g]:.2f} at gamma {g}, "
    f"{found.speedups[g + 1]:.2f} at gamma {g + 1}"
  )
  assert str(found._replace(tried=1.239)) == f"{found}; tried, 1.24 at gamma {g}"


@pytest.mark.parametrize("tried, chosen", [(1.04, True), (0.97, False)])
def test_a_small_gain_must_show_when_it_is_tried(monkeypatch, tried, chosen):
  """The clock is ours: speculation takes 1 / `tried` of the time, and saves 8% by prediction."""
  small = choose(0.8, costs(v_slope=0.3), LENGTHS)._replace(gamma=2, speedups=(1.0, 1.05, 1.08))
  monkeypatch.setattr(calibrate, "choose", lambda *args: small)
  monkeypatch.setattr(calibrate, "round_calls", lambda *args: [])
  monkeypatch.setattr(calibrate, "start_calls", lambda *args: [])
  monkeypatch.setattr(calibrate, "round_costs", lambda *args: {})
  monkeypatch.setattr(calibrate, "GAMMAS", (1, 2))
  clock = lambda calls, repeats: ([1.0, 1 / tried], [call() for call in calls])
  monkeypatch.setattr(calibrate, "interleaved_medians", clock)
  found = calibrate.calibrate(tiny_pair.pair(), TEXTS, GREEDY, 4, 12)
  assert found.tried == pytest.approx(tried) and found.gamma == (2 if chosen else 0)


# The runs that take it.


def auto(monkeypatch, alpha, **dear):
  """Calibration without its measurements."""
  made = choose(alpha, costs(**dear), LENGTHS)
  monkeypatch.setattr(calibrate, "calibrate", lambda *args: made)
  return made


def test_auto_is_resolved_and_a_number_stays(monkeypatch, capsys):
  found = auto(monkeypatch, 0.8)
  rest = None, TEXTS, GREEDY, 1, 12
  assert resolve_gamma("auto", *rest) == found.gamma > 0
  assert capsys.readouterr().out == f"{found}.\n"
  assert resolve_gamma(7, *rest) == 7
  assert resolve_gamma("auto", None, [None, None], *rest[2:]) == 0
  assert capsys.readouterr().out == ""
  for bad in (0, -1, 2.5, "fast"):
    with pytest.raises(InputError, match=f"gamma is {bad!r}"):
      resolve_gamma(bad, *rest)


def test_auto_among_gammas_to_be_measured(monkeypatch, capsys):
  found = auto(monkeypatch, 0.8)
  settings = None, TEXTS, [GREEDY, Sampling()], 1, 12
  assert resolve_gammas((3, "auto"), *settings) == sorted({3, found.gamma})
  assert resolve_gammas("auto", *settings) == [found.gamma]
  said = capsys.readouterr().out
  assert f"temperature 0: {found}." in said and f"temperature 1: {found}." in said
  found = auto(monkeypatch, 0.0)
  assert resolve_gammas(["auto"], *settings) == [found.best_draft] and found.gamma == 0
  assert f"measured is gamma {found.best_draft}." in capsys.readouterr().out
  assert resolve_gammas((5, 7), *settings) == [5, 7] and capsys.readouterr().out == ""


def test_hosts_agree_on_the_first_choice(tmp_path):
  path = tmp_path / "gamma"
  assert decode._agreed(path, 0, lambda: 3) == 3
  assert decode._agreed(path, 1, lambda: pytest.fail("it is chosen")) == 3
  path.unlink()
  another_is_first = lambda: decode._agreed(path, 1, lambda: 0) or 5
  assert decode._agreed(path, 0, another_is_first) == 0
  assert [p.name for p in tmp_path.iterdir()] == ["gamma"]


def test_gamma_0_decodes_plainly():
  pair, sampling = tiny_pair.pair(), Sampling()
  ((_, (decoded,)),) = decode_lines(pair, TEXTS, sampling, 0, 4, 12, seed=3)
  settings = dict(max_new_tokens=12, sampling=sampling)
  own = autoregressive_decode(
    pair.target, pair.target_params, pair.prompt(TEXTS), row_keys(3, 0, 4), **settings
  )
  np.testing.assert_array_equal(decoded.tokens, own.tokens)
  assert decoded.rounds.guesses.shape[-1] == 0


# What choosing could be worth.


def best_by_trying(stands, cost):
  if len(stands) == 0:
    return 0.0
  gains = []
  for g in range(len(cost)):
    n = int(np.cumprod(stands[:g]).sum())
    gains.append(cost[g] + best_by_trying(stands[n + 1 :], cost))
  return min(gains)


@pytest.mark.parametrize("seed", range(5))
def test_times_of_a_text(seed):
  rng = np.random.default_rng(seed)
  stands, cost = rng.random(9) < 0.7, [1.0, 1.3, 1.5, 2.1]
  fixed, best = gamma.times(stands, cost)
  assert best == pytest.approx(best_by_trying(stands, cost)) and best <= fixed.min()
  for g in range(4):
    left, rounds = stands, 0
    while len(left):
      left, rounds = left[int(np.cumprod(left[:g]).sum()) + 1 :], rounds + 1
    assert fixed[g] == pytest.approx(rounds * cost[g])


def test_policies_are_measured(tmp_path, capsys, monkeypatch):
  """The whole experiment on the tiny pair; who knows which guesses stand knows all rounds."""
  monkeypatch.setattr(calibrate, "GAMMAS", (1, 2))
  monkeypatch.setattr(calibrate, "NUM_TEXTS", 2)
  monkeypatch.setattr(calibrate, "REPEATS", 1)
  lines, pair = [tiny_pair.SENTENCES[i] for i in (0, 33)], tiny_pair.pair()
  settings = dict(gammas=(1, 2), temperatures=(0.0,), batch_sizes=(1,), max_new_tokens=12)
  stands, acceptances = [], gamma.acceptances
  noted = lambda *args: stands.extend(found := acceptances(*args)) or found
  monkeypatch.setattr(gamma, "acceptances", noted)
  gamma.gamma(pair, lines, str(tmp_path), **settings, repeats=1)
  measured = read(str(tmp_path / "results.jsonl"))
  by_name = {(r.draft.rpartition(", ")[2], r.gamma): r for r in measured}
  names = [name for name, _ in by_name]
  assert names[:3] == ["oracle of a gamma", "oracle of each text", "oracle of each round"]
  assert names[-1] == "adaptive" and names.count("fixed") == 2 and "plain" in names
  assert all(r.identical for r in measured[3:])
  for g in (1, 2):
    rounds = sum(gamma.times(row > 0.5, [1.0, 1.0, 1.0])[0][g] for row in stands)
    assert by_name["fixed", g].rounds == rounds
  assert set(np.concatenate(stands)) == {0.0, 1.0}
  for row in stands:  # with costs of our own: noise may make those measured negative
    fixed, best = gamma.times(row > 0.5, [1.0, 1.2, 1.4])
    assert best <= fixed.min() + 1e-9
  said = capsys.readouterr().out
  assert "temperature 0, batch 1: " in said and "was chosen: alpha" in said
  gamma.gamma(pair, lines, str(tmp_path), **settings, repeats=1)  # measured already
  assert read(str(tmp_path / "results.jsonl")) == measured
