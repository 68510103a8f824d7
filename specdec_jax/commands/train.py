"""Train a vocabulary or a target on texts, or a draft on the distributions of a target.

An interrupted run of `train_target`, `train_draft` or `train_speculator` resumes. The models are
saved in bfloat16. Their common arguments:

  data: folder of the text files.
  sources: names of the source files, one sentence per line. The files are concatenated. None if the
    target is decoder-only.
  targets: names of the files of translations; for a decoder-only target, of texts.
  valid_source: name of the file of validation sentences; None if the target is decoder-only.
  config: configuration of the model, including the dropout rate for training.
  settings: number of epochs, learning rate, sharding and other settings of training.
  vocabulary: vocabulary file of all models.
  target: checkpoint of the target, in any format that `load.load_pair` reads.
  output: folder for the trained model.
  work_dir: folder for checkpoints and metrics of this run.
  samples: number of outputs sampled from the target at temperature 1 for each source.
  new_sources: number of spliced sentences (`distillation.spliced_sentences`), for each of which one
    output is sampled. For a decoder-only target, number of texts sampled unconditionally.
  distillation_data: path of the file of texts with the target's distributions. It is created if it
    does not exist. By default `distillation_data.npz` in `work_dir`.
  divergence: divergence between the trained model and the target (`objectives.divergences`).
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from jax.sharding import Sharding

from specdec_jax.checkpoints.load import load_model, open_checkpoint
from specdec_jax.checkpoints.save import save_model
from specdec_jax.commands.teacher import decode, open_teacher, without_draft
from specdec_jax.data.pieces import train_sentence_pieces, train_word_pieces
from specdec_jax.data.quality import quality
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import open_vocabulary_of_model, padded_size
from specdec_jax.data.vocabulary import PAD_ID, ModelTokens, Vocabulary
from specdec_jax.drafts.heads import DraftHead
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.partitioning import make_mesh, param_shardings
from specdec_jax.train.batches import ParallelText
from specdec_jax.train.distillation import parallel_text, require_positions
from specdec_jax.train.objectives import Divergence, model_objective
from specdec_jax.train.speculators import speculator_objective, warm_start
from specdec_jax.train.trainer import TrainSettings, train


def fit_vocabulary(data: str, sources: list[str], size: int, vocabulary: str) -> None:
  """Train a vocabulary of `size` pieces on text files, and write it to the file `vocabulary`.

  If the name of this file ends in `.txt`, at most `size` word pieces in BERT's format are trained,
  otherwise a SentencePiece model.
  """
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
  start: str | None = None,
  max_source_tokens: int | None = None,
) -> None:
  """Train a target to the last step and save it.

  Args:
    data: see the module; so are the arguments that are not listed here.
    valid_target: name of the file with the translations of the validation sentences, or of the
      validation texts of a decoder-only model.
    config: configuration of the model, including the dropout rate; with `start`,
      `checkpoint_config`.
    start: checkpoint with the same configuration, in any format that `load.load_pair` reads, from
      whose parameters training starts. None to start from random parameters.
    max_source_tokens: number of tokens to which longer sources are truncated, EOS included. None to
      leave out pairs that are too long (`batches.epoch_batches`).

  Raises:
    InputError: the configuration does not fit the vocabulary, or the parameters in `start`.
  """
  if max_source_tokens is not None:
    require_count("max_source_tokens", max_source_tokens)
  words, config = open_fitting_vocabulary(config, vocabulary)
  cut = max_source_tokens is not None and max_source_tokens <= (config.num_positions or sys.maxsize)
  of_sources = () if cut else (*(sources or ()), valid_source)
  require_positions(config, words, data, *of_sources, *targets, valid_target)
  encoded = functools.partial(parallel_text, words, data, max_source_tokens=max_source_tokens)
  valid = encoded([valid_source] if valid_source else None, [valid_target])

  def bleu(params) -> float:
    return bleu_of(config, params, words, valid.sources, f"{data}/{valid_target}")

  if valid_source:
    quality("BLEU", ["a"], ["a"])  # a missing sacrebleu fails now, not after the first epoch
  text = encoded(sources, targets)
  objective = model_objective(config, settings.label_smoothing)
  params = None
  if start:
    shardings = functools.partial(param_shardings, mesh=make_mesh(settings.model_parallel))
    params = open_checkpoint(start).load(config, shardings=shardings)
  params = train(objective, settings, text, valid, work_dir, params, bleu if valid_source else None)
  save_model(output, config, params, words.fingerprint(), "bfloat16")


def bleu_of(
  config: Config, params: Any, vocabulary: Vocabulary, sources: list[list[int]], references: str
) -> float:
  """Return BLEU, in percent, of a model's argmax outputs for tokenized sources.

  `references` is the path of the file with the translation of each source.
  """
  outputs = decode(without_draft(model_of(config), params, vocabulary), sources)
  texts = [vocabulary.decode(output) for output in outputs]
  return quality("BLEU", texts, read_lines(references))


def checkpoint_config(checkpoint: str, dropout_rate: float = 0.1) -> Config:
  """Return the configuration of the model in a checkpoint, with a dropout rate for training.

  Raises:
    InputError: the checkpoint cannot be opened, or it is a draft head.
  """
  config = open_checkpoint(checkpoint).config
  if isinstance(config, DraftHead):
    raise InputError(f"{checkpoint} is a draft head, which is no model by itself.")
  return dataclasses.replace(config, dropout_rate=dropout_rate)


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
  divergence: Divergence = "forward_kl",
  start: str | None = None,
  distillation_data: str | None = None,
  writer: str | None = None,
  relabel: Callable[[ParallelText, Sharding], ParallelText] | None = None,
) -> None:
  """Train a draft towards the target's distributions and save it.

  The validation accuracy is alpha at temperature 0 on the validation text: the share of tokens of
  the target's argmax outputs (for a decoder-only target, of texts sampled from it) that are also
  the draft's argmax.

  Args:
    data: see the module; so are the arguments that are not listed here.
    tail: whether to append the token of the text to the labels (`distillation.teacher_topk`). Use
      it if the target's most probable tokens cover too little of its distribution, as for news.
    start: folder of a draft with the same configuration, from whose parameters training starts.
      None to start from random parameters.
    writer: checkpoint of the model that samples the outputs; by default, the target samples them.
    relabel: function of the texts and the sharding of a batch that returns the texts with other
      labels, such as `contrib.boosted.residual_labels`.

  Raises:
    InputError: `tail` or `relabel` is set and `divergence` is not 'forward_kl', or the
      configuration does not fit the vocabulary.
  """
  for name, value in {"tail": tail, "relabel": relabel}.items():
    if value and divergence != "forward_kl":
      raise InputError(f"{name} needs the divergence 'forward_kl', and it is {divergence!r}.")
  params = load_model(start)[1] if start else None
  words, config = open_fitting_vocabulary(config, vocabulary)
  teacher = open_teacher(target, words, settings.model_parallel)
  for model in (teacher.config, config):
    require_positions(model, words, data, *(sources or ()), *targets, valid_source)
  objective = model_objective(config, settings.label_smoothing, divergence)
  valid = teacher.validation_pairs(data, valid_source)
  path = distillation_data or f"{work_dir}/distillation_data.npz"
  writing = open_teacher(writer, words, settings.model_parallel).pair if writer else None
  text = teacher.distillation_data(
    path, data, sources, targets, samples, new_sources, tail, writing
  )
  if relabel:
    text = relabel(text, teacher.batch_sharding)
  params = train(objective, settings, text, valid, work_dir, params)
  save_model(output, config, params, words.fingerprint(), "bfloat16")


def train_speculator(
  data: str,
  sources: list[str] | None,
  targets: list[str],
  valid_source: str | None,
  head: Callable[[Config], DraftHead],
  settings: TrainSettings,
  vocabulary: str,
  target: str,
  output: str,
  work_dir: str,
  distillation_data: str | None = None,
  samples: int = 0,
  new_sources: int = 0,
  divergence: Divergence = "forward_kl",
  stride: int = 4,
  start: str | None = None,
) -> None:
  """Train a learned draft head on the hidden states of the frozen target and save it.

  The validation score is the acceptance length at temperature 0 (`speculator_objective`).

  Args:
    data: see the module; so are the arguments that are not listed here.
    head: function from the configuration of the target to the head.
    stride: number of tokens between anchors, the positions at which rounds start.
    start: folder of a model of the head's width, such as a draft of the pair. Training starts from
      its parameters that fit the head (`train.speculators.warm_start`). None to start from random
      parameters.

  Raises:
    InputError: `stride` is less than 1, or the model in `start` does not fit the head.
  """
  require_count("stride", stride)
  words = open_checkpoint(target).open_vocabulary(vocabulary)
  teacher = open_teacher(target, words, settings.model_parallel)
  new = head(teacher.config)  # an invalid one raises before the texts are generated
  require_positions(teacher.config, words, data, *(sources or ()), *targets, valid_source)
  path = distillation_data or f"{work_dir}/distillation_data.npz"
  text = teacher.distillation_data(path, data, sources, targets, samples, new_sources)
  objective = speculator_objective(new, teacher.config, teacher.params, divergence, stride)
  if start:
    init, model = objective.init, load_model(start)
    objective = objective._replace(init=lambda rng: warm_start(init(rng), *model))
  params = train(objective, settings, text, teacher.validation_pairs(data, valid_source), work_dir)
  save_model(output, new, params, words.fingerprint(), "bfloat16")


def open_fitting_vocabulary(config: Config, path: str) -> tuple[Vocabulary, Config]:
  """Open the vocabulary of a model; return it, and the configuration without rows of padding.

  An encoder-decoder gets the vocabulary's EOS.

  Raises:
    InputError: the configuration does not fit the vocabulary.
  """
  tokens = ModelTokens(config.has_encoder, (config.eos_id,), config.pad_id)
  words = open_vocabulary_of_model(path, config.vocab_size, tokens=tokens)
  rows, size = config.vocab_size, len(words)
  if size < rows == padded_size(size):
    config = dataclasses.replace(config, vocab_size=size, padded_vocab_size=rows)
  needed = {"vocab_size": size}
  if config.has_encoder:
    config = dataclasses.replace(config, eos_id=words.eos_id)
  else:
    needed |= {"eos_id": words.eos_id, "start_id": PAD_ID}
  for name, value in needed.items():
    if (given := getattr(config, name)) != value:
      raise InputError(f"The model's {name} is {given}; set it to {value} to train with {path}.")
  return words, config
