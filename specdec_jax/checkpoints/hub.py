"""Models on the Hugging Face Hub: resolve a name to a local folder, downloading it if needed."""

import os
import re

from specdec_jax.errors import InputError

MODEL = ("config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json")
VOCABULARY = ("spiece.model", "tokenizer.json")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(path: str, files: tuple[str, ...] = MODEL) -> str:
  """Return the local folder of a model on the Hub, such as 'google/flan-t5-small'.

  Args:
    path: a name on the Hub. A local path is returned unchanged and takes precedence over a model of
      the same name on the Hub.
    files: patterns of the files to download if Hugging Face's cache does not contain them.

  Raises:
    InputError: there is no such path on this machine, and no such model could be downloaded.
  """
  is_local = os.path.exists(path) or os.path.isdir(path.partition("/")[0])
  if is_local or not _NAME.fullmatch(path):
    return path
  import huggingface_hub  # a slow import that most calls do not need

  try:
    return huggingface_hub.snapshot_download(path, allow_patterns=[*files])
  except Exception as error:  # a network may raise anything
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    raise InputError(
      f"There is no {path} on this machine, and it was not downloaded from the Hugging Face Hub: "
      f"{reason}. Name a local folder or file, or a model on the Hub, as 'google/flan-t5-small'."
    ) from error
