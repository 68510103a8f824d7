"""Compile beam search for a TPU, without a TPU; as `compile` does for decoding."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class BeamSettings:
  """Settings of the beam searches to compile.

  Attributes:
    width: number of beams.
    draft_width: number of beams of the draft; at least `width`.
    nodes: highest number of nodes in a target forward pass; None for no limit.
    gamma: number of steps that the draft searches ahead.
    batch_size: rows searched together.
    source_tokens: length of the padded prompt.
    max_new_tokens: limit for each output.

  Raises:
    InputError: a size is not a positive integer.
  """

  width: int = 4
  draft_width: int = 4
  nodes: int | None = None
  gamma: int = 7
  batch_size: int = 1
  source_tokens: int = 128
  max_new_tokens: int = 128

  def __post_init__(self):
    for name in ("width", "batch_size", "source_tokens", "max_new_tokens"):
      require_count(name, getattr(self, name))


def beam_programs(
  target: Config,
  draft: Config,
  devices: Sequence[jax.Device],
  settings: BeamSettings = BeamSettings(),
) -> Programs:
  """Return the programs of both beam searches, which are lowered when called.

  The target is sharded across all devices, and the draft is replicated. Names of the programs:
    'speculative loop', 'plain loop': the searches, encoders included;
    'round': a round of speculative beam search, of up to gamma + 1 steps;
    'plain step': a step of beam search without a draft.

  Args:
    target: configuration of the target.
    draft: configuration of the draft.
    devices: devices to compile for; see `compile.described`.
    settings: settings of the searches.

  Raises:
    InputError: the devices cannot share the target, or the draft has fewer beams than the search.
  """
  site = Site(devices)
  p = PartitionedModel(model_of(target), site.mesh)
  q = PartitionedModel(model_of(draft), site.mesh, REPLICATED)
  model_draft = ModelDraft(q, Sampling(temperature=0.0), chain(settings.gamma))
  beam_draft = ModelBeamDraft(model_draft, settings.draft_width, settings.nodes)
  beam_draft.num_nodes(settings.width)  # raises if the draft has too few beams
  p_params, q_params = site.params(target, RULES), site.params(draft, REPLICATED)
  prompt = site.array((settings.batch_size, settings.source_tokens), jnp.int32)
  width, limit = settings.width, settings.max_new_tokens

  def lower_round(draft: BeamDraft, draft_params) -> Lowered:
    def run(target_params, draft_params, state):
      state = search.one_round(
        p, draft, target_params, draft_params, LENGTH_PENALTY, p.eos_id, state
      )
      return state, ()

    start = functools.partial(search.start, p, draft, width=width, limit=limit)
    state = jax.eval_shape(start, p_params, draft_params, prompt)
    shardings = state_shardings(state, site.mesh, REPLICATED)._replace(
      target=state_shardings(state.target, site.mesh, RULES)
    )
    return site.lower(run, (p_params, draft_params), state, shardings)

  def lower_speculative_loop() -> Lowered:
    return speculative_beam_search.lower(
      p,
      beam_draft,
      p_params,
      q_params,
      prompt,
      width=width,
      max_new_tokens=limit,
      length_penalty=LENGTH_PENALTY,
    )

  def lower_plain_loop() -> Lowered:
    return beam_search.lower(
      p, p_params, prompt, width=width, max_new_tokens=limit, length_penalty=LENGTH_PENALTY
    )

  return {
    "speculative loop": lower_speculative_loop,
    "plain loop": lower_plain_loop,
    "plain step": functools.partial(lower_round, NullBeamDraft(), ()),
    "round": functools.partial(lower_round, beam_draft, q_params),
  }
