"""Preparation of data sets by TensorFlow Datasets, which the extra `tasks` installs."""

import importlib.util
import sys

from specdec_jax.errors import InputError


def prepare_tfds(name: str, is_required: bool) -> None:
  """Let TensorFlow Datasets download and prepare a data set, and print its folder.

  Args:
    name: name of the data set, with configuration and version.
    is_required: whether it is an error if TensorFlow Datasets is not installed; otherwise a note is
      printed.

  Raises:
    InputError: the download failed; or `is_required` is True, and TensorFlow Datasets is not
      installed.
  """
  if importlib.util.find_spec("tensorflow_datasets") is None:
    message = (
      f"{name} is read by TensorFlow Datasets, which is not installed; run pip install "
      "'specdec_jax[tasks]'."
    )
    if is_required:
      raise InputError(message)
    print(f"note: {message}", file=sys.stderr)
    return
  import tensorflow_datasets

  builder = tensorflow_datasets.builder(name)
  try:
    builder.download_and_prepare()
  except OSError as error:  # of the network
    raise InputError(
      f"{name} cannot be downloaded: {str(error):.200}. If this machine is offline, run tfds build "
      f"{name} on another one, and copy its folder ~/tensorflow_datasets."
    ) from error
  print(builder.data_dir)
