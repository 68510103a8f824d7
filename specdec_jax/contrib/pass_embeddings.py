"""Look-ahead embeddings: the target drafts for itself (PaSS; Monea et al., 2023).

One target forward pass gives all draft tokens. It covers the last committed token and learned
embeddings, which stand for the tokens after it. The first draft token is sampled from the target's
own distribution. A second pass verifies the draft tokens. The cache slots that the first pass
writes are discarded.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Key

from specdec_jax.core.arrays import gather
from specdec_jax.core.context import Context
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, Tree, require_chain
from specdec_jax.core.types import Draft, DraftOptions, Keys, Proposal
from specdec_jax.drafts.heads.base import (
  DraftHead,
  TargetOutputs,
  TrainingLogits,
  require_depth,
)
from specdec_jax.drafts.layer_skip import text_cache
from specdec_jax.drafts.model import depth_keys, sample_next
from specdec_jax.models.families import Config, model_of, module_of


@dataclasses.dataclass(frozen=True)
class PaSSDraft(Draft):
  """A draft that samples all tokens of a chain from the logits of one forward pass.

  Parameters are (parameters of the head, parameters of the target). Without logits processors, the
  draft tokens are independent of each other.
  """

  head: "PassHead"
  target: Config
  sampling: Sampling
  tree: Tree
  options: DraftOptions = DraftOptions()

  def __post_init__(self):
    require_chain("a draft by look-ahead embeddings", self.tree)
    require_depth(self.head.gamma, self.tree.depth)

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    (head_params, target_params), gamma = params, self.tree.depth
    embedded = target_params["token_embedder"]["embedding"][context.last_token][:, None]
    ahead = jnp.broadcast_to(
      head_params["embeddings"][: gamma - 1], (len(rng), gamma - 1, self.head.state_dim)
    )
    block = jnp.concatenate([embedded, ahead], axis=1).astype(self.target.layout.activations)
    module, cache = module_of(self.target), text_cache(context)
    logits, _, _ = module.apply({"params": target_params}, cache, block, method="extend_embedded")
    proposals = []
    for i, key in enumerate(depth_keys(self.options, context, rng, gamma)):
      token, token_q, text = sample_next(self, key, context, logits[:, i])
      context = context._replace(tokens=text, length=context.length + 1)
      proposals.append(Proposal(token, token_q))
    return jax.tree.map(lambda *each: jnp.stack(each, axis=1), *proposals), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassHead(DraftHead):
  """Learned draft head of PaSS: gamma - 1 look-ahead embeddings of width E."""

  uses_target_logits = True

  kind: str = "pass"
  gamma: int = 8

  def init(self, rng: Key[Array, ""]) -> Any:
    return {"embeddings": jax.random.normal(rng, (self.gamma - 1, self.state_dim))}

  def draft(
    self, target: Config, sampling: Sampling, tree: AnyTree, options: DraftOptions
  ) -> PaSSDraft:
    return PaSSDraft(self, target, sampling, self.require_static(tree), options)

  def draft_params(self, target: Config, params: Any, target_params: Any) -> Any:
    return params, target_params

  def training_logits(
    self, params: Any, target: Config, target_params: Any, outputs: TargetOutputs, stride: int
  ) -> TrainingLogits:
    """Return the target's logits at the embeddings.

    Each text has one anchor, for any `stride`. The logits at the anchor's own token are dropped,
    because they do not depend on the embeddings.
    """
    model, (batch, length) = model_of(target), outputs.inputs.shape
    # The number of non-padding inputs. For T5, whose first input is 0, it is the position of the
    # last input.
    ends = (outputs.inputs > 0).sum(axis=1)
    fraction = 0.5 if outputs.rng is None else jax.random.uniform(outputs.rng, (batch,))
    anchor = (fraction * ends).astype(jnp.int32)
    last_token = gather(outputs.inputs, anchor[:, None])
    embedded = target_params["token_embedder"]["embedding"][last_token]
    ahead = jnp.broadcast_to(params["embeddings"], (batch, *params["embeddings"].shape))
    block = jnp.concatenate([embedded, ahead], axis=1).astype(target.layout.activations)
    # The cache in `outputs` has no slots for the embeddings.
    prompt_width = model.prompt_tokens(outputs.source)[0].shape[1]
    num_slots = prompt_width + length + self.gamma
    cache: Any = model.prefill(target_params, outputs.source, num_slots)[1]
    cache = model.extend(target_params, cache, outputs.inputs)[2]
    cache = model.commit(cache, cache.length + anchor)
    variables = {"params": target_params}
    logits = module_of(target).apply(variables, cache, block, method="extend_embedded")[0]
    positions = anchor[:, None, None] + jnp.arange(1, self.gamma)[None, None]
    return TrainingLogits(logits[:, None, 1:], positions)
