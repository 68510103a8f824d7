"""The paper's Tables 2 to 5 and Figures 1 to 5, one command each: `specdec reproduce table2`.

Each row of Tables 2 and 4 is a speedup with a gamma of its own, and each row of Tables 3 and 5 is
an alpha. Models are checkpoints, or stand-ins for a machine without them. Texts and checkpoints are
opened before weights are loaded, a target is loaded once, and rows that cannot be measured are
named. Records that exist are not measured again.
"""

import dataclasses
import functools
import gc
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from experiments.lib.records import measured_with
from experiments.paper.paper import PAPERS_OWN, load_table, target_and_task
from experiments.paper.paper_tables import paper_table
from experiments.table3.acceptance import acceptance
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import DraftSpec, Loaded
from specdec_jax.data.text import read_lines
from specdec_jax.drafts.heads import AnyConfig
from specdec_jax.drafts.ngram import bigram, unigram
from specdec_jax.drafts.uniform import uniform
from specdec_jax.errors import InputError
from specdec_jax.load import BUNDLED, asset, checkpoint_draft, load_pair
from specdec_jax.measure.records import Record, read, results_path
from specdec_jax.measure.roofline import memory_bandwidth
from specdec_jax.measure.speed import Baseline, own_baseline, speed_steps
from specdec_jax.measure.sweep import measure_missing, show
from specdec_jax.measure.tables import Table, number_text
from specdec_jax.models.families import init_params
from specdec_jax.models.sizes import named_config
from specdec_jax.pair import Pair
from specdec_jax.random_models import random_draft, random_pair

TABLES = {"table2": 2, "table3": 3, "table4": 4, "table5": 5}
FIGURES = ("figure1", "figure2", "figure3", "figure4", "figure5")
TARGET = "T5-XXL"
_VOCABULARY = "multi30k_ende/vocabulary.model"
_NGRAMS = {"unigram": unigram, "bigram": bigram}
_OTHER_TARGETS = {
  "GPT-like (97M)": "never published; `specdec table3_gpt_like` measures a smaller pair",
  "LaMDA (137B)": "never published; experiments/table3/lamda.gin runs only the shapes",
}

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
    paths: checkpoints fine-tuned on this task, by the model's name in the paper; they take
      precedence over those of `Checkpoints`.
  """

  name: str
  sources: Callable[[], Sequence[str]]
  target_text: Callable[[], str]
  max_source_tokens: int = 256
  max_new_tokens: int = 128
  paths: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """Models from checkpoints.

  Attributes:
    paths: path of a checkpoint by the model's name in the paper, such as 'T5-XXL', for tasks that
      do not name their own (`Task.paths`).
    vocabulary: path of the vocabulary of all models.
    dtype: dtype of the models.
    version: version of T5, such as '1.0', so that a dry run does not have to open checkpoints.
    papers_own: whether these are the weights that the paper measured. Only then do records count as
      measured with the paper's own models.
  """

  paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
  vocabulary: str | None = None
  dtype: str = "bfloat16"
  version: str | None = None
  papers_own: bool = False

  def config(self, name: str, task: Task, is_speed: bool) -> AnyConfig | None:
    if name not in self._paths(task):
      return None
    if self.version is not None:
      return named_config(self.version, name.removeprefix("T5-").lower())
    return open_checkpoint(self._paths(task)[name]).config

  def open(self, name: str, task: Task) -> None:
    checkpoint = open_checkpoint(self._paths(task)[name])
    tied = getattr(checkpoint.config, "tied_logits", False)
    if self.papers_own and (tied or "flan" in checkpoint.path.casefold()):
      raise InputError(
        f"{checkpoint.path} is T5 1.0 or Flan-T5 and not the paper's {name}; remove papers_own."
      )

  def note(self, tasks: Sequence[Task], is_speed: bool) -> str:
    paths = dict.fromkeys(
      f"{name}: {path}" for task in tasks for name, path in self._paths(task).items()
    )
    others = "" if self.papers_own else ", not the paper's models"
    return f"Checkpoints{others}: {', '.join(paths)}."

  def pair(self, draft: str, task: Task, alpha: float) -> Pair:
    pair = self._target(task)
    return pair.with_draft(self._draft(pair.target, draft, task))

  def alpha_drafts(self, names: Sequence[str], task: Task) -> tuple[Pair, list[LoadsDraft]]:
    loads: list[LoadsDraft] = [
      functools.partial(self._draft, name=name, task=task)
      for name in names
      if name.casefold() not in _NGRAMS
    ]
    first, *others = loads + _ngram_drafts(names, task)
    pair = self._target(task)
    return pair.with_draft(first(pair.target)), others

  def example(self, task: Task) -> tuple[Pair, str, int]:
    text, names = task.sources()[0], [name for name in self._paths(task) if name != TARGET]
    return self.pair(names[0], task, 1.0), text, 0

  def _target(self, task: Task) -> Pair:
    key = self._paths(task)[TARGET], self.vocabulary, self.dtype
    if key not in _LOADED:
      _LOADED.clear()  # before the next is loaded: two targets may not fit in memory
      gc.collect()
      _LOADED[key] = load_pair(key[0], uniform, self.vocabulary, dtype=self.dtype)
    pair = _LOADED[key]
    if self.papers_own:
      pair = pair.with_target(name=PAPERS_OWN + TARGET)
    return dataclasses.replace(pair, task=task.name, max_source_tokens=task.max_source_tokens)

  def _draft(self, target: Loaded, name: str, task: Task) -> DraftSpec:
    draft = checkpoint_draft(target, self._paths(task)[name], dtype=self.dtype)
    if not self.papers_own:
      return draft
    _, comma, change = draft.name.partition(",")  # such as int8 weights
    return dataclasses.replace(draft, name=PAPERS_OWN + name + comma + change)

  def _paths(self, task: Task) -> Mapping[str, str]:
    return {**self.paths, **task.paths}


@dataclasses.dataclass(frozen=True)
class TrainedStandIns(Checkpoints):
  """The bundled target for T5-XXL, and for each of the paper's drafts one of another size.

  They were trained on captions, so rows of other texts have no stand-ins.
  """

  paths: Mapping[str, str] = dataclasses.field(
    default_factory=lambda: {
      TARGET: str(BUNDLED / "target"),
      "T5-small": "experiments/sizes/drafts/300k",
      "T5-base": "experiments/sizes/drafts/900k",
      "T5-large": str(BUNDLED / "draft"),
    }
  )
  vocabulary: str | None = dataclasses.field(default_factory=lambda: asset(_VOCABULARY))
  dtype: str = "float32"

  def note(self, tasks: Sequence[Task], is_speed: bool) -> str:
    return (
      "Stand-ins, not the paper's models: the bundled target for T5-XXL, and drafts of 0.3, 0.9 "
      "and 2.4 million parameters for T5-small, T5-base and T5-large."
    )

  def example(self, task: Task) -> tuple[Pair, str, int]:
    # The GPT-like pair, because the paper's figure has a model without an encoder.
    names = "gpt_like_4m", "gpt_like_600k", "vocabulary.txt"
    # The seed of experiments/figures/README.md: as many tokens and passes as in the paper.
    return load_pair(*(f"experiments/gpt_like/weights/{name}" for name in names)), "", 14

  def _paths(self, task: Task) -> Mapping[str, str]:
    return self.paths if task.name == "captions" else {}


@dataclasses.dataclass(frozen=True)
class RandomStandIns(TrainedStandIns):
  """Stand-ins whose speeds are measured with random weights, and with the paper's simulated alpha.

  Attributes:
    sizes: size of T5 1.1 in place of each model of the paper.
  """

  sizes: Mapping[str, str] = dataclasses.field(
    default_factory=lambda: {
      f"T5-{size}": size.lower() for size in ("XXL", "large", "base", "small")
    }
  )
  dtype: str = "bfloat16"

  def config(self, name: str, task: Task, is_speed: bool) -> AnyConfig | None:
    if not is_speed:
      return super().config(name, task, is_speed)
    return named_config("1.1", self.sizes[name]) if name in self.sizes else None

  def open(self, name: str, task: Task) -> None:
    """Random models need no checkpoint."""

  def note(self, tasks: Sequence[Task], is_speed: bool) -> str:
    if not is_speed:
      return super().note(tasks, is_speed)
    sizes = ", ".join(f"T5 1.1 {size} for {name}" for name, size in self.sizes.items())
    models = f"random weights and the paper's alpha, simulated ({sizes})"
    return f"Stand-ins, not the paper's models: {models}."

  def pair(self, draft: str, task: Task, alpha: float) -> Pair:
    pair = _random_target(self.sizes[TARGET], self.dtype)
    model = dataclasses.replace(pair.target.model, alpha=alpha)
    pair = pair.with_draft(random_draft(pair.target, self.sizes[draft], dtype=self.dtype))
    pair = pair.with_target(model=model)
    return dataclasses.replace(pair, task=task.name, max_source_tokens=task.max_source_tokens)


def stand_ins(true_sizes: bool | None = None) -> TrainedStandIns:
  """Return stand-ins for the paper's models: trained small ones, or random ones of its own sizes.

  Args:
    true_sizes: whether speeds are measured with models of the paper's sizes (24 GB); None: on an
      accelerator.
  """
  if true_sizes is None:
    true_sizes = jax.default_backend() != "cpu"
  return RandomStandIns() if true_sizes else TrainedStandIns()


_LOADED: dict[tuple[str, str | None, str], Pair] = {}  # the last target of `Checkpoints`


@functools.lru_cache(1)
def _random_target(size: str, dtype: str) -> Pair:
  return random_pair(size, uniform, 1.0, dtype=dtype)


def _ngram_drafts(names: Sequence[str], task: Task) -> list[LoadsDraft]:
  ngrams = [draft for name, draft in _NGRAMS.items() if name in map(str.casefold, names)]
  return [functools.partial(draft, target_text=task.target_text()) for draft in ngrams]


class Group(NamedTuple):
  """Rows of a table with the same target, task and draft, by their names in the paper."""

  target: str
  task: str
  draft: str
  rows: tuple[Row, ...]
  missing: str  # reason why they cannot be measured; '' if they can


def groups(number: int, models: Checkpoints, tasks: Mapping[str, Task]) -> list[Group]:
  """Return the rows of a table by target, task and draft."""
  found: dict[tuple[str, str, str], list[Row]] = {}
  for row in load_table(number):
    names = *target_and_task(row), _canonical(str(row["m_q"]))
    found.setdefault(names, []).append(row)
  is_speed = number in (2, 4)

  def missing(target: str, task: str, draft: str) -> str:
    if target != TARGET:
      return _OTHER_TARGETS[target]
    if task not in tasks:
      return "no texts are given for this task"
    for name in (TARGET, draft):
      if name.casefold() not in _NGRAMS and models.config(name, tasks[task], is_speed) is None:
        return f"no model is given for {name}"
    return ""

  return [Group(*names, tuple(rows), missing(*names)) for names, rows in found.items()]


def _not_measured(found: Sequence[Group]) -> list[str]:
  """Return one sentence per target, task and reason about rows that cannot be measured."""
  drafts: dict[tuple[str, str], list[str]] = {}
  for target, task, draft, _, missing in found:
    if missing:
      label = target if target != TARGET else f"{target} ({task})"
      drafts.setdefault((label, missing), []).append(draft)
  return [
    f"Not measured: {label} with {', '.join(names)}: {missing}."
    for (label, missing), names in drafts.items()
  ]


def reproduce(
  names: Sequence[str],
  models: Checkpoints,
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
    models: checkpoints or stand-ins.
    tasks: tasks by their names in the paper, 'EnDe' and 'CNNDM'. Rows with another task are not
      measured.
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
  output, plans = pathlib.Path(output_dir), []
  for name in (name for name in names if name not in FIGURES[:4]):
    number = TABLES.get(name, 2)  # Figure 5 shows the first rows of Table 2
    of_table = groups(number, models, tasks)
    found = [group for group in of_table if not group.missing]
    notes = _not_measured(of_table)
    if not found:
      raise InputError(f"No row of {name} can be measured. {' '.join(notes)}")
    found = found if name in TABLES else found[:1]
    is_speed = number in (2, 4)
    folder = output / ("speeds" if is_speed else f"alphas{number}")
    plans.append((name, number, folder, found))
    table = _plan(name, found, models, tasks, num_texts, repeats, is_speed)
    show([dataclasses.replace(table, notes=(*table.notes, *notes))], str(folder))
  if dry_run:
    return
  _open_inputs([group for *_, found in plans for group in found], models, tasks)
  measured: dict[str, list[tuple[Row, Record]]] = {name: [] for name in names}
  for task, (name, number, folder, found) in itertools.product(tasks, plans):
    of_task = [group for group in found if group.task == task]
    if of_task and number not in (2, 4):
      _measure_alphas(of_task, models, tasks[task], folder / task, min_tokens)
      continue
    for group, baseline in itertools.product(of_task, baselines):
      measured[name] += _measure_speeds(
        group, models, tasks[task], folder, num_texts, repeats, baseline
      )
  for name, number, folder, found in plans:
    if name == "table2":
      show([rows_table(measured[name])], str(folder))
    elif name in TABLES:
      records = [r for path in sorted(folder.glob("*/results.jsonl")) for r in read(path)]
      show([paper_table(number, records, load_table(number))], str(folder))
    else:
      _save_figure(name, output, read(_results(folder, found[0])), models, tasks)
  for name in (name for name in names if name in FIGURES[:4]):
    _save_figure(name, output, [], models, tasks)


def _open_inputs(found: Sequence[Group], models: Checkpoints, tasks: Mapping[str, Task]) -> None:
  """Open all texts and checkpoints, so that one that is missing is reported first."""
  used = dict.fromkeys((group.task, name) for group in found for name in (TARGET, group.draft))
  for task in dict.fromkeys(task for task, _ in used):
    tasks[task].sources()
  for task, name in used:
    is_ngram = name.casefold() in _NGRAMS
    read_lines(tasks[task].target_text(), 1) if is_ngram else models.open(name, tasks[task])


def _results(folder: pathlib.Path, group: Group) -> pathlib.Path:
  """Return the file of the records of a group of speeds."""
  return folder / f"{group.task}_{group.draft}" / "results.jsonl"


def _measure_speeds(
  group: Group,
  models: Checkpoints,
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
  rows, records = [], [r for _, r in measured]
  alpha = "simulated alpha" if any(r.models.simulated for r in records) else "measured alpha"
  columns = f"task|draft|temperature|gamma|paper alpha|{alpha}|measured c|measured v|predicted"
  columns += "|measured speed|paper speed|measured with"
  for row, r in measured:
    cells = f"{row['task']}|{row['m_q']}|{row['temperature']:g}|{row['gamma']:g}|{row['alpha']:.2f}"
    ours = r.outputs.alpha, r.times.c, r.times.verify_cost, r.predicted, r.times.speedup
    numbers = map(number_text, ours, (".2f", ".3f", ".2f", ".2f", ".2f"))
    rows.append((*cells.split("|"), *numbers, f"{row['speed']:.1f}", _measured_as(r)))
  notes = (
    "predicted: the speed by alpha, c (of a draft step) and v (of verification) of this row. A "
    "simulated alpha is a setting. The paper's speeds are on a TPU v4, over T5X.",
    measured_with(records),
  )
  return Table("Table 2, row by row", tuple(columns.split("|")), tuple(rows), notes)


def reproduced_table(records: Sequence[Record]) -> Table:
  """Return `rows_table` of trained stand-ins, for the rows of the paper that have records."""
  names = {name: pathlib.Path(path).name for name, path in TrainedStandIns().paths.items()}
  settings = ((r.models.draft, r.settings.temperature, r.settings.gamma) for r in records)
  found = dict(zip(settings, records))
  rows = [
    (row, found.get((names[row["m_q"]], row["temperature"], row["gamma"])))
    for row in load_table(2)
    if row["task"] == "EnDe"
  ]
  return rows_table([(row, record) for row, record in rows if record])


def _measured_as(r: Record) -> str:
  over = "" if r.settings.baseline == "own" else f", over {r.settings.baseline}"
  return f"{r.models.target}, {r.models.draft}, {r.models.dtype}, {r.device}{over}"


def _save_figure(
  name: str,
  output: pathlib.Path,
  records: Sequence[Record],
  models: Checkpoints,
  tasks: Mapping[str, Task],
) -> None:
  """Draw a figure of the paper to a file in the folder `output`, and print its path.

  Figure 5 is drawn from the records at temperature 0.
  """
  from experiments.figures import figures  # needs matplotlib, which tables do not

  if name == "figure1":
    pair, text, seed = models.example([*tasks.values()][0])
    figure = figures.trace(pair, text, temperature=float(pair.continues), seed=seed)
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
  found: Sequence[Group], models: Checkpoints, task: Task, folder: pathlib.Path, min_tokens: int
) -> None:
  """Measure the alphas of all drafts of a task on the same text of the target."""
  rows = [row for group in found for row in group.rows]
  pair, drafts = models.alpha_drafts([group.draft for group in found], task)
  acceptance(
    pair,
    task.sources(),
    str(folder),
    [Sampling(temperature) for temperature in sorted({row["temperature"] for row in rows})],
    drafts,
    max_new_tokens=task.max_new_tokens,
    min_tokens=min_tokens,
    leniences=sorted({row.get("lenience", 1.0) for row in rows}, reverse=True),
  )


def _plan(
  name: str,
  found: Sequence[Group],
  models: Checkpoints,
  tasks: Mapping[str, Task],
  num_texts: int | None,
  repeats: int,
  is_speed: bool,
) -> Table:
  """Return a table of the rows that would be measured, with memory and an upper bound on time.

  The bound assumes that a forward pass takes as long as reading the parameters of the decoder from
  memory, that all outputs have `max_new_tokens` tokens, and the speedup of the paper.
  """
  named = {group.task: tasks[group.task] for group in found}
  target_bytes, step_bytes = _num_bytes(models, TARGET, tasks[found[0].task], is_speed)
  seconds_per_step, cells, absent = step_bytes / memory_bandwidth(), [], []
  counts = dict.fromkeys(named, num_texts)
  for task in named:
    try:
      counts[task] = len(tasks[task].sources()[:num_texts])
    except InputError as error:
      if num_texts is None:
        raise
      absent.append(f"Missing here: {error}".partition("\n")[0])  # gin adds lines
  for _, task, draft, rows, _ in found:
    is_ngram = draft.casefold() in _NGRAMS
    draft_bytes = 0 if is_ngram else _num_bytes(models, draft, tasks[task], is_speed)[0]
    memory = f"{(target_bytes + draft_bytes) / 1e9:.2f}"
    for row in rows:
      gamma = texts = minutes = None
      if is_speed:
        gamma, texts, speed = row["gamma"], counts[task], row.get("speed") or row["emp"]
        num_steps = repeats * texts * tasks[task].max_new_tokens
        minutes = num_steps * seconds_per_step * (1 + 1 / speed) / 60
      cell = f"{task}|{draft}|{row['temperature']:g}|{number_text(gamma, 'g')}|{row['alpha']:.2f}"
      cell += f"|{row.get('lenience', 1):g}|{number_text(texts, '')}|{memory}"
      cells.append((*cell.split("|"), number_text(minutes, ".1f")))
  note = models.note([*named.values()], is_speed)
  notes = (
    f"{note} Parameters in {models.dtype}; the memory is theirs.",
    f"The time is a bound for outputs of {TARGET} with the maximum number of tokens. Compilation "
    "takes one to two minutes more for each row of the paper's sizes.",
    *absent,
  )
  columns = "task|draft|temperature|gamma|paper alpha|lenience|texts|memory, GB|minutes"
  return Table(f"{name}: rows to measure", tuple(columns.split("|")), tuple(cells), notes, {})


def _num_bytes(models: Checkpoints, name: str, task: Task, is_speed: bool) -> tuple[int, int]:
  """Return the bytes of all parameters of a model, and of those that a decoding step reads."""
  config = cast(Any, models.config(name, task, is_speed))
  init: Any = functools.partial(init_params, config)
  params = jax.eval_shape(init, jax.random.key(0))
  sizes = {part: sum(x.size for x in jax.tree.leaves(of)) for part, of in params.items()}
  per_param = jnp.dtype(models.dtype).itemsize
  unused = sizes.get("encoder", 0) + (0 if config.tied_logits else sizes.get("token_embedder", 0))
  total = sum(sizes.values())
  return total * per_param, (total - unused) * per_param


def _canonical(name: str) -> str:
  """Return the name of a draft as Table 2 prints it: T5-small for T5-SMALL (77M)."""
  short = name.partition(" (")[0].capitalize()
  return short if short.startswith("T5-") or short.casefold() in _NGRAMS else name
