"""Is the output the target's own? Checked for any pair, sampling, chain or tree, and batch size."""

import math
from collections.abc import Sequence

import jax
from rich.console import Console

from specdec_jax.errors import InputError, require_count, require_seed, require_types
from specdec_jax.exactness.compare import (
  Cells,
  cells_of,
  compare_argmax,
  compare_samples,
  rounds_of_self_draft,
)
from specdec_jax.exactness.drift import Judged, detectable_bias, drifts, joined, of_acceptance
from specdec_jax.exactness.joint import Comparison
from specdec_jax.exactness.laws import judge_rounds, positions, recorded
from specdec_jax.exactness.ties import Divergence
from specdec_jax.pairs import Pair, rule_name
from specdec_jax.progress import Progress
from specdec_jax.rules.tokens import TokenRule
from specdec_jax.sampling import Sampling
from specdec_jax.trees import AnyTree, DynamicTree, Tree, chain


def check_exactness(
  pair: Pair,
  texts: Sequence[str],
  samplings: Sequence[Sampling],
  gammas: Sequence[int] = (3,),
  batch_sizes: Sequence[int] = (1, 8),
  max_new_tokens: int = 64,
  num_texts: int = 8,
  samples_per_text: int = 100,
  num_tokens: int = 4,
  num_guesses: int = 12_000,
  level: float = 1e-3,
  seed: int = 0,
  trees: Sequence[Sequence[int]] = (),
  dynamic: Sequence[tuple[int, int]] = (),
) -> None:
  """Check a pair in each setting, print the findings, and exit with status 1 if one fails.

  At temperature 0 all texts are decoded both ways and compared token for token; where a row parts,
  the two logits must lie within the measured rounding; and with the target as its own draft no
  guess may be refused but for rounding, down each path of a tree in turn too. At other temperatures
  many outputs of some texts are drawn, and their first tokens compared with the target's exact
  joint distribution; and in rounds over all texts, guesses, their acceptance and next tokens with
  the laws of each. Smaller batches than the largest, and plain decoding as a control, are sampled
  with the first of the samplings only; rounds only of trees that do not change, under `TokenRule`.

  Args:
    pair: what decodes; see `pairs.load_pair`.
    texts: sources.
    samplings: settings.
    gammas: guesses a round, of chains.
    batch_sizes: rows decoded together, each of another text.
    max_new_tokens: limit for each output at temperature 0.
    num_texts: how many of the texts are sampled from.
    samples_per_text: outputs drawn of each.
    num_tokens: first tokens that are compared jointly.
    num_guesses: guesses judged in rounds of each sampling and gamma or tree, at least.
    level: chance that all sampled settings together raise a false alarm.
    seed: of all sampling.
    trees: parents of each tree, as `trees.Tree` has them.
    dynamic: nodes and depth of each tree that changes (`drafts.dynamic`); only its outputs are
      checked, since how few rounds there could be depends on the text.

  Raises:
    InputError: there is nothing to check, the rule is lossy, or the acceptance is simulated.
  """
  require_types(check_exactness, locals())
  require_seed(seed)
  if not (texts and samplings and (gammas or trees or dynamic) and batch_sizes):
    raise InputError("There is nothing to check: no texts, samplings, guesses or batch sizes.")
  if not 0 < level < 1:
    raise InputError(f"level is {level}; a chance of a false alarm lies between 0 and 1.")
  if pair.simulated_alpha is not None:
    raise InputError(
      "The target's acceptance is simulated, so its output has no law to check; give a real target."
    )
  if not all(pair.rule(sampling).exact for sampling in samplings):
    raise InputError(
      f"{rule_name(pair.rule)} is lossy here: its output is not the target's own, so there is "
      "nothing to check; give an exact rule as pairs.load_pair.rule."
    )
  counts = dict(num_texts=num_texts, samples_per_text=samples_per_text, num_tokens=num_tokens)
  counts |= dict(max_new_tokens=max_new_tokens, num_guesses=num_guesses)
  for name, value in [*counts.items(), *(("gamma", gamma) for gamma in gammas)]:
    require_count(name, value)
  fixed = [*map(chain, gammas), *map(Tree, trees)]
  changing = [DynamicTree(nodes - 1, depth) for nodes, depth in dynamic]
  shapes: list[AnyTree] = [*fixed, *changing]
  for shape in shapes:
    require_count("the number of a tree's guesses", shape.num_guesses)
  for size in batch_sizes:
    pair.require_batch_size(size)
  sampled = [sampling for sampling in samplings if sampling.temperature > 0]
  settings = [
    (sampling, tree, batch_size)
    for sampling in samplings
    for batch_size in (batch_sizes if sampling not in sampled[1:] else [max(batch_sizes)])
    for tree in ((chain(0), *shapes) if sampling in sampled[:1] else shapes)
  ]
  # What happens in rounds has known laws where guesses are judged one by one.
  by_tokens = rule_name(pair.rule) == TokenRule.__name__
  in_rounds = [(s, tree) for s in sampled for tree in fixed if by_tokens]
  # A share for the outputs of each sampled setting, for the rounds of each, and for all rounds.
  num_sampled = sum(sampling.temperature > 0 for sampling, _, _ in settings)
  level /= num_sampled + len(in_rounds) + 1
  console = Console(markup=False, soft_wrap=True)
  verdicts: list[bool] = []
  cells: dict[Sampling, list[Cells]] = {}

  def say(holds: bool, what: str, evidence: str) -> None:
    verdicts.append(holds)
    console.print(f"{'ok  ' if holds else 'FAIL'} {what}: {evidence}")

  with Progress() as bar:
    for sampling, tree, batch_size in bar.track(settings, description="checking outputs"):
      decode, divergences = pair.decoder(sampling, tree), []
      if sampling.temperature == 0:
        plain, limits = pair.decoder(sampling, 0), (batch_size, max_new_tokens)
        divergences = compare_argmax(pair, texts, plain, decode, tree.num_nodes, *limits)
        holds = all(d.is_tie for _, d in divergences)
        evidence = f"{len(texts) - len(divergences)} of {len(texts)} texts identical"
        if isinstance(tree, Tree):
          rounds, fewest = rounds_of_self_draft(pair, texts, tree, *limits)
          holds &= rounds <= 1.01 * fewest
          evidence += f"; the target as its own draft takes {rounds} rounds of {fewest} at best"
        if isinstance(tree, Tree) and not tree.is_chain:
          rounds, fewest = rounds_of_self_draft(pair, texts, tree, *limits, by_paths=True)
          holds &= rounds <= 1.01 * fewest
          evidence += f", and {rounds} of {fewest} on each of the tree's paths in turn"
      else:
        counted = samples_per_text, num_tokens
        if sampling not in cells:
          cells[sampling] = cells_of(pair, texts[:num_texts], sampling, *counted)
        joint = compare_samples(
          *(pair, texts[:num_texts], sampling, decode, batch_size, *counted, seed, cells[sampling])
        )
        if not joint.degrees:
          raise InputError(
            f"No beginning of an output is likely enough to be counted among {samples_per_text} of "
            "each text; give more as samples_per_text, or a sampling with top_k."
          )
        holds, evidence = joint.p_value >= level, _of_samples(joint, num_tokens, level)
      say(holds, f"{_named(sampling, tree)}, batch {batch_size}", evidence)
      for text, divergence in divergences:
        console.print(f"       {_of_divergence(pair, text, divergence)}")
    guesses: list[Judged] = []
    for number, (sampling, tree) in enumerate(bar.track(in_rounds, description="checking rounds")):
      judged = judge_rounds(  # no two settings draw alike, so that all can be taken together
        *(pair, texts, sampling, recorded(pair, sampling, tree), num_guesses, max_new_tokens),
        seed=seed + 1 + number,
      )
      count = max(positions(tree)) + 1
      guesses.append(judged.at(*range(count)))
      say(*_of_rounds(judged, count, f"{_named(sampling, tree)}, rounds", level))
  if guesses:
    say(*_of_acceptance(joined(guesses), level))
  if sampled and (changing or not guesses):
    unjudged = "trees that change" if by_tokens else rule_name(pair.rule)
    console.print(f"Of {unjudged} the outputs were checked, but not the rounds.")
  where = f"{pair.dtype} on {jax.devices()[0].platform}"
  console.print(f"{sum(verdicts)} of {len(verdicts)} checks hold, in {where}.")
  if not all(verdicts):
    raise SystemExit(1)


def _named(sampling: Sampling, tree: AnyTree) -> str:
  truncated = f" top-k {sampling.top_k}" if sampling.top_k else ""
  truncated += f" top-p {sampling.top_p:g}" if sampling.top_p < 1 else ""
  how = f"dynamic tree {tree.num_nodes}/{tree.depth}"
  if isinstance(tree, Tree):
    how = f"gamma {tree.depth}" if tree.is_chain else f"tree {tree.parents}"
    how = how if tree.num_guesses else "plain  "
  return f"temperature {sampling.temperature:g}{truncated}, {how}"


def _of_samples(joint: Comparison, num_tokens: int, level: float) -> str:
  impossible = f", {joint.num_impossible} of them impossible" if joint.num_impossible else ""
  return (
    f"{joint.num_samples} outputs{impossible}, first {num_tokens} tokens in {joint.num_cells} "
    f"cells: p = {joint.p_value:.2g} (fault below {level:.1g}; a total variation of "
    f"{joint.detectable(level):.3f} would be seen 9 times in 10)"
  )


def _of_rounds(judged: Judged, count: int, what: str, level: float) -> tuple[bool, str, str]:
  found = drifts(judged, count)
  p_values = [drift.p_value for by_position in found.values() for drift in by_position]
  level /= len(p_values)
  standings = "; ".join(
    f"{name} {', '.join(f'{drift.z:+.1f}' for drift in by_position)}"
    for name, by_position in found.items()
  )
  guesses = judged.at(*range(count))
  return (
    min(p_values) >= level,
    what,
    (
      f"{len(guesses.position)} guesses judged; standard deviations from the exact laws, by "
      f"position in a round: {standings}; least p = {min(p_values):.2g} (fault below {level:.1g}; "
      f"{_power(guesses, level)})"
    ),
  )


def _of_acceptance(guesses: Judged, level: float) -> tuple[bool, str, str]:
  drift = of_acceptance(guesses)
  return (
    drift.p_value >= level,
    "acceptance in all rounds",
    (
      f"{guesses.accepted.sum():.0f} of {len(guesses.position)} guesses accepted, "
      f"{guesses.probability.sum():.1f} expected, {drift.z:+.1f} standard deviations when "
      f"weighted: p = {drift.p_value:.2g} (fault below {level:.1g}; {_power(guesses, level)})"
    ),
  )


def _power(guesses: Judged, level: float) -> str:
  bias = detectable_bias(guesses, level)
  if math.isinf(bias):
    return "too few guesses to see any bias in acceptance"
  return f"a bias of {bias:.2%} in acceptance would be seen 9 times in 10"


def _of_divergence(pair: Pair, text: int, d: Divergence) -> str:
  plain, speculative = pair.vocabulary.pieces([d.plain, d.speculative])
  verdict = "a tie" if d.is_tie else "a FAULT"
  return (
    f"text {text}, token {d.position + 1}: {plain!r} became {speculative!r}; their logits are "
    f"{d.gap:.2g} apart where rounding moves them by up to {d.rounding:.2g}: {verdict}"
  )
