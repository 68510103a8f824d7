"""What acceptance runs, choices of gamma, peers and trainings gave, as tables."""

import collections
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.records import Record
from specdec_jax.reporting.tables import MISSING, Table, models_text, sampling_text

ACCEPTANCE_LEGEND = (
  "alpha: E[sum min(p, q)] over text that the target generated, with its 95% interval (bootstrap "
  "over texts; of a simulated draft the share of guesses accepted); lag-1: correlation of a "
  "token's sum with that of the token before, 0 if acceptance were independent; rounds: accepted / "
  "(accepted + refused) guesses of real rounds; by position: the same for the first, second, ... "
  "guess of a round."
)

GIVEN_OUTPUTS_LEGEND = (
  "alpha: E[q of the token that the target wrote], with its 95% interval (bootstrap over texts); "
  "paper: that of its Table 3; gamma: tokens a pass of the target in real rounds, and in brackets "
  "the speedup that Theorem 8 predicts from alpha for c = 0."
)

PEERS_LEGEND = (
  "tokens/s: total tokens / total seconds, medians of interleaved repeats, reading the prompt "
  "counted; ms/pass: all seconds shared out over passes of the target; gamma: how many times "
  "faster our speculative decoding with it is; spread: the lowest and the highest of that of the "
  "fastest gamma and of the same ratio in each repeat alone; same: outputs identical to "
  "ours, token for token (argmax and real weights only)."
)

TRAINING_LEGEND = (
  "minutes: of all steps, compiling counted; tokens/s: of target texts, in the last epoch; "
  "loss: on the validation text; acceptance length: there, at temperature 0, of rounds begun at "
  "every fourth token; accuracy: how often the argmax is the target's there."
)


def acceptance_table(measured: Sequence[Record]) -> Table:
  """One row a record."""
  first = measured[0]
  of_target = f"{first.task}, target {first.target}" if first.task else first.target_label
  title = f"{of_target}, {first.dtype}"
  columns = "draft", "sampling", "tokens", "alpha", "lag-1", "rounds", "by position"
  rows = tuple(
    (
      r.draft,
      f"T={sampling_text(r)}" + (f" l={r.lenience:g}" if r.lenience < 1 else ""),
      f"{r.num_tokens}",
      f"{r.alpha:.3f} [{r.alpha_low:.3f},{r.alpha_high:.3f}]",
      _shown(r.beta_lag1, ".2f"),
      f"{r.acceptance_rate:.3f}",
      " ".join(_shown(x, ".2f") for x in r.acceptance_by_position or ()),
    )
    for r in measured
  )
  return Table(title, columns, rows, (ACCEPTANCE_LEGEND,))


def gamma_table(measured: Sequence[Record]) -> Table:
  """One row a record: a way to choose gamma."""
  columns = "temp", "batch", "policy", "gamma", "alpha", "tokens/pass", "predicted", "speedup"
  columns += ("separation",)
  rows = tuple(
    (
      f"{r.temperature:g}",
      f"{r.batch_size}",
      r.draft.rpartition(", ")[2],
      f"{r.gamma}",
      _shown(r.alpha, ".2f"),
      _shown(r.tokens_per_round, ".2f"),
      _shown(r.predicted_finite_length, ".2f"),
      _shown(r.speedup, ".3f"),
      _shown(r.auc, ".3f"),
    )
    for r in measured
  )
  return Table("gamma, chosen in several ways", columns, rows, ())


def given_outputs_table(measured: Sequence[Record], paper: Mapping[str, float]) -> Table:
  """One row a draft: its records, and the paper's alpha of a draft of that name or of others."""
  first, gammas = measured[0], sorted({r.gamma for r in measured})
  theirs = {name.casefold(): f"{alpha:.2f}" for name, alpha in paper.items()}
  rows: list[tuple[str, ...]] = []
  for draft in dict.fromkeys(r.draft for r in measured):
    by_gamma = {r.gamma: r for r in measured if r.draft == draft}
    r = next(iter(by_gamma.values()))  # alpha does not depend on gamma
    lengths = (
      f"{r.tokens_per_round:.2f} ({r.predicted_theorem8:.2f})" if r else MISSING
      for r in map(by_gamma.get, gammas)
    )
    alpha = f"{r.alpha:.2f} [{r.alpha_low:.2f},{r.alpha_high:.2f}]"
    rows.append((draft, alpha, theirs.pop(draft.casefold(), MISSING), *lengths))
  for name, of_paper in paper.items():
    if name.casefold() in theirs:
      rows.append((name, MISSING, f"{of_paper:.2f}", *[MISSING] * len(gammas)))
  title = f"{models_text(first, draft=False)}, {first.num_tokens} tokens, temperature 0"
  columns = "draft", "alpha", "paper", *(f"gamma {gamma}" for gamma in gammas)
  return Table(title, columns, tuple(rows), (GIVEN_OUTPUTS_LEGEND,))


def peers_table(measured: Sequence[Record]) -> Table:
  """One row a decoder, ours first; how much faster ours is than each of the others."""
  first = measured[0]
  gammas = list(dict.fromkeys(r.gamma for r in measured))
  ratios = tuple(f"gamma {gamma}" for gamma in gammas)
  rows: list[tuple[str, ...]] = []
  for gamma in gammas:
    r = next(r for r in measured if r.gamma == gamma)
    rate, passed = r.speculative_tokens_per_s or 0.0, r.tokens_per_round or 0.0
    speeds = f"{rate:.0f}", f"{1e3 * passed / rate:.2f}", f"{passed:.2f}"
    rows.append((f"ours, gamma {gamma}", *speeds, *[MISSING] * (len(gammas) + 2)))
  for name in dict.fromkeys(r.baseline for r in measured):
    of_name = [r for r in measured if r.baseline == name]
    best = max(of_name, key=operator.attrgetter("speedup"))
    rate, pass_ms = best.baseline_tokens_per_s or 0.0, best.baseline_pass_ms or 0.0
    speeds = f"{rate:.0f}", f"{pass_ms:.2f}", f"{pass_ms * rate / 1e3:.2f}"
    spread = MISSING if (of := best.speedup_range) is None else f"{of[0]:.2f}-{of[1]:.2f}"
    same = {True: "yes", False: "NO", None: MISSING}[best.identical]
    rows.append((name, *speeds, *(f"{r.speedup:.2f}" for r in of_name), spread, same))
  of_models = f"{first.task}, {first.target} with {first.draft}" if first.task else first.subject
  title = (
    f"{of_models}, {first.num_examples} texts, batch 1, "
    f"{first.dtype}, kernels {first.kernels}, {first.device}, "
    + (f"{first.beams} beams" if first.beams else f"temperature {first.temperature:g}")
  )
  columns = "decoder", "tokens/s", "ms/pass", "tok/pass", *ratios, "spread", "same"
  return Table(title, columns, tuple(rows), ())


def _shown(x: float | None, form: str) -> str:
  return MISSING if x is None else format(x, form)


def execution_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Times of stochastic speculative execution (`scripts/measure_execution.py`), a row each."""
  cells = tuple(
    (
      f"{row['beta']:.2f}",
      f"{row['kept']:.2f}",
      f"{row['f_ms']:g}",
      f"{row['g_ms']:g}",
      f"{row['in_turn_ms']:g}",
      f"{row['expected_ms']:.1f}",
      f"{row['measured_ms']:.1f}",
    )
    for row in rows
  )
  first = rows[0]
  return Table(
    "Stochastic speculative execution, milliseconds",
    ("beta", "kept", "F", "G", "in turn", "expected", "measured"),
    cells,
    (
      f"Means of {first['trials']} runs each, {first['processor']}, commit {first['commit']} of "
      f"{str(first['date'])[:10]}. beta: chance that the guess is kept; kept: how often it was; "
      "in turn: F + G; expected: beta max(F, G) + (1 - beta) (F + G).",
    ),
  )


def matmuls_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return one row per record of `scripts/measure_matmuls.py`: times of matmuls with few rows."""
  first = rows[0]
  of_one = {row["weights"]: row["us"] for row in rows if row["rows"] == 1}
  cells = tuple(
    (
      row["weights"],
      f"{row['rows']}",
      f"{row['us']:.0f}",
      f"{row['us'] / of_one[row['weights']]:.2f}",
      f"{row['gb_per_s']:.0f}",
      f"{row['share_of_peak']:.0%}",
      f"{row['hot_share_of_peak']:.0%}",
      _shown(row["xla_us"], ".0f"),
    )
    for row in rows
  )
  return Table(
    "Products with a matrix [512, 3072] that comes from memory",
    ("weights", "rows", "us", "of one row", "GB/s", "of peak", "hot", "XLA, us"),
    cells,
    (
      f"Medians, {first['processor']}, {first['threads']} threads, commit {first['commit']} of "
      f"{str(first['date'])[:10]}. of peak: operations a second over those of numpy's product of "
      f"two matrices [2048, 2048], {first['peak_gflops']:.0f} billion; hot: the same for "
      "[512, 512] in the cache; XLA: its product, with weights in float32.",
    ),
  )


def online_table(measured: Sequence[Record]) -> Table:
  """A draft frozen and the same as it learns: their records in turn, in the order of the texts."""
  rows, served = [], collections.Counter[str | None]()
  for frozen, learning in zip(measured[::2], measured[1::2], strict=True):
    first = served[frozen.task] + 1
    served[frozen.task] += frozen.num_examples or 0
    lengths = (f"{r.tokens_per_round:.2f}" for r in (frozen, learning))
    rows.append((frozen.task or MISSING, f"{first} to {served[frozen.task]}", *lengths))
  one = measured[0]
  notes = "Tokens a pass of the target; texts in the order in which they were served."
  title = f"{one.target}, {one.draft}, gamma {one.gamma}: a draft that learns while it serves"
  return Table(title, ("task", "texts", "frozen", "learning"), tuple(rows), (notes,))


def training_table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
  """What trainings cost and came to: lines of `metrics.jsonl` by the name of each, a row each."""
  cells = tuple(
    (
      name,
      f"{lines[-1]['step']}",
      f"{sum(line['seconds'] for line in lines) / 60:.0f}",
      f"{lines[-1]['tokens_per_s']:.0f}",
      f"{lines[-1]['valid_loss']:.3f}",
      _shown(lines[-1].get("valid_acceptance_length"), ".2f"),
      _shown(lines[-1].get("valid_accuracy"), ".3f"),
    )
    for name, lines in runs.items()
  )
  columns = "draft", "steps", "minutes", "tokens/s", "loss", "acceptance length", "accuracy"
  return Table("Trainings", columns, cells, (TRAINING_LEGEND,))
