"""XLA's flags: YNN kernels turned off, and flags that XLA rejects.

With YNN kernels, which jaxlib 0.10 to 0.12 use by default, a CPU may give wrong results or crash:
jax's issues 39103 (wrong results, silently), 39257 and 40412 (crashes and hangs).
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import warnings
from typing import Any

YNN_FLAG = "--xla_cpu_experimental_ynn_fusion_type="  # of no fusion
_KNOWN_TO = "0.10.", "0.11.", "0.12."  # jaxlib; XLA aborts the process at an unknown flag


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


def rejection(flags: str) -> str:
  """Return XLA's message if it rejects `flags` as the value of XLA_FLAGS, else an empty string.

  XLA aborts the process that has such flags, so another process tries them: 0.3 seconds.
  """
  tried = subprocess.run(
    [sys.executable, "-c", "from jaxlib import xla_client; xla_client.make_cpu_client()"],
    env=os.environ | {"XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "0"},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    errors="replace",
  )
  said = re.search(r"^[EF]\d{4} .*flags\w*\.cc:\d+\] (.*)$", tried.stderr, re.MULTILINE)
  return said[1] if said and tried.returncode else ""
