"""Compilation of beam search for a TPU, without a TPU."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.stages import Lowered

from experiments.tpu_v4.compile import Programs, Site
from specdec_jax.beams import BeamSearcher, ModelBeamDraft, NullBeamDraft
from specdec_jax.beams.search import run_search
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.types import Params
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.partitioning import REPLICATED, RULES, PartitionedModel, state_shardings

LENGTH_PENALTY = 0.6


@dataclasses.dataclass(frozen=True)
class BeamSettings:
  """Settings of the beam searches to compile.

  Attributes:
    num_beams: number of beams of the search.
    draft_beams: number of beams of the draft; at least `num_beams`.
    nodes: maximum number of nodes in a target forward pass; None for no limit.
    gamma: number of steps that the draft searches ahead.
    batch_size: number of rows decoded together.
    source_tokens: length of the padded prompt.
    max_new_tokens: maximum number of tokens of each output.
  """

  num_beams: int = 4
  draft_beams: int = 4
  nodes: int | None = None
  gamma: int = 7
  batch_size: int = 1
  source_tokens: int = 128
  max_new_tokens: int = 128


def beam_programs(
  target: Config,
  draft: Config,
  devices: Sequence[jax.Device],
  settings: BeamSettings = BeamSettings(),
) -> Programs:
  """Return functions that lower the programs of speculative and plain beam search, by name.

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
    InputError: the target cannot be sharded across the devices, or `draft_beams` or `nodes` is less
      than `num_beams`.
  """
  site = Site(devices)
  p = PartitionedModel(model_of(target), site.mesh)
  q = PartitionedModel(model_of(draft), site.mesh, REPLICATED)
  model_draft = ModelDraft(q, Sampling(temperature=0.0), chain(settings.gamma))
  beam_draft = ModelBeamDraft(model_draft, settings.draft_beams, settings.nodes)
  beam_draft.num_nodes(settings.num_beams)  # raises if the draft has too few beams
  p_params, q_params = site.params(target, RULES), site.params(draft, REPLICATED)
  prompt = site.array((settings.batch_size, settings.source_tokens), jnp.int32)

  def lower_loop(searcher: BeamSearcher, params: Params) -> Lowered:
    limit = settings.max_new_tokens
    return run_search.lower(searcher, params, prompt, limit, None, None)

  def lower_round(searcher: BeamSearcher, params: Params) -> Lowered:
    def run(params, state):
      return searcher.round(params, state), ()

    init = functools.partial(searcher.init, max_new_tokens=settings.max_new_tokens)
    state = jax.eval_shape(init, params, prompt)
    shardings = state_shardings(state, site.mesh, REPLICATED)._replace(
      target_cache=state_shardings(state.target_cache, site.mesh, RULES)
    )
    return site.lower(run, (params,), state, shardings)

  speculative = BeamSearcher(p, beam_draft, settings.num_beams, LENGTH_PENALTY)
  plain = BeamSearcher(p, NullBeamDraft(), settings.num_beams, LENGTH_PENALTY)
  params, target_params = Params(p_params, q_params), Params(p_params)
  return {
    "speculative loop": functools.partial(lower_loop, speculative, params),
    "plain loop": functools.partial(lower_loop, plain, target_params),
    "plain step": functools.partial(lower_round, plain, target_params),
    "round": functools.partial(lower_round, speculative, params),
  }
