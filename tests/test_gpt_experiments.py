"""Test experiments with decoder-only models: ragged and empty prompts, and injected faults."""

import json
import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair

from specdec_jax import run
from specdec_jax.commands.check import check_exactness
from specdec_jax.commands.decode import decode
from specdec_jax.commands.speedup import decode_examples
from specdec_jax.core.counts import acceptance_rate
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.measure.records import results_path
from specdec_jax.measure.speed import speed_steps
from specdec_jax.measure.sweep import measure_missing
from specdec_jax.models.simulated import SimulatedModel

pytestmark = pytest.mark.slow

GREEDY, RANDOM = Sampling(temperature=0.0), Sampling()
TEXTS = ["a man", "", "the", ""]  # of one width, so that each function compiles once
GAMMA, LIMIT = 2, 12


def decode_one_by_one(texts):
  """Return the greedy autoregressive output for each text, decoded in a batch of one."""
  pair = tiny_pair.gpt_pair()
  autoregressive = pair.decode_fn(GREEDY, chain(0))
  prompts = [pair.prompt([text]) for text in texts]
  return [
    pair.vocabulary.decode(
      autoregressive(prompt, row_keys(0, 0, 1), max_new_tokens=LIMIT).tokens[0]
    )
    for prompt in prompts
  ]


# The exactness checker.


def check(pair, samplings, batch_sizes):
  check_exactness(
    *(pair, TEXTS, samplings, [GAMMA], batch_sizes),
    max_new_tokens=LIMIT,
    num_tokens=400,
    num_draft_tokens=75,
    trees=(),
    dynamic=(),
    long_tokens=0,
  )


def mix_rows(model, params, cache, tokens, tree, first):
  """Run `extend`, but verify each row with the cache of the previous row."""
  is_verification = tokens.shape[1] == GAMMA + 1
  layers = jax.tree.map(lambda x: jnp.roll(x, is_verification, axis=0), cache.layers)
  return model.extend(params, cache.replace(layers=layers), tokens, tree, first)


def test_checker_detects_rows_that_attend_to_the_prompt_of_another_row(
  capsys, few_rounds_on_tables
):
  pair = tiny_pair.gpt_pair()
  target = tiny.ChangedModel(pair.target.model, mix_rows)
  with pytest.raises(SystemExit):
    check(tiny_pair.changed(pair, model=target), [RANDOM], [4])
  lines = capsys.readouterr().out.split("\n")
  rows = [re.split(r" {2,}", line) for line in lines if "batch 4" in line]
  results = {row[2]: row[0] for row in rows}
  assert results == {
    "temperature 1, autoregressive, batch 4": "ok",
    "temperature 1, gamma 2, batch 4": "FAIL",
  }


# Simulated acceptance, costs and speed, lenience.


def test_simulated_acceptance_rate_is_alpha_after_ragged_prompts():
  """For 16 texts of 60 tokens, the tolerance is 5 standard errors, plus 0.02 for EOS."""
  alpha, pair = 0.6, tiny_pair.gpt_pair("random")
  model = SimulatedModel(pair.target.model, alpha, pair.vocabulary.eos_id)
  pair = tiny_pair.changed(pair, model=model)
  prompt = pair.prompt([*TEXTS[:3], *"abcdefghiklmn"])
  assert len(np.unique((np.asarray(prompt) > 0).sum(axis=1))) > 2
  out = jax.device_get(
    pair.decode_fn(RANDOM, chain(3))(prompt, row_keys(0, 0, 16), max_new_tokens=60)
  )
  assert (out.lengths == 60).all()
  num_verified = sum(x.sum() for x in out.rounds.acceptance_counts())
  error = 5 * np.sqrt(alpha * (1 - alpha) / num_verified)
  assert error < 0.1
  assert abs(acceptance_rate([out]) - alpha) < error + 0.02


def test_measurement_of_a_gamma_is_recorded(tmp_path, monkeypatch):
  tiny.know_costs(monkeypatch)  # test_measure.py times T5 models
  settings = DecodeSettings(GREEDY, batch_size=4, max_new_tokens=LIMIT)
  steps = speed_steps(tiny_pair.gpt_pair(), TEXTS, [settings], [GAMMA], repeats=1)
  (r,) = measure_missing(results_path(tmp_path), steps)
  assert r.outputs.identical and r.outputs.num_tokens >= 4
  assert None not in (r.times.speedup, r.times.c, r.times.predicted_finite_length)
  assert 0.3 < r.outputs.alpha <= 1 and 0 < r.times.operations_ratio and r.times.draft_step_mb > 0
  assert r.settings.gamma == GAMMA and r.outputs.rounds < r.outputs.num_tokens


# Generation from empty prompts.


@pytest.fixture
def generate(capsys, monkeypatch, tmp_path):
  """Return a function that runs generate.gin with the tiny pair: () -> (status, lines, stderr)."""
  monkeypatch.chdir(tmp_path)
  folder = tiny_pair.gpt_folder()
  parts = dict(TARGET="target", DRAFT="near", VOCABULARY="vocabulary.txt")
  macros = {name: str(folder / part) for name, part in parts.items()}

  def call(**changes):
    settings = {**macros, "GAMMA": GAMMA, "MAX_NEW_TOKENS": LIMIT, **changes}
    flags = [f"--gin.{name}={value!r}" for name, value in settings.items()]
    file = "--gin_file=experiments/gpt_like/generate.gin"
    try:
      status = run.main(["run", "--jax_compilation_cache_dir=", file, *flags])
    finally:
      gin.clear_config()
    captured = capsys.readouterr()
    return status, captured.out.split("\n")[:-1], " ".join(captured.err.split())

  return call


def test_generate_writes_distinct_texts_for_empty_prompts(generate):
  status, lines, stderr = generate(NUM_TEXTS=3)
  assert status == 0 and len(set(lines)) == 3 and all(lines)
  assert "is empty" not in stderr and "3 lines, " in stderr
  assert generate(NUM_TEXTS=3)[1] == lines != generate(NUM_TEXTS=3, SEED=1)[1]


def test_generate_continues_a_prefix_or_the_lines_of_a_file(generate, tmp_path):
  (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
  assert generate(INPUT="in.txt", TEMPERATURE=0.0)[1] == decode_one_by_one(TEXTS)
  assert (
    generate(PREFIX="a man", NUM_TEXTS=2, TEMPERATURE=0.0)[1] == decode_one_by_one(TEXTS[:1]) * 2
  )
  status, lines, stderr = generate(NUM_TEXTS=0)
  assert status == 2 and not lines and "num_texts is 0" in stderr


def test_decode_command_accepts_empty_prompts(tmp_path):
  pytest.importorskip("apache_beam", reason="Apache Beam is not installed")
  generation = GenerationConfig(max_new_tokens=LIMIT)
  settings = dict(num_shards=1, gamma=GAMMA, batch_size=1, generation=generation)
  decode(tiny_pair.gpt_pair, TEXTS, str(tmp_path), **settings)
  lines = (tmp_path / "outputs-00000-of-00001.jsonl").read_text().splitlines()
  decoded = [json.loads(line)["decoded"] for line in lines]
  assert [each["text"] for each in decoded] == decode_one_by_one(TEXTS)
  assert all(each["rounds"] > 0 for each in decoded)


def test_report_examples_accept_empty_prompts():
  pair, expected = tiny_pair.gpt_pair(), decode_one_by_one(TEXTS)
  settings = DecodeSettings(GREEDY, max_new_tokens=LIMIT)
  examples = [*decode_examples(pair, TEXTS, [settings], chain(GAMMA))]
  assert [e.translation for e in examples] == expected and all(e.rounds for e in examples)
