"""Experiments take decoder-only models as T5s: prompts ragged or empty, faults planted."""

import json

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair

from specdec_jax import records, run
from specdec_jax.commands.check_exactness import check_exactness
from specdec_jax.commands.decode import decode
from specdec_jax.commands.speedup import decode_examples
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.counts import acceptance_rate
from specdec_jax.measurement.measure import measure
from specdec_jax.models.simulated import SimulatedModel

GREEDY, RANDOM = Sampling(temperature=0.0), Sampling()
TEXTS = ["a man", "", "the", ""]  # of one width, so that there is one program of each kind
GAMMA, LIMIT = 2, 12


def texts_alone(texts):
  """Plain decoding of each text by itself, argmax."""
  pair = tiny_pair.gpt_pair()
  plain = pair.decode_fn(GREEDY, 0)
  prompts = [pair.prompt([text]) for text in texts]
  return [
    pair.vocabulary.decode(plain(prompt, row_keys(0, 0, 1), max_new_tokens=LIMIT).tokens[0])
    for prompt in prompts
  ]


# The checker.


def check(pair, samplings, batch_sizes):
  check_exactness(
    *(pair, TEXTS, samplings, [GAMMA], batch_sizes),
    max_new_tokens=LIMIT,
    num_texts=4,
    samples_per_text=60,
    num_guesses=75,
    long_tokens=0,
  )


def mixes_rows(model, params, cache, tokens, tree, first):
  """Verification reads each row's prompt from the row before it."""
  verifies = tokens.shape[1] == GAMMA + 1
  layers = jax.tree.map(lambda x: jnp.roll(x, verifies, axis=0), cache.layers)
  return model.extend(params, cache.replace(layers=layers), tokens, tree, first)


def test_the_checker_fails_rows_that_read_their_neighbours_prompts(capsys):
  pair = tiny_pair.gpt_pair()
  target = tiny.ChangedModel(pair.target, mixes_rows)
  with pytest.raises(SystemExit):
    check(pair._replace(target=target), [RANDOM], [4])
  lines = capsys.readouterr().out.split("\n")
  verdict = {line[5:].split(":")[0]: line[:4] for line in lines if "batch 4" in line}
  assert verdict == {
    "temperature 1, plain  , batch 4": "ok  ",
    "temperature 1, gamma 2, batch 4": "FAIL",
  }


# Simulated acceptance, costs and speed, lenience.


def test_simulated_acceptance_is_as_asked_after_ragged_prompts():
  """16 texts of 60 tokens: within 5 standard errors, and the EOS guessed now and then."""
  alpha, pair = 0.6, tiny_pair.gpt_pair("random")
  pair = pair._replace(target=SimulatedModel(pair.target, alpha, pair.vocabulary.eos_id))
  prompt = pair.prompt([*TEXTS[:3], *"abcdefghiklmn"])
  assert len(np.unique((np.asarray(prompt) > 0).sum(axis=1))) > 2
  out = jax.device_get(pair.decode_fn(RANDOM, 3)(prompt, row_keys(0, 0, 16), max_new_tokens=60))
  assert (out.lengths == 60).all()
  judged = sum(x.sum() for x in out.rounds.acceptance_counts())
  error = 5 * np.sqrt(alpha * (1 - alpha) / judged)
  assert error < 0.1
  assert abs(acceptance_rate([out]) - alpha) < error + 0.02


def test_a_measured_gamma_is_a_record(tmp_path, monkeypatch):
  tiny.know_costs(monkeypatch)  # T5's are timed in test_measure.py
  with records.open_results(str(tmp_path)) as results:
    measured = measure(
      *(tiny_pair.gpt_pair(), TEXTS, results, [GREEDY], [GAMMA]),
      batch_size=4,
      max_new_tokens=LIMIT,
      repeats=1,
    )
  (r,) = measured
  assert (
    r.identical and r.num_tokens >= 4 and None not in (r.speedup, r.c, r.predicted_finite_length)
  )
  assert 0.3 < r.alpha <= 1 and 0 < r.operations_ratio and r.draft_step_mb > 0
  assert r.gamma == GAMMA and r.rounds < r.num_tokens


# Texts from nothing.


@pytest.fixture
def generate(capsys, monkeypatch, tmp_path):
  """Runs generate.gin with the tiny pair: (status, lines, what was said)."""
  monkeypatch.chdir(tmp_path)
  folder = tiny_pair.gpt_folder()
  parts = dict(TARGET="target", DRAFT="near", VOCABULARY="vocabulary.txt")
  macros = {name: str(folder / part) for name, part in parts.items()}

  def call(**changes):
    settings = {**macros, "GAMMA": GAMMA, "MAX_NEW_TOKENS": LIMIT, **changes}
    flags = [f"--gin.{name}={value!r}" for name, value in settings.items()]
    file = "--gin_file=gin/runs/generate.gin"
    try:
      status = run.main(["run", "--jax_compilation_cache_dir=", file, *flags])
    finally:
      gin.clear_config()
    captured = capsys.readouterr()
    return status, captured.out.split("\n")[:-1], " ".join(captured.err.split())

  return call


def test_generating_writes_other_texts_from_nothing(generate):
  status, lines, said = generate(NUM_TEXTS=3)
  assert status == 0 and len(set(lines)) == 3 and all(lines)
  assert "is empty" not in said and "3 lines, " in said
  assert generate(NUM_TEXTS=3)[1] == lines != generate(NUM_TEXTS=3, SEED=1)[1]


def test_generating_goes_on_from_a_prefix_or_from_lines(generate, tmp_path):
  (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
  assert generate(INPUT="in.txt", TEMPERATURE=0.0)[1] == texts_alone(TEXTS)
  assert generate(PREFIX="a man", NUM_TEXTS=2, TEMPERATURE=0.0)[1] == texts_alone(TEXTS[:1]) * 2
  status, lines, said = generate(NUM_TEXTS=0)
  assert status == 2 and not lines and "num_texts is 0" in said


def test_hosts_and_reports_decode_empty_prompts(tmp_path):
  pair, own = tiny_pair.gpt_pair(), texts_alone(TEXTS)
  decode(pair, TEXTS, str(tmp_path), gamma=GAMMA, batch_size=1, max_new_tokens=LIMIT)
  lines = (tmp_path / "outputs.jsonl").read_text().splitlines()
  assert [json.loads(line)["output"] for line in lines] == own
  assert all(json.loads(line)["rounds"] > 0 for line in lines)
  examples = [*decode_examples(pair, TEXTS, [GREEDY], [GAMMA], LIMIT)]
  assert [e.translation for e in examples] == own and all(e.rounds for e in examples)
