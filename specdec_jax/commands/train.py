"""Train a target on sentence pairs or on texts alone, or a draft on a target's own outputs."""

import pathlib
from collections.abc import Callable
from typing import Literal

import sacrebleu

from specdec_jax.checkpoints.folder import load_model, save_model
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.commands.lessons import model_outputs, open_teacher, text_pairs
from specdec_jax.data.sentence_pieces import train_sentence_pieces
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import open_vocabulary, open_vocabulary_of_model
from specdec_jax.data.vocabulary import PAD_ID, Vocabulary
from specdec_jax.data.word_pieces import train_word_pieces
from specdec_jax.errors import InputError, require_count, require_types
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.speculator import SpeculatorConfig
from specdec_jax.training.objectives import Divergence, model_objective
from specdec_jax.training.speculators import begun_with, speculator_objective
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
  valid = text_pairs(words, data, [valid_source] if valid_source else None, [valid_target])
  references = read_lines(f"{data}/{valid_target}")
  model = model_of(config)

  def bleu(params) -> float:
    outputs = model_outputs(model, params, valid.sources)
    return sacrebleu.corpus_bleu([words.decode(o) for o in outputs], [references]).score

  pairs = text_pairs(words, data, sources, targets)
  objective = model_objective(config, settings.label_smoothing)
  params = train(objective, settings, pairs, valid, work_dir, bleu=bleu if valid_source else None)
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
  divergence: Divergence = "forward_kl",
  start: str | None = None,
  on_policy: bool = False,
  lessons: str | None = None,
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
    target: checkpoint of the target, of any kind that `pairs.load_pair` takes.
    output: folder that gets the draft, in bfloat16.
    work_dir: for checkpoints and metrics of this run.
    samples: outputs drawn from the target at temperature 1 for each source.
    new_sources: see `distillation.recombined`.
    tail: see `distillation.teacher_opinions`; for targets that are as uncertain as those of news.
    divergence: of the draft from these opinions (`objectives.divergences`).
    start: folder of a draft to go on from, of the same shape; None begins at random.
    on_policy: what is drawn, that draft draws, and the target thinks of it (DistillSpec: Zhou et
      al., 2024, though drawn once and not as training goes on); by default the target draws.
    lessons: file of what it learns from, made where there is none; by default `lessons.npz` in
      work_dir.

  Raises:
    InputError: `tail` with a divergence that has no use for it, or `on_policy` without `start`.
  """
  require_types(train_draft, locals())
  if tail and divergence != "forward_kl":
    raise InputError(f"tail goes with 'forward_kl', and the divergence is {divergence!r}.")
  if on_policy and not start:
    raise InputError("on_policy wants a draft that draws; name its folder as start.")
  started = load_model(start) if start else None
  writer = (model_of(started[0]), started[1]) if started and on_policy else None
  words = _vocabulary_of(config, vocabulary)
  teacher = open_teacher(target, words, settings.model_parallel)
  path = pathlib.Path(lessons or f"{work_dir}/lessons.npz")
  pairs = teacher.lessons(path, data, sources, targets, samples, new_sources, tail, writer)
  objective = model_objective(config, settings.label_smoothing, divergence)
  begin = started[1] if started else None
  params = train(objective, settings, pairs, teacher.checks(data, valid_source), work_dir, begin)
  save_model(output, config, params, words.fingerprint())


def train_speculator(
  data: str,
  sources: list[str] | None,
  targets: list[str],
  valid_source: str | None,
  config: Callable[[Config], SpeculatorConfig],
  settings: TrainSettings,
  vocabulary: str,
  target: str,
  output: str,
  work_dir: str,
  lessons: str | None = None,
  samples: int = 0,
  new_sources: int = 0,
  divergence: Divergence = "forward_kl",
  stride: int = 4,
  start: str | None = None,
  extra_ids: int | Literal["auto"] = "auto",
) -> None:
  """Train a module on the target's states (`models.speculator`), resuming if it was stopped.

  The target is frozen. What is printed of the validation text is the acceptance length at
  temperature 0, tokens a round, of rounds that begin at every `stride`-th token.

  Args:
    data: as for `train_draft`, and sources, targets, valid_source, settings, vocabulary, samples
      and new_sources.
    config: the target's shape -> the module's.
    target: checkpoint of the target, of any kind that `pairs.load_pair` takes.
    output: folder that gets the module, in bfloat16.
    work_dir: for checkpoints and metrics of this run.
    lessons: as for `train_draft`.
    divergence: of guesses from the target's opinions (`objectives.divergences`).
    stride: as in `training.speculators.speculator_objective`.
    start: folder of a model of the module's width, as a draft of the pair may be, that it begins
      with as far as it can (`training.speculators.begun_with`); None: at random.
    extra_ids: as of `pairs.load_pair`.
  """
  require_types(train_speculator, locals())
  require_count("stride", stride)
  num_rows = open_checkpoint(target).config.vocab_size
  words = open_vocabulary_of_model(vocabulary, num_rows, extra_ids)
  teacher = open_teacher(target, words, settings.model_parallel)
  path = pathlib.Path(lessons or f"{work_dir}/lessons.npz")
  pairs = teacher.lessons(path, data, sources, targets, samples, new_sources)
  made = config(teacher.config)
  objective = speculator_objective(made, teacher.config, teacher.params, divergence, stride)
  if start:
    init, (of, params) = objective.init, load_model(start)
    objective = objective._replace(init=lambda rng: begun_with(init(rng), of, params))
  learnt = train(objective, settings, pairs, teacher.checks(data, valid_source), work_dir)
  save_model(output, made, learnt, words.fingerprint())


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
