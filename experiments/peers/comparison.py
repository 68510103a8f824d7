"""Comparisons of decoding backends: texts, weights and libraries.

The weights of each T5 are written to a folder once, in the format of transformers. Every backend,
including this package, reads these folders.
"""

import dataclasses
import functools
import importlib.util
import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.beams import BeamSearcher
from specdec_jax.checkpoints.checkpoint import param_shapes
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.save import save_huggingface
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import DecodeResult, LoadsDraft, Params
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.errors import InputError
from specdec_jax.load import BUNDLED, checkpoint_draft, is_bundled, load_pair
from specdec_jax.measure.speed import own_baseline
from specdec_jax.models.config import T5Config
from specdec_jax.models.layout import Weights
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.sizes import t5_config, version_name
from specdec_jax.pair import Pair

# Dtype of this package's arithmetic, and how it keeps the weights of the target and of the draft in
# memory; see `load.load_pair`, also for the default of the last one.
Precision = tuple[str, Weights] | tuple[str, Weights, Weights]
PRECISIONS: Sequence[Precision] = (("float32", "float"), ("float32", "stored"))

# Function of (prompt [1, P], rng [1], *, max_new_tokens, sampling), as in this package.
Decode = Callable[..., DecodeResult]
# Function of (source, seed, max_new_tokens, temperature). It returns the tokens, including EOS, and
# the number of target calls.
Generate = Callable[[list[int], int, int, float], tuple[list[int], int]]


@dataclasses.dataclass(frozen=True)
class Workload:
  """Texts that every backend decodes, one at a time, and the settings of decoding.

  Attributes:
    texts: source texts.
    gammas: numbers of draft tokens per round of this package's speculative decoding; each is
      measured.
    temperatures: sampling temperatures; each is measured, and 0 is argmax. A beam search allows
      only 0.
    max_new_tokens: maximum number of tokens of each output.
    beams: number of beams of a beam search, whose best output is compared; None to decode without
      beam search.
    draft_beams: number of beams of this package's draft; None for the same number as `beams`.

  Raises:
    InputError: an attribute has the wrong type, or a beam search has a temperature above 0.
  """

  texts: Sequence[str]
  gammas: Sequence[int] = (5, 10)
  temperatures: Sequence[float] = (0.0, 1.0)
  max_new_tokens: int = 64
  beams: int | None = None
  draft_beams: int | None = None

  def __post_init__(self):
    if self.beams is not None and any(self.temperatures):
      raise InputError(
        f"temperatures are {self.temperatures}, but a beam search samples nothing; set them to "
        "(0.0,)."
      )


class Comparison(NamedTuple):
  """Pair of models in the formats that the backends read, and the texts that they decode.

  Attributes:
    pairs: the pair as this package loads it, once per precision, with the draft from the folder
      `draft` or a learned draft head.
    target: folder of the target M_p in the format of transformers. Backends convert its weights to
      float32, unless their name has a different format.
    draft: folder of the draft M_q in the same format.
    alpha: acceptance rate to simulate; None to measure the real acceptance rate.
    workload: texts and settings of decoding.
  """

  pairs: tuple[Pair, ...]
  target: str
  draft: str
  alpha: float | None
  workload: Workload

  @property
  def pair(self) -> Pair:
    """The first pair."""
    return self.pairs[0]

  @property
  def stops_at_eos(self) -> bool:
    """True if EOS ends an output; if acceptance is simulated, all outputs run to the limit."""
    return self.alpha is None


class Backend(NamedTuple):
  """Decoder of the target with which this package's speculative decoding is compared.

  Attributes:
    name: name of the backend in records.
    packages: packages that the backend imports.
    load: function that loads the weights of a comparison and returns a function that decodes with
      them. It returns a `Decode`, or a `Generate` if the backend runs in a separate process. In a
      separate process, it gets a comparison without `pairs`.
    process: name of the process in which the backend runs; None for this process. Backends of one
      library share a process and its threads.
    python: Python of that process, of a virtual environment that has this package and `packages`;
      None for the Python of this process.
    greedy_only: True if the backend supports temperature 0 only.
    trained_only: True if the backend does not support simulated acceptance.
    searches: True if the backend supports beam search as well; 'only' if it supports nothing else.
    float32: False if the backend rounds weights or activations, so that its outputs may differ from
      those of the float32 target.
  """

  name: str
  packages: tuple[str, ...]
  load: Callable[[Comparison], Decode] | Callable[[Comparison], Generate]
  process: str | None = None
  python: str | None = None
  greedy_only: bool = False
  trained_only: bool = False
  searches: bool | Literal["only"] = False
  float32: bool = True

  def missing_packages(self) -> list[str]:
    """Return the required packages that are not installed."""
    if self.python:
      return [name for name in self.packages if not _has_package(self.python, name)]
    return [name for name in self.packages if importlib.util.find_spec(name) is None]

  def supports(self, comparison: Comparison, sampling: Sampling) -> bool:
    """Return True if the backend can decode the workload of a comparison with this sampling."""
    if comparison.workload.beams and not self.searches:
      return False
    if not comparison.workload.beams and self.searches == "only":
      return False
    if self.greedy_only and sampling.temperature:
      return False
    return comparison.stops_at_eos or not self.trained_only


def _has_package(python: str, name: str) -> bool:
  command = [python, "-c", f"import importlib.util as u; exit(not u.find_spec({name!r}))"]
  try:
    return not subprocess.run(command, check=False).returncode
  except OSError as error:
    raise InputError(f"cannot run {python}: {error.strerror}.") from error


def _load_own(comparison: Comparison) -> Decode:
  """Return a function for autoregressive decoding, or plain beam search if there are beams."""
  if comparison.workload.beams is None:
    return own_baseline(comparison.pair).decode
  searcher = comparison.pair.beam_searcher(comparison.workload.beams, gamma=0)
  return best_of_beams(searcher, comparison.pair.params)


def best_of_beams(searcher: BeamSearcher, params: Params) -> Decode:
  """Return a function (`Decode`) that returns the best text of a beam search."""

  def decode(prompt, rng, *, max_new_tokens: int, sampling: Sampling) -> DecodeResult:
    return searcher.run(params, prompt, max_new_tokens=max_new_tokens).best()

  return decode


OWN_BASELINE = Backend("own", (), _load_own, searches=True)


def trained(
  folder: str,
  workload: Workload,
  target: str = str(BUNDLED / "target"),
  draft: str = str(BUNDLED / "draft"),
  vocabulary: str | None = None,
  task: str | None = None,
  extra_ids: int | Literal["auto"] = "auto",
  learned: str | None = None,
  precisions: Sequence[Precision] = PRECISIONS,
) -> Comparison:
  """Return a comparison with trained weights, by default the weights of the bundled pair.

  Args:
    folder: folder to write the weights to.
    workload: texts and settings of decoding.
    target: checkpoint of the target M_p, as for `load.load_pair`.
    draft: checkpoint of the draft M_q, as for `load.load_pair`.
    vocabulary: vocabulary of both models, as for `load.load_pair`.
    task: task name for records, as for `load.load_pair`.
    extra_ids: number of extra ids of the vocabulary, as for `load.load_pair`.
    learned: path of a learned draft head on the target's hidden states. This package uses it
      instead of `draft`; other backends do not. None to use `draft`.
    precisions: precisions of this package; each is measured. Two that load the same weights, such
      as 'float' and 'stored' for a float32 checkpoint, are measured once.
  """
  checkpoint = open_checkpoint(target)
  vocabulary = vocabulary or checkpoint.open_vocabulary().path
  if task is None and is_bundled(checkpoint):
    task = BUNDLED.name
  target_path, draft_path = (
    open_checkpoint(path).recorded_path for path in (target, learned or draft)
  )
  target, draft = (
    _write_checkpoint(folder, "target", target),
    _write_checkpoint(folder, "draft", draft),
  )
  pairs = tuple(
    pair.with_target(path=target_path).with_draft(dataclasses.replace(pair.draft, path=draft_path))
    for pair in _load_pairs(precisions, target, learned or draft, vocabulary, task, extra_ids)
  )
  return Comparison(pairs, target, draft, None, workload)


def random(
  folder: str,
  texts: Sequence[str],
  target: str,
  draft: str,
  alpha: float,
  version: str | float = "1.1",
  gammas: Sequence[int] = (5, 7),
  max_new_tokens: int = 64,
  num_output_tokens: int | None = None,
  precisions: Sequence[Precision] = PRECISIONS,
) -> Comparison:
  """Return a comparison with published sizes of T5, random weights and a simulated acceptance rate.

  The temperature is 0. Every model performs its complete computation, and all outputs run to the
  limit; see `SimulatedModel`.

  Args:
    folder: folder to write the weights to.
    texts: source texts, which are encoded with the vocabulary of the bundled pair.
    target: size of the target M_p; see `t5_config`.
    draft: size of the draft M_q.
    alpha: acceptance rate to simulate.
    version: version of T5, '1.0' or '1.1'.
    gammas: see `Workload`.
    max_new_tokens: see `Workload`.
    num_output_tokens: number of tokens that this package's draft may propose, the first ones of the
      vocabulary, as in a draft of the most frequent tokens (`load.frequent_tokens`); None for all.
    precisions: see `trained`.
  """
  workload = Workload(texts, gammas, temperatures=(0.0,), max_new_tokens=max_new_tokens)
  vocabulary, task = str(BUNDLED / "vocabulary.model"), f"simulated, alpha {alpha:g}"
  extra_ids = t5_config(target, version).vocab_size - len(open_vocabulary(vocabulary))
  target, draft = (_write_random(folder, size, version) for size in (target, draft))
  drafts = functools.partial(_random_draft, draft, num_output_tokens)
  pairs = tuple(
    pair.with_target(
      model=SimulatedModel(pair.target.model, alpha, pair.target.model.eos_id), path=None
    ).with_draft(dataclasses.replace(pair.draft, path=None))
    for pair in _load_pairs(precisions, target, drafts, vocabulary, task, extra_ids)
  )
  return Comparison(pairs, target, draft, alpha, workload)


def _load_pairs(
  precisions: Sequence[Precision],
  target: str,
  draft: str | Callable[[str, Weights | None], LoadsDraft],
  vocabulary: str,
  task: str | None,
  extra_ids: int | Literal["auto"],
) -> tuple[Pair, ...]:
  """Load a pair in each precision. Of two pairs with the same weights, only the first is kept."""
  pairs: dict[tuple[str, str, str], Pair] = {}
  for dtype, weights, *rest in precisions:
    default: Weights | None = weights if weights in ("int8", "int4") else None
    draft_weights = rest[0] if rest else default
    pair = load_pair(
      target,
      draft if isinstance(draft, str) else draft(dtype, draft_weights),
      vocabulary,
      task,
      dtype,
      extra_ids=extra_ids,
      weights=weights,
      draft_weights=draft_weights,
    )
    pairs.setdefault((pair.dtype, pair.kernels, pair.draft.name), pair)
  return tuple(pairs.values())


def _random_draft(
  folder: str, num_output_tokens: int | None, dtype: str, weights: Weights | None
) -> LoadsDraft:
  """Return a function that loads a draft; its logits cover the first tokens of the vocabulary."""

  def first_tokens(vocabulary: Vocabulary) -> range:
    assert num_output_tokens is not None
    return range(num_output_tokens)

  return functools.partial(
    checkpoint_draft,
    model=folder,
    dtype=dtype,
    weights=weights,
    output_tokens=None if num_output_tokens is None else first_tokens,
  )


def _write_checkpoint(folder: str, name: str, path: str) -> str:
  """Write a T5 checkpoint in the format of transformers, and return its folder.

  The weights are bfloat16 if the checkpoint stores all of them as bfloat16, and float32 otherwise.
  """
  stored = open_checkpoint(path)
  if not isinstance(stored.config, T5Config):
    raise InputError(f"{path} is not a T5; every backend that is compared here needs a T5.")
  is_bfloat16 = all(array.dtype == jnp.bfloat16 for array in stored.arrays.values())
  params = stored.load(stored.config, jnp.bfloat16 if is_bfloat16 else jnp.float32)
  return _write(folder, name, stored.config, params)


def _write_random(folder: str, size: str, version: str | float) -> str:
  """Write a T5 of a published size with random weights and return its folder."""
  config = t5_config(size, version)
  return _write(folder, f"t5_{version_name(version)}_{size}", config, _random_params(config))


def _write(folder: str, name: str, config: T5Config, params) -> str:
  path = os.path.join(folder, name)
  save_huggingface(path, config, params)
  return path


def _random_params(config: T5Config):
  """Return random bfloat16 parameters on the host, scaled to keep activations near 1."""
  rng = np.random.default_rng(0)

  def random_array(leaf):
    if len(leaf.shape) == 1:
      return np.ones(leaf.shape, jnp.bfloat16)
    normal = rng.standard_normal(leaf.shape, np.float32) * np.float32(leaf.shape[0] ** -0.5)
    return normal.astype(jnp.bfloat16)

  return jax.tree.map(random_array, param_shapes(config))
