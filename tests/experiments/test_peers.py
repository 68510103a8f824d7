"""Test comparisons with other libraries: exported weights, libraries as backends, and timing."""

import dataclasses
import functools
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

from experiments.peers import (
  compare,
  ctranslate2,
  huggingface,
  llama_cpp,
  onnxruntime,
  openvino,
  t5x,
  worker,
)
from experiments.peers import comparison as comparisons
from experiments.peers.comparison import (
  OWN_BASELINE,
  Backend,
  Comparison,
  Decode,
  Generate,
  Workload,
)
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.measure import records
from specdec_jax.measure.speed import own_baseline
from specdec_jax.models.kernels import skinny

ARGMAX, LIMIT = Sampling(temperature=0.0), 12
TEXTS = tiny_pair.SENTENCES[:3]


def trained(folder) -> Comparison:
  target, draft, vocabulary = (
    str(tiny_pair.folder() / name) for name in ("target", "near", "vocabulary.model")
  )
  workload = Workload(TEXTS, gammas=(2,), temperatures=(0.0,), max_new_tokens=LIMIT)
  return comparisons.trained(str(folder), workload, target, draft, vocabulary, task="tiny")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Comparison:
  return trained(tmp_path_factory.mktemp("comparison"))


@functools.cache
def simulated(alpha: float, folder: str) -> Comparison:
  return comparisons.random(folder, TEXTS[:1], "tiny", "tiny", alpha, max_new_tokens=LIMIT)


def with_workload(comparison: Comparison, **changes) -> Comparison:
  return comparison._replace(workload=dataclasses.replace(comparison.workload, **changes))


def decode(comparison: Comparison, backend: Backend, sampling: Sampling = ARGMAX):
  """Decode all texts of a comparison with a backend; skip the test if it is missing."""
  if missing := backend.missing_packages():
    pytest.skip(f"{', '.join(missing)} not installed")
  load: Any = backend.load
  call = load(comparison)
  results = []
  for i, text in enumerate(comparison.workload.texts):
    if backend.process:
      source = comparison.pair.encode(text)
      tokens, num_target_calls = call(source, i, LIMIT, sampling.temperature)
      results.append(worker.decode_result(tokens, num_target_calls, LIMIT))
    else:
      prompt, rng = comparison.pair.prompt([text]), row_keys(0, i, 1)
      results.append(call(prompt, rng, max_new_tokens=LIMIT, sampling=sampling))
  return results


BACKENDS = {
  backend.name: backend
  for backend in (
    t5x.temperature_sample(),
    huggingface.autoregressive(),
    huggingface.assisted(),
    huggingface.assisted(3),
    ctranslate2.greedy(),
    ctranslate2.greedy("int8"),
    onnxruntime.generate(),
    onnxruntime.generate(is_int8=True),
    openvino.generate(),
    openvino.generate("bf16", is_int8=True),
  )
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_backends_give_the_tokens_of_the_target(comparison, name):
  got, want = decode(comparison, BACKENDS[name]), decode(comparison, OWN_BASELINE)
  for theirs, ours in zip(got, want, strict=True):
    if BACKENDS[name].float32:
      np.testing.assert_array_equal(theirs.tokens, ours.tokens)
      np.testing.assert_array_equal(theirs.lengths, ours.lengths)
    if "assisted" in name:
      assert 0 < theirs.num_rounds < ours.num_rounds
    else:
      assert theirs.num_rounds == theirs.lengths


def load_with_a_wrong_token(comparison: Comparison) -> Decode:
  """Return this package's autoregressive decoding with one token changed."""
  autoregressive = own_baseline(comparison.pair).decode

  def decode(*args, **kwargs):
    result = autoregressive(*args, **kwargs)
    return result._replace(tokens=result.tokens.at[0, 0].add(1))

  return decode


def load_never(comparison: Comparison):
  pytest.fail("the backend was loaded")


def test_missing_backends_are_named_and_the_others_are_measured(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "120")
  loaded = []

  def load_other(comparison):
    loaded.append(comparison)
    return load_with_a_wrong_token(comparison)

  backends = [
    Backend("absent", ("safetensors", "no_such_package"), load_never),
    Backend("other", (), load_other),
    Backend("rounded", (), load_other, float32=False),
  ]

  def pair_twice(folder):
    """The second pair is the first pair with a different name of its draft."""
    comparison = trained(folder)
    draft = dataclasses.replace(comparison.pair.draft, name="again")
    again = comparison.pair.with_draft(draft)
    return comparison._replace(pairs=(comparison.pair, again))

  measure = functools.partial(compare.peers, [pair_twice], backends, str(tmp_path), repeats=2)
  measure()
  out = capsys.readouterr().out
  assert "not installed: absent (needs no_such_package)" in out
  measured = own, other, _, own_again, other_again, _ = records.read(tmp_path / "results.jsonl")
  assert [(r.settings.baseline, r.outputs.identical) for r in measured] == 2 * [
    *(("own", True), ("other", False), ("rounded", None))
  ]
  assert [r.models.draft for r in measured] == 3 * [own.models.draft] + 3 * ["again"]
  assert own.times.baseline_tokens_per_s == own_again.times.baseline_tokens_per_s
  assert other.times.baseline_tokens_per_s == other_again.times.baseline_tokens_per_s
  for r in measured:
    assert (r.settings.gamma, r.settings.num_examples, r.models.simulated) == (2, 3, False)
    assert r.times.speedup == pytest.approx(
      r.times.speculative_tokens_per_s / r.times.baseline_tokens_per_s
    )
    # The baseline generates one token per target call.
    assert r.times.baseline_pass_ms == pytest.approx(1e3 / r.times.baseline_tokens_per_s)
    assert 0 < r.times.speedup_low <= r.times.speedup <= r.times.speedup_high
  rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
  assert rows["own"][-1] == "yes" and rows["other"][-1] == "NO"
  assert f"{other_again.times.speedup:.2f}" in rows["other"]  # of the table that is printed last

  measure()
  assert len(loaded) == 2 and records.read(tmp_path / "results.jsonl") == [*measured]


def load_echo(comparison: Comparison) -> Generate:
  """Return a function that echoes its arguments, with the process id as the number of calls."""
  assert (comparison.pairs, comparison.alpha) == ((), None)
  return lambda source, seed, limit, temperature: ([*source, seed, limit], os.getpid())


def load_nothing(comparison: Comparison):
  raise ValueError("no weights")


def test_beam_search_is_compared_with_the_backends_that_support_it(comparison, tmp_path, capsys):
  with_beams = with_workload(comparison, beams=2, draft_beams=4)
  supporting = {name for name, b in BACKENDS.items() if b.supports(with_beams, ARGMAX)}
  assert supporting == {name for name in BACKENDS if "t5x" not in name and "assisted" not in name}
  assert OWN_BASELINE.supports(with_beams, ARGMAX)
  assert t5x.beam_search().supports(with_beams, ARGMAX)
  assert not t5x.beam_search().supports(comparison, ARGMAX)
  own = decode(with_beams, OWN_BASELINE)
  for text, result in zip(TEXTS, own, strict=True):
    pair = comparison.pair
    searcher = pair.beam_searcher(2, gamma=0)
    searched = searcher.run(pair.params, pair.prompt([text]), max_new_tokens=LIMIT)
    (tokens,) = searched.tokens[:, 0]
    np.testing.assert_array_equal(result.tokens[0], tokens)

  def make_comparison(folder):
    return with_beams._replace(pairs=(comparison.pair,))

  compare.peers([make_comparison], [], str(tmp_path), repeats=1)
  (record,) = records.read(tmp_path / "results.jsonl")
  assert (record.settings.beams, record.settings.draft_beams, record.outputs.identical) == (
    2,
    4,
    True,
  )
  assert "2 beams" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_beam_search_of_t5x_gives_the_same_tokens(comparison):
  with_beams = with_workload(comparison, beams=3)
  got, want = decode(with_beams, t5x.beam_search()), decode(with_beams, OWN_BASELINE)
  for theirs, ours in zip(got, want, strict=True):
    np.testing.assert_array_equal(theirs.tokens, ours.tokens)
    np.testing.assert_array_equal(theirs.lengths, ours.lengths)


def test_random_weights_are_measured_at_their_simulated_alpha(tmp_path):
  comparison = comparisons.random(
    str(tmp_path),
    TEXTS[:1],
    *("tiny", "tiny", 0.5),
    max_new_tokens=LIMIT,
    num_output_tokens=50,
    precisions=[
      ("float32", "float"),
      ("float32", "stored"),
      ("bfloat16", "float", "stored"),
      ("bfloat16", "float", "int8"),
      ("bfloat16", "int8"),
    ],
  )
  float32 = ["skinny", "skinny+bfloat16"] if skinny.is_available() else ["xla"]
  bfloat16 = "skinny" if skinny.is_available(jnp.bfloat16) else "xla"
  kernels = [*float32, bfloat16, bfloat16, f"{bfloat16}+int8"]
  assert [pair.kernels for pair in comparison.pairs] == kernels
  assert ["int8" in pair.draft.name for pair in comparison.pairs[-3:]] == [False, True, True]

  def make_comparison(folder):
    return with_workload(comparison._replace(pairs=comparison.pairs[-1:]), gammas=(3,))

  trained_only = Backend("trained", (), load_never, trained_only=True)
  compare.peers([make_comparison], [trained_only], str(tmp_path), repeats=1)
  (record,) = records.read(tmp_path / "results.jsonl")
  assert (record.outputs.alpha, record.models.simulated, record.outputs.identical) == (
    0.5,
    True,
    None,
  )
  assert (record.models.target, record.outputs.num_tokens) == ("t5_1.1_tiny", LIMIT)
  assert (record.models.dtype, record.models.kernels) == ("bfloat16", kernels[-1])
  assert record.models.draft == "t5_1.1_tiny, 50 tokens, int8"


@pytest.mark.slow
def test_llama_cpp_gives_the_tokens_of_the_target(tmp_path, monkeypatch):
  """It needs the sizes of the bundled pair. Its threads wait for each other, also for a core."""
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
  texts = ("A man is riding his bicycle through a busy street.", "Two dogs play in the snow.")
  workload = Workload(texts, temperatures=(0.0,), max_new_tokens=LIMIT)
  comparison = comparisons.trained(str(tmp_path), workload, precisions=[("float32", "float")])
  got, want = decode(comparison, llama_cpp.greedy()), decode(comparison, OWN_BASELINE)
  for theirs, ours in zip(got, want, strict=True):
    np.testing.assert_array_equal(theirs.tokens, ours.tokens)
