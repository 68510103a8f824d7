"""Train a target and a draft head together (Medusa-2; Cai et al., 2024; Stern et al., 2018)."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import Array

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.save import save_model
from specdec_jax.commands.teacher import MAX_NEW_TOKENS, Teacher
from specdec_jax.commands.train import bleu_of, checkpoint_config, open_fitting_vocabulary
from specdec_jax.data.text import read_lines
from specdec_jax.drafts.heads import DraftHead
from specdec_jax.errors import InputError, require_number
from specdec_jax.generate import outputs
from specdec_jax.models.families import Config
from specdec_jax.models.partitioning import make_mesh, param_shardings
from specdec_jax.train.batches import Batch, ParallelText
from specdec_jax.train.distillation import parallel_text
from specdec_jax.train.objectives import Divergence, Objective, model_objective
from specdec_jax.train.speculators import speculator_objective
from specdec_jax.train.trainer import TrainSettings, train


def train_jointly(
  data: str,
  sources: list[str] | None,
  targets: list[str],
  valid_source: str | None,
  valid_target: str | None,
  head: Callable[[Config], DraftHead],
  settings: TrainSettings,
  vocabulary: str,
  target: str,
  output: str,
  work_dir: str,
  start: str | None = None,
  texts: Literal["references", "beam_search"] = "references",
  num_beams: int = 4,
  head_weight: float = 0.2,
  target_rate: float = 0.05,
  dropout_rate: float = 0.1,
  divergence: Divergence = "forward_kl",
  stride: int = 4,
) -> None:
  """Train a target and a draft head together, and save both; an interrupted run resumes.

  The result is a new target and a head for it. Decoding with them is exact with respect to the new
  target, not to the original one.

  BLEU of the target on the validation text is computed before training and after each epoch. The
  validation loss, accuracy and acceptance length are those of `joint_objective`, on the original
  target's argmax outputs. The accuracy is therefore the share of their tokens that the new target
  predicts, too.

  Args:
    data: folder of the text files.
    sources: names of the source files, one sentence per line. The files are concatenated. None if
      the target is decoder-only.
    targets: names of the files of translations; for a decoder-only target, of texts.
    valid_source: name of the file of validation sentences, which the original target translates;
      None if the target is decoder-only.
    valid_target: name of the file with the translations of the validation sentences, for BLEU. It
      is not read if `valid_source` is None.
    head: function from the configuration of the target to the head.
    settings: number of epochs, learning rate of the head, sharding and other settings of training.
    vocabulary: vocabulary file of both.
    target: checkpoint of the original target, in any format that `load.load_pair` reads.
    output: folder for the new target (`target`) and its head (`speculator`), in bfloat16.
    work_dir: folder for checkpoints and metrics of this run.
    start: folder of a head that `train_speculator` trained for the original target with the same
      configuration (the first of Medusa's two stages). Training starts from its parameters. None to
      start from random parameters.
    texts: 'references', or 'beam_search' for the outputs of the original target's beam search for
      the sources (sequence-level distillation). These are written to `beam_search.npz` in
      `work_dir`, and read from there if the file exists.
    num_beams: number of beams of this search.
    head_weight: weight of the head's loss relative to that of the target.
    target_rate: learning rate of the target relative to that of the head.
    dropout_rate: dropout rate of the target in its own loss.
    divergence: divergence between the head and the texts (`objectives.divergences`).
    stride: number of tokens between anchors, the positions at which rounds start
      (`train.speculators.speculator_objective`).

  Raises:
    InputError: a number is out of range, 'beam_search' is given for a decoder-only target,
      `valid_source` is given without `valid_target`, the target does not fit the vocabulary, or the
      head in `start` does not fit `head`.
  """
  for name, number in {"head_weight": head_weight, "target_rate": target_rate}.items():
    require_number(name, number, 0, math.inf)
  if texts == "beam_search" and not sources:
    raise InputError("A beam search needs sources; use texts 'references' for this target.")
  if valid_source and not valid_target:
    raise InputError("BLEU needs the translations of valid_source; give their file, valid_target.")
  words, target_config = open_fitting_vocabulary(
    checkpoint_config(target, dropout_rate), vocabulary
  )
  mesh = make_mesh(settings.model_parallel)
  shardings = functools.partial(param_shardings, mesh=mesh)
  original = open_checkpoint(target).load(target_config, shardings=shardings)
  teacher = Teacher(words, target_config, original, mesh)
  text = parallel_text(words, data, sources, targets)
  if texts == "beam_search":
    lines = [line for file in sources or () for line in read_lines(f"{data}/{file}")]
    path = pathlib.Path(work_dir) / "beam_search.npz"
    text = beam_search_text(teacher, path, text, lines, num_beams)
  valid = teacher.validation_pairs(data, valid_source)

  def bleu(params) -> float:
    references = f"{data}/{valid_target}"
    return bleu_of(target_config, params["target"], words, valid.sources, references)

  new = head(target_config)
  rng = jax.random.key(settings.seed)
  head_params = open_checkpoint(start).load(new) if start else new.init(rng)
  objective = joint_objective(
    new,
    target_config,
    head_weight,
    target_rate,
    settings.label_smoothing,
    divergence,
    stride,
  )
  init = {"target": original, "head": head_params}
  params = train(objective, settings, text, valid, work_dir, init, bleu if valid_source else None)
  save_model(f"{output}/target", target_config, params["target"], words.fingerprint(), "bfloat16")
  save_model(f"{output}/speculator", new, params["head"], words.fingerprint(), "bfloat16")


def beam_search_text(
  teacher: Teacher, path: pathlib.Path, text: ParallelText, lines: list[str], num_beams: int
) -> ParallelText:
  """Return the sources of a text with the teacher's beam search outputs, from a file.

  This is sequence-level distillation (Kim and Rush, 2016). The file is created if it is missing.
  `lines` are the sources as text.
  """
  if not path.exists():
    pair = dataclasses.replace(teacher.pair, max_source_tokens=max(map(len, text.sources)))
    found = outputs(
      pair,
      lines,
      gamma=0,
      num_beams=num_beams,
      beam_scorer="t5x",
      max_new_tokens=MAX_NEW_TOKENS,
      batch_size=64,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    ParallelText(text.sources, [output.tokens.tolist() for output in found]).save(path)
  return ParallelText.load(path)


def joint_objective(
  head: DraftHead,
  target: Config,
  head_weight: float,
  target_rate: float,
  label_smoothing: float = 0.0,
  divergence: Divergence = "forward_kl",
  stride: int = 4,
) -> Objective:
  """Return the objective of a target and a draft head that are trained together (Medusa-2).

  The loss is that of the target (`objectives.model_objective`) plus `head_weight` times that of the
  head (`speculator_objective`), whose gradient reaches the target, too, unless the head is of kind
  'drafter'. Both losses have the labels of the batch. The parameters are {"target": ..., "head":
  ...}. The validation scores are this loss, the accuracy of the target, and the acceptance length.

  Args:
    head: the draft head.
    target: configuration of the target, with the dropout rate of training. Dropout applies to the
      target's own loss only.
    head_weight: weight of the head's loss.
    target_rate: learning rate of the target relative to that of the head.
    label_smoothing: label smoothing of the target's loss.
    divergence: divergence between the distribution of the head and the labels.
    stride: distance between anchors, in tokens.
  """
  backbone = model_objective(target, label_smoothing)
  objective = speculator_objective(head, target, (), divergence, stride)

  def init(rng: Array) -> Any:
    return {"target": backbone.init(rng), "head": objective.init(rng)}

  def loss(params, frozen: Any, batch: Batch, rng: Array, progress: Array) -> Array:
    dropout_rng, anchor_rng = jax.random.split(rng)
    of_target = backbone.loss(params["target"], frozen, batch, dropout_rng, progress)
    of_head = objective.loss(params["head"], params["target"], batch, anchor_rng, progress)
    return of_target + head_weight * of_head

  def scores(params, frozen: Any, batch: Batch) -> dict[str, Array]:
    of_target = backbone.scores(params["target"], frozen, batch)
    of_head = objective.scores(params["head"], params["target"], batch)
    valid_loss = of_target["valid_loss"] + head_weight * of_head["valid_loss"]
    return {**of_target, **of_head, "valid_loss": valid_loss}

  return Objective(init, loss, scores, rates={"target": target_rate, "head": 1.0})
