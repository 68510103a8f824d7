"""Many drafts of one target beside each other: acceptance, costs, and the speed they give."""

import pathlib
from collections.abc import Callable, Sequence

import jax
from rich.console import Console

from specdec_jax import records
from specdec_jax.atomic_files import atomic_write
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import LoadedTarget, Verifier
from specdec_jax.errors import require_types
from specdec_jax.measurement.measure import measure
from specdec_jax.pairs import DraftFactory, Pair
from specdec_jax.progress import Progress
from specdec_jax.reporting.drafts import drafts_table
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.html import drafts_report


def compare_drafts(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  drafts: Sequence[Callable[[LoadedTarget], DraftFactory]],
  rules: Sequence[Callable[[Sampling], Verifier]] = (),
  gamma: int = 5,
  temperatures: Sequence[float] = (0.0, 1.0),
  batch_size: int = 1,
  max_new_tokens: int = 64,
  repeats: int = 3,
  seed: int = 0,
) -> None:
  """Measure them one after the other, print a table, append to `results.jsonl`, write a page.

  Args:
    pair: the target, with a draft that is measured first.
    texts: sources.
    output_dir: gets the files; settings recorded there already are not measured again.
    drafts: the others.
    rules: other ways to judge the pair's own draft; above temperature 0 only, where exact ones
      differ.
    gamma: guesses a round, of a tree its depth.
    temperatures: 0 is argmax; each measured.
    batch_size: texts decoded together.
    max_new_tokens: limit for each.
    repeats: of each timed decode, in turn with plain decoding of the same texts.
    seed: of all sampling.
  """
  require_types(compare_drafts, locals())
  samplings = [*map(Sampling, temperatures)]
  warm = [sampling for sampling in samplings if sampling.temperature > 0]
  contenders = [(pair, samplings)]
  contenders += [(pair._replace(verifier=verifier), warm) for verifier in rules if warm]
  contenders += [(pair.with_draft(draft(pair.loaded_target)), samplings) for draft in drafts]
  console = Console(markup=False, soft_wrap=True)
  with records.open_results(output_dir) as results, Progress() as bar:
    found = []
    for one, its_samplings in bar.track(contenders, description="drafts"):
      found += measure(
        *(one, texts, results, its_samplings, [gamma], batch_size, max_new_tokens, repeats, seed)
      )
      jax.clear_caches()  # a process may map only so many programs
    report = pathlib.Path(results).with_name("report.html")
    with atomic_write(report) as file:
      file.write(drafts_report(found, f"Drafts: {pair.task or found[0].target_label}"))
  console.print(render(drafts_table(found), "terminal"))
  console.print(
    f"Records: {results} (measured once; delete the file to measure again); as a page: {report}"
  )
