"""Train a target on sentence pairs or on texts alone, or a draft on a target's own outputs."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import sacrebleu
from rich.progress import track

from specdec_jax.checkpoints.folder import load_model, save_model
from specdec_jax.data.sentence_pieces import train_sentence_pieces
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import PAD_ID, Vocabulary, padded
from specdec_jax.data.word_pieces import train_word_pieces
from specdec_jax.decoding import autoregressive_decode
from specdec_jax.errors import InputError, require_count, require_types
from specdec_jax.models.families import Config, for_decoding, model_of, module_of
from specdec_jax.protocols import Model
from specdec_jax.sampling import Sampling, row_keys
from specdec_jax.training.batches import Pairs
from specdec_jax.training.distillation import load_pairs, recombined, save_pairs, teacher_opinions
from specdec_jax.training.trainer import TrainSettings, train


def fit_vocabulary(data: str, sources: list[str], size: int, vocabulary: str) -> None:
  """Fit a vocabulary of `size` pieces to text files in folder `data`, and write it to a file.

  SentencePiece's, or BERT's word pieces if the name of the file ends in `.txt`.
  """
  require_types(fit_vocabulary, locals())
  require_count("size", size)
  pathlib.Path(vocabulary).parent.mkdir(parents=True, exist_ok=True)
  lines = (line for source in sources for line in read_lines(f"{data}/{source}"))
  fit = train_word_pieces if vocabulary.endswith(".txt") else train_sentence_pieces
  fit(lines, vocabulary, size)


def train_target(
  data: str,
  sources: list[str] | None,
  targets: list[str],
  valid_source: str | None,
  valid_target: str,
  config: Config,
  settings: TrainSettings,
  vocabulary: str,
  output: str,
  work_dir: str,
) -> None:
  """Train a model to the last epoch, resuming if it was stopped, and save it.

  Args:
    data: folder of the text files below.
    sources: text files, one sentence a line; read one after the other. None for a decoder-only
      model, which learns the targets by themselves.
    targets: their translations, file by file.
    valid_source: validation sentences, or None.
    valid_target: their translations.
    config: the model's shape and dropout rate.
    settings: length and rates of the training.
    vocabulary: its file.
    output: folder that gets the model, in bfloat16.
    work_dir: for checkpoints and metrics of this run.
  """
  require_types(train_target, locals())
  words = _vocabulary_of(config, vocabulary)
  valid = _pairs(words, data, [valid_source] if valid_source else None, [valid_target])
  references = read_lines(f"{data}/{valid_target}")
  model = model_of(config)

  def bleu(params) -> float:
    outputs = model_outputs(model, params, valid.sources)
    return sacrebleu.corpus_bleu([words.decode(o) for o in outputs], [references]).score

  pairs = _pairs(words, data, sources, targets)
  params = train(config, settings, pairs, valid, work_dir, bleu=bleu if valid_source else None)
  save_model(output, config, params, words.fingerprint())


def train_draft(
  data: str,
  sources: list[str] | None,
  targets: list[str],
  valid_source: str | None,
  config: Config,
  settings: TrainSettings,
  vocabulary: str,
  target: str,
  output: str,
  work_dir: str,
  samples: int = 0,
  new_sources: int = 0,
  tail: bool = False,
) -> None:
  """Train a draft towards the target's own distributions, resuming if it was stopped; save it.

  It learns them along the references, along `samples` outputs of the target for each source, and
  along one output for each of `new_sources` sentences recombined from the sources; of a
  decoder-only target, along so many texts that it writes unconditionally.

  The validation accuracy it prints is alpha at temperature 0 on the validation text: how often
  the draft's argmax is the target's, on the target's argmax output. (Of a decoder-only target, how
  often the draft's argmax is what the target drew.)

  Args:
    data: folder of the text files below.
    sources: text files, one sentence a line; read one after the other. None if the target is
      decoder-only.
    targets: their translations, file by file.
    valid_source: validation sentences, which the target translates; or None.
    config: the draft's shape and dropout rate.
    settings: length and rates of the training.
    vocabulary: file of both models'.
    target: folder of the target.
    output: folder that gets the draft, in bfloat16.
    work_dir: for `lessons.npz` (what it learns from), checkpoints and metrics of this run.
    samples: outputs drawn from the target at temperature 1 for each source.
    new_sources: see `distillation.recombined`.
    tail: see `distillation.teacher_opinions`; for targets that are as uncertain as those of news.
  """
  require_types(train_draft, locals())
  words = _vocabulary_of(config, vocabulary)
  target_config, params = for_decoding(*load_model(target))
  model, nothing = model_of(target_config), [words.encode("")]
  lessons = pathlib.Path(work_dir) / "lessons.npz"
  if not lessons.exists():
    pairs = _pairs(words, data, sources, targets)
    asked = [pairs.sources] * samples
    if sources:
      lines = [line for file in sources for line in read_lines(f"{data}/{file}")]
      asked.append([words.encode(line) for line in recombined(lines, new_sources)])
    else:
      asked.append(nothing * new_sources)
    for seed, texts in enumerate(asked):
      drawn = model_outputs(model, params, texts, words.eos_id, sampling=Sampling(), seed=seed)
      pairs = Pairs([*pairs.sources, *texts], [*pairs.targets, *drawn])
    opinions = teacher_opinions(module_of(target_config), params, pairs, tail=tail)
    pairs = dataclasses.replace(pairs, teacher=opinions)
    lessons.parent.mkdir(parents=True, exist_ok=True)
    save_pairs(lessons, pairs)
  valid_texts = _encoded(words, data, [valid_source]) if valid_source else nothing * 512
  how = Sampling(temperature=0.0 if valid_source else 1.0)
  valid = model_outputs(model, params, valid_texts, words.eos_id, sampling=how, seed=-1)
  params = train(config, settings, load_pairs(lessons), Pairs(valid_texts, valid), work_dir)
  save_model(output, config, params, words.fingerprint())


def _vocabulary_of(config: Config, path: str) -> Vocabulary:
  """The vocabulary in a file, once it is known, before hours of training, to be the model's."""
  words = open_vocabulary(path)
  needed = {"vocab_size": len(words)}
  if not config.has_encoder:
    needed |= {"eos_id": words.eos_id, "start_id": PAD_ID}
  for name, value in needed.items():
    if (given := getattr(config, name)) != value:
      raise InputError(f"The model's {name} is {given}; set it to {value}, to train with {path}.")
  return words


def _pairs(words: Vocabulary, data: str, sources: list[str] | None, targets: list[str]) -> Pairs:
  """Texts with their sources, or with nothing."""
  texts, nothing = _encoded(words, data, targets), words.encode("")
  return Pairs(_encoded(words, data, sources) if sources else [nothing] * len(texts), texts)


def _encoded(words: Vocabulary, data: str, files: list[str]) -> list[list[int]]:
  return [words.encode(line) for file in files for line in read_lines(f"{data}/{file}")]


def model_outputs(
  model: Model,
  params,
  sources: list[list[int]],
  eos_id: int | None = None,
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
      eos_id=eos_id,
    )
    for i, row, length in zip(chunk, np.asarray(decoded.tokens), np.asarray(decoded.lengths)):
      outputs[i] = row[:length].tolist()
  return outputs
