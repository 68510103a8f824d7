"""Matrix products on a CPU, good for few rows: `skinny.cc`, compiled once, called by `jax.ffi`.

On a CPU XLA's product of 8 rows with a matrix takes twice as long as that of one row, or more,
since its kernels rearrange the matrix first; reading it is all that should take time, and Theorem 8
counts on that. Here a matrix is rearranged once, when it is loaded. Needs a C++ compiler where it
runs, once; without one XLA does the products.
"""

import atexit
import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

SOURCE = pathlib.Path(__file__).with_name("skinny.cc")
TARGET = "specdec_skinny_matmul"  # as XLA knows it
PANEL = 16  # columns


def pack(kernel: np.ndarray) -> np.ndarray:
  """A matrix [E, F] in panels [ceil(F / PANEL), E, PANEL], the last filled up with zeros."""
  depth, width = kernel.shape
  filled = np.pad(kernel, ((0, 0), (0, -width % PANEL)))
  return np.ascontiguousarray(filled.reshape(depth, -1, PANEL).swapaxes(0, 1))


def matmul(x: Array, panels: Array) -> Array:
  """x [M, E] times a matrix in panels [N, E, PANEL]: [M, N * PANEL], as `ready` made possible.

  In float32; the panels may be bfloat16. Each element is one chain of multiply-adds over E: a row
  of the result is the same bits whatever M is.
  """
  out = jax.ShapeDtypeStruct((len(x), len(panels) * PANEL), jnp.float32)
  return jax.ffi.ffi_call(TARGET, out, vmap_method="sequential")(x, panels)


@functools.cache
def ready() -> bool:
  """Whether `matmul` can be used: on one CPU device, with `skinny.cc` compiled and registered."""
  if jax.default_backend() != "cpu" or jax.device_count() > 1:
    return False
  try:
    library = ctypes.CDLL(str(_compiled()))
  except (OSError, subprocess.SubprocessError) as error:
    said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    logging.getLogger(__name__).warning(
      "specdec_jax: XLA multiplies matrices, since the faster kernel of this project cannot be "
      "compiled here: %s",
      next((line for line in said if "error" in line), " ".join(said[:1])),
    )
    return False
  handler = jax.ffi.pycapsule(library.SkinnyMatmul)
  jax.ffi.register_ffi_target(TARGET, handler, platform="cpu")
  return True


def _compiled() -> pathlib.Path:
  """The library for this processor and this jaxlib, from the cache or made now."""
  given = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
  compiler = shlex.split(given or "")
  options = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
  jaxlib = importlib.metadata.version("jaxlib")  # whose headers it includes
  made_of = [SOURCE.read_text(), *compiler, *options, jaxlib, _processor()]
  name = f"skinny-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
  try:
    folder = pathlib.Path("~/.cache/specdec_jax").expanduser()
    if (folder / name).exists():
      return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    part = pathlib.Path(tempfile.mkdtemp(dir=folder))
  except (OSError, RuntimeError):  # no home to write to: for this process alone
    folder = part = pathlib.Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
  command = [*compiler, *options, "-isystem", jax.ffi.include_dir(), str(SOURCE), "-o", name]
  try:
    if not compiler:
      raise OSError("there is no C++ compiler (c++, g++ or $CXX)")
    subprocess.run(command, cwd=part, check=True, capture_output=True, text=True)
    return (part / name).replace(folder / name)  # whole or not at all, whoever else makes it
  finally:
    if part != folder:
      shutil.rmtree(part)


def _processor() -> str:
  """What `-march=native` means here: a home may be shared by unlike machines."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor()
  return next((line for line in lines if line.startswith(("flags", "Features"))), "")
