"""Predict memory, times and speedups of a pair on a device, without weights and without the device.

Bytes and operations are those of `measure.roofline`, counted in programs of shapes. A pass takes
the time of its bytes and kernels (`measure.kernel_times`) and operations / peak. Activations take
only the time of their kernels. All slots of the caches are read. Rows are independent, as in
continuous batching. Encoder and prefill are left out.
"""

import dataclasses
import functools
import itertools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specdec_jax import theory
from specdec_jax.core.context import Encoded, Prompt
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.memory import num_bytes
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import DraftOptions, Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.heads import AnyConfig, DraftHead
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.measure.kernel_times import GPU_TIMES, KernelTimes, KernelWork
from specdec_jax.measure.roofline import jaxpr_bytes, matmul_operations
from specdec_jax.models.config import T5Config
from specdec_jax.models.families import Config, init_params, model_of, with_feature_layers
from specdec_jax.models.transformer import Cache
from specdec_jax.models.whisper import without_encoder


class Device(NamedTuple):
  """Memory in 1e9 bytes, peaks of bandwidth and dense bfloat16 arithmetic, and what is reached.

  Attributes:
    note: how predictions for this device were validated.
  """

  memory_gb: float
  gb_per_s: float
  tflops: float
  times: KernelTimes = KernelTimes()
  note: str = "data sheet, not validated"


# GPUs: data sheets of NVIDIA (H100 SXM, A100 80GB SXM, L4), without sparsity; times of kernels
# are those of the H100. TPUs: cloud.google.com/tpu/docs/v4 and so on. Read in 2026.
DEVICES = {
  "h100": Device(80, 3350, 989, GPU_TIMES, "chains within 6% of measured times, trees 11%"),
  "a100": Device(80, 2039, 312, GPU_TIMES),
  "l4": Device(24, 300, 121, GPU_TIMES),
  "v4": Device(32, 1200, 275, note="bytes validated with its compiler, times not validated"),
  "v5e": Device(16, 819, 197),
  "v5p": Device(95, 2765, 459),
  "v6e": Device(32, 1638, 918),
}
CPU_TFLOPS = 0.15  # per core with AVX-512, in float32, in passes over a few rows
USABLE = 0.9  # share of the memory for weights and caches; programs need the rest

# Kernels of a pass of a T5 compiled for a GPU, by kind: per layer; more per layer if XLA splits the
# inner axis of matmuls (several rows, or WIDE); more per layer over more than LONG tokens per row;
# and once per pass. Below: those of a step or round besides its passes, and those of heads per
# round and per draft token. A test compares them with compiled programs.
KERNELS = {
  "matmul": (6, 4, 3, 1),
  "attention": (2, 0, 6, 0),
  "write": (1, 0, 0, 0),
  "norm": (0, 0, 0, 2),
  "other": (1, 0, 1, 5),
}
WIDE, LONG, STEP_KERNELS, ROUND_KERNELS = 2048, 16, 8, 16
HEAD_KERNELS = {"parallel": (57, 0), "heads": (16, 0), "eagle": (0, 21), "conditioned": (0, 54)}

GAMMAS = range(1, 13)
_CORNERS = 1, 8  # values of gamma from which all others are computed
PAYS = 1.1  # speedup from which speculation pays
# Nodes and depths of trees, and the shares of 1 - alpha with which the second child of a node and
# the next ones are accepted: those of alpha 0.75 in `experiments.gpu.predict`.
NODES, DEPTHS, RANKS = (8, 16, 32, 64), (3, 5, 8), (0.44, 0.16, 0.08, 0.04)


class PairShapes(NamedTuple):
  """Configurations of a pair, and lengths of a row: of its encoded source, and of its new tokens.

  A draft of None takes no time, such as n-grams.
  """

  target: Config
  draft: AnyConfig | None
  source: int
  new_tokens: int


class Work(NamedTuple):
  """Bytes and operations of programs, and memory.

  Attributes:
    target: [weights or attention, bytes or operations] of a target pass over gamma + 1 tokens.
    draft: the same of drafting gamma tokens.
    weights: bytes of the weights of target and draft, encoders included.
    caches: bytes of the keys and values of all rows in target and draft.
  """

  target: np.ndarray
  draft: np.ndarray
  weights: np.ndarray
  caches: np.ndarray


def prompt_of(
  config: Config, batch_size: int, source_tokens: int, array: Any = jax.ShapeDtypeStruct
) -> Prompt:
  """Return the shapes of prompts; those of a Whisper are encoded, with four tokens each."""
  if getattr(config, "num_mels", None) is None:
    return array((batch_size, source_tokens), jnp.int32)
  source = array((batch_size, source_tokens, config.emb_dim), config.layout.activations)
  return Encoded(source, array((batch_size, 4), jnp.int32), array((batch_size,), jnp.int32))


@functools.cache
def param_structs(config: AnyConfig) -> Any:
  """Return the shapes of a model's or head's parameters, in the dtypes of its layout."""

  def struct(path, x):
    return jax.ShapeDtypeStruct(x.shape, config.layout.param_dtype(path[-1].key, x.dtype))

  shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
  return jax.tree_util.tree_map_with_path(struct, shapes)


def counted(pair: PairShapes, batch: int, gamma: int) -> Work:
  """Count the work of the programs of a round; caches have the same size for each gamma."""
  target, draft, tree, sampling = pair.target, pair.draft, chain(gamma), Sampling(0.0)
  model, target_params = model_of(target), param_structs(target)
  proposer: Any = NullDraft(tree)
  own = draft_params = param_structs(draft) if draft else ()
  if isinstance(draft, DraftHead):
    model = with_feature_layers(model, draft.feature_layers)
    whole = functools.partial(draft.draft_params, target)
    draft_params = jax.eval_shape(whole, own, target_params)
    proposer = draft.draft(target, sampling, tree, DraftOptions())
  elif draft:
    if getattr(target, "num_mels", None) is not None:  # the target's encoder serves both
      own = draft_params = without_encoder(own)
    proposer = ModelDraft(model_of(draft), sampling, tree)
  decoder = Decoder(model, proposer, TokenVerifier(sampling))
  rng = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
  init = functools.partial(decoder.init, max_new_tokens=pair.new_tokens - gamma)
  prompt = prompt_of(target, batch, pair.source)
  state = jax.eval_shape(init, Params(target_params, draft_params), prompt, rng)
  tokens = jax.ShapeDtypeStruct((batch, gamma + 1), jnp.int32)
  cache, draft_cache = state.target_cache, state.draft_state
  verify = _work(gamma + 1, 1, cache, model.extend, target_params, cache, tokens)
  # The first pass of the draft is over two tokens.
  inputs = draft_params, draft_cache, state.context, rng
  drafting = _work(gamma + 1, gamma, draft_cache, proposer.propose, *inputs)
  drafted = _held(draft_cache)
  if isinstance(draft, DraftHead) and isinstance(draft_cache, Cache):
    drafted -= _held(draft_cache.cross)  # those of the source are the target's
  weights = np.array([_held(target_params), _held(own)], float)
  return Work(verify, drafting, weights, np.array([_held(cache), drafted], float))


def _work(num_tokens: int, num_passes: int, cache: Any, f: Any, *args: Any) -> np.ndarray:
  """Return [weights or attention, bytes or operations] of f(*args), with passes over a cache.

  Each of `num_tokens` tokens multiplies each cached number, of two bytes, and adds it.
  """
  cached = _held((cache.layers, cache.cross)) if isinstance(cache, Cache) else 0
  jaxpr = jax.make_jaxpr(f)(*args).jaxpr
  total = jaxpr_bytes(jaxpr), matmul_operations(jaxpr)
  attention = num_passes * cached, num_tokens * cached
  return np.array([np.subtract(total, attention), attention], float)


def _held(arrays: Any) -> int:
  return sum(map(num_bytes, jax.tree.leaves(arrays)))


class Counts:
  """Work of a pair, which is linear in layers, batch and gamma, from eight combinations of them."""

  def __init__(self, pair: PairShapes):
    self.pair, models = pair, pair[:2]
    is_head = isinstance(pair.draft, DraftHead)
    # A head reads layers of the target, and may read its last ones.
    features = pair.draft.feature_layers if isinstance(pair.draft, DraftHead) else ()
    fewest = max([1 + is_head, *(1 + layer for layer in features)]), 1
    left = np.array([c.num_decoder_layers - n if c else 0 for c, n in zip(models, fewest)])
    deeper = Work(left[0], left[1], left, left)

    def corner(batch: int, gamma: int) -> Work:
      few, more = (
        counted(pair._replace(target=target, draft=draft), batch, gamma)
        for target, draft in (map(_shallow, models, np.add(fewest, n)) for n in (0, 1))
      )
      return jax.tree.map(lambda n, x, y: x + n * (y - x), deeper, few, more)

    corners = [corner(batch, gamma) for batch in (1, 2) for gamma in _CORNERS]
    self.corners = jax.tree.map(lambda *x: np.array(x).reshape(2, 2, *x[0].shape), *corners)
    serves_both = getattr(pair.target, "num_mels", None) is not None  # its encoder
    for i, config in enumerate(models[: 1 if serves_both else 2]):
      if isinstance(config, T5Config):
        encoder = param_structs(_shallow(config, 1))["encoder"]["layers_0"]
        self.corners.weights[..., i] += (config.num_encoder_layers - 1) * _held(encoder)

  def __call__(self, batch: int, gamma: int) -> Work:
    share = (gamma - _CORNERS[0]) / (_CORNERS[1] - _CORNERS[0])
    factors = np.outer([2 - batch, batch - 1], [1 - share, share])
    return jax.tree.map(lambda x: np.tensordot(factors, x), self.corners)


def _shallow(config: Any, layers: int) -> Any:
  """Return a model with this number of decoder layers, and one of the encoder."""
  if config is None:
    return None
  encoder = {"num_encoder_layers": 1} if isinstance(config, T5Config) else {}
  return dataclasses.replace(config, num_decoder_layers=int(layers), **encoder)


@dataclasses.dataclass(frozen=True)
class Plan:
  """Predicted costs of a pair on a device at a batch size: `c` and `v` for each of GAMMAS."""

  counts: Counts
  device: Device
  batch: int

  def seconds(self, work: np.ndarray, kernels: np.ndarray) -> float:
    """Return the time of [weights or attention, bytes or operations], and of `kernels`."""
    pair, device, (num_bytes, operations) = self.counts.pair, self.device, work.sum(axis=0)
    if self.batch > 1 and device.times.fixed_us:  # on GPUs, a write to slots copies all of the text
      source = pair.source if pair.target.has_encoder else 0
      num_bytes += 2 * work[1, 0] * pair.new_tokens / (pair.new_tokens + source)
    us = device.times.us(KernelWork(num_bytes, 0, *kernels), device.gb_per_s)
    return us / 1e6 + operations / device.tflops / 1e12

  def target_kernels(self, tokens: int) -> np.ndarray:
    """Return [kernels, queries of attention] of a step, or of a round without drafting."""
    rest = ROUND_KERNELS if tokens > 1 else STEP_KERNELS
    return self._pass(self.counts.pair.target, tokens) + [rest, 0]

  def draft_kernels(self, gamma: int, nodes: int = 0) -> np.ndarray:
    """Return [kernels, queries of attention] of drafting `gamma` tokens, or levels of a tree."""
    draft = self.counts.pair.draft
    if draft is None:
      return np.zeros(2)
    if isinstance(draft, DraftHead):
      per_round, per_token = HEAD_KERNELS.get(draft.kind, HEAD_KERNELS["conditioned"])
      return np.array([per_round + gamma * per_token, 0])
    # The first pass is over two tokens, the others over those of a level.
    return self._pass(draft, 2) + (gamma - 1) * self._pass(draft, max(1, nodes // gamma))

  def _pass(self, config: Config, tokens: int) -> np.ndarray:
    kernels = pass_kernels(config, self.batch, tokens)
    queries = kernels["attention"] * tokens * config.num_heads * (tokens <= LONG)
    return np.array([sum(kernels.values()), queries])

  def target_s(self, tokens: int = 1) -> float:
    """Return the time of a step or, over several tokens per row, of a round without drafting."""
    work = self.counts(self.batch, tokens - 1).target
    return self.seconds(work, self.target_kernels(tokens))

  def draft_s(self, gamma: int, nodes: int = 0) -> float:
    """Return the time to draft `gamma` tokens, or as many levels of a tree with `nodes`."""
    return self.seconds(self.counts(self.batch, gamma).draft, self.draft_kernels(gamma, nodes))

  @functools.cached_property
  def c(self) -> np.ndarray:
    return np.array([self.draft_s(gamma) / gamma for gamma in GAMMAS]) / self.target_s()

  @functools.cached_property
  def v(self) -> np.ndarray:
    return np.array([self.target_s(gamma + 1) for gamma in GAMMAS]) / self.target_s()

  @property
  def memory_gb(self) -> float:
    """Bytes of weights and caches in 1e9."""
    work = self.counts(self.batch, 0)
    return (work.weights + work.caches).sum() / 1e9

  @property
  def fits(self) -> bool:
    return self.memory_gb <= USABLE * self.device.memory_gb

  def best(self, alpha: float) -> tuple[float, str]:
    """Return the largest speedup, and its gamma or its tree, as '5' or '16/5': nodes/depth."""
    gains = theory.walltime_improvement(alpha, np.array(GAMMAS), self.c, self.v)
    found = [(float(gain), f"{gamma}") for gamma, gain in zip(GAMMAS, gains)]
    for nodes, depth in itertools.product(NODES, DEPTHS):
      cost = (self.draft_s(depth, nodes) + self.target_s(nodes)) / self.target_s()
      found.append((_tree_tokens(alpha, nodes, depth) / cost, f"{nodes}/{depth}"))
    return max(found)


def pass_kernels(config: Config, batch: int, tokens: int) -> dict[str, int]:
  """Return the kernels of a pass over `tokens` per row by kind, from KERNELS."""
  splits = batch * tokens > 1 or config.emb_dim >= WIDE
  layers = config.num_decoder_layers
  times = layers, layers * splits, layers * (tokens > LONG), 1
  return {kind: sum(map(operator.mul, row, times)) for kind, row in KERNELS.items()}


def least_alpha(c: ArrayLike, v: ArrayLike) -> float:
  """Return the lowest alpha, in steps of 0.01, at which a chain pays, or infinity.

  c and v are those of gamma 1, 2 and so on.
  """
  alphas, gammas = np.arange(101) / 100, np.arange(1, np.size(c) + 1)
  gains = theory.walltime_improvement(alphas[:, None], gammas, c, v)
  return float(alphas[gains.max(axis=1) >= PAYS].min(initial=np.inf))


@functools.cache
def _tree_tokens(alpha: float, nodes: int, depth: int) -> float:
  acceptance = alpha, *((1 - alpha) * share for share in RANKS)
  return theory.tree_tokens(theory.best_tree(acceptance, nodes, depth), acceptance)
