"""Test training: batches, losses, resumption, distillation data, and decoder-only models."""

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

from specdec_jax.checkpoints.load import load_model
from specdec_jax.checkpoints.save import save_model
from specdec_jax.commands import teacher
from specdec_jax.commands import train as commands
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import chain
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import padded
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.models.families import module_of
from specdec_jax.train import trainer
from specdec_jax.train.batches import (
  BUCKETS,
  MAX_TARGET,
  PADDING,
  ParallelText,
  epoch_batches,
  padded_batches,
)
from specdec_jax.train.distillation import spliced_sentences, teacher_topk
from specdec_jax.train.objectives import cross_entropy, model_objective, teacher_forced
from specdec_jax.train.trainer import TrainSettings, train

pytestmark = pytest.mark.slow


def random_text(count, seed, longest=60) -> ParallelText:
  """Return random pairs, 1 to `longest` tokens per side; the source of pair i starts with 100 +
  i."""
  rng = np.random.default_rng(seed)

  def random_side():
    return [*rng.integers(2, 90, rng.integers(0, longest)).tolist(), 1]

  sources = [[100 + i, *random_side()[1:], 1] for i in range(count)]
  return ParallelText(sources, [random_side() for _ in range(count)])


def longer_side(text, i):
  return max(len(text.sources[i]), len(text.targets[i]))


# Batches.


def test_epoch_has_every_pair_in_batches_of_one_shape_per_bucket():
  text = random_text(300, 0)
  batches = epoch_batches(text, 256, seed=0, epoch=0)
  for length, indices in batches:
    assert len(indices) == 256 // length
    longest = [longer_side(text, i) for i in indices]
    assert max((b for b in BUCKETS if b < length), default=0) < min(longest)
    assert max(longest) <= length
  assert len({length for length, _ in batches}) >= 10
  occurrences = collections.Counter(i for _, indices in batches for i in indices.tolist())
  assert occurrences.keys() == set(range(300))
  repeats = collections.Counter()
  for i, count in occurrences.items():
    repeats[next(b for b in BUCKETS if longer_side(text, i) <= b)] += count - 1
  assert all(count < 256 // length for length, count in repeats.items())
  # A pair that is longer than a batch is a batch of one.
  assert {len(indices) for _, indices in epoch_batches(text, 4, 0, 0)} == {1}


def test_order_is_fixed_by_seed_and_epoch():
  """A resumed run finds its epoch and batch from the number of steps."""
  text = random_text(200, 2)

  def order(seed, epoch):
    return str([(n, i.tolist()) for n, i in epoch_batches(text, 256, seed, epoch)])

  assert order(3, 5) == order(3, 5)
  assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
  assert len({len(epoch_batches(text, 128, s, e)) for s in range(3) for e in range(5)}) == 1


def test_padded_batches_hold_the_padded_pairs():
  text = random_text(50, 4)
  batches = epoch_batches(text, 128, 0, 0)
  total = 0
  for (length, indices), batch in zip(batches, padded_batches(text, batches), strict=True):
    assert batch.source.shape == batch.targets.shape == (len(indices), length)
    assert batch.source.dtype == batch.targets.dtype == np.int32
    for i, source, targets in zip(indices, batch.source, batch.targets, strict=True):
      for row, tokens in ((source, text.sources[i]), (targets, text.targets[i])):
        assert row[: len(tokens)].tolist() == tokens and (row[len(tokens) :] == PADDING).all()
    total += len(indices)
  assert total >= 50


def test_different_numbers_of_sources_and_targets_raise():
  with pytest.raises(InputError, match="2 source lines but 1 target lines"):
    ParallelText([[1], [1]], [[1]])


@pytest.mark.parametrize("source, target", [(BUCKETS[-1], 1), (1, MAX_TARGET)])
def test_pairs_that_are_too_long_are_left_out_with_a_warning(source, target):
  text = ParallelText([[5] * source + [1], [5, 1]], [[5] * target + [1], [5, 1]])
  with pytest.warns(UserWarning, match=f"1 pairs .* {BUCKETS[-1]} tokens .* {MAX_TARGET}"):
    batches = epoch_batches(text, 256, 0, 0)
  assert {i for _, indices in batches for i in indices.tolist()} == {1}


def test_long_sources_do_not_widen_the_targets():
  text = ParallelText([[5] * 300 + [1]], [[5] * 7 + [1]])
  batches = epoch_batches(text, 640, 0, 0)
  (batch,) = padded_batches(text, batches)
  assert batch.source.shape == (2, 320) and batch.targets.shape == (2, MAX_TARGET)


# Loss.


def batch_of(targets, length=6, teacher=None):
  """Return a padded batch of targets, with sources that consist of EOS."""
  text = ParallelText([[1]] * len(targets), targets, teacher)
  return next(padded_batches(text, [(length, np.arange(len(targets)))]))


def some_targets(logits):
  """Return four rows of targets for logits [4, 6, 9]; most targets are the argmax."""
  rows = [row[:length].argmax(axis=-1) for row, length in zip(logits, (6, 3, 1, 5), strict=True)]
  rows = [np.maximum(row, 1).tolist() for row in rows]  # 0 is padding
  rows[0][2], rows[3][4] = 5, 1
  return rows


LOGITS = np.random.default_rng(0).normal(0, 3, (4, 6, 9)).astype(np.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_a_numpy_reference(smoothing):
  losses, correct = [], []
  for logits, row in zip(LOGITS, some_targets(LOGITS), strict=True):
    for position, target in enumerate(row):
      smoothed = np.full(9, smoothing / 9)
      smoothed[target] += 1 - smoothing
      losses.append(-(smoothed * special.log_softmax(logits[position].astype(np.float64))).sum())
      correct.append(logits[position].argmax() == target)
  loss, accuracy = cross_entropy(jnp.asarray(LOGITS), batch_of(some_targets(LOGITS)), smoothing)
  assert len(losses) == 15
  assert loss == pytest.approx(np.mean(losses), rel=1e-5)
  assert 0.5 < accuracy < 1 and accuracy == pytest.approx(np.mean(correct))


def test_padding_does_not_change_the_loss():
  short = cross_entropy(jnp.asarray(LOGITS[:1, :2]), batch_of([[3, 1]], length=2), 0.1)
  long = cross_entropy(jnp.asarray(LOGITS[:1]), batch_of([[3, 1]], length=6), 0.1)
  np.testing.assert_allclose(short, long, rtol=1e-6)


def test_labels_are_the_teachers_distribution_instead_of_the_targets():
  """The loss is the cross-entropy with the teacher's distribution over all 9 tokens."""
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


# Training. The task is to copy 12 rows of up to 5 tokens, in batches of 2.

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
  """Share compiled programs among the runs of this module, as the command line does."""
  settings = {
    "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
  }
  before = {name: getattr(jax.config, name) for name in settings}
  for values in (settings, before):
    for name, value in values.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()  # the cache reads its settings only once
    if values is settings:
      yield


def copies() -> ParallelText:
  rng = np.random.default_rng(0)
  rows = [[*rng.integers(2, 12, rng.integers(1, 6)).tolist(), 1] for _ in range(12)]
  return ParallelText(rows, rows)


def initial_params():
  return tiny_pair.random_params(CONFIG, 0)


def run(output, **changes):
  options = {"init": initial_params(), **changes}
  return jax.device_get(train(OBJECTIVE, SETTINGS, copies(), copies(), str(output), **options))


def metrics(output):
  return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def epochs(output):
  return [line["epoch"] for line in metrics(output)]


@pytest.fixture(scope="module")
def init():
  """Return the initial parameters of the uninterrupted run."""
  return initial_params()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, init):
  """Return (parameters, folder) of an uninterrupted run."""
  output = tmp_path_factory.mktemp("whole")
  return run(output, init=init), output


def stopped_after(num_batches, work):
  """Call `work` and interrupt it after `num_batches` batches of training and validation."""
  unpatched, remaining = trainer.padded_batches, [num_batches]

  def interrupted_batches(text, batches):
    for batch in unpatched(text, batches):
      if not remaining[0]:
        raise KeyboardInterrupt
      remaining[0] -= 1
      yield batch

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(trainer, "padded_batches", interrupted_batches)
    with pytest.raises(KeyboardInterrupt):
      work()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """Return (parameters, folder) of a run interrupted between checkpoints and in a validation."""
  output = tmp_path_factory.mktemp("stopped")
  stopped_after(16, lambda: run(output))
  before = epochs(output)

  def stop_when_scored(params):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    run(output, bleu=stop_when_scored)
  assert epochs(output) == before == [1]  # both interruptions were in the second epoch
  return run(output), output


def test_a_tiny_model_learns_to_copy(whole):
  lines = metrics(whole[1])
  assert epochs(whole[1]) == [*range(1, 11)]
  assert [line["step"] for line in lines] == [*range(6, 66, 6)]
  for line in lines:
    assert line["train_loss"] > 0 and line["tokens_per_s"] > 0 and line["bleu"] is None
  assert lines[0]["valid_loss"] > 1.5 and lines[-1]["valid_loss"] < 0.4
  assert lines[-1]["valid_accuracy"] > 0.9


def test_last_scores_are_those_of_the_returned_parameters(whole):
  text = copies()
  batch = batch_of(text.targets, length=8)
  inputs = np.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
  logits = tiny.teacher_forced(CONFIG)(whole[0], padded(text.sources, 8), inputs)
  loss, accuracy = cross_entropy(logits, batch, 0.0)
  # A recorded score is the mean over batches, which have about the same number of tokens.
  assert metrics(whole[1])[-1]["valid_loss"] == pytest.approx(float(loss), rel=0.25)
  assert metrics(whole[1])[-1]["valid_accuracy"] == pytest.approx(float(accuracy), abs=0.03)


def test_resumed_run_has_the_same_parameters_and_scores(whole, stopped):
  jax.tree.map(np.testing.assert_array_equal, stopped[0], whole[0])
  assert epochs(stopped[1]) == epochs(whole[1])
  for ours, want in zip(metrics(stopped[1]), metrics(whole[1]), strict=True):
    for name in ("step", "valid_loss", "valid_accuracy"):
      assert ours[name] == want[name]


def test_max_steps_may_end_within_an_epoch(init, tmp_path):
  settings = dataclasses.replace(SETTINGS, max_steps=8)
  train(OBJECTIVE, settings, copies(), copies(), str(tmp_path), init)
  assert [line["step"] for line in metrics(tmp_path)] == [6, 8]


def test_completed_run_is_not_trained_further(whole):
  before = (whole[1] / "metrics.jsonl").read_bytes()
  jax.tree.map(np.testing.assert_array_equal, run(whole[1]), whole[0])
  assert (whole[1] / "metrics.jsonl").read_bytes() == before


def test_epoch_whose_checkpoint_was_not_saved_has_one_metrics_line(whole, tmp_path):
  """The run was killed after it wrote the line and before it saved; the epoch is repeated."""
  output = tmp_path / "killed"
  shutil.copytree(whole[1], output)
  shutil.rmtree(output / "checkpoints" / "60")
  jax.tree.map(np.testing.assert_array_equal, run(output), whole[0])
  assert epochs(output) == epochs(whole[1])


def test_train_does_not_donate_the_callers_parameters(whole, init):
  jax.tree.map(np.testing.assert_array_equal, init, initial_params())


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"training": ParallelText([], [])}, "no training pairs"),
    ({"validation": ParallelText([], [])}, "no validation pairs"),
    ({"settings": dataclasses.replace(SETTINGS, warmup_steps=60)}, "warmup_steps is 60"),
  ],
)
def test_impossible_run_raises(tmp_path, changes, words):
  given = {"settings": SETTINGS, "training": copies(), "validation": copies(), **changes}
  with pytest.raises(InputError, match=words):
    train(OBJECTIVE, *given.values(), str(tmp_path), init=initial_params())
  assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("fault, message", [("gradient", "")])
def test_training_stops_where_a_loss_is_not_finite(tmp_path, fault, message):
  """The last checkpoint from before it remains; it is that of step 12, the second epoch."""

  def loss(params, frozen, batch, rng, progress):
    value = OBJECTIVE.loss(params, frozen, batch, rng, progress)
    late = progress * 60 > (12.5 if fault == "loss" else 16.5)
    if fault == "loss":
      return jnp.where(late, jnp.nan, value)
    return value + jnp.sqrt(jnp.where(late, value - jax.lax.stop_gradient(value), 1.0))

  message = message or "loss of step 18 is|After step 18, the parameters are not finite"
  with pytest.raises(InputError, match=message):
    objective = OBJECTIVE._replace(loss=loss)
    train(objective, SETTINGS, copies(), copies(), str(tmp_path), initial_params())
  assert epochs(tmp_path) == [1, 2]
  assert max(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == 12
  run(tmp_path)  # a good loss goes on from there
  assert epochs(tmp_path) == [*range(1, 11)]


# Distillation data.


def test_outputs_are_in_the_order_of_the_sources(monkeypatch):
  monkeypatch.setattr(teacher, "BATCH_SIZE", 3)
  pair = tiny_pair.pair()
  texts = [tiny_pair.SENTENCES[i][:n] for i, n in ((0, 3), (30, 9), (60, 5), (90, 12), (7, 1))]
  sources = [pair.encode(text) for text in texts]
  outputs = teacher.decode(pair, sources)
  assert len({tuple(row) for row in outputs}) > 2
  assert all(len(row) == 96 or row[-1] == 1 for row in outputs)
  assert teacher.decode(pair, sources[::-1]) == outputs[::-1]
  want = pair.generate(texts, gamma=0, max_new_tokens=96)
  assert outputs == [output.tokens.tolist() for output in want]


def test_teacher_topk_are_the_most_probable_tokens():
  params, text = initial_params(), copies()
  topk = teacher_topk(CONFIG, params, text, k=4, tokens_per_batch=32)
  batch = batch_of(text.targets, length=8)
  inputs = np.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
  probs = jax.nn.softmax(tiny.teacher_forced(CONFIG)(params, padded(text.sources, 8), inputs))
  for (tokens, weights), target, p in zip(topk, text.targets, np.asarray(probs), strict=True):
    assert tokens.shape == weights.shape == (len(target), 4)
    for position in range(len(target)):
      assert tokens[position].tolist() == np.argsort(-p[position])[:4].tolist()
      want = p[position, tokens[position]]
      np.testing.assert_allclose(weights[position], want, rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:1 pairs have a source")
def test_teacher_topk_with_tail_marks_text_tokens_outside_the_top_k(tmp_path):
  """A pair that is too long for a batch has empty arrays, which can be saved and loaded."""
  short = copies()
  text = ParallelText([[5] * 600, *short.sources], [[1], *short.targets])
  topk = functools.partial(teacher_topk, CONFIG, initial_params(), text, k=4, tokens_per_batch=32)
  plain, tailed = topk(), topk(tail=True)
  assert tailed[0][0].shape == (0, 5)
  tail_weights = []
  for target, (tokens, probs), (tailed_tokens, weights) in zip(
    text.targets[1:], plain[1:], tailed[1:]
  ):
    np.testing.assert_array_equal(tailed_tokens[:, :4], tokens)
    np.testing.assert_array_equal(weights[:, :4], probs)
    assert tailed_tokens[:, 4].tolist() == target
    assert weights[:, 4].tolist() == [x not in row for x, row in zip(target, tokens)]
    tail_weights += weights[:, 4].tolist()
  assert {*tail_weights} == {0, 1}
  path = tmp_path / "distillation_data.npz"
  dataclasses.replace(text, teacher=tailed).save(path)
  assert ParallelText.load(path).teacher[0][0].shape == (0, 5)


def test_spliced_sentences_start_as_one_line_and_end_as_another():
  lines = ["a dog in a park runs", "two men in a boat sleep", "a cat", "two men in a boat row"]
  possible = ["two men in a park runs", "a dog in a boat row", "a dog in a boat sleep"]
  assert sorted(spliced_sentences(lines, 3)) == sorted(possible)
  assert spliced_sentences(lines, 2, seed=1) == spliced_sentences(lines, 2, seed=1)
  with pytest.raises(InputError, match="4 lines can be spliced into 3 new sentences, not 4"):
    spliced_sentences(lines, 4)


def test_saved_parallel_text_is_loaded_unchanged(tmp_path):
  text, rng = random_text(20, 0), np.random.default_rng(1)
  shapes = [(len(row), 3) for row in text.targets]
  teacher = [(rng.integers(0, 90, shape), rng.random(shape, np.float32)) for shape in shapes]
  for saved in (text, dataclasses.replace(text, teacher=teacher)):
    saved.save(tmp_path / "distillation_data.npz")
    loaded = ParallelText.load(tmp_path / "distillation_data.npz")
    assert (loaded.sources, loaded.targets) == (text.sources, text.targets)
    jax.tree.map(np.testing.assert_array_equal, loaded.teacher, saved.teacher)


def test_draft_is_trained_on_references_samples_and_spliced_sources(tmp_path, monkeypatch):
  """The data has sources with references, then with samples, then spliced sources with outputs."""
  texts = tiny_pair.SENTENCES[::7]
  for name, lines in (("train.en", texts), ("train.de", texts[::-1]), ("val.en", texts[:2])):
    (tmp_path / name).write_text("".join(line + "\n" for line in lines))
  train_calls = []
  monkeypatch.setattr(commands, "train", lambda *args: train_calls.append(args))
  monkeypatch.setattr(commands, "save_model", lambda *args: None)
  train_draft = functools.partial(
    commands.train_draft,
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
  train_draft()
  ((_, _, text, valid, *_),) = train_calls
  pair = tiny_pair.pair()
  encode = pair.vocabulary.encode
  sources, references = map(encode, texts), map(encode, texts[::-1])
  new = map(encode, spliced_sentences(texts, 3))
  assert text.sources == [*sources] * 3 + [*new] and text.targets[: len(texts)] == [*references]
  assert text.targets[18:36] != text.targets[36:54]  # sampled with different seeds
  assert len(text.targets) == len(text.teacher) == 57
  argmax = teacher.decode(pair, valid.sources)
  assert valid.targets == argmax and valid.teacher is None
  # The file is read again by a run that would write the same one, and by no other.
  monkeypatch.setattr(teacher, "teacher_topk", None)
  train_draft()
  assert train_calls[1][2].targets == text.targets
  message = "distillation_data.npz was made with {} .* name another file, or delete this one"
  for name, changes in {"samples": {"samples": 1}, "tail": {"tail": True}}.items():
    with pytest.raises(InputError, match=message.format(name)):
      train_draft(**changes)
  with pytest.raises(InputError, match=message.format("target")):
    train_draft(target=str(tiny_pair.folder() / "near"))
  (tmp_path / "train.de").write_text("".join(line + "\n" for line in texts))
  with pytest.raises(InputError, match=message.format("texts")):
    train_draft()


def test_target_is_trained_from_the_parameters_of_a_checkpoint(tmp_path, monkeypatch):
  (tmp_path / "lines").write_text("".join(line + "\n" for line in tiny_pair.SENTENCES[:4]))
  train_calls, saved, target = [], [], str(tiny_pair.folder() / "target")
  monkeypatch.setattr(commands, "train", lambda *args: train_calls.append(args))
  monkeypatch.setattr(commands, "save_model", lambda *args: saved.append(args))
  train_target = functools.partial(
    commands.train_target,
    data=str(tmp_path),
    sources=["lines"],
    targets=["lines"],
    valid_source="lines",
    valid_target="lines",
    settings=SETTINGS,
    vocabulary=str(tiny_pair.folder() / "vocabulary.model"),
    output=str(tmp_path / "tuned"),
    work_dir=str(tmp_path / "work"),
    start=target,
    max_source_tokens=7,
  )
  train_target(config=commands.checkpoint_config(target, dropout_rate=0.2))
  ((_, _, text, *_, init, bleu),) = train_calls
  assert {len(source) for source in text.sources} == {7}
  assert all(source[-1] == 1 for source in text.sources)
  config, params = load_model(target)
  jax.tree.map(np.testing.assert_array_equal, init, params)
  assert saved[0][1] == dataclasses.replace(config, dropout_rate=0.2)
  assert callable(bleu)
  with pytest.raises(InputError, match="shape"):
    train_target(config=dataclasses.replace(config, mlp_dim=config.mlp_dim + 8))


def test_rows_of_padding_are_not_part_of_the_vocabulary():
  """T5's table has 32,128 rows for 32,000 pieces and 100 sentinels."""
  path = str(tiny_pair.folder() / "vocabulary.model")
  size = len(tiny_pair.pair().vocabulary)
  rows = -(-(size + 100) // 128) * 128
  words, config = commands.open_fitting_vocabulary(
    dataclasses.replace(CONFIG, vocab_size=rows, eos_id=3), path
  )
  assert config.eos_id == words.eos_id == 1
  assert len(words) == config.vocab_size == size + 100 and config.padded_vocab_size == rows


# Decoder-only models: training a pair on texts, and decoding with it.

GPT = tiny.gpt_config(
  vocab_size=100, layers=1, emb_dim=32, mlp_dim=64, num_positions=128, tied_logits=True
)
SMALLER = dataclasses.replace(GPT, emb_dim=16, num_heads=1, mlp_dim=32)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
  """Return a folder with `vocabulary.txt`, `target`, `draft` and `untrained`, a random draft."""
  with pytest.MonkeyPatch.context() as patch:
    # One shape to compile; longer texts that the target generates are left out.
    patch.setattr("specdec_jax.train.batches.BUCKETS", (40,))
    return trained_gpt(tmp_path_factory)


def trained_gpt(tmp_path_factory):
  path = tmp_path_factory.mktemp("gpt")
  lines = [line + "\n" for line in tiny_pair.SENTENCES[:40]]
  (path / "texts").write_text("".join(lines * 4))  # fewer epochs: fewer checkpoints and scores
  (path / "valid").write_text("".join(lines))
  common = dict(
    data=str(path),
    sources=None,
    targets=["texts"],
    valid_source=None,
    settings=TrainSettings(epochs=5, tokens_per_batch=320, warmup_steps=10, label_smoothing=0.0),
    vocabulary=str(path / "vocabulary.txt"),
  )
  commands.fit_vocabulary(str(path), ["texts"], 100, common["vocabulary"])
  commands.train_target(
    **common,
    valid_target="valid",
    config=GPT,
    output=str(path / "target"),
    work_dir=str(path / "train_target"),
  )
  commands.train_draft(
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
  """Return the vocabulary of a pair and its outputs for 16 empty prompts."""
  names = {name: str(folder / name) for name in ("target", "vocabulary.txt")}
  pair = load_pair(names["target"], str(folder / draft), names["vocabulary.txt"], kernels="xla")
  prompt, keys = pair.prompt([""] * 16), row_keys(0, 0, 16)
  return pair.vocabulary, pair.decode_fn(sampling, chain(gamma))(prompt, keys, max_new_tokens=32)


@pytest.mark.filterwarnings("ignore:.* pairs have a source")
def test_decoder_only_model_is_trained_on_texts_without_sources(gpt):
  lines = metrics(gpt / "train_target")
  assert [line["epoch"] for line in lines] == [*range(1, 6)]
  assert lines[0]["valid_loss"] > 2 * lines[-1]["valid_loss"]
  assert lines[-1]["bleu"] is None


def test_trained_decoder_only_target_generates_training_texts_unconditionally(gpt):
  words, out = decoded(gpt, "draft", 0, Sampling())
  texts = [words.decode(row) for row in np.asarray(out.tokens)]
  training_texts = {words.decode(words.encode(text)) for text in tiny_pair.SENTENCES[:40]}
  assert {*texts} & training_texts
  assert len({*texts}) > 4


def test_trained_decoder_only_draft_is_accepted_more_often_than_an_untrained_one(gpt):
  """With either draft, argmax outputs are those of autoregressive decoding."""
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
  "changes, message",
  [
    ({"vocab_size": 12}, "vocab_size is 12; set it to 100"),
    ({"eos_id": 3}, "eos_id is 3; set it to 1"),
    ({"start_id": None}, "start_id is None; set it to 0"),
  ],
)
def test_configuration_that_does_not_fit_the_vocabulary_raises_before_training(
  gpt, changes, message
):
  with pytest.raises(InputError, match=message):
    commands.train_target(
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


def test_decoder_only_loss_covers_the_first_token_and_not_padding():
  """Logits at a position do not depend on the token there."""
  texts = [[5, 6, 7, 1], [5, 1]]
  text = ParallelText([[1], [1]], texts)
  (batch,) = padded_batches(text, [(8, np.arange(2))])
  params = tiny_pair.random_params(GPT, 0)
  logits = teacher_forced(module_of(GPT), params, batch)
  pad = np.zeros((1, 1), np.int32)
  start = tiny.teacher_forced(GPT)(params, pad, pad)
  np.testing.assert_allclose(logits[:, 0], np.repeat(start[:, 0], 2, axis=0), atol=1e-5)
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  losses = [
    -log_probs[row, position, token]
    for row, tokens in enumerate(texts)
    for position, token in enumerate(tokens)
  ]
  assert float(cross_entropy(logits, batch, 0.0)[0]) == pytest.approx(np.mean(losses), rel=1e-5)
