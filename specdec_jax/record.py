"""One measured setting: what was set, what was measured, where and when."""

import dataclasses
from typing import Any

from specdec_jax.version import __version__

SCHEMA = 2
BUNDLED = "specdec_jax/assets/"  # begins the paths of checkpoints that come with the package


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """A setting, and what was measured in it; None is what was not measured.

  Attributes:
    task: name of the inputs; None if it was not given.
    target: name of M_p.
    draft: name of M_q.
    target_path: checkpoint of M_p, or its name on the Hugging Face Hub; None if it has none.
    draft_path: the same of M_q.
    temperature: 0 means argmax.
    top_k: 0 keeps all.
    top_p: 1.0 keeps all.
    gamma: guesses a round.
    lenience: l of Appendix A.5; 1.0 for exactness.
    verifier: how guesses are judged, the class of `rules`.
    tree: parents of the guesses (`trees.Tree`), of depth gamma; none for a chain.
    dynamic_nodes: of a tree whose shape changes, the newest token counted; of a beam search, what a
      pass reads at most; none for others.
    beams: of a beam search, whose steps a pass are told as tokens a round; None for none.
    draft_beams: of its draft.
    length_penalty: of its scores.
    batch_size: rows decoded together.
    baseline: whose autoregressive decoding the speedup is over: own, t5x, hf, ...
    acceptance: measured with a real draft, or simulated.
    platform: cpu, gpu or tpu.
    device_kind: as jax names it.
    processor: of the host, with its widest vectors: on a CPU that is the device.
    cores: of the host.
    threads: that compute on a CPU.
    num_devices: that share the target's parameters.
    dtype: of activations.
    kernels: who multiplies matrices: xla, or skinny for `kernels.skinny` (on a CPU, with weights);
      skinny+bfloat16 where it reads bfloat16 weights, the rest being of `dtype`.
    seed: of sampling.
    num_examples: inputs decoded.
    inputs: a hash of them, so that other inputs are another setting.
    max_new_tokens: limit of each output.
    num_tokens: tokens they gave, EOS counted, none past it.
    rounds: rounds of speculation, each one pass of the target.
    alpha: E[min(p, q)] over text that the target generated (Corollary 6).
    alpha_low: lower end of its 95% interval.
    alpha_high: upper end.
    acceptance_rate: accepted / (accepted + rejected) guesses in real rounds.
    acceptance_by_position: share accepted of the first guess of a round, the second, ...; of those
      that were judged.
    separation: how often, of a guess that stands and one that does not, a number that should tell
      them apart is higher for the former (the area under its ROC curve).
    beta_lag1: correlation of min(p, q)'s sum at a token with that at the one before.
    tokens_per_round: tokens emitted a round, n + 1: the acceptance length.
    tokens_per_round_low: lower end of its 95% interval, by bootstrap over texts.
    tokens_per_round_high: upper end.
    target_start_ms: plain decoding up to its first step, once a batch: mostly T5's encoder.
    draft_start_ms: what the draft reading the prompt adds to it.
    target_step_ms: a step of plain decoding: the target over one token, sampling, committing.
    draft_step_ms: what drafting adds to a round / gamma.
    c: draft_step_ms / target_step_ms (Definition 7).
    verify_ms: the target over gamma + 1 tokens, and committing. Where there is no accept_ms, with
      accepting.
    accept_ms: p from the logits, judging the guesses, sampling the next token.
    rest_ms: round_ms less gamma draft_step_ms, verify_ms and accept_ms: what rounds of the texts
      took more than the same rounds timed by themselves.
    round_ms: a round of the texts: their seconds but for target_start_ms and draft_start_ms, over
      all rounds that ran.
    verify_cost: v = (verify_ms + accept_ms) / target_step_ms.
    draft_mb: parameters of the draft that are not the target's own arrays, 1e6 bytes.
    memory_gb_per_s: at which the device reads its memory, measured; 1e9 bytes a second.
    target_step_mb: that a step of plain decoding must read at least, 1e6 bytes: parameters, caches.
    draft_step_mb: that a step of the draft must read.
    verify_mb: that a pass of the target over gamma + 1 tokens must read.
    operations_ratio: c-hat, arithmetic operations of a draft step / of a target step (Section 3.4).
    operations_factor: operations / plain decoding's, by Theorem 10.
    predicted_theorem8: speedup by Theorem 8, which takes v = 1; this and what follows over our own
      plain decoding only.
    predicted_measured_cost: speedup predicted with the measured v, for a long text.
    predicted_text: the same with all that was measured: also the time to read the prompts, and
      texts as short as they are (`theory.text_improvement`).
    baseline_pass_ms: a pass of the target in the baseline's decoding, all its time shared out.
    baseline_tokens_per_s: total tokens / total seconds.
    speculative_tokens_per_s: total tokens / total seconds.
    speedup: total seconds / total seconds, with the median of the repeats for each text.
    speedup_low: lowest value of the same ratio over all repeats and over each of them alone; None
      for a single repeat. Old records leave out the former.
    speedup_high: highest value.
    total_variation: between the target's distribution and that of a token guessed and judged,
      averaged over alpha's text: what lenience changes; 0 up to rounding at lenience 1.
    identical: whether the outputs are the baseline's, token for token; of a beam search all texts
      it found, in their order, but for `ties`.
    ties: rows of a beam search in which texts with equal scores, to 1e-5, are in another order than
      the baseline's.
    metric: of the outputs' quality by references: BLEU, ROUGE-1, ROUGE-2 or ROUGE-Lsum.
    quality: of the outputs, 0 to 100.
    baseline_quality: of the baseline's.
    jax_version: that ran.
    specdec_version: that ran.
    commit: of the checkout that ran, with '+' if it was changed since.
    date: at which the run began, UTC.
    seconds: the whole measurement took.
    schema: of this record.
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
  inputs: str | None = None
  max_new_tokens: int | None = None
  num_tokens: int | None = None
  rounds: int | None = None
  alpha: float | None = None
  alpha_low: float | None = None
  alpha_high: float | None = None
  acceptance_rate: float | None = None
  acceptance_by_position: list[float | None] | None = None
  separation: float | None = None
  beta_lag1: float | None = None
  tokens_per_round: float | None = None
  tokens_per_round_low: float | None = None
  tokens_per_round_high: float | None = None
  target_start_ms: float | None = None
  draft_start_ms: float | None = None
  target_step_ms: float | None = None
  draft_step_ms: float | None = None
  c: float | None = None
  verify_ms: float | None = None
  accept_ms: float | None = None
  rest_ms: float | None = None
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
  predicted_text: float | None = None
  baseline_pass_ms: float | None = None
  baseline_tokens_per_s: float | None = None
  speculative_tokens_per_s: float | None = None
  speedup: float | None = None
  speedup_low: float | None = None
  speedup_high: float | None = None
  total_variation: float | None = None
  identical: bool | None = None
  ties: int | None = None
  metric: str | None = None
  quality: float | None = None
  baseline_quality: float | None = None
  jax_version: str | None = None
  specdec_version: str | None = __version__
  commit: str | None = None
  date: str | None = None
  seconds: float | None = None
  schema: int = SCHEMA

  @property
  def target_label(self) -> str:
    """Where the target comes from, or its name if that is not known."""
    return self.target if self.target_path is None else self.target_path.removeprefix(BUNDLED)

  @property
  def draft_label(self) -> str:
    """Path of the draft, or its name if no path is recorded."""
    return self.draft if self.draft_path is None else self.draft_path.removeprefix(BUNDLED)

  @property
  def subject(self) -> str:
    """Title of the measurement: the task, or the models if no task was given."""
    return self.task or f"{self.target_label} with {self.draft_label}"

  @property
  def kind(self) -> str:
    """Of the guesses of a round: chain (Algorithm 1), tree or dynamic tree."""
    return "dynamic tree" if self.dynamic_nodes else "tree" if self.tree else "chain"

  @property
  def num_nodes(self) -> int:
    """Of a round, the newest token counted."""
    return self.dynamic_nodes or len(self.tree or range(self.gamma)) + 1

  @property
  def speedup_range(self) -> tuple[float, float] | None:
    """Lowest and highest speedup of the repeats, around `speedup`; None if there is only one."""
    if self.speedup is None or self.speedup_low is None or self.speedup_high is None:
      return None
    if self.speedup_low == self.speedup_high:
      return None
    return min(self.speedup_low, self.speedup), max(self.speedup_high, self.speedup)

  @property
  def device(self) -> str:
    """What it was measured on, in words."""
    if self.platform != "cpu" or self.processor is None:
      return self.device_kind + (f" x {self.num_devices}" if self.num_devices > 1 else "")
    threads = "" if self.threads == self.cores else f", threads: {self.threads}"
    return f"{self.processor}, {self.cores} cores{threads}"


_SETTINGS = (
  *(
    "task",
    "target",
    "draft",
    "target_path",
    "draft_path",
    "temperature",
    "top_k",
    "top_p",
    "gamma",
    "lenience",
    "verifier",
  ),
  *("tree", "dynamic_nodes", "beams", "draft_beams", "length_penalty", "batch_size"),
  *(
    "num_examples",
    "inputs",
    "max_new_tokens",
    "baseline",
    "acceptance",
    "platform",
    "device_kind",
    "num_devices",
    "dtype",
    "kernels",
    "seed",
  ),
)
_OF_A_CPU = ("processor", "cores", "threads")  # elsewhere the host is not what is measured


def key(record: Record) -> tuple:
  """The settings that identify a record: measuring the same ones again would be a repeat."""
  names = _SETTINGS + (_OF_A_CPU if record.platform == "cpu" else ())
  values = (getattr(record, name) for name in names)
  return tuple(map(_of_key, values))


def _of_key(value: Any) -> Any:
  """A setting as `key` has it. Old records have no paths, and bundled models need none."""
  if isinstance(value, str) and value.startswith(BUNDLED):
    return None
  return tuple(value) if isinstance(value, list) else value
