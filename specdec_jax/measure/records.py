"""Records of measurements, and the JSON Lines files that contain them.

A record has one setting, its measurements, and their provenance (versions, commit, date). Each line
of `results.jsonl` is a record, with the fields in groups. A record is appended completely or not at
all, and an interrupted run resumes with the settings that `missing` returns.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import reprlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from specdec_jax import __version__
from specdec_jax.errors import InputError

SCHEMA = 3
FIELDS_OF_SCHEMA_1 = {  # old name: current name
  "rule": "verifier",
  "inputs": "inputs_sha256",
  "separation": "auc",
  "target_start_ms": "target_prefill_ms",
  "draft_start_ms": "draft_prefill_ms",
  "rest_ms": "unaccounted_ms",
  "predicted_text": "predicted_finite_length",
}
POLICIES_OF_SCHEMA_1 = {  # suffix of the name of a draft: current suffix
  ", plain": ", autoregressive",
  ", told by largest probability": ", confidence: largest probability",
  ", told by entropy bound": ", confidence: entropy bound",
}
DRAFTS_OF_SCHEMA_1 = {  # name of a learned draft: current name
  "anchored": "conditioned",
  "decoder": "shared_encoder",
  "exit": "early_exit",
  "look_ahead": "pass",
}
BUNDLED = "specdec_jax/assets/"  # prefix of the paths of bundled checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """Setting of a measurement. Two records with equal settings are repeats (see `key`).

  Attributes:
    task: name of the inputs; None if no name was given.
    target: name of the target M_p.
    draft: name of the draft M_q.
    target_path: path of the target's checkpoint, or name of the target on the Hugging Face Hub;
      None if it has neither.
    draft_path: path of the draft's checkpoint, or name of the draft on the Hugging Face Hub; None
      if it has neither.
    temperature: sampling temperature; 0 means argmax.
    top_k: number of most probable tokens that can be sampled; 0 means no limit.
    top_p: probability mass of nucleus sampling; 1.0 means no limit.
    gamma: number of draft tokens per round (Section 2.3); for a tree, its depth; for beam search,
      the number of steps that the draft searches ahead.
    lenience: lenience l of Appendix A.5; 1.0 keeps the target's distribution.
    verifier: class name of the verifier (`core.verify`, `verifiers`).
    tree: parents of the draft tokens of a static tree (`core.trees.Tree`); None for a chain and for
      other proposals.
    dynamic_nodes: number of nodes of a dynamic tree, including the last committed token; None for
      other proposals.
    beam_nodes: maximum number of nodes in one target forward pass of beam search; None for other
      proposals.
    beams: number of beams; None without beam search. For beam search, `tokens_per_round` is the
      number of search steps per target forward pass.
    draft_beams: number of beams of the draft.
    length_penalty: exponent of the length penalty of beam search.
    batch_size: number of rows that are decoded together.
    baseline: implementation of autoregressive decoding that the speedup is relative to: own (this
      package), t5x, hf, ...; or 'batches', the same decoding in batches that run to their last row
      (`experiments/throughput`).
    acceptance: "measured" with a real draft, or "simulated".
    platform: cpu, gpu or tpu.
    device_kind: name of the device in JAX.
    processor: processor of the host, with its widest vector extension. If the platform is cpu, this
      is the device.
    cores: number of CPU cores of the host.
    threads: number of CPU threads that compute.
    num_devices: number of devices across which the target's parameters are sharded.
    dtype: dtype of the activations.
    kernels: implementation of the layers: "xla", or "skinny" if the matmuls with weights, attention
      and RMSNorm are those of `kernels.skinny` (CPU). "skinny+bfloat16" reads weights in bfloat16
      and keeps everything else in `dtype`.
    seed: seed of the random key.
    num_examples: number of inputs.
    inputs_sha256: first 12 hexadecimal digits of the SHA-256 of the inputs. Different inputs make a
      different setting.
    max_new_tokens: limit of each output, in tokens.
  """

  task: str | None
  target: str
  draft: str
  target_path: str | None = None
  draft_path: str | None = None
  temperature: float
  top_k: int = 0
  top_p: float = 1.0
  gamma: int
  lenience: float = 1.0
  verifier: str = "TokenVerifier"
  tree: list[int] | None = None
  dynamic_nodes: int | None = None
  beam_nodes: int | None = None
  beams: int | None = None
  draft_beams: int | None = None
  length_penalty: float | None = None
  batch_size: int
  baseline: str = "own"
  acceptance: str = "measured"
  platform: str
  device_kind: str
  processor: str | None = None
  cores: int | None = None
  threads: int | None = None
  num_devices: int = 1
  dtype: str
  kernels: str = "xla"
  seed: int
  num_examples: int | None = None
  inputs_sha256: str | None = None
  max_new_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
  """Outputs of a measurement, and the acceptance of draft tokens in them.

  Attributes:
    num_tokens: total length of the outputs, in tokens. EOS counts; tokens after EOS do not.
    rounds: number of rounds, summed over rows. The rows of a batch share target forward passes.
    alpha: E[sum min(p / l, q)] over text generated by the target (Corollary 6), with lenience l;
      for simulated acceptance, its rate.
    alpha_low: lower end of the 95% confidence interval of alpha.
    alpha_high: upper end of the 95% confidence interval of alpha.
    acceptance_rate: accepted / (accepted + rejected) draft tokens in the decoded rounds.
    acceptance_by_position: acceptance rate at each position in a round, from the first draft token.
      Draft tokens that were not verified do not count.
    auc: area under the ROC curve of a confidence score that predicts acceptance: the probability
      that the score of an accepted draft token is higher than that of a rejected one. For gamma
      above 1, the scores and the acceptances of gamma consecutive tokens are multiplied.
    beta_lag1: lag-1 autocorrelation of beta = sum min(p, q) along the text.
    rejection_sampling_rate: acceptance rate of rejection sampling (Appendix A.2), min q / p,
      averaged over the same text as alpha.
    tokens_per_round: mean number of tokens emitted per round (acceptance length).
    tokens_per_round_low: lower end of the 95% confidence interval of tokens_per_round (bootstrap
      over texts).
    tokens_per_round_high: upper end of the 95% confidence interval of tokens_per_round.
    total_variation: total variation distance between the target's distribution and the distribution
      of an emitted token, which measures the effect of lenience. It is averaged over the same text
      as alpha. At lenience 1 it is 0 up to rounding.
    identical: whether the outputs are identical to the outputs of the baseline, token for token.
      For beam search, whether all returned texts are identical and in the same order, except for
      `ties`.
    ties: number of rows of a beam search whose texts differ from the baseline's only in the order
      of texts with equal scores (to 1e-5), or in a last text that has an equal score.
  """

  num_tokens: int | None = None
  rounds: int | None = None
  alpha: float | None = None
  alpha_low: float | None = None
  alpha_high: float | None = None
  acceptance_rate: float | None = None
  acceptance_by_position: list[float | None] | None = None
  auc: float | None = None
  beta_lag1: float | None = None
  rejection_sampling_rate: float | None = None
  tokens_per_round: float | None = None
  tokens_per_round_low: float | None = None
  tokens_per_round_high: float | None = None
  total_variation: float | None = None
  identical: bool | None = None
  ties: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
  """Measured times, speeds and speedups, bytes, operations, and predicted speedups.

  Attributes:
    target_prefill_ms: time of autoregressive decoding before its first step, once per batch. For
      T5, it is mostly the time of the encoder.
    draft_prefill_ms: additional time for the draft's prefill, once per batch.
    target_step_ms: time of one step of autoregressive decoding: a target forward pass over one
      token, sampling, and the cache update. For beam search, a step of plain beam search.
    draft_step_ms: time that drafting adds to a round, divided by gamma.
    c: draft_step_ms / target_step_ms (Definition 7).
    verify_ms: time of a target forward pass over gamma + 1 tokens, and of the cache update. It
      includes verification of the draft tokens in records without accept_ms.
    accept_ms: time to compute p from the logits, verify the draft tokens and sample the next token.
    unaccounted_ms: round_ms - (gamma draft_step_ms + verify_ms + accept_ms): the time of a round
      that its separately timed parts do not account for.
    round_ms: mean time of a round of a batch: total time without target_prefill_ms and
      draft_prefill_ms, divided by the number of target forward passes.
    verify_cost: v = (verify_ms + accept_ms) / target_step_ms.
    draft_mb: size of the parameters that the draft does not share with the target, in 1e6 bytes.
    memory_gb_per_s: measured memory bandwidth of the device, in 1e9 bytes per second.
    target_step_mb: bytes of parameters and caches that one step of autoregressive decoding reads,
      in 1e6 bytes.
    draft_step_mb: bytes that one draft step reads, in 1e6 bytes.
    verify_mb: bytes that a target forward pass over gamma + 1 tokens reads, in 1e6 bytes.
    operations_ratio: c-hat, the number of arithmetic operations of a draft step, divided by that of
      a target step (Section 3.4).
    operations_factor: number of arithmetic operations relative to autoregressive decoding, as
      predicted by Theorem 10.
    predicted_theorem8: speedup predicted by Theorem 8, which assumes v = 1. All predictions are
      relative to this package's own autoregressive decoding.
    predicted_measured_cost: speedup predicted with the measured v for infinitely long text; for
      trees, and if alpha is unknown, from tokens_per_round instead of alpha; for beam search,
      tokens_per_round * target_step_ms / round_ms.
    predicted_finite_length: speedup predicted with all measured costs, including prefill, for texts
      of the measured lengths (`theory.text_improvement`).
    baseline_pass_ms: time per target forward pass of the baseline: total time / number of passes.
    baseline_tokens_per_s: total tokens / total seconds of the baseline.
    speculative_tokens_per_s: total tokens / total seconds of speculative decoding.
    speedup: speculative_tokens_per_s / baseline_tokens_per_s; for beam search, total seconds of the
      baseline / those of the search. The time of each batch is the median over repeats.
    speedup_low: minimum of `speedup` and of the speedups in single repeats; None if there is only
      one repeat. In old records, it is the minimum over single repeats only.
    speedup_high: maximum over the same values.
  """

  target_prefill_ms: float | None = None
  draft_prefill_ms: float | None = None
  target_step_ms: float | None = None
  draft_step_ms: float | None = None
  c: float | None = None
  verify_ms: float | None = None
  accept_ms: float | None = None
  unaccounted_ms: float | None = None
  round_ms: float | None = None
  verify_cost: float | None = None
  draft_mb: float | None = None
  memory_gb_per_s: float | None = None
  target_step_mb: float | None = None
  draft_step_mb: float | None = None
  verify_mb: float | None = None
  operations_ratio: float | None = None
  operations_factor: float | None = None
  predicted_theorem8: float | None = None
  predicted_measured_cost: float | None = None
  predicted_finite_length: float | None = None
  baseline_pass_ms: float | None = None
  baseline_tokens_per_s: float | None = None
  speculative_tokens_per_s: float | None = None
  speedup: float | None = None
  speedup_low: float | None = None
  speedup_high: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
  """Quality of the outputs, compared with references.

  Attributes:
    metric: name of the metric: BLEU, ROUGE-1, ROUGE-2 or ROUGE-Lsum.
    quality: score of the outputs against the references, 0 to 100.
    baseline_quality: score of the baseline's outputs.
  """

  metric: str | None = None
  quality: float | None = None
  baseline_quality: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
  """Versions of the software, and time of the measurement.

  Attributes:
    jax_version: version of JAX.
    specdec_version: version of this package.
    commit: commit of the checkout, followed by '+' if files differ from the commit.
    date: start of the run, in UTC.
    seconds: duration of the whole measurement.
  """

  jax_version: str | None = None
  specdec_version: str | None = __version__
  commit: str | None = None
  date: str | None = None
  seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Setting, Outputs, Timings, Quality, Provenance):
  """A setting and its measurements. Fields that were not measured are None.

  The fields are those of the base classes. In a file, the fields of each base class are a separate
  JSON object.

  Attributes:
    schema: schema number of this record.
  """

  schema: int = SCHEMA

  @property
  def target_label(self) -> str:
    """Path of the target's checkpoint (without BUNDLED), or its name if no path is recorded."""
    return self.target if self.target_path is None else self.target_path.removeprefix(BUNDLED)

  @property
  def draft_label(self) -> str:
    """Path of the draft's checkpoint (without BUNDLED), or its name if no path is recorded."""
    return self.draft if self.draft_path is None else self.draft_path.removeprefix(BUNDLED)

  @property
  def subject(self) -> str:
    """Title of the measurement: the task, or the labels of the models if no task was given."""
    return self.task or f"{self.target_label} with {self.draft_label}"

  @property
  def kind(self) -> str:
    """Kind of proposal: chain (Algorithm 1), tree, dynamic tree or beam search."""
    if self.beam_nodes:
      return "beam search"
    return "dynamic tree" if self.dynamic_nodes else "tree" if self.tree else "chain"

  @property
  def num_nodes(self) -> int:
    """Number of nodes per round (maximum for beam search), including the last committed token."""
    return self.beam_nodes or self.dynamic_nodes or len(self.tree or range(self.gamma)) + 1

  @property
  def speedup_range(self) -> tuple[float, float] | None:
    """Range of the overall speedup and the speedups in single repeats; None for one repeat."""
    if self.speedup is None or self.speedup_low is None or self.speedup_high is None:
      return None
    if self.speedup_low == self.speedup_high:
      return None
    return min(self.speedup_low, self.speedup), max(self.speedup_high, self.speedup)

  @property
  def device(self) -> str:
    """Description of the device; for a CPU, the processor, its cores and the threads in use."""
    if self.platform != "cpu" or self.processor is None:
      return self.device_kind + (f" x {self.num_devices}" if self.num_devices > 1 else "")
    threads = "" if self.threads == self.cores else f", threads: {self.threads}"
    return f"{self.processor}, {self.cores} cores{threads}"


GROUPS = {group.__name__.lower(): group for group in Record.__bases__}  # objects of a JSON line
_SETTINGS = [field.name for field in dataclasses.fields(Setting)]
_CPU_SETTINGS = {"processor", "cores", "threads"}  # on other platforms the host does not matter


def key(record: Record) -> tuple:
  """Return the settings that identify a record. Two records with equal keys are repeats."""
  names = [name for name in _SETTINGS if record.platform == "cpu" or name not in _CPU_SETTINGS]
  return tuple(_key_value(getattr(record, name)) for name in names)


def _key_value(value: Any) -> Any:
  """Return a hashable form of a setting; None for bundled paths, which old records lack."""
  if isinstance(value, str) and value.startswith(BUNDLED):
    return None
  return tuple(value) if isinstance(value, list) else value


@contextlib.contextmanager
def open_results(output_dir: str | os.PathLike) -> Iterator[str]:
  """Create `output_dir`, and yield the path of `results.jsonl` in it.

  The folder and the file are created first, so that a path that cannot be written fails before the
  measurement. An incomplete last line, left by a killed run, is dropped with a warning.
  """
  os.makedirs(output_dir, exist_ok=True)
  path = os.path.join(output_dir, "results.jsonl")
  with _locked(path) as fd:
    _drop_torn_line(fd, path)
  yield path


def append(path: str | os.PathLike, record: Record) -> None:
  """Append `record` as one line and flush it to disk. If that fails, leave the file unchanged.

  An incomplete last line, left by a killed run, is dropped first with a warning. Several runs may
  append to the same file.

  Raises:
    OSError: the file cannot be written, or its disk is full.
  """
  values: dict[str, Any] = {"schema": SCHEMA}
  for name, group in GROUPS.items():
    fields = (field.name for field in dataclasses.fields(group))
    values[name] = {field: _json_value(getattr(record, field)) for field in fields}
  line = json.dumps(values, allow_nan=False).encode() + b"\n"
  with _locked(path) as fd:
    size = _drop_torn_line(fd, path)
    try:
      num_written = os.write(fd, line)
      if num_written < len(line):  # the disk is full: a second write raises the error
        os.write(fd, line[num_written:])
      os.fsync(fd)
    except BaseException:
      os.ftruncate(fd, size)
      raise


def read(path: str | os.PathLike) -> list[Record]:
  """Read the records of a file in order. An incomplete last line is skipped with a warning.

  Raises:
    FileNotFoundError: the file does not exist.
    InputError: a line is not a record, or its schema is unknown to this version.
  """
  with open(path, "rb") as f:
    lines = f.read().splitlines(keepends=True)
  if lines and not lines[-1].endswith(b"\n") and _json_object(lines[-1]) is None:
    _warn_torn(path, len(lines.pop()))
  return [_parse(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]


def missing(path: str | os.PathLike, settings: Iterable[Record]) -> list[Record]:
  """Return the settings (records without measurements) for which a file has no record yet."""
  done = {key(record) for record in read(path)} if os.path.exists(path) else set()
  return [setting for setting in settings if key(setting) not in done]


def _json_value(value):
  """Convert numpy and JAX scalars to Python's, and NaN and infinity, which JSON lacks, to None."""
  value = value.item() if hasattr(value, "item") else value
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _parse(line: bytes, location: str) -> Record:
  values = _json_object(line)
  if values is None:
    raise InputError(f"{location}: not a JSON object; correct or delete that line.")
  try:
    values = _upgraded(values)
  except InputError as error:
    raise InputError(f"{location}: {error} Correct or delete that line.") from None
  schema = values.get("schema")
  if schema != SCHEMA:
    provenance = values.get("provenance")
    holder = provenance if isinstance(provenance, dict) else values
    version = holder.get("specdec_version", "not stated")
    raise InputError(
      f"{location}: a record of schema {reprlib.repr(schema)}, but specdec_jax {__version__} "
      f"reads schema 1 to {SCHEMA}; read it with the version that wrote it "
      f"({reprlib.repr(version)})."
    )
  try:
    return Record(**values)
  except TypeError as error:
    fault = str(error).replace("Record.__init__() ", "")
    raise InputError(f"{location}: not a record of schema {SCHEMA}: {fault}.") from None


def _upgraded(values: dict[str, Any]) -> dict[str, Any]:
  """Return the fields of a record of any known schema, with their current names and values."""
  schema = values.get("schema")
  if schema == SCHEMA:
    groups = [group for name in GROUPS if isinstance(group := values.get(name), dict)]
    if len(values) != len(GROUPS) + 1 or len(groups) != len(GROUPS):
      raise InputError(f"a record of schema {SCHEMA} has the objects {', '.join(GROUPS)}.")
    return {"schema": schema} | {name: value for group in groups for name, value in group.items()}
  if schema == 2:  # the fields were not grouped
    return values | {"schema": SCHEMA}
  if schema != 1:
    return values
  renamed = {FIELDS_OF_SCHEMA_1.get(name, name): value for name, value in values.items()}
  verifier = renamed.get("verifier")
  if isinstance(verifier, str):
    renamed["verifier"] = re.sub("Rule$", "Verifier", verifier)
  draft = renamed.get("draft")
  if isinstance(draft, str):
    name, comma, policy = DRAFTS_OF_SCHEMA_1.get(draft, draft).partition(", ")
    renamed["draft"] = name + POLICIES_OF_SCHEMA_1.get(comma + policy, comma + policy)
  # Schema 1 had one field for the nodes of a dynamic tree and for those of beam search.
  if renamed.get("beams") is not None and "dynamic_nodes" in renamed:
    renamed["beam_nodes"] = renamed.pop("dynamic_nodes")
  return renamed | {"schema": SCHEMA}


def _json_object(line: bytes) -> dict[str, Any] | None:
  """Parse a line as a JSON object; return None if it is not one or has an invalid number.

  NaN and numbers with a magnitude of 1e300 or more are invalid.
  """
  try:
    values = json.loads(line, parse_int=_finite, parse_float=_finite, parse_constant=_finite)
  except (ValueError, RecursionError):  # RecursionError: brackets nested a thousand deep
    return None
  return values if isinstance(values, dict) else None


def _finite(text: str) -> int | float:
  value = float(text)
  if not abs(value) < 1e300:  # also false for NaN
    raise ValueError(text)
  return int(text) if text.lstrip("-").isdecimal() else value


@contextlib.contextmanager
def _locked(path: str | os.PathLike) -> Iterator[int]:
  """Open a file for appending, and hold an exclusive lock on it in the context."""
  fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
  try:
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield fd
  finally:
    os.close(fd)


def _drop_torn_line(fd: int, path) -> int:
  """Truncate a file after its last complete record, and return the resulting size in bytes.

  If only the final newline of that record is missing, it is added.
  """
  size = os.fstat(fd).st_size
  if not size or os.pread(fd, 1, size - 1) == b"\n":
    return size
  content = os.pread(fd, size, 0)
  start = content.rfind(b"\n") + 1
  if _json_object(content[start:]) is not None:  # complete, but without the final newline
    return size + os.write(fd, b"\n")
  _warn_torn(path, size - start)
  os.ftruncate(fd, start)
  return start


def _warn_torn(path, length: int) -> None:
  warnings.warn(
    f"{path}: dropped {length} characters of an incomplete record at its end, left by a killed "
    "run; its setting is measured again.",
    stacklevel=3,
  )
