"""Rounds of a beam search as the compiler for TPUs sees them, beside `compile`'s of decoding."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.stages import Lowered

from specdec_jax.beam_search import (
  ModelBeamDraft,
  NullBeamDraft,
  beam_search,
  search,
  speculative_beam_search,
)
from specdec_jax.beam_search.drafts import BeamDraft
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import require_count
from specdec_jax.models.families import Config, model_of
from specdec_jax.partitioning import REPLICATED, RULES, PartitionedModel, state_shardings
from specdec_jax.tpu.compile import Programs, Site

LENGTH_PENALTY = 0.6


def beam_programs(
  target: Config,
  draft: Config,
  devices: Sequence[jax.Device],
  *,
  width: int = 4,
  draft_width: int = 4,
  nodes: int | None = None,
  gamma: int = 7,
  batch_size: int = 1,
  source_tokens: int = 128,
  max_new_tokens: int = 128,
) -> Programs:
  """Both searches, and a round of each: 'plain step', which makes one step, and 'round', up to
  gamma + 1. Other arguments as `compile.programs`'.

  Raises:
    InputError: the devices cannot share the target, the draft has fewer beams than the search, or a
      size is no whole number from 1.
  """
  sizes = dict(
    width=width,
    batch_size=batch_size,
    source_tokens=source_tokens,
    max_new_tokens=max_new_tokens,
  )
  for name, size in sizes.items():
    require_count(name, size)
  site = Site(devices)
  p = PartitionedModel(model_of(target), site.mesh)
  q = PartitionedModel(model_of(draft), site.mesh, REPLICATED)
  own = ModelBeamDraft(ModelDraft(q, Sampling(temperature=0.0), chain(gamma)), draft_width, nodes)
  own.num_nodes(width)
  p_params, q_params = site.params(target, RULES), site.params(draft, REPLICATED)
  prompt = site.array((batch_size, source_tokens), jnp.int32)

  def of_round(draft: BeamDraft, draft_params) -> Lowered:
    def run(target_params, draft_params, state):
      models = p, draft, target_params, draft_params
      return search.one_round(*models, LENGTH_PENALTY, p.eos_id, state), ()

    at_start = functools.partial(search.start, p, draft, width=width, limit=max_new_tokens)
    state = jax.eval_shape(at_start, p_params, draft_params, prompt)
    places = state_shardings(state, site.mesh, REPLICATED)._replace(
      target=state_shardings(state.target, site.mesh, RULES)
    )
    return site.lower(run, (p_params, draft_params), state, places)

  how = dict(width=width, max_new_tokens=max_new_tokens, length_penalty=LENGTH_PENALTY)
  return {
    "speculative loop": lambda: speculative_beam_search.lower(
      p, own, p_params, q_params, prompt, **how
    ),
    "plain loop": lambda: beam_search.lower(p, p_params, prompt, **how),
    "plain step": lambda: of_round(NullBeamDraft(), ()),
    "round": lambda: of_round(own, q_params),
  }
