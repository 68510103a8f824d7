"""Rounds of beam search, plain and speculative, compiled for a TPU that is not there."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Lowered

from specdec_jax.beams import BeamDraft, ModelBeams, NoBeams, search
from specdec_jax.models.families import Config, init_params, model_of
from specdec_jax.partitioning import (
  REPLICATED,
  RULES,
  PartitionedModel,
  make_mesh,
  param_shardings,
  state_shardings,
)


def beam_rounds(
  target: Config,
  draft: Config,
  devices: Sequence[jax.Device],
  *,
  width: int = 4,
  draft_width: int = 8,
  gamma: int = 3,
  batch_size: int = 1,
  source_tokens: int = 128,
  max_new_tokens: int = 128,
) -> dict[str, Lowered]:
  """A round of plain search and one of speculative search, which drafts, reads and replays.

  The target is sharded across all devices, the draft replicated; caches have the compiler's own
  layouts and are updated in place. Sizes as of `beams.speculative_beam_search`.
  """
  mesh = make_mesh(len(devices), devices)
  everywhere = NamedSharding(mesh, PartitionSpec())
  models = (
    PartitionedModel(model_of(target), mesh),
    PartitionedModel(model_of(draft), mesh, REPLICATED),
  )

  def params(config: Config, rules) -> Any:
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    struct = lambda x, place: jax.ShapeDtypeStruct(x.shape, config.dtype, sharding=place)
    return jax.tree.map(struct, shapes, param_shardings(shapes, mesh, rules))

  of_target, of_draft = params(target, RULES), params(draft, REPLICATED)
  prompt = jax.ShapeDtypeStruct((batch_size, source_tokens), jnp.int32, sharding=everywhere)

  def lowered(beams: BeamDraft, draft_params: Any) -> Lowered:
    def run(target_params, draft_params, state):
      return search.one_round(models[0], beams, target_params, draft_params, 0.6, 1, state)

    begin = functools.partial(search.start, models[0], beams, width=width, limit=max_new_tokens)
    state = jax.eval_shape(begin, of_target, draft_params, prompt)
    places = state_shardings(state, mesh, REPLICATED)._replace(
      target=state_shardings(state.target, mesh, RULES)
    )
    chosen = jax.tree.map(lambda place: Format(Layout.AUTO, place), places)
    at = jax.tree.map(lambda x: x.sharding, (of_target, draft_params))
    jitted = jax.jit(run, in_shardings=(*at, chosen), out_shardings=chosen, donate_argnums=2)
    return jitted.lower(of_target, draft_params, state)

  return {
    "plain": lowered(NoBeams(), ()),
    "speculative": lowered(ModelBeams(models[1], draft_width, gamma), of_draft),
  }
