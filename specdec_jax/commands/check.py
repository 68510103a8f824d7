"""Check whether the outputs of a pair have the target's distribution, in any settings."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from rich.console import Console

from specdec_jax.core.generation_config import FILTERS, GenerationConfig
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree, DynamicTree, Tree, chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.text import read_lines
from specdec_jax.errors import InputError, require_count, require_seed
from specdec_jax.exactness import tables
from specdec_jax.exactness.checker import (
  Checker,
  Row,
  Setting,
  TableTest,
  detectable_errors,
  pooled_rows,
  rounds_row,
  samples_row,
  shape_name,
  table_row,
)
from specdec_jax.exactness.martingale import RoundScores
from specdec_jax.exactness.outputs import OutputsChecker, groups_of
from specdec_jax.exactness.texts import TextScores
from specdec_jax.files.records import read_records, source_of
from specdec_jax.generate import warn_of_truncation
from specdec_jax.measure.progress import Progress
from specdec_jax.pair import Pair

SAMPLINGS = (
  Sampling(0.0),
  Sampling(1.0),
  Sampling(0.7),
  Sampling(top_k=40),
  Sampling(top_p=0.9),
  Sampling(0.7, top_k=40),
  Sampling(0.7, top_p=0.9),
)
TREE = Tree((0, 0, 0, 1, 1, 2, 4))
DYNAMIC_TREE = DynamicTree(num_draft_tokens=7, depth=3)
# Shapes on which a verifier is tested alone.
ALONE: tuple[AnyTree, ...] = (
  chain(3),
  Tree((0, 0, 1, 1, 2, 4)),
  DynamicTree(num_draft_tokens=6, depth=3),
)


def check_exactness(
  pair: Pair,
  texts: Sequence[str],
  samplings: Sequence[Sampling] = SAMPLINGS,
  gammas: Sequence[int] = (3, 7),
  batch_sizes: Sequence[int] = (8, 1),
  max_new_tokens: int = 64,
  num_tokens: int = 4_000,
  num_draft_tokens: int = 4_000,
  num_rounds: int = 2**13,
  level: float = 1e-3,
  seed: int = 0,
  trees: Sequence[Sequence[int]] | None = None,
  dynamic: Sequence[tuple[int, int]] | None = None,
  long_tokens: int = 160,
  generation: GenerationConfig | None = None,
  temperatures: Sequence[float] | None = None,
  fixed_width: bool = False,
  outputs: str | None = None,
  prefix: str = "",
) -> None:
  """Check whether a pair is exact in each setting; exit with status 1 if a check fails.

  The results of the checks (docs/exactness.md) are printed as a table. First, the verifier is
  tested alone on tables, then with the draft of the pair; if one of these tests fails, the others
  do not run. A shape is a chain or a tree of draft tokens. The first shape (the first gamma, if
  there is one) is checked with all sampling methods. Other shapes are checked at temperature 0, and
  with the first sampling method above it. So are batches smaller than the largest, but with the
  first shape only. At temperature 0, a quarter of the texts are used for smaller batches.

  Args:
    gammas: gamma of each chain.
    batch_sizes: numbers of texts that are decoded together.
    max_new_tokens: limit for each output at temperature 0. In the check of rounds, it is at most
      ROUND_TOKENS.
    num_tokens: minimum number of tokens in the check of samples, for each setting.
    num_draft_tokens: minimum number of draft tokens in the check of rounds, for each sampling
      method and shape. For the first method and a chain, it is multiplied by gamma.
    num_rounds: number of rounds of the draft with the verifier on tables, for each kind of shape.
    level: probability of a false alarm, for all statistical checks together.
    trees: parents of the draft tokens of each tree, as in `trees.Tree`; by default TREE.
    dynamic: (nodes, depth) of each dynamic tree (`drafts.dynamic`); by default DYNAMIC_TREE. A
      default is left out, with the reason, if draft or verifier do not support it.
    long_tokens: length of long outputs, which continue past EOS; 0 disables them. It is reduced if
      the target has too few positions. The last gamma (without gammas, the last shape) is checked
      with long outputs: outputs at temperature 0, and rounds with the first sampling method above.
    generation: settings of logits processors, which apply in all checks except the first, and of
      the filters of sampling, such as top_k.
    temperatures: if it is given, or `generation` has filters, sampling methods with these
      temperatures (by default 0 and 1) and filters replace `samplings`.
    fixed_width: whether outputs at temperature 0 are compared with those of passes of equal width
      (`generate`), where no bit may differ.
    outputs: file of outputs of any engine (docs/exactness.md), which are checked in place of those
      of the pair. Settings that its lines lack are those of `generation` and `temperatures`.
    prefix: text prepended to the sources of `outputs` that are not blank.

  Raises:
    InputError: there is nothing to check, an argument is out of range, the verifier is lossy, the
      acceptance is simulated, or `generation` has settings other than those of logits processors.
  """
  require_seed(seed)
  generation = generation or GenerationConfig()
  if not 0 < level < 1:
    raise InputError(f"level is {level}; a chance of a false alarm lies between 0 and 1.")
  if pair.simulated_alpha is not None:
    raise InputError(
      "The target's acceptance is simulated, so its output has no distribution to check; give a "
      "real target."
    )
  if outputs is not None:
    if len(temperatures or ()) > 1:
      raise InputError("Several temperatures are given; lines with outputs may name their own.")
    given = [generation.given(), *({"temperature": t} for t in temperatures or ())]
    records = [*read_records(read_lines(outputs), outputs, decoded=True)]
    texts = [source_of(record, prefix) for record in records]
    warn_of_truncation(pair, texts)
    groups = groups_of(pair, texts, records, GenerationConfig.merged(*given).given())
    if not groups:
      raise InputError(f"{outputs} has no outputs.")
    argmax = [group for group in groups if group.config.sampling().is_argmax]
    plan = Plan([], [], [], [], argmax, [group for group in groups if group not in argmax])
    _run(OutputsChecker(pair, max(batch_sizes)), plan, [], 0, 0, 0, level, seed)
    return
  filters = {name: x for name, x in generation.given().items() if name in FILTERS}
  if filters or temperatures is not None:
    generation = dataclasses.replace(generation, **dict.fromkeys(filters))
    wanted = (0.0, 1.0) if temperatures is None else temperatures
    samplings = [GenerationConfig(temperature=t, **filters).sampling() for t in wanted]
  left_out: list[str] = []

  def if_supported(tree: AnyTree) -> list[AnyTree]:
    if texts and (problem := _problem(pair, tree, texts[:1])):
      left_out.append(f"Trees such as the {shape_name(tree)} are left out: {problem}")
    return [] if problem else [tree]

  static = if_supported(TREE) if trees is None else [*map(Tree, trees)]
  if dynamic is None:
    changing = if_supported(DYNAMIC_TREE)
  else:
    changing = [DynamicTree(nodes - 1, depth) for nodes, depth in dynamic]
  chains = [*map(chain, gammas)]
  shapes: list[AnyTree] = [*chains, *static, *changing]
  if not (texts and samplings and shapes and batch_sizes):
    raise InputError("There is nothing to check: no texts, samplings, draft tokens or batch sizes.")
  if not all(pair.verifier(sampling).exact for sampling in samplings):
    raise InputError(
      f"{pair.verifier_name} is lossy here: its output is not the target's own, so there "
      "is nothing to check; give an exact --verifier."
    )
  counts = dict(num_tokens=num_tokens, num_draft_tokens=num_draft_tokens)
  counts |= dict(num_rounds=num_rounds, max_new_tokens=max_new_tokens)
  for name, value in [*counts.items(), *(("gamma", gamma) for gamma in gammas)]:
    require_count(name, value)
  require_count("long_tokens", long_tokens, 0)
  for shape in shapes:
    require_count("the number of a tree's draft tokens", shape.num_draft_tokens)
  for size in batch_sizes:
    pair.require_batch_size(size)
  check = Checker(
    pair, texts, shapes, max(batch_sizes), max_new_tokens, long_tokens, generation, fixed_width
  )
  plan = _plan(check, samplings, chains, static, changing, batch_sizes)
  _run(check, plan, left_out, num_tokens, num_draft_tokens, num_rounds, level, seed)


class Plan(NamedTuple):
  """Settings of the checks, in the order of the checks; `shapes` are those of the logits."""

  alone: Sequence[Setting]  # rounds of the verifier on tables
  with_draft: Sequence[Setting]  # rounds of the draft with the verifier on tables
  shapes: Sequence[AnyTree]
  rounds: Sequence[Setting]
  outputs: Sequence[Any]  # Setting, or `exactness.outputs.Group`
  samples: Sequence[Any]


def _plan(
  check: Checker,
  samplings: Sequence[Sampling],
  chains: Sequence[AnyTree],
  static: Sequence[AnyTree],
  changing: Sequence[AnyTree],
  batch_sizes: Sequence[int],
) -> Plan:
  """Return the settings to check; see `check_exactness`."""
  fixed = [*chains, *static]
  shapes = [*fixed, *changing]
  sampled = [sampling for sampling in samplings if sampling.temperature > 0]
  argmax = [sampling for sampling in samplings if sampling.temperature == 0]
  smaller = sorted({*batch_sizes} - {check.batch_size}, reverse=True)
  outputs = [Setting(sampling, tree, check.batch_size) for sampling in argmax for tree in shapes]
  outputs += [Setting(sampling, shapes[0], size) for sampling in argmax for size in smaller]
  if check.long_tokens:
    long = shapes[len(chains) - 1]
    outputs += [Setting(sampling, long, check.batch_size, True) for sampling in argmax]
  samples = [Setting(sampling, shapes[0], check.batch_size) for sampling in sampled]
  for sampling in sampled[:1]:
    samples += [Setting(sampling, tree, check.batch_size) for tree in (chain(0), *shapes[1:])]
    samples += [Setting(sampling, shapes[0], size) for size in smaller]
  rounds: list[Setting] = []
  if _scores_rounds(check.pair) and fixed:
    rounds = [Setting(sampling, fixed[0], 32) for sampling in sampled]
    rounds += [Setting(sampling, tree, 32) for sampling in sampled[:1] for tree in fixed[1:]]
    if check.long_tokens:
      rounds += [Setting(sampling, fixed[len(chains) - 1], 8, True) for sampling in sampled[:1]]
  of_kinds = chains, static, changing
  alone = _settings_alone(samplings, [kind for kind, of_kind in zip(ALONE, of_kinds) if of_kind])
  first_shapes = [of_kind[0] for of_kind in of_kinds if of_kind]
  with_draft = [Setting(sampling, shape) for sampling in sampled[:1] for shape in first_shapes]
  return Plan(alone, with_draft, shapes, rounds, outputs, samples)


def _scores_rounds(pair: Pair) -> bool:
  """Return whether rounds have known distributions: tokens are verified one by one."""
  return pair.verifier_name == TokenVerifier.__name__


def _run(
  check: Checker,
  plan: Plan,
  notes: Sequence[str],
  num_tokens: int,
  num_draft_tokens: int,
  num_rounds: int,
  level: float,
  seed: int,
) -> None:
  """Run the checks of a plan, and print `notes` and a row for each; exit if one fails."""
  # A third of the level is for rounds on tables, a third for the six tests of all settings
  # together, and a third for tests of one setting.
  table_level = level / 3 / max(1, len(plan.alone) + len(plan.with_draft))
  pooled_level = level / 3 / 6
  setting_level = level / 3 / max(1, len(plan.samples) + len(plan.rounds))
  console = Console(markup=False, soft_wrap=True)
  passed: list[bool] = []
  width = max(len(str(x)) for x in [*plan.rounds, *plan.outputs, *plan.samples, ""])

  def show(result: str, check: str, setting: object, *cells: str) -> None:
    found, fault, details = cells
    console.print(f"{result:6}{check:30}{setting!s:{width}}  {found:14}{fault:12}{details}")

  def report(row: Row) -> None:
    passed.append(row.holds)
    show("ok" if row.holds else "FAIL", row.check, row.setting, row.found, row.fault, row.details)
    for line in row.lines:
      console.print(f"      {line}")

  if check.processors:
    names = dict.fromkeys(type(processor).__name__ for processor in check.processors)
    console.print(f"Logits processors: {', '.join(names)}.")
  for note in notes:
    console.print(note)
  show("", "check", "setting", "found", "fault", "details")
  with Progress() as bar:
    of_tables: list[TableTest] = []
    for setting in bar.track(plan.alone, description="checking the verifier"):
      of_tables.append(check.verifier_alone(setting, seed))
      report(table_row(of_tables[-1], setting, table_level))
    with_draft = plan.with_draft if all(passed) else []
    for setting in bar.track(with_draft, description="checking the draft"):
      of_tables.append(check.draft(setting, seed, num_rounds))
      report(table_row(of_tables[-1], setting, table_level))
    if not all(passed):  # outputs of the pair would be wrong, too
      plan = plan._replace(shapes=[], rounds=[], outputs=[], samples=[])
    for tree in bar.track(plan.shapes, description="checking logits"):
      report(check.logits(tree))
    scored: list[RoundScores] = []
    for number, setting in enumerate(bar.track(plan.rounds, description="checking rounds")):
      is_first = setting.sampling == plan.rounds[0].sampling
      is_first &= setting.tree.is_chain and not setting.is_long
      count = num_draft_tokens * (setting.tree.depth if is_first else 1)
      # Each setting has its own seed, so that all can be tested together.
      scored.append(check.rounds(setting, count, seed + 1 + number))
      report(rounds_row(scored[-1], setting, setting_level))
    for row in pooled_rows(scored, pooled_level) if scored else ():
      report(row)
    for setting in bar.track(plan.outputs, description="checking outputs"):
      report(check.outputs(setting))
    of_texts: list[TextScores] = []
    for number, setting in enumerate(bar.track(plan.samples, description="checking samples")):
      of_texts.append(check.samples(setting, num_tokens, seed + 1 + len(scored) + number))
      report(samples_row(of_texts[-1:], setting, setting_level))
    if of_texts:
      report(samples_row(of_texts, "all settings", pooled_level))
  are_unscored = not scored or any(isinstance(x, DynamicTree) for x in plan.shapes)
  if plan.alone and plan.samples and are_unscored:
    unscored = "dynamic trees" if _scores_rounds(check.pair) else check.pair.verifier_name
    console.print(f"For {unscored}, rounds were checked on tables only.")
  if errors := detectable_errors(of_tables, table_level, of_texts, pooled_level):
    console.print(errors)
  where = f"{check.pair.dtype} on {jax.devices()[0].platform}"
  console.print(f"{sum(passed)} of {len(passed)} checks hold, in {where}.")
  if not all(passed):
    raise SystemExit(1)


def _settings_alone(samplings: Sequence[Sampling], kinds: Sequence[AnyTree]) -> list[Setting]:
  """Return the settings of the verifier alone: the first shape with all sampling methods."""
  samplings = [*dict.fromkeys(map(tables.small_sampling, samplings))]
  first = {sampling.temperature > 0: sampling for sampling in reversed(samplings)}.values()
  settings = [Setting(sampling, kind) for kind in kinds[:1] for sampling in samplings]
  return settings + [Setting(sampling, kind) for kind in kinds[1:] for sampling in first]


def _problem(pair: Pair, tree: AnyTree, texts: Sequence[str]) -> str:
  """Return why the draft cannot propose a tree or the verifier cannot verify it, or ''."""
  prompt, keys = pair.prompt(texts), row_keys(0, 0, len(texts))
  try:
    decode = functools.partial(pair.decode_fn(Sampling(), tree), max_new_tokens=1)
    jax.eval_shape(decode, prompt, keys)
  except Exception as error:  # of a draft or a verifier of the user, of any type
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
  return ""
