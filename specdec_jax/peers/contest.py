"""Who decodes what, with which weights: a pair's are written once, as transformers has them.

Everyone, ours too, reads that folder.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.beam_search import best
from specdec_jax.checkpoints.huggingface import save_huggingface
from specdec_jax.checkpoints.load import open_checkpoint, recorded_path
from specdec_jax.checkpoints.stored import param_shapes
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import DecodeResult
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.errors import InputError, require_types
from specdec_jax.measurement.speed import own_baseline
from specdec_jax.models.config import T5Config, t5_config, version_name
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.pairs import EMBEDDED, Pair, is_bundled, load_pair, vocabulary_of

Decode = Callable[
  ..., DecodeResult
]  # (prompt [1, P], rng [1], *, max_new_tokens, sampling), as ours
# (source, seed, max_new_tokens, temperature) -> tokens, EOS among them, and passes of the target.
Generate = Callable[[list[int], int, int, float], tuple[list[int], int]]


class Contest(NamedTuple):
  """What all competitors decode, and with which weights.

  Attributes:
    pairs: ours, read from the two folders: with float32 weights, and, where they are stored as
      bfloat16 and can be used so, as they are stored.
    target: folder of M_p as transformers has it. All but the second of ours widen it to float32.
    draft: folder of M_q.
    alpha: the acceptance rate to simulate, or None for the real one.
    texts: sources, decoded one at a time.
    gammas: guesses a round of ours, each measured.
    temperatures: 0 is argmax; each measured.
    max_new_tokens: limit for each.
    beams: of a beam search, the best of whose texts is the output; None for none.
    draft_beams: of our draft.
  """

  pairs: tuple[Pair, ...]
  target: str
  draft: str
  alpha: float | None
  texts: Sequence[str]
  gammas: Sequence[int]
  temperatures: Sequence[float]
  max_new_tokens: int
  beams: int | None = None
  draft_beams: int | None = None

  @property
  def pair(self) -> Pair:
    """Ours with float32 weights."""
    return self.pairs[0]

  @property
  def ends(self) -> bool:
    """Whether EOS ends a text; where acceptance is simulated, all run to the limit."""
    return self.alpha is None


class Competitor(NamedTuple):
  """Whose decoding of the target ours is compared with.

  Attributes:
    name: for records.
    packages: that must be installed.
    load: reads a contest's weights. In a process of its own, which gets the contest without pairs,
      it gives `Generate`.
    process: name of that process; those of one library share it, with its threads. None for this
      one.
    greedy_only: takes no part at temperatures above 0.
    searches: takes part where there are beams, too; or only there, if it is told 'only'.
    trained_only: takes no part where acceptance is simulated.
  """

  name: str
  packages: tuple[str, ...]
  load: Callable[[Contest], Decode] | Callable[[Contest], Generate]
  process: str | None = None
  greedy_only: bool = False
  trained_only: bool = False
  searches: bool | Literal["only"] = False

  def absent(self) -> list[str]:
    """Those of its packages that are not installed."""
    return [name for name in self.packages if importlib.util.find_spec(name) is None]

  def takes_part(self, contest: Contest, sampling: Sampling) -> bool:
    fits = self.searches if contest.beams else self.searches != "only"
    return bool(fits) and not (
      (self.greedy_only and sampling.temperature) or (self.trained_only and not contest.ends)
    )


def _own(contest: Contest) -> Decode:
  """Our plain decoding, or our plain beam search."""
  if contest.beams is None:
    return own_baseline(contest.pair).decode
  search = contest.pair.beam_searcher(contest.beams, 0)
  return lambda prompt, rng, *, max_new_tokens, sampling: best(
    search(prompt, max_new_tokens=max_new_tokens)
  )


OWN = Competitor("own", (), _own, searches=True)


def trained(
  folder: str,
  texts: Sequence[str],
  target: str = str(EMBEDDED / "target"),
  draft: str = str(EMBEDDED / "draft"),
  vocabulary: str | None = None,
  task: str | None = None,
  extra_ids: int | Literal["auto"] = "auto",
  gammas: Sequence[int] = (5, 10),
  temperatures: Sequence[float] = (0.0, 1.0),
  max_new_tokens: int = 64,
  beams: int | None = None,
  draft_beams: int | None = None,
  learned: str | None = None,
) -> Contest:
  """A pair with trained weights, by default the bundled one.

  Args:
    folder: gets the weights.
    texts: sources.
    target: checkpoint of M_p; as for `pairs.load_pair`, like the three after it.
    draft: checkpoint of M_q.
    vocabulary: of both.
    task: name for records; as for `pairs.load_pair`.
    extra_ids: of the vocabulary, as for `pairs.load_pair`.
    gammas: as in `Contest`, like what follows.
    temperatures: likewise; 0 alone with beams.
    max_new_tokens: likewise.
    beams: likewise.
    draft_beams: likewise.
    learned: what was trained on the target's states, with which ours decode in place of the draft.
  """
  require_types(trained, locals())
  if beams is not None and any(temperatures):
    raise InputError(f"temperatures are {temperatures}, and a beam search samples nothing; (0.0,).")

  def write(name: str, path: str) -> str:
    stored = open_checkpoint(path)
    if not isinstance(stored.config, T5Config):
      raise InputError(f"{path} is no T5, which all that is compared here can run.")
    halved = all(array.dtype == jnp.bfloat16 for array in stored.arrays.values())
    params = stored.load(stored.config, jnp.bfloat16 if halved else jnp.float32)
    return _write(folder, name, stored.config, params)

  vocabulary, guesses = vocabulary or vocabulary_of(target), learned or draft
  if task is None and is_bundled(target):
    task = EMBEDDED.name
  target_path, draft_path = recorded_path(target), recorded_path(guesses)
  target, draft = write("target", target), write("draft", draft)
  pairs = tuple(
    pair._replace(target_path=target_path, draft_path=draft_path)
    for pair in _pairs(target, learned or draft, vocabulary, task, extra_ids)
  )
  limits = gammas, temperatures, max_new_tokens, beams, draft_beams
  return Contest(pairs, target, draft, None, texts, *limits)


def random(
  folder: str,
  texts: Sequence[str],
  target: str,
  draft: str,
  alpha: float,
  version: str | float = "1.1",
  gammas: Sequence[int] = (5, 7),
  max_new_tokens: int = 64,
) -> Contest:
  """Published sizes of T5 with random weights and a set acceptance rate, at temperature 0.

  All models do all of their work, and all texts run to the limit; see `SimulatedModel`.

  Args:
    folder: gets the weights.
    texts: sources; the embedded vocabulary makes tokens of them.
    target: size of M_p; see `t5_config`.
    draft: size of M_q.
    alpha: acceptance rate.
    version: of T5, '1.0' or '1.1'.
    gammas: as in `Contest`.
    max_new_tokens: likewise.
  """
  require_types(random, locals())

  def write(size: str) -> str:
    config = t5_config(size, version)
    return _write(folder, f"t5_{version_name(version)}_{size}", config, _random_params(config))

  vocabulary, task = str(EMBEDDED / "vocabulary.model"), f"simulated, alpha {alpha:g}"
  extra_ids = t5_config(target, version).vocab_size - len(open_vocabulary(vocabulary))
  target, draft = write(target), write(draft)
  pairs = tuple(
    pair._replace(
      target=SimulatedModel(pair.target, alpha, pair.target.eos_id),
      simulated_alpha=alpha,
      target_path=None,
      draft_path=None,
    )
    for pair in _pairs(target, draft, vocabulary, task, extra_ids)
  )
  return Contest(pairs, target, draft, alpha, texts, gammas, (0.0,), max_new_tokens)


def _pairs(
  target: str, draft: str, vocabulary: str, task: str | None, extra_ids: int | Literal["auto"]
) -> tuple[Pair, ...]:
  """As `load_pair`, with float32 weights and with those that are stored, if that is another."""
  load = functools.partial(load_pair, target, draft, vocabulary, task, extra_ids=extra_ids)
  widened, stored = load(), load(stored_weights=True)
  return (widened,) if widened.kernels == stored.kernels else (widened, stored)


def _write(folder: str, name: str, config: T5Config, params) -> str:
  path = os.path.join(folder, name)
  save_huggingface(path, config, params)
  return path


def _random_params(config: T5Config):
  """Parameters on the host that keep activations near 1, bfloat16 as published ones often are."""
  rng = np.random.default_rng(0)

  def draw(leaf):
    if len(leaf.shape) == 1:
      return np.ones(leaf.shape, jnp.bfloat16)
    drawn = rng.standard_normal(leaf.shape, np.float32) * np.float32(leaf.shape[0] ** -0.5)
    return drawn.astype(jnp.bfloat16)

  return jax.tree.map(draw, param_shapes(config))
