"""XLA's YNN kernels, turned off: with jaxlib 0.10 and 0.11 a CPU may give wrong results or crash.

jax's issues 39103 (wrong results, silently), 39257 and 40412 (crashes and hangs).
"""

import importlib.metadata
import os
import sys
import warnings
from typing import Any

YNN_FLAG = "--xla_cpu_experimental_ynn_fusion_type="  # of no fusion
_KNOWN_TO = "0.10.", "0.11."  # jaxlib; XLA ends the process at a flag that it does not know


def turn_ynn_off() -> None:
  """Say so in XLA_FLAGS, unless YNN_FLAG is there with whatever value.

  XLA reads XLA_FLAGS once, when jax is first used: after that, or where it names a file of flags, a
  warning says what to do.
  """
  given = os.environ.get("XLA_FLAGS", "").strip()
  try:
    version = importlib.metadata.version("jaxlib")
  except importlib.metadata.PackageNotFoundError:  # records and reports need no jax
    return
  if YNN_FLAG in given or not version.startswith(_KNOWN_TO):
    return
  # jax says this nowhere in public.
  bridge: Any = sys.modules.get("jax._src.xla_bridge")
  used = bridge is not None and bridge.backends_are_initialized()
  if used and bridge.default_backend() != "cpu":
    return
  if used or given[:1] not in ("", "-"):
    warnings.warn(
      f"XLA's YNN kernels are on, with which jaxlib {version} may give wrong results on a CPU; "
      f"start Python with {YNN_FLAG} in XLA_FLAGS, or import specdec_jax before jax is used.",
      stacklevel=3,
    )
    return
  os.environ["XLA_FLAGS"] = f"{given} {YNN_FLAG}".strip()
