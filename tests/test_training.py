"""Batches hold every pair, the loss is the textbook's, and a stopped run ends like any other."""

import collections
import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from jax.experimental.compilation_cache import compilation_cache
from scipy import special

from specdec_jax.checkpoints.folder import load_model, save_model
from specdec_jax.commands import train as experiment
from specdec_jax.commands.lessons import model_outputs
from specdec_jax.commands.tabulate import named_table
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import padded
from specdec_jax.errors import InputError
from specdec_jax.models.families import model_of, module_of
from specdec_jax.models.t5 import T5
from specdec_jax.pairs import load_pair
from specdec_jax.reporting.tables import MISSING
from specdec_jax.training import trainer
from specdec_jax.training.batches import BUCKETS, Pairs, arrays, epoch_batches
from specdec_jax.training.distillation import load_pairs, recombined, save_pairs, teacher_opinions
from specdec_jax.training.objectives import cross_entropy, model_objective, teacher_forced
from specdec_jax.training.trainer import TrainSettings, train


def random_pairs(count, seed, longest=60) -> Pairs:
  """Sides of 1..longest tokens, EOS last; the first source token tells the pair, in two digits."""
  rng = np.random.default_rng(seed)
  side = lambda: [*rng.integers(2, 90, rng.integers(0, longest)).tolist(), 1]
  return Pairs([[100 + i, *side()[1:], 1] for i in range(count)], [side() for _ in range(count)])


def length_of(pairs, i):
  return max(len(pairs.sources[i]), len(pairs.targets[i]))


# Batches.


def test_every_pair_is_in_the_epoch_and_few_are_twice():
  """What does not fill a batch is topped up from the same bucket, by less than a batch."""
  pairs = random_pairs(300, 0)
  batches = epoch_batches(pairs, 256, seed=0, epoch=0)
  seen = collections.Counter(i for _, indices in batches for i in indices.tolist())
  assert seen.keys() == set(range(300))
  size_of = {length: len(indices) for length, indices in batches}
  repeats = collections.Counter()
  for i, count in seen.items():
    repeats[next(b for b in BUCKETS if length_of(pairs, i) <= b)] += count - 1
  assert all(count < size_of[length] for length, count in repeats.items())


def test_batches_have_one_shape_a_bucket_and_about_the_same_tokens():
  pairs = random_pairs(300, 1)
  batches = epoch_batches(pairs, 256, seed=0, epoch=0)
  for length, indices in batches:
    assert length in BUCKETS and len(indices) == 256 // length
    longest = [length_of(pairs, i) for i in indices]
    assert max(longest) <= length
    assert min(longest) > max((b for b in BUCKETS if b < length), default=0)
  assert len({length for length, _ in batches}) >= 10


def test_a_pair_of_more_tokens_than_a_batch_is_a_batch():
  pairs = random_pairs(5, 0)
  assert {len(indices) for _, indices in epoch_batches(pairs, 4, 0, 0)} == {1}


def test_order_is_fixed_by_seed_and_epoch():
  pairs = random_pairs(200, 2)
  text = lambda *key: str([(n, i.tolist()) for n, i in epoch_batches(pairs, 256, *key)])
  assert text(3, 5) == text(3, 5)
  assert len({text(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_an_epoch_has_as_many_batches_as_any_other():
  """A resumed run finds its place by counting them."""
  pairs = random_pairs(200, 3)
  assert len({len(epoch_batches(pairs, 128, s, e)) for s in range(3) for e in range(5)}) == 1


def test_arrays_are_the_padded_pairs():
  pairs = random_pairs(50, 4)
  batches = epoch_batches(pairs, 128, 0, 0)
  total = 0
  for (length, indices), batch in zip(batches, arrays(pairs, batches), strict=True):
    assert batch.source.shape == batch.targets.shape == (len(indices), length)
    assert batch.source.dtype == batch.targets.dtype == np.int32
    for i, source, targets in zip(indices, batch.source, batch.targets, strict=True):
      for row, tokens in ((source, pairs.sources[i]), (targets, pairs.targets[i])):
        assert row[: len(tokens)].tolist() == tokens and not row[len(tokens) :].any()
    total += len(indices)
  assert total >= 50


def test_sides_of_different_length_are_refused():
  with pytest.raises(InputError, match="2 source lines but 1 target lines"):
    Pairs([[1], [1]], [[1]])


def test_pairs_too_long_for_any_bucket_are_not_dropped_in_silence():
  row = [5] * BUCKETS[-1] + [1]
  with pytest.warns(UserWarning, match=str(BUCKETS[-1])):
    epoch_batches(Pairs([row, [5, 1]], [[5, 1], [5, 1]]), 256, 0, 0)


# Loss.


def batch_of(targets, length=6, teacher=None):
  """Targets as training pads them; their sources do not matter."""
  pairs = Pairs([[1]] * len(targets), targets, teacher)
  return next(arrays(pairs, [(length, np.arange(len(targets)))]))


def some_targets(logits):
  """Four rows of targets for logits [4, 6, 9]; most are their argmax."""
  rows = [row[:length].argmax(axis=-1) for row, length in zip(logits, (6, 3, 1, 5), strict=True)]
  rows = [np.maximum(row, 1).tolist() for row in rows]  # 0 is padding
  rows[0][2], rows[3][4] = 5, 1
  return rows


LOGITS = np.random.default_rng(0).normal(0, 3, (4, 6, 9)).astype(np.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_numpys(smoothing):
  losses, correct = [], []
  for logits, row in zip(LOGITS, some_targets(LOGITS), strict=True):
    for at, target in enumerate(row):
      goal = np.full(9, smoothing / 9)
      goal[target] += 1 - smoothing
      losses.append(-(goal * special.log_softmax(logits[at].astype(np.float64))).sum())
      correct.append(logits[at].argmax() == target)
  loss, accuracy = cross_entropy(jnp.asarray(LOGITS), batch_of(some_targets(LOGITS)), smoothing)
  assert len(losses) == 15
  assert loss == pytest.approx(np.mean(losses), rel=1e-5)
  assert 0.5 < accuracy < 1 and accuracy == pytest.approx(np.mean(correct))


def test_padding_has_no_part_in_the_loss():
  short = cross_entropy(jnp.asarray(LOGITS[:1, :2]), batch_of([[3, 1]], length=2), 0.1)
  long = cross_entropy(jnp.asarray(LOGITS[:1]), batch_of([[3, 1]], length=6), 0.1)
  np.testing.assert_allclose(short, long, rtol=1e-6)


def test_a_teacher_is_learned_from_in_place_of_the_targets():
  """Cross-entropy with the teacher's own distribution, given as its likeliest tokens, all 9."""
  targets, rng = some_targets(LOGITS), np.random.default_rng(1)
  probs = [rng.dirichlet(np.ones(9), len(row)) for row in targets]
  order = [np.argsort(-p, axis=-1) for p in probs]
  teacher = [(i, np.take_along_axis(p, i, axis=-1)) for i, p in zip(order, probs, strict=True)]
  loss, accuracy = cross_entropy(jnp.asarray(LOGITS), batch_of(targets, teacher=teacher), 0.0)
  losses = [
    -(p * special.log_softmax(logits[: len(p)].astype(np.float64), axis=-1)).sum(axis=-1)
    for logits, p in zip(LOGITS, probs, strict=True)
  ]
  assert loss == pytest.approx(np.concatenate(losses).mean(), rel=1e-5)
  assert accuracy == cross_entropy(jnp.asarray(LOGITS), batch_of(targets), 0.0)[1]


# Training. To be copied: 12 rows of up to 5 tokens, in batches of 2.

CONFIG = tiny.config(
  vocab_size=12, layers=1, emb_dim=64, num_heads=4, mlp_dim=64, tied_logits=True, dropout_rate=0.02
)
SETTINGS = TrainSettings(
  epochs=10,
  tokens_per_batch=16,
  peak_learning_rate=0.05,
  warmup_steps=5,
  label_smoothing=0.01,
  save_every=9,
)
OBJECTIVE = model_objective(CONFIG, SETTINGS.label_smoothing)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
  """Runs one after the other share their compiled programs, as those of the command do."""
  settings = {
    "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
  }
  before = {name: getattr(jax.config, name) for name in settings}
  for values in (settings, before):
    for name, value in values.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()  # it looks at the settings once
    if values is settings:
      yield


def copies() -> Pairs:
  rng = np.random.default_rng(0)
  rows = [[*rng.integers(2, 12, rng.integers(1, 6)).tolist(), 1] for _ in range(12)]
  return Pairs(rows, rows)


def start():
  return tiny_pair.random_params(CONFIG, 0)


def run(output, **changes):
  params = train(
    OBJECTIVE, SETTINGS, copies(), copies(), str(output), **{"init": start(), **changes}
  )
  return jax.device_get(params)


def metrics(output):
  return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def epochs(output):
  return [line["epoch"] for line in metrics(output)]


@pytest.fixture(scope="module")
def init():
  """What the run that nothing stopped began with."""
  return start()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, init):
  """(parameters, folder) of a run that nothing stopped."""
  output = tmp_path_factory.mktemp("whole")
  return run(output, init=init), output


def stopped_after(count, work):
  """Do the work until it has read so many batches, of training and of validation."""
  counted, left = trainer.arrays, [count]

  def stop_after_some(pairs, batches):
    for batch in counted(pairs, batches):
      if not left[0]:
        raise KeyboardInterrupt
      left[0] -= 1
      yield batch

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(trainer, "arrays", stop_after_some)
    with pytest.raises(KeyboardInterrupt):
      work()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """The same, of a run stopped between two checkpoints, and again while an epoch is scored."""
  output = tmp_path_factory.mktemp("stopped")
  stopped_after(16, lambda: run(output))
  before = epochs(output)

  def stop_when_scored(params):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    run(output, bleu=stop_when_scored)
  assert epochs(output) == before == [1]  # both stops fell into the second epoch
  return run(output), output


def test_a_tiny_model_learns_to_copy(whole):
  lines = metrics(whole[1])
  assert lines[-1]["step"] == 60
  assert lines[0]["valid_loss"] > 1.5 and lines[-1]["valid_loss"] < 0.4
  assert lines[-1]["valid_accuracy"] > 0.9


def test_metrics_have_a_line_an_epoch(whole):
  assert epochs(whole[1]) == [*range(1, 11)]
  assert [line["step"] for line in metrics(whole[1])] == [*range(6, 66, 6)]
  for line in metrics(whole[1]):
    assert line["train_loss"] > 0 and line["tokens_per_s"] > 0 and line["bleu"] is None


def test_a_training_is_a_row_of_their_table(whole):
  lines = metrics(whole[1])
  last = lines[-1]
  (row,) = named_table("training", [whole[1] / "metrics.jsonl"]).rows
  assert row[:2] == ("metrics", "60")
  assert float(row[2]) == round(sum(line["seconds"] for line in lines) / 60)
  assert row[4:] == (f"{last['valid_loss']:.3f}", MISSING, f"{last['valid_accuracy']:.3f}")


def test_the_scores_are_of_the_parameters_returned(whole):
  pairs = copies()
  batch = batch_of(pairs.targets, length=8)
  inputs = np.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
  logits = tiny.teacher_forced(CONFIG)(whole[0], padded(pairs.sources, 8), inputs)
  loss, accuracy = cross_entropy(logits, batch, 0.0)
  # A score is the mean over batches, each of which has about as many tokens.
  assert metrics(whole[1])[-1]["valid_loss"] == pytest.approx(float(loss), rel=0.25)
  assert metrics(whole[1])[-1]["valid_accuracy"] == pytest.approx(float(accuracy), abs=0.03)


def test_a_stopped_run_ends_with_the_same_parameters(whole, stopped):
  jax.tree.map(np.testing.assert_array_equal, stopped[0], whole[0])


def test_a_stopped_run_has_a_line_for_each_epoch_and_none_twice(whole, stopped):
  assert epochs(stopped[1]) == epochs(whole[1])


def test_a_stopped_run_has_the_same_scores(whole, stopped):
  scores = lambda output: {
    line["epoch"]: (line["step"], line["valid_loss"], line["valid_accuracy"])
    for line in metrics(output)
  }
  want, got = scores(whole[1]), scores(stopped[1])
  assert got.items() <= want.items() and len(got) >= len(want) - 1


def test_a_run_may_be_shorter_than_an_epoch(init, tmp_path):
  train(
    OBJECTIVE, dataclasses.replace(SETTINGS, max_steps=8), copies(), copies(), str(tmp_path), init
  )
  assert [line["step"] for line in metrics(tmp_path)] == [6, 8]


def test_a_run_that_ended_is_not_trained_further(whole):
  before = (whole[1] / "metrics.jsonl").read_bytes()
  jax.tree.map(np.testing.assert_array_equal, run(whole[1]), whole[0])
  assert (whole[1] / "metrics.jsonl").read_bytes() == before


def test_no_epoch_is_told_twice_when_its_checkpoint_was_not_on_disk_yet(whole, tmp_path):
  """Killed after the line was written, while the checkpoint was: the steps are made again."""
  output = tmp_path / "killed"
  shutil.copytree(whole[1], output)
  shutil.rmtree(output / "checkpoints" / "60")
  jax.tree.map(np.testing.assert_array_equal, run(output), whole[0])
  assert epochs(output) == epochs(whole[1])


def test_the_callers_parameters_can_still_be_used(whole, init):
  jax.tree.map(np.testing.assert_array_equal, init, start())


@pytest.mark.parametrize("side", ["training", "validation"])
def test_no_pairs_are_refused(tmp_path, side):
  none = Pairs([], [])
  pairs = (none, copies()) if side == "training" else (copies(), none)
  with pytest.raises(InputError, match=side):
    train(OBJECTIVE, SETTINGS, *pairs, str(tmp_path), init=start())
  assert not (tmp_path / "metrics.jsonl").exists()


def test_a_warm_up_longer_than_the_run_is_refused(tmp_path):
  settings = dataclasses.replace(SETTINGS, warmup_steps=60)
  with pytest.raises(InputError, match="warmup_steps is 60"):
    train(OBJECTIVE, settings, copies(), copies(), str(tmp_path), init=start())


# What a draft is trained on: the target's own outputs.


def test_outputs_come_in_the_order_of_the_sources():
  pair = tiny_pair.pair()
  texts = [tiny_pair.SENTENCES[i][:n] for i, n in ((0, 3), (30, 9), (60, 5), (90, 12), (7, 1))]
  sources = [pair.encode(text) for text in texts]
  decode = lambda rows: model_outputs(pair.target, pair.target_params, rows, batch_size=3)
  outputs = decode(sources)
  assert len({tuple(row) for row in outputs}) > 2
  assert all(len(row) == 96 or row[-1] == 1 for row in outputs)
  assert decode(sources[::-1]) == outputs[::-1]


def test_teacher_opinions_are_its_likeliest_tokens():
  params, pairs = start(), copies()
  opinions = teacher_opinions(T5(CONFIG), params, pairs, k=4, tokens_per_batch=32)
  batch = batch_of(pairs.targets, length=8)
  inputs = np.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
  probs = jax.nn.softmax(tiny.teacher_forced(CONFIG)(params, padded(pairs.sources, 8), inputs))
  for (tokens, weights), target, p in zip(opinions, pairs.targets, np.asarray(probs), strict=True):
    assert tokens.shape == weights.shape == (len(target), 4)
    for at in range(len(target)):
      assert tokens[at].tolist() == np.argsort(-p[at])[:4].tolist()
      np.testing.assert_allclose(weights[at], p[at, tokens[at]], rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:1 pairs are longer")
def test_opinions_with_a_tail_tell_whether_the_text_has_another_token(tmp_path):
  """Also of a pair too long to learn from, of which there is none."""
  few = copies()
  pairs = Pairs([[5] * 200, *few.sources], [[1], *few.targets])
  ask = lambda **how: teacher_opinions(T5(CONFIG), start(), pairs, 4, tokens_per_batch=32, **how)
  plain, tailed = ask(), ask(tail=True)
  assert tailed[0][0].shape == (0, 5)
  found = []
  for target, (tokens, probs), (more, weights) in zip(pairs.targets[1:], plain[1:], tailed[1:]):
    np.testing.assert_array_equal(more[:, :4], tokens)
    np.testing.assert_array_equal(weights[:, :4], probs)
    assert more[:, 4].tolist() == target
    assert weights[:, 4].tolist() == [x not in row for x, row in zip(target, tokens)]
    found += weights[:, 4].tolist()
  assert {*found} == {0, 1}
  save_pairs(tmp_path / "lessons.npz", dataclasses.replace(pairs, teacher=tailed))
  assert load_pairs(tmp_path / "lessons.npz").teacher[0][0].shape == (0, 5)


def test_recombined_lines_begin_as_one_line_and_end_as_another():
  lines = ["a dog in a park runs", "two men in a boat sleep", "a cat", "two men in a boat row"]
  new = ["two men in a park runs", "a dog in a boat row", "a dog in a boat sleep"]
  assert sorted(recombined(lines, 3)) == sorted(new)  # all that there are, each once
  assert recombined(lines, 2, seed=1) == recombined(lines, 2, seed=1)
  with pytest.raises(InputError, match="4 lines recombine to 3 new ones, not 4"):
    recombined(lines, 4)


def test_saved_pairs_are_read_as_they_were(tmp_path):
  pairs, rng = random_pairs(20, 0), np.random.default_rng(1)
  opinion = lambda row: (rng.integers(0, 90, (len(row), 3)), rng.random((len(row), 3), np.float32))
  pairs = dataclasses.replace(pairs, teacher=[opinion(row) for row in pairs.targets])
  save_pairs(tmp_path / "lessons.npz", pairs)
  again = load_pairs(tmp_path / "lessons.npz")
  assert (again.sources, again.targets) == (pairs.sources, pairs.targets)
  for one, other in zip(again.teacher, pairs.teacher, strict=True):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_draft_learns_from_references_samples_and_new_sources(tmp_path, monkeypatch):
  """Sources with their references, with outputs drawn for them, then new ones with theirs."""
  texts = tiny_pair.SENTENCES[::7]
  for name, lines in (("train.en", texts), ("train.de", texts[::-1]), ("val.en", texts[:2])):
    (tmp_path / name).write_text("".join(line + "\n" for line in lines))
  seen = []
  monkeypatch.setattr(experiment, "train", lambda *args: seen.append(args))
  monkeypatch.setattr(experiment, "save_model", lambda *args: None)
  experiment.train_draft(
    data=str(tmp_path),
    sources=["train.en"],
    targets=["train.de"],
    valid_source="val.en",
    config=dataclasses.replace(CONFIG, vocab_size=len(tiny_pair.pair().vocabulary)),
    settings=SETTINGS,
    vocabulary=str(tiny_pair.folder() / "vocabulary.model"),
    target=str(tiny_pair.folder() / "target"),
    output=str(tmp_path / "draft"),
    work_dir=str(tmp_path / "work"),
    samples=2,
    new_sources=3,
  )
  ((_, _, pairs, valid, *_),) = seen
  pair = tiny_pair.pair()
  encode = pair.vocabulary.encode
  sources, references = map(encode, texts), map(encode, texts[::-1])
  new = map(encode, recombined(texts, 3))
  assert pairs.sources == [*sources] * 3 + [*new] and pairs.targets[: len(texts)] == [*references]
  assert pairs.targets[18:36] != pairs.targets[36:54]  # drawn anew
  assert len(pairs.targets) == len(pairs.teacher) == 57
  argmax = model_outputs(pair.target, pair.target_params, valid.sources)
  assert valid.targets == argmax and valid.teacher is None


def test_on_policy_the_draft_draws_and_the_target_judges(tmp_path, monkeypatch):
  (tmp_path / "lines").write_text("".join(line + "\n" for line in tiny_pair.SENTENCES[:8]))
  seen, folder = [], tiny_pair.folder()
  monkeypatch.setattr(experiment, "train", lambda *args: seen.append(args))
  monkeypatch.setattr(experiment, "save_model", lambda *args: None)
  config, params = load_model(str(folder / "near"))
  learn = functools.partial(
    experiment.train_draft,
    data=str(tmp_path),
    sources=["lines"],
    targets=["lines"],
    valid_source="lines",
    config=config,
    settings=SETTINGS,
    vocabulary=str(folder / "vocabulary.model"),
    target=str(folder / "target"),
    output=str(tmp_path / "draft"),
    work_dir=str(tmp_path / "work"),
    samples=1,
    on_policy=True,
  )
  learn(start=str(folder / "near"))
  ((_, _, pairs, *_, begin),) = seen
  drawn = model_outputs(model_of(config), params, pairs.sources[8:], 1, sampling=Sampling())
  assert pairs.targets[8:] == drawn
  target = tiny_pair.pair().target_params
  wanted = teacher_opinions(module_of(tiny_pair.pair().target.config), target, pairs)
  np.testing.assert_allclose(pairs.teacher[-1][1], wanted[-1][1], atol=2e-3)
  assert jax.tree.map(np.shape, begin) == jax.tree.map(np.shape, params)
  with pytest.raises(InputError, match="name its folder as start"):
    learn()


# Decoder-only models, from texts to a pair that decodes.

GPT = tiny.gpt_config(
  vocab_size=100, layers=1, emb_dim=32, mlp_dim=64, num_positions=128, tied_logits=True
)
SMALLER = dataclasses.replace(GPT, emb_dim=16, num_heads=1, mlp_dim=32)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
  """A folder: `vocabulary.txt`, `target` (whose training was stopped once) and `draft`."""
  with pytest.MonkeyPatch.context() as patch:
    # One shape to compile; what the target writes past it is left out.
    patch.setattr("specdec_jax.training.batches.BUCKETS", (40,))
    return trained_gpt(tmp_path_factory)


def trained_gpt(tmp_path_factory):
  path = tmp_path_factory.mktemp("gpt")
  lines = [line + "\n" for line in tiny_pair.SENTENCES[:40]]
  (path / "texts").write_text("".join(lines * 4))  # as often in an epoch: fewer checkpoints, scores
  (path / "valid").write_text("".join(lines))
  common = dict(
    data=str(path),
    sources=None,
    targets=["texts"],
    valid_source=None,
    settings=TrainSettings(epochs=5, tokens_per_batch=320, warmup_steps=10, label_smoothing=0.0),
    vocabulary=str(path / "vocabulary.txt"),
  )
  experiment.fit_vocabulary(str(path), ["texts"], 100, common["vocabulary"])
  experiment.train_target(
    **common,
    valid_target="valid",
    config=GPT,
    output=str(path / "target"),
    work_dir=str(path / "train_target"),
  )
  experiment.train_draft(
    **common,
    config=SMALLER,
    target=str(path / "target"),
    output=str(path / "draft"),
    work_dir=str(path / "train_draft"),
    new_sources=64,
    tail=True,
  )
  words = open_vocabulary(common["vocabulary"])
  untrained = tiny_pair.random_params(SMALLER, 1)
  save_model(str(path / "untrained"), SMALLER, untrained, words.fingerprint())
  return path


def decoded(folder, draft, gamma, sampling):
  """What 16 empty prompts become."""
  names = {name: str(folder / name) for name in ("target", "vocabulary.txt")}
  pair = load_pair(names["target"], str(folder / draft), names["vocabulary.txt"], kernels="xla")
  prompt, keys = pair.prompt([""] * 16), row_keys(0, 0, 16)
  return pair.vocabulary, pair.decoder(sampling, gamma)(prompt, keys, max_new_tokens=32)


@pytest.mark.filterwarnings("ignore:.* pairs are longer")
def test_a_decoder_only_model_learns_texts_by_themselves(gpt):
  lines = metrics(gpt / "train_target")
  assert [line["epoch"] for line in lines] == [*range(1, 6)]
  assert lines[0]["valid_loss"] > 2 * lines[-1]["valid_loss"]
  assert lines[-1]["bleu"] is None


def test_a_trained_decoder_only_target_writes_its_texts_from_nothing(gpt):
  words, out = decoded(gpt, "draft", 0, Sampling())
  texts = [words.decode(row) for row in np.asarray(out.tokens)]
  plain = lambda text: words.decode(words.encode(text))
  assert {*texts} & {*map(plain, tiny_pair.SENTENCES[:40])}
  assert len({*texts}) > 4


def test_a_trained_decoder_only_draft_is_accepted_more_often_than_an_untrained_one(gpt):
  """The texts of argmax are the target's own with either."""
  tokens_per_pass = {}
  want = np.asarray(decoded(gpt, "draft", 0, Sampling(temperature=0.0))[1].tokens)
  for draft in ("draft", "untrained"):
    argmax = decoded(gpt, draft, 3, Sampling(temperature=0.0))[1]
    np.testing.assert_array_equal(argmax.tokens, want)
    sampled = decoded(gpt, draft, 3, Sampling())[1]
    passes = np.count_nonzero(sampled.rounds.num_emitted)
    tokens_per_pass[draft] = np.sum(sampled.lengths) / passes
  assert tokens_per_pass["draft"] > 1.5 * tokens_per_pass["untrained"]


@pytest.mark.parametrize(
  "changes, said",
  [
    ({"vocab_size": 12}, "vocab_size is 12; set it to 100"),
    ({"eos_id": 3}, "eos_id is 3; set it to 1"),
    ({"start_id": None}, "start_id is None; set it to 0"),
  ],
)
def test_a_shape_that_is_not_the_vocabularys_is_refused_before_training(gpt, changes, said):
  with pytest.raises(InputError, match=said):
    experiment.train_target(
      data=str(gpt),
      sources=None,
      targets=["texts"],
      valid_source=None,
      valid_target="texts",
      config=dataclasses.replace(GPT, **changes),
      settings=SETTINGS,
      vocabulary=str(gpt / "vocabulary.txt"),
      output=str(gpt / "refused"),
      work_dir=str(gpt / "train_refused"),
    )
  assert not (gpt / "refused").exists() and not (gpt / "train_refused").exists()


def test_the_first_token_of_a_text_is_learned_from_the_start_and_padding_is_not():
  """Logits at a position do not see its own token."""
  texts = [[5, 6, 7, 1], [5, 1]]
  pairs = Pairs([[1], [1]], texts)
  (batch,) = arrays(pairs, [(8, np.arange(2))])
  params = tiny_pair.random_params(GPT, 0)
  logits = teacher_forced(module_of(GPT), params, batch)
  begin = tiny.teacher_forced(GPT)(params, np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32))
  np.testing.assert_allclose(logits[:, 0], np.repeat(begin[:, 0], 2, axis=0), atol=1e-5)
  losses = -np.asarray(jax.nn.log_softmax(logits))
  each = [losses[row, at, token] for row, text in enumerate(texts) for at, token in enumerate(text)]
  assert float(cross_entropy(logits, batch, 0.0)[0]) == pytest.approx(np.mean(each), rel=1e-5)
