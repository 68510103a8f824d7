"""Checks of a pair in one setting at a time, and the rows of the report with their results."""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from specdec_jax.core.counts import require_finite
from specdec_jax.core.decode import DecodeSettings, num_positions
from specdec_jax.core.generation_config import PROCESSORS, SETTINGS, GenerationConfig, with_effect
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, chain
from specdec_jax.core.types import DecodeResult
from specdec_jax.errors import InputError
from specdec_jax.exactness import martingale
from specdec_jax.exactness.argmax import (
  PAST_END,
  Decode,
  Divergence,
  Rounding,
  compare_argmax,
  node_moves,
  share_of,
)
from specdec_jax.exactness.martingale import Drift, RoundScores
from specdec_jax.exactness.round_scores import positions, recorded, score_rounds
from specdec_jax.exactness.tables import (
  TextCounts,
  draft_with_verifier,
  verifier_alone,
)
from specdec_jax.exactness.texts import TextScores, score_texts
from specdec_jax.pair import Pair

ROUND_TOKENS = 24  # limit of outputs whose rounds are tested; a batch waits for its longest output
MOST_LINES = 20  # limit of the lines below a row of samples
TEXT_TOKENS = 16  # limit of outputs whose tokens are tested
ENDLESS = -1  # an EOS id that no token has, so that texts do not end


class Setting(NamedTuple):
  """Combination of settings in which outputs or rounds are checked.

  Attributes:
    tree: tree of draft tokens; `chain(0)` for autoregressive decoding.
    batch_size: number of texts that are decoded together; 0 for rounds on tables.
    is_long: whether outputs continue past EOS, up to the limit for long texts.
  """

  sampling: Sampling
  tree: AnyTree
  batch_size: int = 0
  is_long: bool = False

  def __str__(self) -> str:
    sampling = self.sampling
    truncated = f" top-k {sampling.top_k}" if sampling.top_k else ""
    truncated += f" top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
    shape = shape_name(self.tree) if self.tree.num_draft_tokens else "autoregressive"
    shape += ", long texts" if self.is_long else ""
    batch = f", batch {self.batch_size}" if self.batch_size else ""
    return f"temperature {sampling.temperature:g}{truncated}, {shape}{batch}"


class Row(NamedTuple):
  """Row of the report.

  Attributes:
    found: the measured value, such as a p-value.
    fault: values that are a fault.
    details: what was compared, and how large a fault would be detected nine times in ten.
    lines: lines below the row.
  """

  holds: bool
  check: str
  setting: object
  found: str
  fault: str
  details: str
  lines: Sequence[str] = ()


class TableTest(NamedTuple):
  """Result of rounds on tables (`exactness.tables`).

  Attributes:
    drifts: those of the scores of draft tokens; empty for the verifier alone.
  """

  counts: TextCounts
  drifts: Mapping[str, Drift]
  is_alone: bool

  @property
  def p_values(self) -> list[float]:
    """The p-values of the tokens at each position of a text, and of the scores of draft tokens."""
    return [*self.counts.p_values, *(drift.p_value for drift in self.drifts.values())]


def processors_of(pair: Pair, generation: GenerationConfig) -> Processors:
  """Return the logits processors of `generation`, for the target of a pair.

  Other settings in it raise InputError. A check does not apply the generation settings of the
  checkpoint; a warning names those that change outputs, other than `forced_eos_token_id`, which
  affects only the last token of an output that reaches its limit.
  """
  others = [
    name for name in SETTINGS if name not in PROCESSORS and getattr(generation, name) is not None
  ]
  if others:
    raise InputError(
      f"generation has {', '.join(others)}, which a check does not take; give settings of logits "
      "processors or filters of sampling."
    )
  effective = with_effect({**pair.target.generation, "forced_eos_token_id": None})
  if effective:
    stated = ", ".join(f"{k} {v!r:.60}" for k, v in effective.items())
    warnings.warn(
      f"{pair.target.path or pair.target.name} sets {stated}, which Pair.generate applies and a "
      "check does not; the outputs that are checked may differ.",
      stacklevel=2,
    )
  return pair.processors_of(generation, (pair.vocabulary.eos_id,))


class Checker:
  """Checks of a pair in one setting at a time; see `commands.check`."""

  def __init__(
    self,
    pair: Pair,
    texts: Sequence[str],
    shapes: Sequence[AnyTree],
    batch_size: int,
    max_new_tokens: int,
    long_tokens: int,
    generation: GenerationConfig | None,
    fixed_width: bool = False,
  ):
    self.pair, self.texts, self.batch_size = pair, texts, batch_size
    self.max_new_tokens = max_new_tokens
    self.processors = processors_of(pair, generation or GenerationConfig())
    if most := num_positions(pair.target.model):
      longest = int(pair.target.model.prompt_tokens(pair.prompt(texts))[1].max())
      long_tokens = min(long_tokens, most + 1 - longest)
    self.long_tokens = long_tokens
    self.share = share_of(pair)
    self.moved: dict[AnyTree, float] = {}
    self.decode_fn = functools.partial(pair.decode_fn, processors=self.processors)
    self.fixed_width = fixed_width
    # Unless their width is fixed, all shapes are compared with the same autoregressive outputs.
    self.autoregressive = functools.cache(
      lambda sampling, eos_id=None, tree=None: _cached(
        self.decode_fn(sampling, tree or chain(0), eos_id=eos_id, fixed_width=tree is not None)
      )
    )

  def verifier_alone(self, setting: Setting, seed: int) -> TableTest:
    """Test the verifier of the pair alone, on tables."""
    verifier = self.pair.verifier_for(setting.sampling)
    return TableTest(verifier_alone(verifier, setting.tree, seed), {}, True)

  def draft(self, setting: Setting, seed: int, num_rounds: int) -> TableTest:
    """Test the draft of the pair with its verifier, on tables."""
    decoder = self.pair.decoder(setting.sampling, setting.tree)
    prompt = self.pair.prompt([self.texts[i % len(self.texts)] for i in range(32)])
    found = draft_with_verifier(decoder, self.pair.params, prompt, seed, num_rounds)
    return TableTest(*found, False)

  def logits(self, tree: AnyTree) -> Row:
    """Compare the logits of a verification pass with the logits of passes over one token."""
    rows = np.arange(self.batch_size) % len(self.texts)
    prompt = self.pair.prompt(self.texts)[rows]
    decode = self.autoregressive(Sampling(temperature=0.0))
    keys = row_keys(0, 0, self.batch_size)
    output = decode(prompt, keys, max_new_tokens=self.max_new_tokens)
    tokens, lengths = np.asarray(output.tokens), np.asarray(output.lengths)
    self.moved[tree], share = node_moves(self.pair, prompt, tokens, lengths, tree)
    details = f"largest difference to logits of single tokens: {self.moved[tree]:.2g}; found and "
    details += "fault are shares of the logits' range"
    found, fault = f"{share:.2g}", f"> {self.share:.2g}"
    return Row(share <= self.share, "logits", shape_name(tree), found, fault, details)

  def outputs(self, setting: Setting) -> Row:
    """Compare outputs at temperature 0 with those of autoregressive decoding."""
    pair, (sampling, tree, batch_size, is_long) = self.pair, setting
    texts = self.texts
    if batch_size < self.batch_size:
      texts = texts[: -(-len(texts) // 4)]
    limit, eos_id = self.max_new_tokens, None
    if is_long:
      texts, limit, eos_id = texts[:batch_size], self.long_tokens, ENDLESS
    divergences = compare_argmax(
      pair,
      texts,
      self.autoregressive(sampling, eos_id, tree if self.fixed_width else None),
      self.decode_fn(sampling, tree, eos_id=eos_id),
      tree.num_nodes,
      DecodeSettings(sampling, batch_size, limit),
      Rounding(self.share, self.moved[tree]),
      self.processors,
    )
    holds = not divergences if self.fixed_width else all(d.is_tie for _, d in divergences)
    details = "texts identical" + f", {limit} tokens each" * is_long
    found = f"{len(texts) - len(divergences)} of {len(texts)}"
    lines = [of_divergence(pair, text, divergence) for text, divergence in divergences]
    fault = "any" if self.fixed_width else "no tie"
    return Row(holds, "outputs", setting, found, fault, details, lines)

  def samples(self, setting: Setting, num_tokens: int, seed: int) -> TextScores:
    """Sample outputs in a setting, and score their tokens."""
    return score_texts(
      self.pair,
      self.texts,
      self.decode_fn(setting.sampling, setting.tree),
      DecodeSettings(setting.sampling, setting.batch_size, TEXT_TOKENS, seed),
      num_tokens,
      max(4, setting.tree.depth + 1),
      self.processors,
    )

  def rounds(self, setting: Setting, num_draft_tokens: int, seed: int) -> RoundScores:
    """Decode texts in a setting, and score the draft tokens and next tokens of the rounds."""
    assert isinstance(setting.tree, Tree)
    eos_id = ENDLESS if setting.is_long else None
    decode = recorded(self.pair, setting.sampling, setting.tree, eos_id, self.processors)
    limit = self.long_tokens if setting.is_long else min(ROUND_TOKENS, self.max_new_tokens)
    settings = DecodeSettings(setting.sampling, setting.batch_size, limit, seed)
    return score_rounds(self.pair, self.texts, decode, settings, num_draft_tokens, self.processors)


def _cached(decode: Decode) -> Decode:
  """Cache the results of argmax decoding, which do not depend on the random keys."""
  results: dict[tuple, DecodeResult] = {}

  def cached(prompt, keys, *, max_new_tokens: int) -> DecodeResult:
    key = max_new_tokens, *(np.asarray(x).tobytes() for x in jax.tree.leaves(prompt))
    if key not in results:
      results[key] = require_finite(decode(prompt, keys, max_new_tokens=max_new_tokens))
    return results[key]

  return cached


def shape_name(tree: AnyTree) -> str:
  """Return the name of a chain or a tree in the report."""
  if isinstance(tree, DynamicTree):
    return f"dynamic tree {tree.num_nodes}/{tree.depth}"
  return f"gamma {tree.depth}" if tree.is_chain else f"tree {tree.parents}"


def _p_value(check: str, setting: object, p_value: float, level: float, details: str) -> Row:
  return Row(p_value >= level, check, setting, f"p = {p_value:.2g}", f"< {level:.1g}", details)


def table_row(found: TableTest, setting: Setting, level: float) -> Row:
  """Return the row of rounds on tables: tests of each token of texts, and of draft tokens."""
  counts, drifts, level = found.counts, found.drifts, level / len(found.p_values)
  details = f"{counts.num_tokens[0]} rounds"
  details += f", {counts.num_impossible} tokens impossible" * bool(counts.num_impossible)
  details += ", G " + ", ".join(f"{g:.0f}" for g in counts.statistic)
  details += " on " + ", ".join(map(str, counts.freedom)) + " degrees of freedom"
  if drifts:
    of_kind = ", ".join(f"{kind} {drift.z:+.1f}" for kind, drift in drifts.items())
    details += f"; draft tokens {of_kind} standard deviations"
  check = "verifier alone" if found.is_alone else "draft with verifier"
  return _p_value(check, setting, min(found.p_values), level, details)


def detectable_errors(
  of_tables: Sequence[TableTest], table_level: float, of_texts: Sequence[TextScores], level: float
) -> str:
  """Return a sentence on the smallest error that each stage detects nine times in ten.

  It is empty if nothing was sampled.
  """
  stages = []
  for is_alone, what in ((True, "the verifier alone"), (False, "the draft with the verifier")):
    tests = [test for test in of_tables if test.is_alone == is_alone and test.counts.freedom[0]]
    if not tests:
      continue
    share = min(x.counts.detectable(table_level / len(x.p_values)) for x in tests)
    stages.append(f"{what}, " + _detected(share, "a token's probability"))
    logs = [(x.drifts["log-probability"], table_level / len(x.p_values)) for x in tests if x.drifts]
    bias = min((martingale.detectable_temperature(*log) for log in logs), default=math.inf)
    if math.isfinite(bias):
      stages[-1] += f" or {bias:.1%} of a draft's temperature"
  if of_texts:
    drift = functools.reduce(Drift.plus, (x.drifts()["draft"][0] for x in of_texts))
    share = martingale.detectable_shift(drift, level / len(of_texts[0].scores))
    stages.append("outputs, " + _detected(share))
  return f"Smallest errors that are detected nine times in ten: {'; '.join(stages)}." * bool(stages)


def _detected(share: float, of: str = "tokens taken from the draft's distribution") -> str:
  return f"{share:.1%} of {of}" if share <= 1 else "none (too few tokens)"


def rounds_row(scored: RoundScores, setting: Setting, level: float) -> Row:
  """Return the row of the tests of the rounds of one setting."""
  assert isinstance(setting.tree, Tree)
  count = max(positions(setting.tree)) + 1
  draft_tokens = scored.at(*range(count))
  what = f"{len(draft_tokens.position)} draft tokens, by position in a round"
  power = functools.partial(_bias, draft_tokens, martingale.MAX_SETTING_WEIGHT)
  return _of_drifts("rounds", setting, martingale.drifts(scored, count), level, what, power)


def pooled_rows(scored: Sequence[RoundScores], level: float) -> Iterator[Row]:
  """Yield the tests of the rounds of all settings together, each at `level`."""
  every = martingale.joined(scored)
  draft_tokens = every.where(every.position >= 0)
  sampled = jax.tree.map(lambda x: x[every.next.spread > 0], every.next)
  what = (
    f"{draft_tokens.accepted.sum():.0f} of {len(draft_tokens.position)} draft tokens accepted, "
  )
  what += f"{draft_tokens.probability.sum():.1f} expected"
  power: Callable[[float], str] = functools.partial(_bias, draft_tokens, martingale.MAX_WEIGHT)
  weighted = {"weighted": [martingale.acceptance_drift(draft_tokens)]}
  yield _of_drifts("acceptance", "all rounds", weighted, level, what, power)
  for check, scores in (("draft tokens", draft_tokens.draft_token), ("next tokens", sampled)):
    by_kind = {kind: [martingale.token_drift(scores, kind)] for kind in martingale.TOKEN_SCORES}
    power = functools.partial(_temperature, martingale.token_drift(scores, "log-probability"))
    what = f"{len(scores.rank)} tokens"
    yield _of_drifts(check, "all rounds", by_kind, level, what, power)
  for where in ("within", "between"):
    correlate = martingale.within_rounds if where == "within" else martingale.between_rounds
    by_name = _pooled([correlate(of_setting) for of_setting in scored])
    worst = min(by_name, key=lambda name: by_name[name].p_value)
    what, least = f"{len(by_name)} correlations, the least p for", {worst: [by_name[worst]]}
    check, of_each = f"independence {where} rounds", level / len(by_name)
    yield _of_drifts(check, "all rounds", least, of_each, what)


def samples_row(scored: Sequence[TextScores], setting: object, level: float) -> Row:
  """Return the row of the tests of the tokens of outputs, in one setting or in several."""
  drifts = scored[0].drifts() if len(scored) == 1 else {}
  kinds = _pooled([{kind: x.drifts()[kind][0] for kind in x.scores} for x in scored])
  by_name = drifts | {kind: [drift] for kind, drift in kinds.items()}
  every = [(drift.p_value, name) for name, of_name in by_name.items() for drift in of_name]
  level /= len(every)
  p_value, worst = min(every)
  impossible = sum(x.num_impossible for x in scored)
  details = f"{sum(x.num_tokens for x in scored)} tokens"
  details += f", {impossible} outputs impossible" * bool(impossible)
  details += ": " + ", ".join(f"{kind} {drift.z:+.1f}" for kind, drift in kinds.items())
  details += f" standard deviations; least p of {len(every)} for {worst}"
  share = martingale.detectable_shift(kinds["draft"], level)
  if math.isfinite(share):
    details += "; detects " + _detected(share)
  if "log-probability" in kinds:
    details += "; " + _temperature(kinds["log-probability"], level)
  row = _p_value("samples", setting, 0.0 if impossible else p_value, level, details)
  return row._replace(lines=scored[0].lines[:MOST_LINES]) if len(scored) == 1 else row


def _pooled(parts: Sequence[Mapping[str, Drift]]) -> dict[str, Drift]:
  """Return the drifts of all parts together, by name."""
  names = dict.fromkeys(name for part in parts for name in part)
  of_name = {name: [part[name] for part in parts if name in part] for name in names}
  return {name: functools.reduce(Drift.plus, drifts) for name, drifts in of_name.items()}


def _of_drifts(
  check: str,
  setting: object,
  by_name: Mapping[str, Sequence[Drift]],
  level: float,
  what: str,
  power: Callable[[float], str] = lambda level: "",
) -> Row:
  """Return the row of a test of several drifts, whose levels add up to `level`."""
  p_values = [drift.p_value for drifts in by_name.values() for drift in drifts]
  level /= len(p_values)
  deviations = "; ".join(
    f"{name} {', '.join(f'{drift.z:+.1f}' for drift in drifts)}" for name, drifts in by_name.items()
  )
  detected = power(level)
  details = f"{what}: {deviations} standard deviations" + (detected and f"; {detected}")
  return _p_value(check, setting, min(p_values), level, details)


def _bias(draft_tokens: RoundScores, max_weight: float, level: float) -> str:
  bias = martingale.detectable_bias(draft_tokens, level, max_weight=max_weight)
  if bias > 1:
    return "too few draft tokens to detect a bias in acceptance"
  return f"detects a bias of {bias:.2%} in acceptance"


def _temperature(drift: Drift, level: float) -> str:
  bias = martingale.detectable_temperature(drift, level)
  if math.isinf(bias):
    return "no token was sampled at random"
  return f"detects a temperature wrong by {bias:.2%}"


def of_divergence(pair: Pair, text: int, d: Divergence) -> str:
  """Return the line of the report on a token of the text with a number."""
  expected, got = (
    "(end)" if token == PAST_END else pair.vocabulary.pieces([token])[0]
    for token in (d.autoregressive, d.speculative)
  )
  conclusion = "a tie" if d.is_tie else "a FAULT"
  return (
    f"text {text}, token {d.position + 1}: {expected!r} became {got!r}; their logits are "
    f"{d.gap:.2g} apart where rounding moves them by up to {d.rounding:.2g}: {conclusion}"
  )
