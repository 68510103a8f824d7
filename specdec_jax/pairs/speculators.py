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
from specdec_jax.core.types import Draft, DraftFactory, Model, OnTarget
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.drafts.early_exit import EarlyExitModel
from specdec_jax.drafts.encoder_sharing import ConditionedDraft, SharedEncoderDraft
from specdec_jax.drafts.layer_skip import LayerSkipDraft, of_layers
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.pass_embeddings import PaSSDraft
from specdec_jax.drafts.speculator import SpeculatorDraft
from specdec_jax.errors import InputError, require_types
from specdec_jax.models.conditioned import ConditionedModel
from specdec_jax.models.families import Config, init_params, model_of, without_encoder
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.speculator import SpeculatorConfig, speculator_config
from specdec_jax.models.t5 import T5Model


def speculator(vocabulary: Vocabulary, path: str) -> OnTarget:
  """What `train_speculator` wrote to a folder, as draft of the target that it was trained on.

  Args:
    vocabulary: of the pair.
    path: the folder, local or `gs://`.

  Raises:
    InputError: there is none, or it was trained with another vocabulary; once the target is known,
      that it is for another one.
  """
  require_types(speculator, locals())
  checkpoint = open_folder(path)
  learnt = checkpoint.config
  if not isinstance(learnt, SpeculatorConfig):
    raise InputError(f"{path} is a model by itself, and no part of a target; give it as the draft.")
  if checkpoint.vocabulary not in (None, vocabulary.fingerprint()):
    raise InputError(
      f"The draft in {path} was trained with another vocabulary than {vocabulary.path}."
    )

  def on_target(target: Model, params: Any) -> DraftFactory:
    config = _laid_out(learnt, shape_of(target))
    own = checkpoint.load(config, stored_weights=True, beside=params)
    made = drafter(checkpoint_name(path), config, own, target, params)
    return made._replace(path=recorded_path(path))

  return OnTarget(on_target)


def random_speculator(
  vocabulary: Vocabulary, config: Callable[[Config], SpeculatorConfig] = speculator_config
) -> OnTarget:
  """One of random weights, for `random_pair`: what it costs, not what it knows.

  Args:
    vocabulary: of the pair.
    config: the target's shape -> the module's.
  """
  require_types(random_speculator, locals())

  def on_target(target: Model, params: Any) -> DraftFactory:
    made = config(shape_of(target))
    own = jax.tree.map(lambda x: x.astype(made.dtype), init_params(made, jax.random.key(0)))
    return drafter(f"random {made.kind}", made, own, target, params)

  return OnTarget(on_target)


def drafter(
  name: str, config: SpeculatorConfig, own: Any, target: Model, target_params: Any
) -> DraftFactory:
  """A module with parameters `own` as draft of a target.

  Raises:
    InputError: the target's shape is another than the module was made for.
  """
  shape, of_target = shape_of(target), target_params
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
  own = target.model if isinstance(target, SimulatedModel) else target
  config = getattr(own, "config", None)
  if not isinstance(config, Config):
    raise InputError(f"{type(own).__name__} has no states that a draft could read.")
  return config


def _laid_out(config: SpeculatorConfig, target: Config) -> SpeculatorConfig:
  """The module with products of the kind that its target has."""
  return dataclasses.replace(config, dtype=target.dtype, kernels=target.kernels, fused=target.fused)
