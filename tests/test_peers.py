"""Test comparisons with other libraries: exported weights, libraries as backends, and timing."""

import dataclasses
import functools
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from safetensors import safe_open

from experiments.peers import compare, ctranslate2, huggingface, onnxruntime, openvino, t5x, worker
from experiments.peers import comparison as comparisons
from experiments.peers.comparison import (
  OWN_BASELINE,
  Backend,
  Comparison,
  Decode,
  Generate,
  Workload,
)
from specdec_jax.checkpoints.huggingface import save_huggingface
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.errors import InputError
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


SHAPES = {
  "1.0": dict(gated=False, activation="relu", tied_logits=True),
  "1.1": dict(),
  "tied and gated": dict(tied_logits=True, num_decoder_layers=3),
}


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_exported_weights_are_loaded_unchanged(tmp_path, fields, dtype):
  config = tiny.config(**fields)
  params = jax.tree.map(lambda x: x.astype(dtype), tiny_pair.random_params(config, 1))
  save_huggingface(str(tmp_path), config, params)
  stored = open_checkpoint(str(tmp_path))
  assert stored.config == config
  assert {array.dtype for array in stored.arrays.values()} == {jnp.dtype(dtype)}
  jax.tree.map(np.testing.assert_array_equal, stored.load(config), params)


def test_exported_arrays_have_the_names_of_transformers(tmp_path):
  config = tiny.config(layers=1)
  save_huggingface(str(tmp_path), config, tiny_pair.random_params(config, 1))

  def attention(layer, name):
    return {f"{layer}.{name}.{part}.weight" for part in "qkvo"}

  def mlp(layer):
    return {f"{layer}.DenseReluDense.{part}.weight" for part in ("wi_0", "wi_1", "wo")}

  def norms(stack, count):
    return {f"{stack}.block.0.layer.{i}.layer_norm.weight" for i in range(count)}

  bias = "layer.0.SelfAttention.relative_attention_bias.weight"
  with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
    assert set(file.keys()) == {
      *("shared.weight", "lm_head.weight"),
      *(f"{stack}.final_layer_norm.weight" for stack in ("encoder", "decoder")),
      *(f"{stack}.block.0.{bias}" for stack in ("encoder", "decoder")),
      *norms("encoder", 2),
      *norms("decoder", 3),
      *attention("encoder.block.0.layer.0", "SelfAttention"),
      *attention("decoder.block.0.layer.0", "SelfAttention"),
      *attention("decoder.block.0.layer.1", "EncDecAttention"),
      *mlp("encoder.block.0.layer.1"),
      *mlp("decoder.block.0.layer.2"),
    }


@pytest.mark.parametrize("fields", [dict(fused=True), dict(gated=False), dict(activation="relu")])
def test_exporting_a_configuration_that_transformers_lacks_raises(tmp_path, fields):
  with pytest.raises(InputError, match="cannot be written for transformers"):
    save_huggingface(str(tmp_path), tiny.config(**fields), {})


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_pytorch_computes_the_same_logits(tmp_path, fields):
  torch = pytest.importorskip("torch", reason="PyTorch is not installed")
  pytest.importorskip("transformers", reason="transformers is not installed")
  config = tiny.config(**fields)
  params = tiny_pair.random_params(config, 1)
  save_huggingface(str(tmp_path), config, params)
  source, inputs = tiny.sources(config, 0, 3), tiny.sources(config, 1, 3)
  with torch.no_grad():
    got = huggingface.load_model(str(tmp_path))(
      input_ids=torch.tensor(source, dtype=torch.long),
      attention_mask=torch.tensor(source != 0),
      decoder_input_ids=torch.tensor(inputs, dtype=torch.long),
    ).logits.numpy()
  want = tiny.teacher_forced(config)(params, source, inputs)
  assert np.std(want) > 0.3
  np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)


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


@pytest.mark.parametrize(
  "name", [name for name, backend in BACKENDS.items() if not backend.trained_only]
)
def test_outputs_with_simulated_acceptance_run_to_the_limit(tmp_path, name):
  (got,) = decode(simulated(1.0, str(tmp_path)), BACKENDS[name])
  assert got.lengths == LIMIT
  assert got.num_rounds == (LIMIT / 4 if "assisted" in name else LIMIT)


def test_simulated_alpha_0_rejects_all_draft_tokens_of_the_assistant(tmp_path):
  (got,) = decode(simulated(0.0, str(tmp_path)), huggingface.assisted(3))
  assert got.lengths == got.num_rounds == LIMIT


def test_samples_of_a_backend_are_reproducible(comparison):
  backend, sampling = huggingface.autoregressive(), Sampling(temperature=1.0)
  first, second = (decode(comparison, backend, sampling) for _ in range(2))
  for a, b in zip(first, second, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)
  greedy = decode(comparison, backend)
  assert any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(first, greedy, strict=True))


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
    """The second pair is the first pair under a different name of its kernels."""
    comparison = trained(folder)
    return comparison._replace(pairs=(comparison.pair, comparison.pair._replace(kernels="again")))

  measure = functools.partial(compare.peers, [pair_twice], backends, str(tmp_path), repeats=2)
  measure()
  out = capsys.readouterr().out
  assert "not installed: absent (needs no_such_package)" in out
  measured = own, other, _, own_again, other_again, _ = records.read(tmp_path / "results.jsonl")
  assert [(r.baseline, r.identical) for r in measured] == 2 * [
    *(("own", True), ("other", False), ("rounded", None))
  ]
  assert [r.kernels for r in measured] == 3 * [own.kernels] + 3 * ["again"]
  assert own.baseline_tokens_per_s != own_again.baseline_tokens_per_s
  assert other.baseline_tokens_per_s == other_again.baseline_tokens_per_s
  for r in measured:
    assert (r.gamma, r.num_examples, r.acceptance) == (2, 3, "measured")
    assert r.speedup == pytest.approx(r.speculative_tokens_per_s / r.baseline_tokens_per_s)
    # The baseline generates one token per target call.
    assert r.baseline_pass_ms == pytest.approx(1e3 / r.baseline_tokens_per_s)
    assert 0 < r.speedup_low <= r.speedup <= r.speedup_high
  rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
  assert rows["own"][-1] == "yes" and rows["other"][-1] == "NO"
  assert f"{other_again.speedup:.2f}" in rows["other"]  # of the table that is printed last

  measure()
  assert len(loaded) == 2 and records.read(tmp_path / "results.jsonl") == [*measured]


def load_echo(comparison: Comparison) -> Generate:
  """Return a function that echoes its arguments, with the process id as the number of calls."""
  assert (comparison.pairs, comparison.alpha) == ((), None)
  return lambda source, seed, limit, temperature: ([*source, seed, limit], os.getpid())


def test_backends_of_one_process_run_in_the_same_subprocess(comparison):
  backends = [Backend(name, (), load_echo, "echo") for name in "ab"]
  prompt, rng = comparison.pair.prompt(TEXTS[:1]), row_keys(7, 0, 1)
  with worker.Process() as process:
    decodes = [worker.in_subprocess(process, backend, comparison) for backend in backends]
    calls = [decode(prompt, rng, max_new_tokens=64, sampling=ARGMAX) for decode in decodes]
  source = comparison.pair.encode(TEXTS[0])
  seed = int(jax.random.key_data(rng)[0, -1])
  for seconds, got in calls:
    assert got.tokens[0, : got.lengths[0]].tolist() == [*source, seed, 64]
    assert 0 < seconds < 1
    assert got.num_rounds == calls[0][1].num_rounds != os.getpid()


def load_nothing(comparison: Comparison):
  raise ValueError("no weights")


def test_subprocesses_report_errors_and_their_end(comparison):
  backend = Backend("broken", (), load_nothing, "broken", python=sys.executable)
  assert backend.missing_packages() == []
  assert backend._replace(packages=("no_such_package",)).missing_packages()
  with worker.Process() as process:
    with pytest.raises(RuntimeError, match="ValueError: no weights"):
      worker.in_subprocess(process, backend, comparison)
    with pytest.raises(RuntimeError, match="exit code 3"):
      process.call(os._exit, 3)
  with pytest.raises(InputError, match="cannot run /no/python"):
    backend._replace(python="/no/python", packages=("jax",)).missing_packages()


def test_greedy_only_backend_does_not_support_sampling(comparison):
  backend = Backend("argmax", (), load_never, greedy_only=True)
  assert backend.supports(comparison, ARGMAX)
  assert not backend.supports(comparison, Sampling(temperature=1.0))


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
  assert (record.beams, record.draft_beams, record.identical) == (2, 4, True)
  assert "2 beams" in " ".join(capsys.readouterr().out.split())


def test_beam_search_of_t5x_gives_the_same_tokens(comparison):
  with_beams = with_workload(comparison, beams=3)
  got, want = decode(with_beams, t5x.beam_search()), decode(with_beams, OWN_BASELINE)
  for theirs, ours in zip(got, want, strict=True):
    np.testing.assert_array_equal(theirs.tokens, ours.tokens)
    np.testing.assert_array_equal(theirs.lengths, ours.lengths)


def test_beam_search_with_a_temperature_raises():
  with pytest.raises(InputError, match="a beam search samples nothing"):
    Workload(TEXTS, beams=2, temperatures=(0.0, 1.0))


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
  assert ["int8" in pair.draft_name for pair in comparison.pairs[-3:]] == [False, True, True]

  def make_comparison(folder):
    return with_workload(comparison._replace(pairs=comparison.pairs[-1:]), gammas=(3,))

  trained_only = Backend("trained", (), load_never, trained_only=True)
  compare.peers([make_comparison], [trained_only], str(tmp_path), repeats=1)
  (record,) = records.read(tmp_path / "results.jsonl")
  assert (record.alpha, record.acceptance, record.identical) == (0.5, "simulated", None)
  assert (record.target, record.num_tokens) == ("t5_1.1_tiny", LIMIT)
  assert (record.dtype, record.kernels) == ("bfloat16", kernels[-1])
  assert record.draft == "t5_1.1_tiny, 50 tokens, int8"


def test_comparison_without_texts_raises(tmp_path):
  with pytest.raises(InputError, match="no comparisons"):
    compare.peers([], [], str(tmp_path))

  def without_texts(folder):
    return with_workload(trained(folder), texts=[])

  with pytest.raises(InputError, match="no texts"):
    compare.peers([without_texts], [], str(tmp_path))
