"""The paper's Tables 2 to 5 and Figures 1 to 5, one command each: `specdec reproduce table2`.

Each row of Tables 2 and 4 is a speedup with a gamma of its own, and each row of Tables 3 and 5 is
an alpha. Models are checkpoints, or stand-ins for a machine without them. Records that exist are
not measured again.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax

from experiments.figures import figures
from experiments.paper.paper import load_table
from experiments.paper.paper_tables import paper_table
from experiments.table3.acceptance import acceptance
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import DraftSpec, Loaded
from specdec_jax.drafts.heads import AnyConfig
from specdec_jax.drafts.ngram import bigram, unigram
from specdec_jax.drafts.uniform import uniform
from specdec_jax.errors import InputError
from specdec_jax.load import EMBEDDED, asset, checkpoint_draft, load_pair
from specdec_jax.measure.records import Record, read, results_path
from specdec_jax.measure.roofline import memory_bandwidth
from specdec_jax.measure.speed import Baseline, own_baseline, speed_steps
from specdec_jax.measure.sweep import measure_missing, show
from specdec_jax.measure.tables import MISSING, Table, measured_with, number_text
from specdec_jax.models.families import init_params
from specdec_jax.models.sizes import named_config
from specdec_jax.pair import Pair
from specdec_jax.random_models import random_draft, random_pair

TABLES = {"table2": 2, "table3": 3, "table4": 4, "table5": 5}
FIGURES = ("figure1", "figure2", "figure3", "figure4", "figure5")
TARGET = "T5-XXL"
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_NGRAMS = {"unigram": unigram, "bigram": bigram}

Row = Mapping[str, Any]
LoadsDraft = Callable[[Loaded], DraftSpec]


@dataclasses.dataclass(frozen=True)
class Task:
  """A task of the paper.

  Attributes:
    name: name of the task in records.
    sources: function that returns the sources.
    target_text: function that returns the path of reference outputs, one per line, in which n-grams
      are counted.
    max_source_tokens: length to which sources are truncated.
    max_new_tokens: limit for each output.
  """

  name: str
  sources: Callable[[], Sequence[str]]
  target_text: Callable[[], str]
  max_source_tokens: int = 256
  max_new_tokens: int = 128


@dataclasses.dataclass(frozen=True)
class StandIns:
  """Models for a machine without checkpoints; see `stand_ins`.

  Speeds are measured with models with random weights, which simulate the paper's alpha. Alphas are
  measured with the bundled pair.

  Attributes:
    sizes: size of T5 1.1 in place of each model of the paper.
    dtype: dtype of the models.
  """

  sizes: Mapping[str, str] = dataclasses.field(
    default_factory=lambda: {
      "T5-XXL": "base",
      **dict.fromkeys(("T5-large", "T5-base", "T5-small"), "small"),
    }
  )
  dtype: str = "float32"

  def config(self, name: str, is_speed: bool) -> AnyConfig | None:
    """Return the configuration of a model of the paper, or None if it is not available.

    Args:
      name: name of the model.
      is_speed: whether speeds are measured with it, not alphas.
    """
    if is_speed:
      return named_config("1.1", self.sizes[name]) if name in self.sizes else None
    bundled = {TARGET: "target", "T5-small": "draft"}
    return open_checkpoint(str(EMBEDDED / bundled[name])).config if name in bundled else None

  def note(self, is_speed: bool) -> str:
    """Describe the models that are measured with."""
    sizes = ", ".join(f"T5 1.1 {size} for {name}" for name, size in self.sizes.items())
    models = f"random weights and the paper's alpha, simulated ({sizes})"
    return f"Stand-ins, not the paper's models: {models if is_speed else 'the bundled pair'}."

  def pair(self, draft: str, task: Task, alpha: float) -> Pair:
    """Return the target with a draft; stand-ins simulate `alpha`."""
    pair = _random_target(self.sizes[TARGET], self.dtype)
    model = dataclasses.replace(pair.target.model, alpha=alpha)
    pair = pair.with_draft(random_draft(pair.target, self.sizes[draft], dtype=self.dtype))
    pair = pair.with_target(model=model)
    return dataclasses.replace(pair, task=task.name, max_source_tokens=task.max_source_tokens)

  def alpha_drafts(self, names: Sequence[str], task: Task) -> tuple[Pair, list[LoadsDraft]]:
    """Return a pair, and functions that load further drafts, whose alphas are measured."""
    pair = load_pair(draft=asset("multi30k_ende/draft"))
    return pair, _ngram_drafts(names, task)

  def example(self, task: Task) -> tuple[Pair, str]:
    """Return a pair and a text whose rounds are drawn in Figure 1."""
    # The GPT-like pair, because the paper's figure has a model without an encoder.
    names = "gpt_like_4m", "gpt_like_600k", "vocabulary.txt"
    return load_pair(*(f"experiments/gpt_like/weights/{name}" for name in names)), ""


def stand_ins(true_sizes: bool | None = None) -> StandIns:
  """Return stand-ins for the paper's models: of its own sizes in bfloat16, or small ones.

  Args:
    true_sizes: whether they have the paper's sizes (24 GB); None: on an accelerator.
  """
  if true_sizes is None:
    true_sizes = jax.default_backend() != "cpu"
  sizes = {name: name.removeprefix("T5-").lower() for name in StandIns().sizes}
  return StandIns(sizes, "bfloat16") if true_sizes else StandIns()


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """Models from checkpoints.

  Attributes:
    paths: path of a checkpoint by the model's name in the paper, such as 'T5-XXL'. Rows of the
      paper's tables whose models have no path are left out.
    vocabulary: path of the vocabulary.
    dtype: dtype of the models.
    sizes: version and size of models of T5, such as ('1.0', 'xxl'), so that a dry run does not have
      to open their checkpoints.
  """

  paths: Mapping[str, str]
  vocabulary: str | None = None
  dtype: str = "bfloat16"
  sizes: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

  def config(self, name: str, is_speed: bool) -> AnyConfig | None:
    if name not in self.paths:
      return None
    if name in self.sizes:
      return named_config(*self.sizes[name])
    return open_checkpoint(self.paths[name]).config

  def note(self, is_speed: bool) -> str:
    return f"Checkpoints: {', '.join(f'{name}: {path}' for name, path in self.paths.items())}."

  def pair(self, draft: str, task: Task, alpha: float) -> Pair:
    pair = _target(self.paths[TARGET], self.vocabulary, self.dtype)
    pair = dataclasses.replace(pair, task=task.name, max_source_tokens=task.max_source_tokens)
    return pair.with_draft(checkpoint_draft(pair.target, self.paths[draft], self.dtype))

  def alpha_drafts(self, names: Sequence[str], task: Task) -> tuple[Pair, list[LoadsDraft]]:
    first, *others = self._available(names)
    loads = [
      functools.partial(checkpoint_draft, model=self.paths[name], dtype=self.dtype)
      for name in others
    ]
    return self.pair(first, task, 1.0), [*loads, *_ngram_drafts(names, task)]

  def example(self, task: Task) -> tuple[Pair, str]:
    draft = self._available([name for name in self.paths if name != TARGET])[0]
    return self.pair(draft, task, 1.0), task.sources()[0]

  def _available(self, names: Sequence[str]) -> list[str]:
    """Return the names that have a path; raise InputError if there is none."""
    available = [name for name in names if name in self.paths]
    if not available:
      raise InputError("paths has no draft of this table; give one, such as 'T5-small'.")
    return available


Models = StandIns | Checkpoints


@functools.lru_cache(1)
def _random_target(size: str, dtype: str) -> Pair:
  return random_pair(size, uniform, 1.0, dtype=dtype)


@functools.lru_cache(1)  # the target is loaded once for all of its drafts
def _target(target: str, vocabulary: str | None, dtype: str) -> Pair:
  return load_pair(target, uniform, vocabulary, dtype=dtype)


def _ngram_drafts(names: Sequence[str], task: Task) -> list[LoadsDraft]:
  ngrams = [draft for name, draft in _NGRAMS.items() if name in map(str.casefold, names)]
  return [functools.partial(draft, path=task.target_text()) for draft in ngrams]


class Group(NamedTuple):
  """Rows of a table with the same task and draft.

  Attributes:
    task: name of the task in the paper.
    draft: name of the draft.
    rows: rows of the table with this task and draft.
  """

  task: str
  draft: str
  rows: tuple[Row, ...]


def groups(number: int, models: Models) -> list[Group]:
  """Return the rows of a table that can be measured with the given models, by task and draft."""
  found: dict[tuple[str, str], list[Row]] = {}
  for row in load_table(number):
    target, task = _target_and_task(row)
    draft = _canonical(str(row["m_q"]))
    is_ngram = draft.casefold() in _NGRAMS
    if target == TARGET and (is_ngram or models.config(draft, number in (2, 4)) is not None):
      found.setdefault((task, draft), []).append(row)
  return [Group(*names, tuple(rows)) for names, rows in found.items()]


def reproduce(
  names: Sequence[str],
  models: Models,
  tasks: Mapping[str, Task],
  output_dir: str,
  num_texts: int | None = None,
  repeats: int = 3,
  min_tokens: int = 10_000,
  baselines: Sequence[Callable[[Pair], Baseline]] = (own_baseline,),
  dry_run: bool = False,
) -> None:
  """Measure tables of the paper, and print each of them next to the paper's numbers.

  Figures are drawn to files in `output_dir`. Figures 2 to 4 are closed forms, and Figure 5 needs a
  measurement.

  Args:
    names: keys of `TABLES` or members of `FIGURES`.
    models: `Checkpoints` or `StandIns`.
    tasks: tasks by their names in the paper, 'EnDe' and 'CNNDM'. Rows with another task are left
      out.
    output_dir: folder for the records. Settings that are recorded there are not measured again.
    num_texts: number of sources of each task on which speeds are measured; None for all.
    repeats: number of timed decodes of each text.
    min_tokens: number of generated tokens on which alpha is measured; the paper uses 10,000.
    baselines: functions from a pair to a baseline of the speedups; each is measured.
    dry_run: whether to print what would be measured, with memory and time, and measure nothing.

  Raises:
    InputError: there is no such table or figure, or no row of a table can be measured.
  """
  for name in names or ("",):
    if name not in (*TABLES, *FIGURES):
      known = ", ".join([*TABLES, *FIGURES])
      raise InputError(f"There is no table or figure {name!r} to reproduce; there are {known}.")
  output = pathlib.Path(output_dir)
  for name in names:
    if name in FIGURES[:4]:
      if not dry_run:
        _save_figure(name, output, [], models, tasks)
      continue
    number = TABLES.get(name, 2)  # Figure 5 shows the first rows of Table 2
    found = [group for group in groups(number, models) if group.task in tasks]
    if not found:
      raise InputError(f"No row of {name} can be measured with these models and tasks.")
    found = found if name in TABLES else found[:1]
    is_speed = number in (2, 4)
    folder = output / ("speeds" if is_speed else f"alphas{number}")
    if is_speed or dry_run:
      show([_plan(name, found, models, tasks, num_texts, repeats, is_speed)], str(folder))
    if dry_run:
      continue
    measured = []
    if is_speed:
      for group, baseline in itertools.product(found, baselines):
        task = tasks[group.task]
        measured += _measure_speeds(group, models, task, folder, num_texts, repeats, baseline)
    else:
      _measure_alphas(found, models, tasks, folder, min_tokens)
    if name == "table2":
      show([rows_table(measured)], str(folder))
    elif name in TABLES:
      records = [r for path in sorted(folder.glob("*/results.jsonl")) for r in read(path)]
      show([paper_table(number, records, load_table(number))], str(folder))
    else:
      _save_figure(name, output, read(_results(folder, found[0])), models, tasks)


def _results(folder: pathlib.Path, group: Group) -> pathlib.Path:
  """Return the file of the records of a group of speeds."""
  return folder / f"{group.task}_{group.draft}" / "results.jsonl"


def _measure_speeds(
  group: Group,
  models: Models,
  task: Task,
  folder: pathlib.Path,
  num_texts: int | None,
  repeats: int,
  baseline: Callable[[Pair], Baseline],
) -> list[tuple[Row, Record]]:
  """Measure the speedup of each row of a group, with its own gamma."""
  texts, measured = task.sources()[:num_texts], []
  results = results_path(_results(folder, group).parent)
  for row in group.rows:
    pair = models.pair(group.draft, task, row["alpha"])
    settings = DecodeSettings(Sampling(row["temperature"]), max_new_tokens=task.max_new_tokens)
    gamma = int(row["gamma"])
    steps = speed_steps(pair, texts, [settings], [gamma], repeats, baseline(pair))
    measured += [(row, record) for record in measure_missing(results, steps)]
  return measured


def rows_table(measured: Sequence[tuple[Row, Record]]) -> Table:
  """Return a table of rows of the paper's Table 2, each with its measurement."""
  columns = "task|draft|temperature|gamma|paper alpha|alpha|c|v|predicted|speed|paper speed"
  rows, records = [], [r for _, r in measured]
  for row, r in measured:
    cells = f"{row['task']}|{row['m_q']}|{row['temperature']:g}|{row['gamma']:g}|{row['alpha']:.2f}"
    ours = r.outputs.alpha, r.times.c, r.times.verify_cost, r.predicted, r.times.speedup
    numbers = map(number_text, ours, (".2f", ".3f", ".2f", ".2f", ".2f"))
    rows.append((*cells.split("|"), *numbers, f"{row['speed']:.1f}", _measured_as(r)))
  notes = (
    "c, v: measured costs of a draft step and of verification. predicted: with them and alpha. "
    "speed: measured. The paper's speeds are on a TPU v4, over T5X.",
    *["alpha is simulated: a setting, not a measurement."]
    * any(r.models.simulated for r in records),
    measured_with(records),
  )
  return Table("Table 2, row by row", (*columns.split("|"), "measured with"), tuple(rows), notes)


def _measured_as(r: Record) -> str:
  over = "" if r.settings.baseline == "own" else f", over {r.settings.baseline}"
  return f"{r.models.target}, {r.models.draft}, {r.models.dtype}, {r.device}{over}"


def _save_figure(
  name: str,
  output: pathlib.Path,
  records: Sequence[Record],
  models: Models,
  tasks: Mapping[str, Task],
) -> None:
  """Draw a figure of the paper to a file in the folder `output`, and print its path.

  Figure 5 is drawn from the records at temperature 0.
  """
  if name == "figure1":
    pair, text = models.example([*tasks.values()][0])
    figure = figures.trace(pair, text, temperature=float(pair.continues))
  elif name == "figure2":
    figure = figures.tokens_figure()
  elif name == "figure3":
    figure = figures.gamma_figure()
  elif name == "figure4":
    figure = figures.operations_figure(load_table(1))
  else:
    figure = figures.timeline_figure([r for r in records if r.settings.temperature == 0])
  output.mkdir(parents=True, exist_ok=True)
  figures.save(figure, output / f"{name}.svg")
  print(output / f"{name}.svg")


def _measure_alphas(
  found: Sequence[Group],
  models: Models,
  tasks: Mapping[str, Task],
  folder: pathlib.Path,
  min_tokens: int,
) -> None:
  """Measure the alphas of all drafts on the same text of the target."""
  for name in dict.fromkeys(group.task for group in found):
    of_task = [group for group in found if group.task == name]
    rows = [row for group in of_task for row in group.rows]
    pair, drafts = models.alpha_drafts([group.draft for group in of_task], tasks[name])
    acceptance(
      pair,
      tasks[name].sources(),
      str(folder / name),
      [Sampling(temperature) for temperature in sorted({row["temperature"] for row in rows})],
      drafts,
      max_new_tokens=tasks[name].max_new_tokens,
      min_tokens=min_tokens,
      leniences=sorted({row.get("lenience", 1.0) for row in rows}, reverse=True),
    )


def _plan(
  name: str,
  found: Sequence[Group],
  models: Models,
  tasks: Mapping[str, Task],
  num_texts: int | None,
  repeats: int,
  is_speed: bool,
) -> Table:
  """Return a table of the rows that would be measured, with memory and an upper bound on time.

  The bound assumes that a forward pass takes as long as reading the parameters of the decoder from
  memory, that all outputs have `max_new_tokens` tokens, and the speedup of the paper.
  """
  target_bytes, step_bytes = _num_bytes(models, TARGET, is_speed)
  seconds_per_step, cells = step_bytes / memory_bandwidth(), []
  counts = {task: _num_sources(tasks[task], num_texts) for task in {group.task for group in found}}
  for task, draft, rows in found:
    draft_bytes = 0 if draft.casefold() in _NGRAMS else _num_bytes(models, draft, is_speed)[0]
    for row in rows:
      gamma = f"{row['gamma']:g}" if is_speed else MISSING
      minutes = None
      if is_speed:
        num_steps = repeats * counts[task] * tasks[task].max_new_tokens
        speed = row.get("speed") or row["emp"]
        minutes = num_steps * seconds_per_step * (1 + 1 / speed) / 60
      cells.append(
        (
          task,
          draft,
          f"{row['temperature']:g}",
          gamma,
          f"{row['alpha']:.2f}",
          f"{row.get('lenience', 1):g}",
          f"{counts[task]}" if is_speed else MISSING,
          f"{(target_bytes + draft_bytes) / 1e9:.2f}",
          number_text(minutes, ".1f"),
        )
      )
  notes = (
    f"{models.note(is_speed)} Parameters in {models.dtype}; the memory is theirs.",
    f"The time is a bound for outputs of {TARGET} with the maximum number of tokens. Compilation "
    "takes one to two minutes more for each row of the paper's sizes.",
  )
  columns = "task|draft|temperature|gamma|paper alpha|lenience|texts|memory, GB|minutes"
  return Table(f"{name}: rows to measure", tuple(columns.split("|")), tuple(cells), notes, {})


def _num_sources(task: Task, num_texts: int | None) -> int:
  """Return the number of sources of a task; `num_texts` if they cannot be read here."""
  try:
    return len(task.sources()[:num_texts])
  except InputError:
    if num_texts is None:
      raise
    return num_texts


def _num_bytes(models: Models, name: str, is_speed: bool) -> tuple[int, int]:
  """Return the bytes of all parameters of a model, and of those that a decoding step reads."""
  config = models.config(name, is_speed)
  if config is None:
    raise InputError(f"There is no model for {name}.")
  init: Any = functools.partial(init_params, cast(Any, config))
  params = jax.eval_shape(init, jax.random.key(0))
  sizes = {part: sum(x.size for x in jax.tree.leaves(of)) for part, of in params.items()}
  per_param = _DTYPE_BYTES[models.dtype]
  unused = sizes.get("encoder", 0) + (0 if config.tied_logits else sizes.get("token_embedder", 0))
  total = sum(sizes.values())
  return total * per_param, (total - unused) * per_param


def _canonical(name: str) -> str:
  """Return the name of a model as Table 2 prints it: T5-small for T5-SMALL (77M)."""
  name = name.partition(" (")[0]
  return f"T5-{name[3:].lower()}" if name.upper().startswith("T5-") else name.capitalize()


def _target_and_task(row: Row) -> tuple[str, str]:
  """Return the target and the task of a row; see `paper_tables`."""
  target, _, task = str(row.get("m_p", f"{TARGET} ({row.get('task', 'EnDe')})")).partition(" (")
  return target, task.rstrip(")")
