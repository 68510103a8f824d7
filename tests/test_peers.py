"""Other programs decode the weights we wrote for them, and are timed beside ours."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from safetensors import safe_open

from specdec_jax import records
from specdec_jax.checkpoints.huggingface import save_huggingface
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.commands import peers
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.errors import InputError
from specdec_jax.kernels import skinny
from specdec_jax.measurement.speed import own_baseline
from specdec_jax.peers import contest as contests
from specdec_jax.peers import ctranslate2, huggingface, t5x, worker
from specdec_jax.peers.contest import Competitor, Contest, Decode, Generate

ARGMAX, LIMIT = Sampling(temperature=0.0), 12
TEXTS = tiny_pair.SENTENCES[:3]


def trained(folder) -> Contest:
  return contests.trained(
    str(folder),
    TEXTS,
    *(str(tiny_pair.folder() / name) for name in ("target", "near", "vocabulary.model")),
    task="tiny",
    gammas=(2,),
    temperatures=(0.0,),
    max_new_tokens=LIMIT,
  )


@pytest.fixture(scope="module")
def contest(tmp_path_factory) -> Contest:
  return trained(tmp_path_factory.mktemp("contest"))


@functools.cache
def simulated(alpha: float, folder: str) -> Contest:
  return contests.random(folder, TEXTS[:1], "tiny", "tiny", alpha, max_new_tokens=LIMIT)


def decode(contest: Contest, competitor: Competitor, sampling: Sampling = ARGMAX):
  """All texts of a contest by a competitor; skips where it is not installed."""
  if missing := competitor.absent():
    pytest.skip(f"{', '.join(missing)} not installed")
  load: Any = competitor.load
  call = load(contest)
  decodes = []
  for i, text in enumerate(contest.texts):
    if competitor.process:
      source = contest.pair.encode(text)
      decodes.append(worker.decoded(*call(source, i, LIMIT, sampling.temperature), LIMIT))
    else:
      prompt, rng = contest.pair.prompt([text]), row_keys(0, i, 1)
      decodes.append(call(prompt, rng, max_new_tokens=LIMIT, sampling=sampling))
  return decodes


SHAPES = {
  "1.0": dict(gated=False, activation="relu", tied_logits=True),
  "1.1": dict(),
  "tied and gated": dict(tied_logits=True, num_decoder_layers=3),
}


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_written_for_transformers_reads_back(tmp_path, fields, dtype):
  config = tiny.config(**fields)
  params = jax.tree.map(lambda x: x.astype(dtype), tiny_pair.random_params(config, 1))
  save_huggingface(str(tmp_path), config, params)
  stored = open_checkpoint(str(tmp_path))
  assert stored.config == config
  assert {array.dtype for array in stored.arrays.values()} == {jnp.dtype(dtype)}
  jax.tree.map(np.testing.assert_array_equal, stored.load(config), params)


def test_arrays_are_called_what_transformers_calls_them(tmp_path):
  config = tiny.config(layers=1)
  save_huggingface(str(tmp_path), config, tiny_pair.random_params(config, 1))
  attention = lambda layer, name: {f"{layer}.{name}.{part}.weight" for part in "qkvo"}
  mlp = lambda layer: {f"{layer}.DenseReluDense.{part}.weight" for part in ("wi_0", "wi_1", "wo")}
  norms = lambda stack, count: {
    f"{stack}.block.0.layer.{i}.layer_norm.weight" for i in range(count)
  }
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
def test_a_shape_that_transformers_lacks_is_refused(tmp_path, fields):
  with pytest.raises(InputError, match="cannot be written for transformers"):
    save_huggingface(str(tmp_path), tiny.config(**fields), {})


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_logits_of_pytorch_are_ours(tmp_path, fields):
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


COMPETITORS = {
  c.name: c
  for c in (
    t5x.temperature_sample(),
    huggingface.plain(),
    huggingface.assisted(),
    huggingface.assisted(3),
    ctranslate2.greedy(),
  )
}


@pytest.mark.parametrize("name", COMPETITORS)
def test_competitors_write_what_the_target_writes(contest, name):
  got, want = decode(contest, COMPETITORS[name]), decode(contest, contests.OWN)
  for theirs, ours in zip(got, want, strict=True):
    np.testing.assert_array_equal(theirs.tokens, ours.tokens)
    np.testing.assert_array_equal(theirs.lengths, ours.lengths)
    if "assisted" in name:
      assert 0 < theirs.num_rounds < ours.num_rounds
    else:
      assert theirs.num_rounds == ours.num_rounds


@pytest.mark.parametrize("name", [name for name, c in COMPETITORS.items() if not c.trained_only])
def test_simulated_texts_run_to_their_limit(tmp_path, name):
  (got,) = decode(simulated(1.0, str(tmp_path)), COMPETITORS[name])
  assert got.lengths == LIMIT
  assert got.num_rounds == (LIMIT / 4 if "assisted" in name else LIMIT)


def test_assistants_are_refused_as_often_as_asked(tmp_path):
  (got,) = decode(simulated(0.0, str(tmp_path)), huggingface.assisted(3))
  assert got.lengths == got.num_rounds == LIMIT


def test_a_sample_can_be_drawn_again(contest):
  competitor, sampling = huggingface.plain(), Sampling(temperature=1.0)
  one, other = (decode(contest, competitor, sampling) for _ in range(2))
  for a, b in zip(one, other, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)
  greedy = decode(contest, competitor)
  assert any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(one, greedy, strict=True))


def other_words(contest: Contest) -> Decode:
  """Our plain decoding, but for one token."""
  own = own_baseline(contest.pair).decode

  def decode(*args, **kwargs):
    decoded = own(*args, **kwargs)
    return decoded._replace(tokens=decoded.tokens.at[0, 0].add(1))

  return decode


def test_who_is_not_there_is_named_and_the_rest_is_measured(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "120")
  loads = []

  def loaded(contest):
    loads.append(contest)
    return other_words(contest)

  competitors = [
    Competitor("absent", ("safetensors", "no_such_package"), lambda contest: pytest.fail()),
    Competitor("other", (), loaded),
  ]

  def twice(folder):
    """With the same pair again, as if it had other weights."""
    contest = trained(folder)
    return contest._replace(pairs=(contest.pair, contest.pair._replace(kernels="again")))

  measure = functools.partial(peers.peers, [twice], competitors, str(tmp_path), repeats=2)
  measure()
  out = capsys.readouterr().out
  assert "not installed: absent (needs no_such_package)" in out
  measured = own, other, own_again, other_again = records.read(tmp_path / "results.jsonl")
  assert [(r.baseline, r.identical) for r in measured] == 2 * [("own", True), ("other", False)]
  assert [r.kernels for r in measured] == 2 * [own.kernels] + 2 * ["again"]
  assert own.baseline_tokens_per_s != own_again.baseline_tokens_per_s
  assert other.baseline_tokens_per_s == other_again.baseline_tokens_per_s
  for r in measured:
    assert (r.gamma, r.num_examples, r.acceptance) == (2, 3, "measured")
    assert r.speedup == pytest.approx(r.speculative_tokens_per_s / r.baseline_tokens_per_s)
    assert r.baseline_pass_ms == pytest.approx(1e3 / r.baseline_tokens_per_s)  # one token a pass
    assert 0 < r.speedup_low <= r.speedup <= r.speedup_high
  rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
  assert rows["own"][-1] == "yes" and rows["other"][-1] == "NO"
  assert f"{other_again.speedup:.2f}" in rows["other"]  # the later table

  measure()
  assert len(loads) == 1 and records.read(tmp_path / "results.jsonl") == [*measured]


def echo(contest: Contest) -> Generate:
  """Gives back what it is given, and the process it is in."""
  assert (contest.pairs, contest.alpha) == ((), None)
  return lambda source, seed, limit, temperature: ([*source, seed, limit], os.getpid())


def test_others_are_in_a_process_of_their_own(contest):
  one, other = (Competitor(name, (), echo, "echo") for name in "ab")
  prompt, rng = contest.pair.prompt(TEXTS[:1]), row_keys(7, 0, 1)
  with worker.process() as process:
    decodes = [worker.elsewhere(process, competitor, contest) for competitor in (one, other)]
    calls = [decode(prompt, rng, max_new_tokens=64, sampling=ARGMAX) for decode in decodes]
  source = contest.pair.encode(TEXTS[0])
  seed = int(jax.random.key_data(rng)[0, -1])
  for seconds, got in calls:
    assert got.tokens[0, : got.lengths[0]].tolist() == [*source, seed, 64]
    assert 0 < seconds < 1
    assert got.num_rounds == calls[0][1].num_rounds != os.getpid()


def test_who_has_no_part_is_left_out(contest):
  competitor = Competitor("argmax", (), lambda contest: None, greedy_only=True)
  assert competitor.takes_part(contest, ARGMAX)
  assert not competitor.takes_part(contest, Sampling(temperature=1.0))


def test_with_beams_all_search_and_who_cannot_is_left_out(contest, tmp_path, capsys):
  searched = contest._replace(beams=2, draft_beams=4)
  taking_part = {name for name, c in COMPETITORS.items() if c.takes_part(searched, ARGMAX)}
  assert taking_part == {"hf", "ctranslate2"} and contests.OWN.takes_part(searched, ARGMAX)
  assert t5x.beam_search().takes_part(searched, ARGMAX)
  assert not t5x.beam_search().takes_part(contest, ARGMAX)
  own = decode(searched, contests.OWN)
  for text, found in zip(TEXTS, own, strict=True):
    prompt = contest.pair.prompt([text])
    (tokens,) = contest.pair.beam_searcher(2, 0)(prompt, max_new_tokens=LIMIT).tokens[:, 0]
    np.testing.assert_array_equal(found.tokens[0], tokens)
  make = lambda folder: searched._replace(pairs=(contest.pair,))
  peers.peers([make], [], str(tmp_path), repeats=1)
  (record,) = records.read(tmp_path / "results.jsonl")
  assert (record.beams, record.draft_beams, record.identical) == (2, 4, True)
  assert "2 beams" in " ".join(capsys.readouterr().out.split())


def test_t5xs_beams_are_ours(contest):
  searched = contest._replace(beams=3)
  got, want = decode(searched, t5x.beam_search()), decode(searched, contests.OWN)
  for theirs, ours in zip(got, want, strict=True):
    np.testing.assert_array_equal(theirs.tokens, ours.tokens)
    np.testing.assert_array_equal(theirs.lengths, ours.lengths)


def test_beams_sample_nothing(tmp_path):
  with pytest.raises(InputError, match="a beam search samples nothing"):
    contests.trained(str(tmp_path), TEXTS, beams=2, temperatures=(0.0, 1.0))


def test_random_weights_are_simulated_at_their_alpha(tmp_path):
  contest = simulated(0.5, str(tmp_path))
  halved = ["skinny", "skinny+bfloat16"] if skinny.ready() else ["xla"]
  assert [pair.kernels for pair in contest.pairs] == halved
  make = lambda folder: contest._replace(pairs=contest.pairs[-1:], gammas=(3,))
  trained_only = Competitor("trained", (), lambda contest: pytest.fail(), trained_only=True)
  peers.peers([make], [trained_only], str(tmp_path), repeats=1)
  (record,) = records.read(tmp_path / "results.jsonl")
  assert (record.alpha, record.acceptance, record.identical) == (0.5, "simulated", None)
  assert (record.target, record.num_tokens) == ("t5_1.1_tiny", LIMIT)
  assert record.kernels == halved[-1]


def test_nothing_to_measure_is_told(tmp_path):
  with pytest.raises(InputError, match="no contests"):
    peers.peers([], [], str(tmp_path))
  empty = lambda folder: trained(folder)._replace(texts=[])
  with pytest.raises(InputError, match="no texts"):
    peers.peers([empty], [], str(tmp_path))
