"""Families of models in the format of Hugging Face, one module per family.

Each module maps the names of transformers to those of this package, and its config to ours:

  PREFIX: prefix of names that is removed, if a name has it.
  UNUSED: regular expression for names of arrays that no model uses, with their prefix.
  config(path, fields): config of the model that the fields of config.json describe.
  names(config): our name for each name in transformers.
  TRANSPOSED: endings of our names of arrays whose axes transformers stores in another order.
  convert(config, fields, arrays): the config and leaves, given the arrays by our names. Factors
    that transformers applies to activations are merged into parameters here.
"""

from types import ModuleType

from specdec_jax.checkpoints.families import bart, gpt2, t5, t5gemma, whisper

FAMILIES: dict[str, ModuleType] = {
  **dict.fromkeys(t5.DEFAULTS, t5),
  "gpt2": gpt2,
  "t5gemma": t5gemma,
  **dict.fromkeys(bart.DEFAULTS, bart),
  "whisper": whisper,
}
