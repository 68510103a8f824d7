"""Models on the Hugging Face Hub, which are downloaded to local folders when needed."""

import os
import re

from specdec_jax.errors import InputError

VOCABULARY = "*.json", "spiece.model", "sentencepiece.bpe.model", "*.spm", "merges.txt"
MODEL = *VOCABULARY, "*.safetensors"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(path: str, files: tuple[str, ...] = MODEL) -> str:
  """Return the local folder of a model on the Hugging Face Hub, such as 'google/flan-t5-small'.

  Files that match the patterns `files` are downloaded if Hugging Face's cache lacks them. A string
  that cannot be such a name is returned unchanged. So is a path in a local folder, which takes
  precedence over a name on the Hub.
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
