"""Compiled programs, kept between runs. jax, which reads the environment, is not imported here."""

import os
import sys


def kept_in() -> str:
  """Where compiled programs are kept unless told; empty: nowhere."""
  return os.environ.get("JAX_COMPILATION_CACHE_DIR", "~/.cache/specdec_jax")


def keep_compiled(directory: str) -> None:
  """Keep what takes jax half a second or more to compile in `directory`, for the next run.

  An empty one keeps nothing, and so, with a warning, does one that cannot be made.
  """
  if directory:
    directory = os.path.abspath(os.path.expanduser(directory))
    try:
      os.makedirs(directory, exist_ok=True)
    except OSError as error:
      sentence = f"cannot use '{error.filename}': {error.strerror}."
      print(f"warning: compiled programs are not kept: {sentence}", file=sys.stderr)
      directory = ""
  seconds = os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
  os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
  if directory:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = directory
  if jax := sys.modules.get("jax"):  # which reads the environment once, when it is imported
    jax.config.update("jax_compilation_cache_dir", directory or None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))
