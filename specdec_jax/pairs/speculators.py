"""Learned modules on a target's states (`models.speculator`), loaded as drafts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from specdec_jax.checkpoints.folder import open_folder
from specdec_jax.checkpoints.load import checkpoint_name, recorded_path
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import require_static
from specdec_jax.core.types import Draft, DraftFactory, LoadedTarget, Model
from specdec_jax.drafts.early_exit import EarlyExitModel
from specdec_jax.drafts.encoder_sharing import ConditionedDraft, SharedEncoderDraft
from specdec_jax.drafts.layer_skip import LayerSkipDraft, of_layers
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.pass_embeddings import PaSSDraft
from specdec_jax.drafts.speculator import SpeculatorDraft
from specdec_jax.errors import InputError, require_types
from specdec_jax.models.conditioned import ConditionedModel
from specdec_jax.models.families import Config, init_params, model_of, without_encoder
from specdec_jax.models.simulated import unwrapped
from specdec_jax.models.speculator import SpeculatorConfig, speculator_config
from specdec_jax.models.t5 import T5Model


def speculator(target: LoadedTarget, path: str) -> DraftFactory:
  """Load what `train_speculator` wrote to a folder, as draft of the target it was trained on.

  Args:
    target: the target.
    path: the folder, local or `gs://`.

  Raises:
    InputError: there is no such folder, or it was trained with another vocabulary or target.
  """
  require_types(speculator, locals())
  checkpoint = open_folder(path)
  config = checkpoint.config
  if not isinstance(config, SpeculatorConfig):
    raise InputError(f"{path} is a model by itself, and no part of a target; give it as the draft.")
  if checkpoint.vocabulary not in (None, target.vocabulary.fingerprint()):
    raise InputError(
      f"The draft in {path} was trained with another vocabulary than {target.vocabulary.path}."
    )
  config = _laid_out(config, shape_of(target.model))
  params = checkpoint.load(config, stored_weights=True, other_arrays=target.params)
  factory = drafter(checkpoint_name(path), config, params, target)
  return factory._replace(path=recorded_path(path))


def random_speculator(
  target: LoadedTarget, config: Callable[[Config], SpeculatorConfig] = speculator_config
) -> DraftFactory:
  """Make a learned draft with random weights, for `random_pair`: it has the cost, not the skill.

  Args:
    target: the target.
    config: function from the shape of the target to the shape of the draft.
  """
  require_types(random_speculator, locals())
  shape = config(shape_of(target.model))
  params = jax.tree.map(lambda x: x.astype(shape.dtype), init_params(shape, jax.random.key(0)))
  return drafter(f"random {shape.kind}", shape, params, target)


def drafter(name: str, config: SpeculatorConfig, own: Any, target: LoadedTarget) -> DraftFactory:
  """A module with parameters `own` as draft of a target.

  Raises:
    InputError: the target's shape is another than the module was made for.
  """
  shape, of_target = shape_of(target.model), target.params
  _require_fit(config, shape)
  make: Callable[[Sampling, Any], Draft]
  if config.kind == "decoder":
    model = T5Model(without_encoder(config))
    make, params = functools.partial(SharedEncoderDraft, model), own
  elif config.kind == "anchored":
    told = ConditionedModel(without_encoder(config), config.gamma)
    make, params = functools.partial(ConditionedDraft, told), own
  elif config.kind == "exit":
    layers = tuple(range(config.exit_layers))
    fewer, params = of_layers(shape, of_target, layers)
    exits = EarlyExitModel(model_of(fewer), config)
    make = lambda sampling, tree: LayerSkipDraft(ModelDraft(exits, sampling, tree), layers)
    params = own, params
  elif config.kind == "look_ahead":
    make, params = functools.partial(PaSSDraft, config, shape), (own, of_target)
  else:
    rest = {k: x for k, x in of_target["decoder"].items() if not k.startswith("layers_")}
    read = {"token_embedder": of_target["token_embedder"], "decoder": rest}
    width = min(8, config.vocab_size)
    make = functools.partial(SpeculatorDraft, config, shape, width=width)
    params = own, read if config.kind == "heads" else ()  # the others have logits of their own
    return DraftFactory(name, make, params)
  who = f"a draft of kind {config.kind!r}"
  static = lambda sampling, tree: make(sampling, require_static(who, tree))
  return DraftFactory(name, static, params)


def _require_fit(config: SpeculatorConfig, target: Config) -> None:
  decoder = config.kind in ("decoder", "anchored")
  if decoder and not target.has_encoder:
    raise InputError(
      f"A draft of kind {config.kind!r} shares an encoder, and this target has none."
    )
  asks = (decoder or config.kind in ("eagle", "parallel")) and config.has_encoder
  heads = lambda c: (c.num_heads, c.head_dim) if asks else ()
  wanted = config.has_encoder, config.state_dim, *heads(config)
  found = target.has_encoder, target.emb_dim, *heads(target)
  if wanted != found or config.exit_layers > target.num_decoder_layers:
    raise InputError(
      f"The draft is for a target with (encoder, emb_dim, heads) {wanted}, this one has {found}; "
      "use the target that it was trained on."
    )


def shape_of(target: Model) -> Config:
  """The shape of a target that has states to read.

  Raises InputError if it is no T5 and no decoder-only model of this project.
  """
  own = unwrapped(target)
  config = getattr(own, "config", None)
  if not isinstance(config, Config):
    raise InputError(f"{type(own).__name__} has no states that a draft could read.")
  return config


def _laid_out(config: SpeculatorConfig, target: Config) -> SpeculatorConfig:
  """The module with products of the kind that its target has."""
  return dataclasses.replace(config, dtype=target.dtype, kernels=target.kernels, fused=target.fused)
