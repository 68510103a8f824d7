"""A decoder's arithmetic on a CPU, good for few rows, compiled once and called by `jax.ffi`.

On a CPU XLA's product of 8 rows with a matrix takes twice as long as that of one row, or more,
since its kernels rearrange the matrix first; reading it is all that should take time, and Theorem 8
counts on that. Here a matrix is rearranged once, when it is loaded (`skinny.cc`). And what XLA does
in ten small programs, attention or a norm, which then take as long as products, is one call
(`attention.cc`). Needs a C++ compiler where it runs, once; without one XLA does it all.
"""

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
import stat
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specdec_jax.atomic_files import atomic_write

SOURCES = [pathlib.Path(__file__).with_name(x) for x in ("skinny.cc", "attention.cc", "vectors.h")]
MATMUL, ATTENTION, NORM = (f"specdec_skinny_{x}" for x in ("matmul", "attention", "norm"))
PANEL = 16  # columns


def packed_shape(depth: int, width: int, pairs: bool) -> tuple[int, int, int]:
  """Of `pack`ed matrices [depth, width]."""
  each = 1 + pairs
  return -(-width // PANEL), -(-depth // each), each * PANEL


def pack(kernel: np.ndarray, pairs: bool = False) -> np.ndarray:
  """A matrix [E, F] in panels [ceil(F / PANEL), E, PANEL], the last filled up with zeros.

  For products of bfloat16 with it, in `pairs` along E: [ceil(F / PANEL), ceil(E / 2), 2 * PANEL].
  """
  each, (depth, width) = 1 + pairs, kernel.shape
  filled = np.pad(kernel, ((0, -depth % each), (0, -width % PANEL)))
  panels = filled.reshape(-1, each, filled.shape[1] // PANEL, PANEL).transpose(2, 0, 3, 1)
  return np.ascontiguousarray(panels.reshape(packed_shape(depth, width, pairs)))


def matmul(x: Array, panels: Array) -> Array:
  """x [M, E] times a matrix in panels, float32: [M, N * PANEL], as `ready` made possible.

  Panels [N, E, PANEL] are float32 or bfloat16, and each element is one chain of multiply-adds over
  E. In pairs they are bfloat16, x is rounded to that, and it is one chain of sums of two products.
  A row of the result is the same bits whatever M is.
  """
  out = jax.ShapeDtypeStruct((len(x), len(panels) * PANEL), jnp.float32)
  return jax.ffi.ffi_call(MATMUL, out, vmap_method="sequential")(x, panels)


def attend(queries: Array, keys: Array, values: Array, bias: Array, masked: float) -> Array:
  """Softmax attention of queries [B, K, H, D] to keys and values [B, H, T, D], float32, under a
  bias [B or 1, H or 1, K or 1, T]: [B, K, H, D].

  Slots whose bias is below half of `masked` are hidden, and not looked at; a query that sees none
  sees all. What one gives is the same bits whatever K is, and wherever hidden slots lie.
  """
  out = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
  call = jax.ffi.ffi_call(ATTENTION, out, vmap_method="sequential")
  return call(queries, keys, values, bias, masked=np.float32(masked))


def rms_norm(x: Array, scale: Array) -> Array:
  """x [M, E] by the root of its mean square, and times a scale [E]; float32."""
  out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  return jax.ffi.ffi_call(NORM, out, vmap_method="sequential")(x, scale)


def ready(dtype: Any = jnp.float32) -> bool:
  """Whether these can be used for a model of this type: on one CPU device, where they could be
  compiled; of bfloat16 if the processor multiplies them (AVX512-BF16)."""
  library = _registered()
  return library is not None and (dtype == jnp.float32 or library.HasBfloat16())


@functools.cache
def _registered() -> ctypes.CDLL | None:
  if jax.default_backend() != "cpu" or jax.device_count() > 1:
    return None
  try:
    library = _library()
    library.HasBfloat16.restype = ctypes.c_bool
  except (OSError, subprocess.SubprocessError) as error:
    said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    logging.getLogger(__name__).warning(
      "specdec_jax: XLA multiplies matrices, since the faster kernel of this project cannot be "
      "compiled here: %s",
      next((line for line in said if "error" in line), " ".join(said[:1])),
    )
    return None
  handlers = library.SkinnyMatmul, library.SkinnyAttention, library.SkinnyNorm
  for name, handler in zip((MATMUL, ATTENTION, NORM), handlers):
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
  return library


def _library() -> ctypes.CDLL:
  """The sources for this processor and this jaxlib, from the cache or compiled now.

  In the cache a file's name ends in a hash of what is in it.
  """
  given = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
  try:
    compiler = shlex.split(given or "")
  except ValueError as error:
    raise OSError(f"CXX is {given!r}, which is not a command: {error}") from error
  options = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
  jaxlib = importlib.metadata.version("jaxlib")  # whose headers it includes
  made_of = [*(x.read_text() for x in SOURCES), *compiler, *options, jaxlib, _processor()]
  name = f"skinny-{_hash(repr(made_of).encode())}"
  try:
    folder = pathlib.Path("~/.cache/specdec_jax/kernels").expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder.stat()):
      raise OSError(f"others may write to {folder}; make it yours, with mode 700")
    for path in sorted(folder.glob(f"{name}-*.so")):
      if (library := _loaded(path)) is not None:
        return library
    scratch = tempfile.TemporaryDirectory(dir=folder)
  except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
    logging.getLogger(__name__).warning(
      "specdec_jax: the kernel is compiled for this process alone, and not kept: %s", error
    )
    folder, scratch = None, tempfile.TemporaryDirectory()
  with scratch:
    sources = [str(source) for source in SOURCES if source.suffix == ".cc"]
    command = [*compiler, *options, "-isystem", jax.ffi.include_dir(), *sources, "-o", name]
    if not compiler:
      raise OSError("there is no C++ compiler (c++, g++ or $CXX)")
    subprocess.run(command, cwd=scratch.name, check=True, capture_output=True, text=True)
    made = pathlib.Path(scratch.name, name)
    if folder is None:
      return ctypes.CDLL(str(made))  # which may go: it is in memory
    content = made.read_bytes()
  path = folder / f"{name}-{_hash(content)}.so"
  with atomic_write(path, "wb") as file:
    os.fchmod(file.fileno(), 0o600)
    file.write(content)
  return ctypes.CDLL(str(path))


def _loaded(path: pathlib.Path) -> ctypes.CDLL | None:
  """A library from the cache, unless it is another's or damaged, which would end in a signal."""
  with open(path, "rb") as file:
    if not _is_private(os.fstat(file.fileno())) or not path.stem.endswith(_hash(file.read())):
      return None
    same = f"/proc/self/fd/{file.fileno()}"  # what was read, whatever has the name by now
    return ctypes.CDLL(same if os.path.exists(same) else str(path))


def _is_private(about: os.stat_result) -> bool:
  """Whether a file or folder is this user's, and no one else's to write to."""
  return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _hash(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> str:
  """What `-march=native` means here: a home may be shared by unlike machines."""
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor()
  return next((line for line in lines if line.startswith(("flags", "Features"))), "")
