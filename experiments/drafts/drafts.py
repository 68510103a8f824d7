"""Comparison of drafts of one target: acceptance, costs and speed."""

from collections.abc import Callable, Sequence

from experiments.record_tables import drafts_table
from experiments.reports import drafts_report
from specdec_jax.core.loading import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import Verifier
from specdec_jax.drafts.composed import LoadsDraft
from specdec_jax.measure.measure import speed_steps
from specdec_jax.measure.speed import Timing
from specdec_jax.measure.sweep import sweep
from specdec_jax.pairs import LoadedPair


def compare_drafts(
  pair: LoadedPair,
  texts: Sequence[str],
  output_dir: str,
  drafts: Sequence[LoadsDraft],
  verifiers: Sequence[Callable[[Sampling], Verifier]] = (),
  drafts_with_verifiers: Sequence[tuple[LoadsDraft, Callable[[Sampling], Verifier]]] = (),
  gamma: int = 5,
  temperatures: Sequence[float] = (0.0, 1.0),
  batch_size: int = 1,
  max_new_tokens: int = 64,
  repeats: int = 3,
  seed: int = 0,
) -> None:
  """Measure drafts in turn; print a table, append to `results.jsonl`, and write a page.

  Args:
    pair: target, and the draft that is measured first.
    texts: sources.
    output_dir: folder for the files; settings recorded there already are not measured again.
    drafts: functions that load the other drafts.
    verifiers: other verifiers for the draft of the pair. Each is a class of `core.verify` or a
      function from a sampling method to a verifier. They are measured only at temperatures above 0,
      because all exact verifiers accept the same tokens at temperature 0.
    drafts_with_verifiers: pairs of a function that loads a draft and a verifier for this draft.
    gamma: number of draft tokens per round, or the depth of a tree.
    temperatures: sampling temperatures; each is measured, and 0 is argmax.
    batch_size: number of texts decoded together.
    max_new_tokens: maximum number of tokens of each output.
    repeats: number of timed decodes of each text, interleaved with autoregressive decoding.
    seed: random seed of all sampling.
  """
  settings = [
    DecodeSettings(Sampling(temperature), batch_size, max_new_tokens, seed)
    for temperature in temperatures
  ]
  sampled = [each for each in settings if each.sampling.temperature > 0]
  measurements = [(pair, settings)]
  measurements += [(pair._replace(verifier=verifier), sampled) for verifier in verifiers if sampled]
  measurements += [(pair.with_draft(draft(pair.loaded_target)), settings) for draft in drafts]
  measurements += [
    (pair.with_draft(draft(pair.loaded_target))._replace(verifier=verifier), settings)
    for draft, verifier in drafts_with_verifiers
  ]
  sweep(
    output_dir,
    lambda: [
      step
      for pair_with_draft, its_settings in measurements
      for step in speed_steps(pair_with_draft, texts, its_settings, [gamma], Timing(repeats))
    ],
    lambda measured: [drafts_table(measured)],
    lambda measured: drafts_report(measured, f"Drafts: {pair.task or measured[0].target_label}"),
  )
