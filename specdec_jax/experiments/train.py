"""Train a target on sentence pairs, or a draft on a target's own outputs."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import sacrebleu
from rich.progress import track

from specdec_jax.checkpoints.folder import load_model, save_model
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import Vocabulary, padded, train_vocabulary
from specdec_jax.decoding import autoregressive_decode
from specdec_jax.experiments.speed import row_keys
from specdec_jax.models.config import T5Config
from specdec_jax.models.t5 import T5, for_decoding, t5_model
from specdec_jax.protocols import Model
from specdec_jax.sampling import Sampling
from specdec_jax.training.batches import Pairs
from specdec_jax.training.distillation import load_pairs, recombined, save_pairs, teacher_opinions
from specdec_jax.training.trainer import TrainSettings, train


def fit_vocabulary(data: str, sources: list[str], size: int, pair_dir: str) -> None:
  """Fit a SentencePiece vocabulary of `size` pieces to text files in folder `data`.

  It becomes `vocabulary.model` in `pair_dir`.
  """
  pathlib.Path(pair_dir).mkdir(parents=True, exist_ok=True)
  lines = (line for source in sources for line in read_lines(f"{data}/{source}"))
  train_vocabulary(lines, f"{pair_dir}/vocabulary.model", size)


def train_target(
  data: str,
  sources: list[str],
  targets: list[str],
  valid_source: str,
  valid_target: str,
  config: T5Config,
  settings: TrainSettings,
  pair_dir: str,
  work_dir: str,
) -> None:
  """Train a T5 on sentence pairs to the last epoch, resuming if it was stopped, and save it.

  Args:
    data: folder of the text files below.
    sources: text files, one sentence a line; read one after the other.
    targets: their translations, file by file.
    valid_source: validation sentences.
    valid_target: their translations.
    config: the model's shape and dropout rate.
    settings: length and rates of the training.
    pair_dir: has `vocabulary.model`; gets the model as `target`, in bfloat16.
    work_dir: for checkpoints and metrics of this run.
  """
  words = Vocabulary(f"{pair_dir}/vocabulary.model")
  valid = Pairs(_encoded(words, data, [valid_source]), _encoded(words, data, [valid_target]))
  references = read_lines(f"{data}/{valid_target}")
  model = t5_model(config)

  def bleu(params) -> float:
    outputs = model_outputs(model, params, valid.sources)
    return sacrebleu.corpus_bleu([words.decode(o) for o in outputs], [references]).score

  pairs = Pairs(_encoded(words, data, sources), _encoded(words, data, targets))
  params = train(config, settings, pairs, valid, work_dir, bleu=bleu)
  save_model(f"{pair_dir}/target", config, params, words.fingerprint())


def train_draft(
  data: str,
  sources: list[str],
  targets: list[str],
  valid_source: str,
  config: T5Config,
  settings: TrainSettings,
  pair_dir: str,
  work_dir: str,
  samples: int = 0,
  new_sources: int = 0,
) -> None:
  """Train a draft towards the target's own distributions, resuming if it was stopped; save it.

  It learns them along the references, along `samples` outputs of the target for each source, and
  along one output for each of `new_sources` sentences recombined from the sources.

  The validation accuracy it prints is alpha at temperature 0 on the validation text: how often
  the draft's argmax is the target's, on the target's argmax output.

  Args:
    data: folder of the text files below.
    sources: text files, one sentence a line; read one after the other.
    targets: their translations, file by file.
    valid_source: validation sentences, which the target translates.
    config: the draft's shape and dropout rate.
    settings: length and rates of the training.
    pair_dir: has `vocabulary.model` and `target`; gets the model as `draft`, in bfloat16.
    work_dir: for `lessons.npz` (what it learns from), checkpoints and metrics of this run.
    samples: outputs drawn from the target at temperature 1 for each source.
    new_sources: see `distillation.recombined`.
  """
  words = Vocabulary(f"{pair_dir}/vocabulary.model")
  target_config, params = for_decoding(*load_model(f"{pair_dir}/target"))
  target = t5_model(target_config)
  lessons = pathlib.Path(work_dir) / "lessons.npz"
  if not lessons.exists():
    lines = [line for file in sources for line in read_lines(f"{data}/{file}")]
    pairs = Pairs([words.encode(line) for line in lines], _encoded(words, data, targets))
    asked = [lines] * samples + [recombined(lines, new_sources)]
    for seed, texts in enumerate([[words.encode(line) for line in more] for more in asked]):
      drawn = model_outputs(target, params, texts, sampling=Sampling(), seed=seed)
      pairs = Pairs([*pairs.sources, *texts], [*pairs.targets, *drawn])
    pairs = dataclasses.replace(pairs, teacher=teacher_opinions(T5(target_config), params, pairs))
    lessons.parent.mkdir(parents=True, exist_ok=True)
    save_pairs(lessons, pairs)
  valid_texts = _encoded(words, data, [valid_source])
  valid = Pairs(valid_texts, model_outputs(target, params, valid_texts))
  params = train(config, settings, load_pairs(lessons), valid, work_dir)
  save_model(f"{pair_dir}/draft", config, params, words.fingerprint())


def _encoded(words: Vocabulary, data: str, files: list[str]) -> list[list[int]]:
  return [words.encode(line) for file in files for line in read_lines(f"{data}/{file}")]


def model_outputs(
  model: Model,
  params,
  sources: list[list[int]],
  batch_size: int = 64,
  sampling: Sampling = Sampling(temperature=0.0),
  seed: int = 0,
) -> list[list[int]]:
  """A model's own outputs for encoded sources, as token ids, in order; argmax unless told."""
  order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
  outputs: list[list[int]] = [[]] * len(sources)
  for at in track(range(0, len(order), batch_size), "decoding", transient=True):
    chunk = order[at : at + batch_size]
    chunk += [chunk[-1]] * (batch_size - len(chunk))  # one shape a length, also at the end
    width = -(-max(len(sources[i]) for i in chunk) // 16) * 16
    decoded = autoregressive_decode(
      model,
      params,
      jnp.asarray(padded([sources[i] for i in chunk], width)),
      row_keys(seed, at, batch_size),
      max_new_tokens=96,
      sampling=sampling,
    )
    for i, row, length in zip(chunk, np.asarray(decoded.tokens), np.asarray(decoded.lengths)):
      outputs[i] = row[:length].tolist()
  return outputs
