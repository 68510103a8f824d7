"""Test the planner: counts of work and kernels, times, and the command `specdec plan`."""

import dataclasses
import pathlib

import numpy as np
import pytest
import tiny

from specdec_jax import theory
from specdec_jax.commands import plan as command
from specdec_jax.drafts.heads import new_head
from specdec_jax.errors import InputError
from specdec_jax.measure import plan
from specdec_jax.models.sizes import PUBLISHED, named_config, t5_config

ROOT = pathlib.Path(__file__).parents[1]


def t5(layers: int = 4, **fields):
  return tiny.config(vocab_size=64, layers=layers, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "conditioned", "eagle", None])
def test_work_of_all_layers_is_computed_from_that_of_few(kind):
  target = t5()
  draft = dataclasses.replace(target, num_decoder_layers=3, num_encoder_layers=2)
  if kind != "model":
    draft = kind and new_head(target, kind, emb_dim=16, mlp_dim=32, num_decoder_layers=2)
  pair = plan.PairShapes(target, draft, source=8, new_tokens=16)
  got, want = plan.Counts(pair)(3, 4), plan.counted(pair, 3, 4)
  for name, x, y in zip(want._fields, got, want):
    np.testing.assert_allclose(x, y, rtol=1e-3, err_msg=name)
  assert got.draft.any() == (kind is not None)


class Linear:
  """Work of a target of 2e9 bytes and a draft of a fiftieth."""

  pair = plan.PairShapes(t5_config("xxl"), None, 10, 30)

  def __call__(self, batch, gamma):
    step = np.array([[2e9, 2e9 * batch], [1e6 * batch, 1e6 * batch]])
    target = step * [[1, gamma + 1], [1, gamma + 1]]
    return plan.Work(target, 0.02 * gamma * step, np.array([2e9, 0]), np.array([1e6 * batch, 0]))


def test_times_memory_and_speedups_follow_from_the_work():
  times = plan.KernelTimes(share=0.5, fixed_us=1, query_us=0.01)
  device = plan.Device(memory_gb=3, gb_per_s=1000, tflops=100, times=times)
  each, kernels = plan.Plan(Linear(), device, 1), plan.pass_kernels(Linear.pair.target, 1, 4)
  us = sum(kernels.values()) + plan.ROUND_KERNELS + 0.01 * 64 * 4 * kernels["attention"]
  assert each.target_s(4) == pytest.approx(2.001 / 500 + 8.004e9 / 1e14 + 1e-6 * us)
  two = plan.Plan(Linear(), device, 2)  # writes copy 30 of 40 slots
  us += 2 * 0.75 * 2e6 / 500e3
  assert two.target_s(4) == pytest.approx(2.002 / 500 + 2 * 8.004e9 / 1e14 + 1e-6 * us)
  assert each.draft_s(3) == pytest.approx(0.06 * (2.001 / 500 + 2.001e9 / 1e14))
  assert each.memory_gb == pytest.approx(2.001) and each.fits
  assert not plan.Plan(Linear(), device, 800).fits
  chains = theory.walltime_improvement(0.6, np.array(plan.GAMMAS), each.c, each.v)
  gain, shape = each.best(0.6)
  assert gain >= chains.max() and ("/" in shape) == (gain > chains.max())
  lowest = plan.least_alpha(each.c, each.v)
  for alpha, pays in ((lowest, True), (lowest - 0.01, False)):
    gains = theory.walltime_improvement(alpha, np.array(plan.GAMMAS), each.c, each.v)
    assert (gains.max() >= plan.PAYS) == pays
  assert plan.least_alpha([2.0], [3.0]) == np.inf
  busy = plan.Plan(Linear(), device, 2000)  # operations take as long as bytes: nothing is free
  assert plan.least_alpha(busy.c, busy.v) > lowest


def test_published_names_are_those_of_known_sizes():
  assert all(named_config(*PUBLISHED[name]) for name in PUBLISHED)
  assert PUBLISHED["google/flan-t5-xxl"] == ("1.1", "xxl")
  assert PUBLISHED["openai/whisper-large-v3"] == ("whisper_v3", "large")
  assert PUBLISHED["facebook/nllb-200-distilled-600M"] == ("nllb", "600m")


def test_models_and_drafts_are_named(tmp_path):
  target, bundled = t5(), ROOT / "specdec_jax/assets/multi30k_ende"
  assert command.read(str(bundled / "target")).emb_dim == 512
  assert command.read(str(bundled / "conditioned")).kind == "conditioned"
  (tmp_path / "config.json").write_text('{"model_type": "t5", "d_model": 24}')
  assert command.read(str(tmp_path)).emb_dim == 24
  shape = command.as_draft("num_decoder_layers=1,emb_dim=16", target)
  assert (shape.num_decoder_layers, shape.emb_dim, shape.mlp_dim) == (1, 16, target.mlp_dim)
  assert command.as_draft("kind=eagle", target).emb_dim == target.emb_dim
  assert command.as_draft("ngrams", target) is None
  for name, words in {
    "google/flan-t5-small": "vocabular",
    "num_layers=1": "num_layers",
    "nowhere": "google/flan-t5-xxl",
  }.items():
    with pytest.raises(InputError, match=words):
      command.as_draft(name, target)


def test_candidates_share_the_vocabulary_and_are_smaller():
  def published(name):
    return {x for x in command.candidates(name, command.read(name)) if x in PUBLISHED}

  assert published("google/madlad400-3b-mt") == set()
  assert published("google/flan-t5-large") == {"google/flan-t5-small", "google/flan-t5-base"}
  assert "google/madlad400-3b-mt" in published("google/madlad400-7b-mt")
  assert published("openai/whisper-large-v3") == {
    "openai/whisper-large-v3-turbo",
    "distil-whisper/distil-large-v3",
  }


@pytest.mark.slow
@pytest.mark.parametrize("weights, fits", [("float", False), ("int8", True)])
def test_flan_t5_xxl_on_an_l4(weights, fits, capsys):
  command.plan([], "google/flan-t5-xxl", "google/flan-t5-small", "l4", [1], [0.7], weights=weights)
  said = capsys.readouterr().out
  assert ("does not fit" in said) == ("weights that fit: int8, int4" in said) == (not fits)


@pytest.mark.slow
def test_drafts_are_ranked_by_the_alpha_that_they_need(capsys):
  command.plan([], "google/madlad400-3b-mt", None, "l4", [4], [0.7])
  said = capsys.readouterr().out
  assert "No smaller published model" in said
  assert said.index("\n ngrams") < said.index("\n num_decoder_layers=2,num_encoder_layers=2 ")


@pytest.mark.slow
def test_alpha_is_measured_on_this_machine(capsys):
  texts = ["Two dogs are playing in the snow.", "A man runs."]
  folder = ROOT / "specdec_jax/assets/multi30k_ende"
  pair = [str(folder / name) for name in ("target", "draft")]
  options = dict(gb_per_s=20.0, max_new_tokens=16, measure=True, temperature=1.0)
  command.plan(texts, *pair, "cpu", [1], [0.7], **options)
  said = capsys.readouterr().out
  found = command.measured_alpha(*pair, texts, 16, temperature=1.0)
  assert f"2 texts: {round(found.mean, 3)} [" in said and 0.3 < found.low <= found.mean < 1
