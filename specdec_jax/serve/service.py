"""Pair that is served, with its engine and its metrics."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specdec_jax.core.decode import Decoder
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.trees import Tree, chain
from specdec_jax.generate import GenerateCall, generation_config
from specdec_jax.pair import Pair
from specdec_jax.serve.engine import Engine, Limits
from specdec_jax.serve.metrics import Metrics
from specdec_jax.serve.slots import Slots


class Service:
  """Pair that is served.

  Attributes:
    pair: target and draft.
    limits: limits of requests and of the engine.
    name: name of the model in requests.
    prefix: text before each prompt of a request without a task.
    metrics: counters.
    engine: engine that decodes the texts.
  """

  def __init__(
    self,
    pair: Pair,
    gamma: int = 5,
    tree: Sequence[int] | None = None,
    limits: Limits = Limits(),
    name: str | None = None,
    prefix: str = "",
  ):
    """Start the engine.

    Args:
      pair: target and draft.
      gamma: number of draft tokens per round; 0 for autoregressive decoding.
      tree: parents of the draft tokens of a tree, which replaces the chain of gamma draft tokens.
      limits: limits of requests and of the engine.
      name: name of the model in requests; by default, the name of the target.
      prefix: text before each prompt of a request without a task.

    Raises:
      InputError: gamma, tree or a default of requests is invalid, the model has too few positions
        for the limits, or there is not enough memory.
    """
    self.pair, self.limits, self.prefix = pair, limits, prefix
    self.name = name or pair.target.name
    self._tree = Tree(tree) if tree is not None else chain(gamma)
    config, _ = generation_config(pair, None, {"num_beams": 1})
    prompt = jnp.zeros((limits.num_slots, pair.max_source_tokens), jnp.int32)
    init = functools.partial(self.call(config).decoder().init, max_new_tokens=limits.max_new_tokens)
    jax.eval_shape(init, pair.params, prompt, jax.random.key(0))  # checks positions and memory
    self.metrics = Metrics()
    self.engine = Engine(self._new_slots, limits)

  def call(self, config: GenerationConfig, logprobs: bool = False) -> GenerateCall:
    """Return a call of `generate` with the settings of a request."""
    return GenerateCall(self.pair, config, self._tree, logprobs=logprobs)

  def _new_slots(self, decoder: Decoder) -> Slots:
    pair, limits = self.pair, self.limits
    return Slots(
      decoder,
      pair.params,
      limits.num_slots,
      pair.max_source_tokens,
      limits.max_new_tokens,
      pair.vocabulary.pad_id,
      has_encoder=not pair.continues,
    )
