"""Models by their names on the Hugging Face Hub: from its cache on this machine, or fetched."""

import os
import re

from specdec_jax.errors import InputError

MODEL = ("config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json")
VOCABULARY = ("spiece.model", "tokenizer.json")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(path: str, files: tuple[str, ...] = MODEL) -> str:
  """The folder of what the Hub calls `path`, as 'google/flan-t5-small'; any other path as it is.

  Args:
    path: what is on this machine goes before what has the same name on the Hub.
    files: patterns of those that are fetched, unless Hugging Face's own cache has them.

  Raises:
    InputError: it is not on this machine, and cannot be fetched.
  """
  ours = os.path.exists(path) or os.path.isdir(path.partition("/")[0])
  if ours or not _NAME.fullmatch(path):
    return path
  import huggingface_hub  # which is slow, and few paths come here

  try:
    return huggingface_hub.snapshot_download(path, allow_patterns=[*files])
  except Exception as error:  # what a network can say has no end
    about = str(error).strip().partition("\n")[0].rstrip(".")
    raise InputError(
      f"There is no {path} on this machine, and it was not fetched from the Hugging Face Hub: "
      f"{about}. Name a folder or file that is here, or a model there, as 'google/flan-t5-small'."
    ) from error
