"""Functions that disable XLA's YNN kernels by a flag, and that find flags that XLA rejects.

YNN kernels are enabled by default in jaxlib 0.10 to 0.12. On a CPU they may return wrong results or
crash: see jax issues 39103 (silently wrong results), 39257 and 40412 (crashes and hangs).
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import warnings
from typing import Any

YNN_FLAG = "--xla_cpu_experimental_ynn_fusion_type="  # the empty value enables no YNN fusion
# Versions of jaxlib that know YNN_FLAG. XLA aborts the process if a flag is unknown.
_VERSIONS = "0.10.", "0.11.", "0.12."


def disable_ynn() -> None:
  """Add YNN_FLAG to XLA_FLAGS, unless the user has set it to any value or jaxlib does not know it.

  XLA reads XLA_FLAGS once, when jax is first used. If jax has already been used, or if XLA_FLAGS
  names a file of flags, the flag cannot be added. A warning then says what to do, unless jax has
  been used on a device other than a CPU.
  """
  flags = os.environ.get("XLA_FLAGS", "").strip()
  try:
    version = importlib.metadata.version("jaxlib")
  except importlib.metadata.PackageNotFoundError:  # records and reports work without jax
    return
  if YNN_FLAG in flags or not version.startswith(_VERSIONS):
    return
  # jax has no public function that tells whether a backend is initialized.
  bridge: Any = sys.modules.get("jax._src.xla_bridge")
  used = bridge is not None and bridge.backends_are_initialized()
  if used and bridge.default_backend() != "cpu":
    return
  if used or flags[:1] not in ("", "-"):
    warnings.warn(
      f"XLA's YNN kernels are enabled, with which jaxlib {version} may return wrong results on a "
      f"CPU; start Python with {YNN_FLAG} in XLA_FLAGS, or import specdec_jax before jax is used.",
      stacklevel=3,
    )
    return
  os.environ["XLA_FLAGS"] = f"{flags} {YNN_FLAG}".strip()


def rejection_message(flags: str) -> str:
  """Return XLA's error message if XLA rejects `flags` in XLA_FLAGS, otherwise an empty string.

  XLA aborts a process whose flags it rejects, so a subprocess tries them, which takes 0.3 seconds.
  """
  process = subprocess.run(
    [sys.executable, "-c", "from jaxlib import xla_client; xla_client.make_cpu_client()"],
    env=os.environ | {"XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "0"},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    errors="replace",
  )
  error = re.search(r"^[EF]\d{4} .*flags\w*\.cc:\d+\] (.*)$", process.stderr, re.MULTILINE)
  return error[1] if error and process.returncode else ""
