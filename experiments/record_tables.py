"""Tables of records about drafts, gammas, trees, beams, other libraries and given outputs."""

import collections
import operator
from collections.abc import Callable, Mapping, Sequence

from specdec_jax.measure.records import Record
from specdec_jax.measure.reporting.columns import cell, headings, legend, range_text, records_table
from specdec_jax.measure.reporting.speeds import speed_columns
from specdec_jax.measure.reporting.tables import (
  MISSING,
  Table,
  measured_with,
  models_text,
  sampling_text,
)

ACCEPTANCE = ("draft", "sampling", "tokens", "alpha_of_text", "lag1", "rounds", "by_position")
BEAMS = ("beams", "draft_beams", "gamma", "beam_nodes", "steps", "beam_round", "predicted_beams")
BEAMS += ("speedup_beams", "identical_beams", "bleu")
GAMMA = ("temperature", "batch", "policy", "gamma", "alpha_only", "length", "predicted_policy")
GAMMA += ("speedup", "auc")
LAYERS = ("draft", "alpha_of_text", "c", "v", "gamma", "predicted")
# Columns of `lengths_table` before and after "over chain".
LENGTHS = ("filters", "proposal", "nodes", "depth", "verifier", "tokens", "length_interval")
LENGTHS_COSTS = ("c", "v", "predicted_long", "identical", "seed")

DRAFTS_LEGEND = {
  "alpha": "acceptance rate of the first draft token (in a tree: of the first child) at every "
  "token, with its 95% interval; a draft that learns from outcomes has none",
  "length": "acceptance length: tokens per target forward pass",
  "cost ratio c": "time of a draft step / time of a step of autoregressive decoding, at the lowest "
  "temperature; a draft that stops early has neither c nor a prediction, because its rounds "
  "differ in length",
  "verify cost v": "time of a round without drafting / time of a step of autoregressive decoding, "
  "at the lowest temperature",
  "predicted": "predicted speedup without prefill: length / (gamma c + v)",
  "bandwidth-bound": "predicted speedup at the lowest temperature if a forward pass takes as long "
  "as its memory reads, as on an accelerator; of the rounds of a hierarchical draft one counts",
  "speedup": "measured tokens/s over autoregressive decoding's in the same process, interleaved",
  "MB": "parameters of the draft that it does not share with the target, in 1e6 bytes",
  "identical": "whether the output is identical to that of autoregressive decoding at temperature "
  "0, token for token",
}

GIVEN_OUTPUTS_LEGEND = {
  "alpha": "mean of q at the target's own token, with its 95% interval (bootstrap over texts)",
  "paper": "alpha in the paper's Table 3",
  "gamma N": "tokens per target forward pass in real rounds; in brackets the speedup of Theorem 8 "
  "for this alpha and c = 0",
}

PEERS_LEGEND = {
  "tokens/s": "total tokens / total seconds, prefill included, medians of interleaved repeats",
  "ms/pass": "total seconds / target forward passes, in ms",
  "tok/pass": "tokens per target forward pass",
  "gamma N": "speedup of our speculative decoding with this gamma over the decoder of the row",
  "spread": "for the fastest gamma, the lowest and highest of this speedup over all repeats and "
  "in each repeat",
  "identical": "whether the outputs are identical to ours, token for token (only for argmax and "
  "real weights)",
}

# Settings that are part of the title if all records agree in them, and columns otherwise.
_SETTINGS: dict[str, Callable[[Record], str]] = {
  "task": lambda r: r.task or MISSING,
  "target": lambda r: r.target if r.task else r.target_label,
  "draft": lambda r: (
    (r.draft if r.task else r.draft_label) + (" (simulated)" if r.acceptance == "simulated" else "")
  ),
  "texts": lambda r: f"{r.num_examples} texts",
  "batch": lambda r: f"batch {r.batch_size}",
  "dtype": lambda r: r.dtype,
  "kernels": lambda r: f"{r.kernels} kernels",
  "baseline": lambda r: (
    "over our own autoregressive decoding" if r.baseline == "own" else f"over {r.baseline}"
  ),
  "device": lambda r: r.device,
}


def measured_table(records: Sequence[Record]) -> Table:
  """Return a table of predicted and measured speedups with one row per record."""
  settings = {name: [text(r) for r in records] for name, text in _SETTINGS.items()}
  varying = [name for name, values in settings.items() if len({*values}) > 1]
  shared = [values[0] for name, values in settings.items() if name not in varying]
  title = ", ".join(value for value in shared if value != MISSING)
  names = speed_columns(records)
  rows = tuple(
    (*(settings[name][i] for name in varying), *(cell(name, r) for name in names))
    for i, r in enumerate(records)
  )
  return Table(title, (*varying, *headings(names)), rows, (measured_with(records),), legend(names))


def acceptance_table(records: Sequence[Record]) -> Table:
  """Return a table of alpha and acceptance rates, with one row per record."""
  first = records[0]
  target = f"{first.task}, target {first.target}" if first.task else first.target_label
  names = [*ACCEPTANCE]
  if any(r.rejection_sampling_rate is not None for r in records):
    names.insert(names.index("lag1"), "rejection")
  return records_table(f"{target}, {first.dtype}", records, names)


def gamma_table(records: Sequence[Record]) -> Table:
  """Return a table of policies that choose gamma, with one row per record."""
  return records_table("Policies that choose gamma", records, GAMMA)


def layers_table(records: Sequence[Record]) -> Table:
  """Return a table of drafts by layer skipping, with one row per record.

  All records have the same target, texts and sampling method.
  """
  first = records[0]
  title = f"{models_text(first, draft=False)}: layer skipping, temperature {sampling_text(first)}, "
  title += f"batch {first.batch_size}, {first.num_examples} texts, {first.device}"
  notes = (
    "gamma is the one with the best predicted speed. c and v are measured with one layer and with "
    "all layers but one, and interpolated linearly.",
    measured_with(records),
  )
  return records_table(title, records, LAYERS, notes)


def beams_table(records: Sequence[Record]) -> Table:
  """Return a table that compares speculative with plain beam search, with one row per record.

  All records have the same pair and texts.
  """
  first = records[0]
  title = f"{models_text(first)}: beam search, {first.num_examples} texts, "
  title += f"batch {first.batch_size}, {first.device}"
  return records_table(title, records, BEAMS, [measured_with(records)])


def lengths_table(records: Sequence[Record]) -> Table:
  """Return a table of the acceptance lengths of chains and trees, with one row per record.

  All records have the same pair and texts.
  """
  first = records[0]
  chain_lengths = {
    (sampling_text(r), r.gamma, r.seed): r.tokens_per_round
    for r in records
    if r.kind == "chain" and r.verifier == "TokenVerifier"
  }

  def over_chain(r: Record) -> str:
    chain_length = chain_lengths.get((sampling_text(r), r.gamma, r.seed))
    return f"{(r.tokens_per_round or 0.0) / chain_length:.3f}" if chain_length else MISSING

  rows = tuple(
    (
      *(cell(name, r) for name in LENGTHS),
      over_chain(r),
      *(cell(name, r) for name in LENGTHS_COSTS),
    )
    for r in records
  )
  meanings = legend((*LENGTHS, *LENGTHS_COSTS)) | {
    "over chain": "acceptance length / that of the chain of the same depth with token verification"
  }
  texts_per_batch = "1 text" if first.batch_size == 1 else f"{first.batch_size} texts"
  notes = f"Costs are measured with {texts_per_batch} per batch.", measured_with(records)
  columns = (*headings(LENGTHS), "over chain", *headings(LENGTHS_COSTS))
  return Table(f"{models_text(first)}: acceptance lengths", columns, rows, notes, meanings)


def drafts_table(records: Sequence[Record]) -> Table:
  """Return a table with one row per draft and verifier. All records share target and texts."""
  first = records[0]
  temperatures = sorted({r.temperature for r in records})
  rows = []
  for draft, verifier in dict.fromkeys((r.draft, r.verifier) for r in records):
    by_temperature = {
      r.temperature: r for r in records if (r.draft, r.verifier) == (draft, verifier)
    }
    coldest = by_temperature[min(by_temperature)]
    ordered = [by_temperature.get(temperature) for temperature in temperatures]
    rows.append(
      (
        draft,
        verifier.removesuffix("Verifier"),
        *_cells("alpha", ordered),
        *_cells("length", ordered),
        cell("c", coldest),
        cell("v", coldest),
        *(_predicted(r) for r in ordered),
        cell("bandwidth_bound", coldest),
        *_cells("speedup", ordered),
        cell("draft_mb", coldest),
        cell("identical", coldest),
      )
    )
  columns = (
    "draft",
    "verifier",
    *(f"alpha, T = {t:g}" for t in temperatures),
    *(f"length, T = {t:g}" for t in temperatures),
    *headings(("c", "v")),
    *(f"predicted, T = {t:g}" for t in temperatures),
    "bandwidth-bound",
    *(f"speedup, T = {t:g}" for t in temperatures),
    "MB",
    "identical",
  )
  title = f"{models_text(first, draft=False)}, gamma {first.gamma}, batch {first.batch_size}, "
  title += f"{first.num_examples} texts, {first.device}"
  return Table(title, columns, tuple(rows), (measured_with(records),), DRAFTS_LEGEND)


def _predicted(r: Record | None) -> str:
  if r is None or r.c is None or r.tokens_per_round is None or r.verify_cost is None:
    return MISSING
  return f"{r.tokens_per_round / (r.gamma * r.c + r.verify_cost):.2f}"


def _cells(name: str, records: Sequence[Record | None]) -> list[str]:
  return [cell(name, r) if r else MISSING for r in records]


def given_outputs_table(measured: Sequence[Record], paper: Mapping[str, float]) -> Table:
  """Return a table of the acceptance of drafts on given outputs, with one row per draft.

  Args:
    measured: records of drafts on given outputs.
    paper: alphas that the paper prints, by the name of the draft. A draft of the paper has a row
      even if it has no record.
  """
  first, gammas = measured[0], sorted({r.gamma for r in measured})
  paper_alphas = {name.casefold(): f"{alpha:.2f}" for name, alpha in paper.items()}
  rows: list[tuple[str, ...]] = []
  for draft in dict.fromkeys(r.draft for r in measured):
    by_gamma = {r.gamma: r for r in measured if r.draft == draft}
    r = next(iter(by_gamma.values()))  # alpha does not depend on gamma
    lengths = (
      f"{r.tokens_per_round:.2f} ({r.predicted_theorem8:.2f})" if r else MISSING
      for r in map(by_gamma.get, gammas)
    )
    alpha = f"{r.alpha:.2f} [{r.alpha_low:.2f},{r.alpha_high:.2f}]"
    rows.append((draft, alpha, paper_alphas.pop(draft.casefold(), MISSING), *lengths))
  for name, alpha in paper.items():
    if name.casefold() in paper_alphas:
      rows.append((name, MISSING, f"{alpha:.2f}", *[MISSING] * len(gammas)))
  title = f"{models_text(first, draft=False)}, {first.num_tokens} tokens, temperature 0"
  columns = "draft", "alpha", "paper", *(f"gamma {gamma}" for gamma in gammas)
  return Table(title, columns, tuple(rows), (), GIVEN_OUTPUTS_LEGEND)


def peers_table(measured: Sequence[Record]) -> Table:
  """Return a table of our decoders and then of the baselines, with our speedup over each baseline.

  The legend, PEERS_LEGEND, is printed once below several tables.
  """
  first = measured[0]
  gammas = list(dict.fromkeys(r.gamma for r in measured))
  speedup_columns = tuple(f"gamma {gamma}" for gamma in gammas)
  rows: list[tuple[str, ...]] = []
  for gamma in gammas:
    r = next(r for r in measured if r.gamma == gamma)
    tokens_per_s, tokens_per_pass = r.speculative_tokens_per_s or 0.0, r.tokens_per_round or 0.0
    pass_ms = 1e3 * tokens_per_pass / tokens_per_s
    speeds = f"{tokens_per_s:.0f}", f"{pass_ms:.2f}", f"{tokens_per_pass:.2f}"
    rows.append((f"ours, gamma {gamma}", *speeds, *[MISSING] * (len(gammas) + 2)))
  for name in dict.fromkeys(r.baseline for r in measured):
    over_baseline = [r for r in measured if r.baseline == name]
    best = max(over_baseline, key=operator.attrgetter("speedup"))
    tokens_per_s, pass_ms = best.baseline_tokens_per_s or 0.0, best.baseline_pass_ms or 0.0
    speeds = f"{tokens_per_s:.0f}", f"{pass_ms:.2f}", f"{pass_ms * tokens_per_s / 1e3:.2f}"
    limits = best.speedup_range
    spread = MISSING if limits is None else f"{limits[0]:.2f}-{limits[1]:.2f}"
    speedups = (f"{r.speedup:.2f}" for r in over_baseline)
    rows.append((name, *speeds, *speedups, spread, cell("identical", best)))
  models = f"{first.task}, {first.target} with {first.draft}" if first.task else first.subject
  title = (
    f"{models}, {first.num_examples} texts, batch 1, "
    f"{first.dtype}, kernels {first.kernels}, {first.device}, "
    + (f"{first.beams} beams" if first.beams else f"temperature {first.temperature:g}")
  )
  columns = "decoder", "tokens/s", "ms/pass", "tok/pass", *speedup_columns, "spread", "identical"
  return Table(title, columns, tuple(rows), ())


def online_table(measured: Sequence[Record]) -> Table:
  """Return a table of the acceptance lengths of a frozen draft and of a version that changes.

  Args:
    measured: records in the order of the texts. Each record of the frozen draft is followed by the
      record of the other version on the same texts.
  """
  rows, num_texts = [], collections.Counter[str | None]()
  for frozen, changing in zip(measured[::2], measured[1::2], strict=True):
    first_text = num_texts[frozen.task] + 1
    num_texts[frozen.task] += frozen.num_examples or 0
    lengths = (f"{r.tokens_per_round:.2f}" for r in (frozen, changing))
    rows.append((frozen.task or MISSING, f"{first_text} to {num_texts[frozen.task]}", *lengths))
  first, version = measured[0], measured[1].draft.removeprefix(f"{measured[0].draft}, ")
  notes = "Tokens per target forward pass; texts in the order in which they were served."
  title = f"{first.target}, {first.draft}, gamma {first.gamma}: frozen and {version}"
  return Table(title, ("task", "texts", "frozen", version), tuple(rows), (notes,))


def throughput_table(measured: Sequence[Record]) -> Table:
  """Return a table of the tokens per second of batches and of continuous batching."""
  headings = "task", "draft", "batch", "gamma", "batches", "continuous", "ratio", "identical"
  rows = [
    (
      r.task or MISSING,
      r.draft if r.gamma else MISSING,
      str(r.batch_size),
      str(r.gamma),
      f"{r.baseline_tokens_per_s:,.0f}",
      f"{r.speculative_tokens_per_s:,.0f}",
      f"{r.speedup:.2f}{range_text(r)}",
      {True: "yes", False: "NO", None: MISSING}[r.identical],
    )
    for r in measured
  ]
  notes = (
    "Tokens per second. Batches run to their last row; in continuous batching, the next text takes "
    "the row of a text that has ended.",
  )
  first = measured[0]
  device = first.processor or first.device_kind
  title = f"{first.target}, {first.dtype}, {first.kernels} kernels, {device}"
  return Table(title, headings, tuple(rows), notes)


def gammas_table(measured: Sequence[Record]) -> Table:
  """Return a table of the tokens per second of continuous batching for each gamma."""
  # Without a draft, the speed depends only on the target's arithmetic and the batch size.
  of_target = {
    (r.dtype, r.kernels, r.batch_size): {0: r.speculative_tokens_per_s or 0}
    for r in measured
    if not r.gamma
  }
  speeds: dict[tuple[str, ...], dict[int, float]] = {}
  for r in measured:
    row = f"{r.dtype}, {r.kernels}", r.draft, str(r.batch_size)
    without_draft = of_target.get((r.dtype, r.kernels, r.batch_size), {})
    speeds.setdefault(row, {**without_draft})[r.gamma] = r.speculative_tokens_per_s or 0
  gammas = sorted({r.gamma for r in measured})
  headings = (
    "arithmetic, kernels",
    "draft",
    "batch",
    *(f"gamma {gamma}" for gamma in gammas),
    "best",
  )
  rows = [
    (
      *row,
      *(f"{by_gamma[gamma]:,.0f}" if gamma in by_gamma else MISSING for gamma in gammas),
      f"gamma {max(by_gamma, key=by_gamma.__getitem__)}",
    )
    for row, by_gamma in speeds.items()
  ]
  first = measured[0]
  title = f"{first.task}, {first.num_examples} texts, {first.processor or first.device_kind}"
  notes = ("Tokens per second of continuous batching; gamma 0 is autoregressive decoding.",)
  return Table(title, headings, tuple(rows), notes)
