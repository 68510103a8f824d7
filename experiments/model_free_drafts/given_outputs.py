"""Acceptance of drafts on recorded outputs of a target (Table 3, temperature 0).

The target itself is not needed. At temperature 0 its distribution is the one-hot of its next token
(Section 2.2), so its outputs alone determine which draft tokens it accepts. Times are not measured.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from experiments.lib.records import measured_with, models_text
from specdec_jax import theory
from specdec_jax.core.arrays import gather
from specdec_jax.core.counts import acceptance_by_position, acceptance_rate, num_rounds, num_tokens
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree, NodeLayout, chain, place_chain
from specdec_jax.core.types import DraftSpec, Loaded
from specdec_jax.data.pieces import EOS_ID
from specdec_jax.data.vocabulary import PAD_ID, Vocabulary, padded
from specdec_jax.errors import InputError
from specdec_jax.measure.alpha import draft_probs, lag1_correlation, mean_with_interval
from specdec_jax.measure.records import Record, settings_to_measure
from specdec_jax.measure.sweep import Report, Step, sweep
from specdec_jax.measure.tables import MISSING, Table
from specdec_jax.pair import Pair

GIVEN_OUTPUTS_LEGEND = {
  "alpha": "mean of q at the target's own token, with its 95% interval (bootstrap over texts)",
  "paper": "alpha in the paper's Table 3",
  "gamma N": "tokens per target forward pass in real rounds; in brackets the speedup of Theorem 8 "
  "for this alpha and c = 0",
}

ARGMAX = Sampling(temperature=0.0)


@struct.dataclass
class Place:
  """Cache of a `RecitingModel`, which holds no keys and values.

  Attributes:
    length: [B], number of processed tokens of each row.
  """

  length: Array


@dataclasses.dataclass(frozen=True)
class RecitingModel:
  """Target that outputs given texts.

  Its parameters are the tokens [B, T] of the texts, which end with EOS unless they are truncated.
  Its logits are the one-hot of the next token of the text, so p at temperature 0 is the same
  one-hot. Its hidden states are empty (E = 0).

  Attributes:
    vocab_size: size of the vocabulary, V.
    start_id: token before a text.
    eos_id: token that ends a text.
  """

  vocab_size: int
  start_id: int = PAD_ID
  eos_id: int = EOS_ID

  def prompt_tokens(self, prompt: Array) -> tuple[Array, Array]:
    return jnp.full((len(prompt), 1), self.start_id, jnp.int32), jnp.ones(len(prompt), jnp.int32)

  def prefill(self, params: Array, prompt: Array, num_slots: int) -> tuple[Array, Place]:
    return jnp.zeros((len(prompt), 1, 0)), Place(length=jnp.zeros(len(prompt), jnp.int32))

  def extend(
    self,
    params: Array,
    cache: Place,
    tokens: Array,
    tree: NodeLayout | None = None,
    first: Array | int = 0,
  ) -> tuple[Array, Array, Place]:
    # Slot 0 holds the start token, so token i of the text follows position i.
    place = place_chain if tree is None else tree.place
    positions = place(cache.length, first, tokens.shape[1], num_slots=0).positions
    next_tokens = gather(params, jnp.clip(positions, 0, params.shape[1] - 1))
    logits = jax.nn.one_hot(next_tokens, self.vocab_size)
    return logits, jnp.zeros((*tokens.shape, 0)), cache

  def commit(
    self, cache: Place, length: Array, tree: AnyTree | None = None, path: Array | None = None
  ) -> Place:
    return Place(length=length)


def given_outputs(
  vocabulary: Vocabulary,
  sources: Sequence[str],
  outputs: Sequence[str],
  drafts: Sequence[Callable[[Loaded], DraftSpec]],
  output_dir: str,
  task: str,
  target: str,
  gammas: Sequence[int] = (3, 5, 7, 10),
  max_source_tokens: int = 512,
  max_new_tokens: int = 128,
  paper_rows: Sequence[Mapping[str, Any]] = (),
  paper_target: str = "",
) -> None:
  """Measure drafts on given outputs of a target; print a table and append to `results.jsonl`.

  The measured quantities are alpha, and the acceptance in real rounds.

  Args:
    vocabulary: vocabulary of the target.
    sources: inputs of the target.
    outputs: argmax output of the target for each source.
    drafts: functions that load a draft; each draft is measured.
    output_dir: folder for `results.jsonl`; settings recorded there already are not measured again.
    task: name of the inputs, for records.
    target: name of the target, for records.
    gammas: numbers of draft tokens per round; each is measured.
    max_source_tokens: maximum number of tokens of a source, including EOS.
    max_new_tokens: maximum number of tokens of an output; an output that is truncated there has no
      EOS.
    paper_rows: rows of Table 3 (`paper.load_table`). The printed table shows the alphas of
      `paper_target` at temperature 0 next to ours.
    paper_target: name of a target in the column `m_p` of Table 3.

  Raises:
    InputError: the numbers of sources and outputs differ.
  """
  if len(sources) != len(outputs):
    raise InputError(
      f"There are {len(sources)} sources but {len(outputs)} outputs; give one output for each "
      "source."
    )
  model = RecitingModel(len(vocabulary), vocabulary.start_id, vocabulary.eos_id)
  loaded = Loaded(target, model, None, vocabulary)  # the parameters are the text of each source
  pairs = [
    Pair(loaded, draft(loaded), task=task, max_source_tokens=max_source_tokens) for draft in drafts
  ]
  source_ids = [pairs[0].encode(source) for source in sources]
  output_ids = [vocabulary.encode(output)[:max_new_tokens] for output in outputs]
  inputs = [f"{source} {output}" for source, output in zip(source_ids, output_ids)]
  settings = [DecodeSettings(ARGMAX, max_new_tokens=max_new_tokens)]
  steps = [
    Step(
      pair.draft.name,
      settings_to_measure(pair, inputs, settings, gammas),
      functools.partial(_measure, pair, source_ids, output_ids),
    )
    for pair in pairs
  ]
  paper_alphas = {
    row["m_q"]: row["alpha"]
    for row in paper_rows
    if row["m_p"] == paper_target and row["temperature"] == 0
  }
  sweep(output_dir, steps, lambda measured: [given_outputs_table(measured, paper_alphas)])


def _measure(
  pair: Pair,
  source_ids: Sequence[Sequence[int]],
  output_ids: Sequence[Sequence[int]],
  settings: Sequence[Record],
  report: Report,
) -> Iterator[Record]:
  """Yield one record per gamma, for one draft on the given outputs."""
  since = time.perf_counter()
  prompts, texts = (padded(rows, max(map(len, rows)))[:, None] for rows in (source_ids, output_ids))
  draft = pair.draft.build(ARGMAX, chain(1))
  betas = []  # p is a one-hot, so sum min(p, q) is q of its token
  for prompt, text, tokens in zip(prompts, texts, output_ids):
    q = np.asarray(draft_probs(pair.with_target(params=text), draft, prompt, text)[0])
    betas.append(q[np.arange(len(tokens)), tokens])
  alpha = mean_with_interval(betas)
  for number, setting in enumerate(settings):
    gamma = setting.settings.gamma
    report(number / len(settings))
    decoded = []
    for i, (prompt, text) in enumerate(zip(prompts, texts)):
      decode = pair.with_target(params=text).decode_fn(ARGMAX, chain(gamma))
      keys = row_keys(setting.settings.seed, i, 1)
      decoded.append(jax.device_get(decode(prompt, keys, max_new_tokens=texts.shape[-1])))
    yield setting.replace(
      num_tokens=num_tokens(decoded),
      rounds=num_rounds(decoded),
      alpha=alpha.mean,
      alpha_low=alpha.low,
      alpha_high=alpha.high,
      acceptance_rate=acceptance_rate(decoded),
      acceptance_by_position=acceptance_by_position(decoded),
      beta_lag1=lag1_correlation(betas),
      tokens_per_round=num_tokens(decoded) / num_rounds(decoded),
      predicted_theorem8=float(
        theory.walltime_improvement(alpha.mean, setting.settings.gamma, 0.0)
      ),
      seconds=time.perf_counter() - since,
    )


def given_outputs_table(measured: Sequence[Record], paper: Mapping[str, float]) -> Table:
  """Return a table of the acceptance of drafts on given outputs, with one row per draft.

  Args:
    measured: records of drafts on given outputs.
    paper: alphas that the paper prints, by the name of the draft. A draft of the paper has a row
      even if it has no record.
  """
  first, gammas = measured[0], sorted({r.settings.gamma for r in measured})
  paper_alphas = {name.casefold(): f"{alpha:.2f}" for name, alpha in paper.items()}
  rows: list[tuple[str, ...]] = []
  for draft in dict.fromkeys(r.models.draft for r in measured):
    by_gamma = {r.settings.gamma: r for r in measured if r.models.draft == draft}
    r = next(iter(by_gamma.values()))  # alpha does not depend on gamma
    lengths = (
      f"{r.outputs.tokens_per_round:.2f} ({r.times.predicted_theorem8:.2f})" if r else MISSING
      for r in map(by_gamma.get, gammas)
    )
    alpha = f"{r.outputs.alpha:.2f} [{r.outputs.alpha_low:.2f},{r.outputs.alpha_high:.2f}]"
    rows.append((draft, alpha, paper_alphas.pop(draft.casefold(), MISSING), *lengths))
  for name, alpha in paper.items():
    if name.casefold() in paper_alphas:
      rows.append((name, MISSING, f"{alpha:.2f}", *[MISSING] * len(gammas)))
  title = f"{models_text(first, draft=False)}, {first.outputs.num_tokens} tokens, temperature 0"
  columns = "draft", "alpha", "paper", *(f"gamma {gamma}" for gamma in gammas)
  return Table(title, columns, tuple(rows), (), GIVEN_OUTPUTS_LEGEND)


def code_table(measured: Sequence[Record]) -> Table:
  """Return tokens per round with each gamma, with one row per task and draft."""
  gammas = sorted({r.settings.gamma for r in measured})
  found: dict[tuple[str, str], list[Record]] = {}
  for r in measured:
    found.setdefault((r.settings.task or "", r.models.draft), []).append(r)
  rows = []
  for (task, draft), of in found.items():
    lengths = {r.settings.gamma: f"{r.outputs.tokens_per_round:.2f}" for r in of}
    first = of[0].outputs
    alpha = f"{first.alpha:.2f} [{first.alpha_low:.2f},{first.alpha_high:.2f}]"
    cells = task, draft, f"{first.num_tokens}", alpha
    rows.append((*cells, *(lengths.get(gamma, MISSING) for gamma in gammas)))
  columns = "task", "draft", "tokens", "alpha", *(f"gamma {gamma}" for gamma in gammas)
  title = "Tokens per target forward pass on code and JSON, temperature 0"
  return Table(title, columns, tuple(rows), (measured_with(measured),))
