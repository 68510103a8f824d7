"""Compiled programs, kept between runs. jax, which reads the environment, is not imported here."""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import sys

from specdec_jax.errors import InputError
from specdec_jax.xla_flags import YNN_FLAG, rejection


def default_cache_dir() -> str:
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


def check_xla_flags() -> None:
  """Try the user's XLA_FLAGS once per value and jaxlib: XLA aborts a process if it rejects them.

  What was accepted is remembered by an empty file beside the compiled programs.

  Raises:
    InputError: XLA rejects them.
  """
  flags = " ".join(os.environ.get("XLA_FLAGS", "").replace(YNN_FLAG, "").split())
  if not flags:
    return
  kept = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
  made_of = f"{importlib.metadata.version('jaxlib')} {flags}".encode()
  accepted = pathlib.Path(kept, f"xla_flags-{hashlib.sha256(made_of).hexdigest()[:16]}")
  may_keep = bool(kept) and flags.startswith("-")  # else they are in a file, which may change
  if may_keep and accepted.exists():
    return
  if said := rejection(flags):
    raise InputError(
      f"XLA_FLAGS is '{flags}', which XLA rejects: {said.rstrip('.')}; correct it or unset it."
    )
  if may_keep:
    with contextlib.suppress(OSError):  # it is tried again next time
      accepted.touch()
