"""Records of measurements, and the JSON Lines files that contain them.

`docs/metrics.md` explains the fields of the results.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from specdec_jax import __version__
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.types import AnyPair
from specdec_jax.errors import InputError
from specdec_jax.measure.machine import provenance

BUNDLED = "specdec_jax/assets/"  # prefix of the paths of bundled checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Models:
  """Target and draft of a measurement."""

  target: str  # names
  draft: str
  target_path: str | None = None  # paths of checkpoints, or names on the Hugging Face Hub
  draft_path: str | None = None
  dtype: str  # of the activations
  kernels: str = "xla"  # "gpu" or "skinny" (`models.kernels`); "+bfloat16" and so on: weights
  simulated: bool = False  # whether acceptance is simulated


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasurementSettings:
  """Settings of a measurement, without models and machine."""

  task: str | None = None  # name of the inputs
  num_examples: int | None = None  # number of inputs
  # Number of different inputs. Copies of a text are decoded alike, so none waits for another one of
  # its batch. None in old records of single texts.
  distinct_texts: int | None = dataclasses.field(default=None, compare=False)
  inputs_sha256: str | None = None  # first 12 hexadecimal digits of the SHA-256 of the inputs
  temperature: float  # 0 means argmax
  top_k: int = 0  # 0 means no limit
  top_p: float = 1.0
  min_p: float = 0.0  # this and the following filters are those of `Sampling`
  typical_p: float = 1.0
  epsilon_cutoff: float = 0.0
  eta_cutoff: float = 0.0
  lenience: float = 1.0
  gamma: int  # for a tree its depth; for beam search the steps that the draft searches ahead
  tree: tuple[int, ...] | None = None  # parents of the draft tokens of a static tree
  dynamic_nodes: int | None = None  # of a dynamic tree, including the last committed token
  verifier: str = "TokenVerifier"  # name of the class
  beams: int | None = None  # None without beam search
  draft_beams: int | None = None
  beam_nodes: int | None = None  # maximum number in a target forward pass of beam search
  length_penalty: float | None = None
  batch_size: int
  max_new_tokens: int | None = None
  seed: int
  baseline: str = "own"  # what the speedup is relative to: this package, t5x, hf, ... or 'batches'
  repeats: int | None = None  # of each timed call; None if nothing was timed, and in old records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
  """Device of a measurement, and its host."""

  platform: str  # cpu, gpu or tpu
  device_kind: str
  num_devices: int = 1  # across which the target is sharded
  processor: str | None = None  # of the host, with its widest vector extension
  cores: int | None = None
  threads: int | None = None  # that compute, on a CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
  """Outputs of a measurement, and the acceptance of draft tokens in them.

  Intervals (low to high) are 95% confidence intervals by bootstrap over texts.
  """

  num_tokens: int | None = None  # EOS included
  rounds: int | None = None  # summed over rows
  alpha: float | None = None  # E[sum min(p / l, q)] over the target's text; None if it is undefined
  alpha_low: float | None = None
  alpha_high: float | None = None
  acceptance_rate: float | None = None  # accepted / (accepted + rejected) draft tokens
  acceptance_by_position: list[float | None] | None = None
  auc: float | None = None
  beta_lag1: float | None = None
  rejection_sampling_rate: float | None = None
  tokens_per_round: float | None = None  # for beam search, steps per target forward pass
  tokens_per_round_low: float | None = None
  tokens_per_round_high: float | None = None
  total_variation: float | None = None
  identical: bool | None = None  # to the baseline's; for beam search except for `ties`
  ties: int | None = None  # rows of a beam search that differ in texts with equal scores only
  metric: str | None = None  # BLEU, ROUGE-1, ROUGE-2 or ROUGE-Lsum
  quality: float | None = None  # score against references, 0 to 100
  baseline_quality: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
  """Measured times, speeds, bytes and operations, and predicted speedups."""

  target_prefill_ms: float | None = None
  draft_prefill_ms: float | None = None  # in addition to the target's
  target_step_ms: float | None = None
  draft_step_ms: float | None = None  # time that drafting adds to a round / gamma
  c: float | None = None  # draft_step_ms / target_step_ms
  verify_ms: float | None = None  # includes accept_ms in records without it
  accept_ms: float | None = None
  unaccounted_ms: float | None = None  # round_ms - (gamma draft_step_ms + verify_ms + accept_ms)
  round_ms: float | None = None  # without prefill
  verify_cost: float | None = None  # v = (verify_ms + accept_ms) / target_step_ms
  draft_mb: float | None = None
  memory_gb_per_s: float | None = None
  target_step_mb: float | None = None
  draft_step_mb: float | None = None
  verify_mb: float | None = None
  operations_ratio: float | None = None  # c-hat
  operations_factor: float | None = None  # Theorem 10
  predicted_theorem8: float | None = None
  predicted_measured_cost: float | None = None  # for a long text, with the measured v
  predicted_finite_length: float | None = None  # with all costs, for texts of the measured lengths
  baseline_pass_ms: float | None = None
  baseline_tokens_per_s: float | None = None
  speculative_tokens_per_s: float | None = None
  speedup: float | None = None  # the time of each batch is the median over repeats
  speedup_low: float | None = None  # over all repeats and in each; None for one repeat
  speedup_high: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
  """Versions of the software, and time of the measurement."""

  jax_version: str | None = None
  specdec_version: str | None = __version__
  commit: str | None = None  # followed by '+' if files differ from it
  date: str | None = None  # in UTC
  seconds: float | None = None  # duration of the whole measurement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """A setting and its measurements. Values that were not measured are None."""

  models: Models
  settings: MeasurementSettings
  machine: Machine
  outputs: Outputs = Outputs()
  times: Times = Times()
  origin: Origin = Origin()

  def replace(self, **values: Any) -> "Record":
    """Return a record with other values of fields, which may belong to any group."""
    changed = {}
    for name in GROUPS:
      group = getattr(self, name)
      own = {field: values.pop(field) for field in [*values] if hasattr(group, field)}
      changed[name] = dataclasses.replace(group, **own)
    return dataclasses.replace(self, **changed, **values)

  @property
  def key(self) -> tuple[Models, MeasurementSettings, Machine]:
    """What identifies a record. Two records with equal keys are repeats."""
    machine = self.machine
    if machine.platform != "cpu":  # the host does not matter
      machine = dataclasses.replace(machine, processor=None, cores=None, threads=None)
    return self.models, self.settings, machine

  @property
  def target_label(self) -> str:
    """Path of the target's checkpoint (without BUNDLED), or its name if no path is recorded."""
    return (self.models.target_path or self.models.target).removeprefix(BUNDLED)

  @property
  def draft_label(self) -> str:
    """Path of the draft's checkpoint (without BUNDLED), or its name if no path is recorded."""
    return (self.models.draft_path or self.models.draft).removeprefix(BUNDLED)

  @property
  def subject(self) -> str:
    """Title of the measurement: the task, or the labels of the models if no task was given."""
    return self.settings.task or f"{self.target_label} with {self.draft_label}"

  @property
  def kind(self) -> str:
    """Kind of proposal: chain (Algorithm 1), tree, dynamic tree or beam search."""
    if self.settings.beam_nodes:
      return "beam search"
    tree = "tree" if self.settings.tree else "chain"
    return "dynamic tree" if self.settings.dynamic_nodes else tree

  @property
  def num_nodes(self) -> int:
    """Number of nodes per round (maximum for beam search), including the last committed token."""
    settings = self.settings
    num_draft_tokens = len(settings.tree) if settings.tree else settings.gamma
    return settings.beam_nodes or settings.dynamic_nodes or num_draft_tokens + 1

  @property
  def predicted(self) -> float | None:
    """Predicted speedup for texts of the measured lengths, or else for a long text."""
    finite = self.times.predicted_finite_length
    return self.times.predicted_measured_cost if finite is None else finite

  @property
  def speedup_range(self) -> tuple[float, float] | None:
    """Range of the overall speedup and the speedups in single repeats; None for one repeat."""
    low, speedup, high = self.times.speedup_low, self.times.speedup, self.times.speedup_high
    if speedup is None or low is None or high is None or low == high:
      return None
    return min(low, speedup), max(high, speedup)

  @property
  def device(self) -> str:
    """Description of the device; for a CPU, the processor, its cores and the threads in use."""
    machine = self.machine
    if machine.platform != "cpu" or machine.processor is None:
      return machine.device_kind + (f" x {machine.num_devices}" * (machine.num_devices > 1))
    threads = "" if machine.threads == machine.cores else f", threads: {machine.threads}"
    return f"{machine.processor}, {machine.cores} cores{threads}"


GROUPS = {
  "models": Models,
  "settings": MeasurementSettings,
  "machine": Machine,
  "outputs": Outputs,
  "times": Times,
  "origin": Origin,
}


def settings_to_measure(
  pair: AnyPair,
  texts: Sequence[str],
  settings: Iterable[DecodeSettings],
  gammas: Sequence[int],
  baseline: str = "own",
  repeats: int | None = None,
) -> list[Record]:
  """Return a record without measurements for each combination of settings and gamma.

  `repeats` is None if nothing is timed.
  """
  device, host = jax.devices()[0], provenance()
  num_devices = [len(x.sharding.device_set) for x in jax.tree.leaves(pair.target.params)]
  models = Models(
    target=pair.target.name,
    draft=pair.draft.name,
    target_path=pair.target.path,
    draft_path=pair.draft.path,
    dtype=pair.dtype,
    kernels=pair.kernels,
    simulated=pair.simulated_alpha is not None,
  )
  machine = Machine(
    platform=device.platform,
    device_kind=device.device_kind,
    num_devices=max(num_devices, default=1),
    **{name: host[name] for name in ("processor", "cores", "threads")},
  )
  origin = Origin(jax_version=jax.__version__, commit=host["commit"], date=host["date"])
  return [
    Record(
      models=models,
      settings=MeasurementSettings(
        task=pair.task,
        num_examples=len(texts),
        distinct_texts=len(set(texts)),
        inputs_sha256=hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12],
        **dataclasses.asdict(each.sampling),
        lenience=each.lenience,
        gamma=gamma,
        verifier=pair.verifier_name,
        batch_size=each.batch_size,
        max_new_tokens=each.max_new_tokens,
        seed=each.seed,
        baseline=baseline,
        repeats=repeats,
      ),
      machine=machine,
      origin=origin,
    )
    for each in settings
    for gamma in gammas
  ]


def results_path(output_dir: str | os.PathLike) -> pathlib.Path:
  """Create a folder, and an empty file of records in it if there is none; return the file's path.

  A path that cannot be written fails before the measurement.
  """
  path = pathlib.Path(output_dir) / "results.jsonl"
  path.parent.mkdir(parents=True, exist_ok=True)
  path.touch()
  return path


def append(path: str | os.PathLike, record: Record) -> None:
  """Append a record to a file as one line."""
  values = dataclasses.asdict(record, dict_factory=lambda x: {name: _plain(y) for name, y in x})
  line = json.dumps(values, allow_nan=False)
  with open(path, "a", encoding="utf-8") as file:
    file.write(line + "\n")


def read(path: str | os.PathLike) -> list[Record]:
  """Read the records of a file in order.

  Raises:
    FileNotFoundError: the file does not exist.
    InputError: a line is not a record.
  """
  records = []
  for i, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").splitlines(), 1):
    try:
      records.append(_parsed(json.loads(line)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
      raise InputError(
        f"{path}, line {i} is not a record of this version ({type(error).__name__}: {error}); "
        "delete the line, or the file."
      ) from None
  return records


def missing(path: str | os.PathLike, settings: Iterable[Record]) -> list[Record]:
  """Return the settings (records without measurements) for which a file has no record yet."""
  done = {record.key for record in read(path)} if os.path.exists(path) else set()
  return [setting for setting in settings if setting.key not in done]


def _parsed(values: dict[str, Any]) -> Record:
  groups: dict[str, Any] = {name: group(**values.pop(name)) for name, group in GROUPS.items()}
  tree = groups["settings"].tree
  return Record(**groups, **values).replace(tree=tree and tuple(tree))


def _plain(value: Any) -> Any:
  """Convert numpy and JAX scalars to Python's, and NaN and infinity, which JSON lacks, to None."""
  value = value.item() if hasattr(value, "item") else value
  return None if isinstance(value, float) and not math.isfinite(value) else value
