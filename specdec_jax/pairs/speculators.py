"""Functions that load learned draft heads (`drafts.heads`) as drafts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specdec_jax.checkpoints.checkpoint import LoadedWeights
from specdec_jax.checkpoints.load import checkpoint_name, open_checkpoint, recorded_path
from specdec_jax.core.loading import DraftFactory, LoadedTarget
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import Draft, Model
from specdec_jax.drafts.heads import SpeculatorConfig, head_of, speculator_config
from specdec_jax.errors import InputError
from specdec_jax.models.families import Config
from specdec_jax.models.simulated import unwrapped


def speculator(
  target: LoadedTarget,
  path: str,
  weights: LoadedWeights | None = None,
  output_tokens: Callable[[Any], Sequence[int]] | None = None,
) -> DraftFactory:
  """Load a draft head from `train_speculator` as a draft of the target that it was trained on.

  Args:
    target: target of the pair.
    path: folder of the head, local or `gs://`.
    weights: see `load_pair`. By default 'int8' if the target's are int8, otherwise 'stored'.
    output_tokens: see `checkpoint_draft`.

  Raises:
    InputError: the folder does not exist or contains no head, or the head was trained with a
      different vocabulary or for a target with a different shape.
  """
  checkpoint = open_checkpoint(path)
  config = checkpoint.config
  if not isinstance(config, SpeculatorConfig):
    raise InputError(f"{path} is a model by itself, and no part of a target; give it as the draft.")
  if checkpoint.vocabulary not in (None, target.vocabulary.fingerprint()):
    raise InputError(
      f"The draft in {path} was trained with another vocabulary than {target.vocabulary.path}."
    )
  config = _with_layout(config, config_of(target.model))
  weights = weights or ("int8" if config.weights == "int8" else "stored")
  tokens = output_tokens and output_tokens(target.vocabulary)
  config = dataclasses.replace(
    config,
    weights="int8" if weights == "int8" else "float",
    num_output_tokens=None if tokens is None else len(tokens),
  )
  params = checkpoint.load(
    config,
    stored_weights=weights == "stored",
    other_arrays=target.params,
    output_tokens=tokens,
  )
  factory = head_factory(draft_name(checkpoint_name(path), config), config, params, target)
  return factory._replace(path=recorded_path(path))


def random_speculator(
  target: LoadedTarget, config: Callable[[Config], SpeculatorConfig] = speculator_config
) -> DraftFactory:
  """Return a draft head with random weights for `random_pair`; it is as fast as a trained one.

  Args:
    target: target of the pair.
    config: function from the configuration of the target to the configuration of the head.
  """
  head_config = config(config_of(target.model))
  params = head_of(head_config).init(jax.random.key(0))
  params = jax.tree.map(lambda x: x.astype(head_config.dtype), params)
  return head_factory(f"random {head_config.kind}", head_config, params, target)


def head_factory(
  name: str, config: SpeculatorConfig, params: Any, target: LoadedTarget
) -> DraftFactory:
  """Return the draft factory of a draft head for a target.

  Args:
    name: name of the draft in records.
    config: configuration of the head.
    params: parameters of the head.
    target: target of the pair.

  Raises:
    InputError: the head is for a target with a different shape.
  """
  head, target_config = head_of(config), config_of(target.model)
  head.require_target(target_config)

  def build(sampling: Sampling, tree: AnyTree) -> Draft:
    return head.draft(target_config, sampling, tree)

  params = head.draft_params(target_config, params, target.params)
  return DraftFactory(name, build, params, feature_layers=head.feature_layers)


def draft_name(name: str, config: Config | SpeculatorConfig) -> str:
  """Return the name of a draft for records, with its number of output tokens and int8 weights."""
  tokens = [f"{config.num_output_tokens} tokens"] if config.num_output_tokens else []
  return ", ".join([name, *tokens, *(["int8"] if config.weights == "int8" else [])])


def config_of(target: Model) -> Config:
  """Return the configuration of a target, which may be a model that `SimulatedModel` wraps.

  Raises:
    InputError: the target is not a T5 or a decoder-only model of this project.
  """
  model = unwrapped(target)
  config = getattr(model, "config", None)
  if not isinstance(config, Config):
    raise InputError(f"{type(model).__name__} has no states that a draft could read.")
  return config


def _with_layout(config: SpeculatorConfig, target: Config) -> SpeculatorConfig:
  """Return the configuration of a draft head with dtype, kernels and layout of its target."""
  names = "dtype", "kernels", "fused", "weights"
  return dataclasses.replace(config, **{name: getattr(target, name) for name in names})
