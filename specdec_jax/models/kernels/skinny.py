"""CPU kernels for a decoder with few rows: matmul, attention and norms, called through `jax.ffi`.

On a CPU, XLA's matmul of 8 rows takes at least twice as long as its matmul of one row, because the
matrix is rearranged in each call. Reading the matrix should dominate the time, as Theorem 8
assumes. Here a matrix is packed in panels once, when it is loaded (`skinny.cc`). Attention and
norms are one call each (`attention.cc`). XLA runs about ten small programs for them, which take as
long as the matmuls.

The kernels are compiled at the first use, which needs a C++ compiler. Without one, XLA runs
everything.
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

from specdec_jax.core.atomic_files import atomic_write

SOURCES = [pathlib.Path(__file__).with_name(x) for x in ("skinny.cc", "attention.cc", "vectors.h")]
MATMUL, MATMUL_INT8, ATTENTION, RMS_NORM, LAYER_NORM = (
  f"specdec_skinny_{x}" for x in ("matmul", "matmul_int8", "attention", "rms_norm", "layer_norm")
)
PANEL = 16  # columns of a panel


def packed_shape(
  depth: int, width: int, pairs: bool, is_int8: bool = False
) -> tuple[int, int, int]:
  """Return the shape of the result of `pack` for a matrix [depth, width]."""
  rows_per_step = (4 if is_int8 else 2) if pairs else 1
  return -(-width // PANEL), -(-depth // rows_per_step), rows_per_step * PANEL


def pack(kernel: np.ndarray, pairs: bool = False) -> np.ndarray:
  """Pack a matrix [E, F] in panels of PANEL columns. The last panel is padded with zeros.

  The result is [ceil(F / PANEL), E, PANEL]. With `pairs`, it is [ceil(F / PANEL), ceil(E / 2),
  2 * PANEL], or [ceil(F / PANEL), ceil(E / 4), 4 * PANEL] if the matrix is int8: rows are
  interleaved for the instructions that multiply pairs of bfloat16 or groups of four int8 values
  (`is_available`), and E is padded with rows of zeros.
  """
  depth, width = kernel.shape
  shape = packed_shape(depth, width, pairs, kernel.dtype == np.int8)
  rows_per_step = shape[2] // PANEL
  padded = np.pad(kernel, ((0, -depth % rows_per_step), (0, -width % PANEL)))
  panels = padded.reshape(-1, rows_per_step, shape[0], PANEL).transpose(2, 0, 3, 1)
  return np.ascontiguousarray(panels.reshape(shape))


def matmul(x: Array, panels: Array, scale: Array | None = None) -> Array:
  """Multiply x by a packed matrix of N panels, and return a float32 array [M, N * PANEL].

  A row of the result is bit-identical for any number of rows M. `is_available` must have returned
  True.

  Args:
    x: float32 [M, E].
    panels: result of `pack`. There are two layouts. Without `pairs`, panels [N, E, PANEL] are
      float32, bfloat16 or int8, and each element of the result is accumulated over E in order. With
      `pairs`, panels are bfloat16 or int8. For bfloat16 panels, x is rounded to bfloat16, and each
      element is accumulated in order over sums of two products. For int8 panels, each row of x is
      rounded to integers of 16 bits with a scale, products are summed without rounding, and E is
      at most 65,536.
    scale: float32 [N * PANEL], by which the columns of the result are multiplied; for int8 panels,
      and only for them.
  """
  out = jax.ShapeDtypeStruct((len(x), len(panels) * PANEL), jnp.float32)
  if scale is None:
    return jax.ffi.ffi_call(MATMUL, out, vmap_method="sequential")(x, panels)
  return jax.ffi.ffi_call(MATMUL_INT8, out, vmap_method="sequential")(x, panels, scale)


def attend(
  queries: Array,
  keys: Array,
  values: Array,
  bias: Array,
  masked: float,
  cap: float | None = None,
) -> Array:
  """Return the result of softmax attention without scaling, a float32 array [B, K, H, D].

  The result for a query is bit-identical for any K and any placement of the masked slots.

  Args:
    queries: [B, K, H, D], with heads of size D.
    keys: [B, G, T, D], where G divides H. Head h of the queries reads group h // (H / G).
    bias: [B or 1, H or 1, K or 1, T], added to the logits.
    masked: bias of a masked slot, a large negative number. Slots whose bias is below half of it are
      skipped. A query whose slots are all masked attends to all slots.
    cap: soft cap of the logits, by default none: the bias is added to cap * tanh(logits / cap).
  """
  out = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
  call = jax.ffi.ffi_call(ATTENTION, out, vmap_method="sequential")
  return call(queries, keys, values, bias, masked=np.float32(masked), cap=np.float32(cap or 0))


def rms_norm(x: Array, scale: Array) -> Array:
  """Return x [M, E] divided by the root mean square of each row and multiplied by scale [E]."""
  out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  return jax.ffi.ffi_call(RMS_NORM, out, vmap_method="sequential")(x, scale)


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
  """Return the LayerNorm of each row of x [M, E], with a scale [E], a bias [E] and epsilon 1e-5.

  A row of the result is bit-identical for any number of rows M.
  """
  out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  return jax.ffi.ffi_call(LAYER_NORM, out, vmap_method="sequential")(x, scale, bias)


def is_available(dtype: Any = jnp.float32) -> bool:
  """Return True if the kernels can run a model of the given dtype.

  The first call compiles the kernels, or loads them from the cache. They need a single CPU device
  for which they can be compiled. For bfloat16, the processor must have the instructions
  AVX512-BF16 and AVX512-VNNI.
  """
  library = _register()
  return library is not None and (dtype == jnp.float32 or library.HasBfloat16())


@functools.cache
def _register() -> ctypes.CDLL | None:
  """Register the kernels with JAX and return their library, or None if they cannot be used."""
  if jax.default_backend() != "cpu" or jax.device_count() > 1:
    return None
  try:
    library = _library()
    library.HasBfloat16.restype = ctypes.c_bool
  except (OSError, subprocess.SubprocessError) as error:
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    logging.getLogger(__name__).warning(
      "specdec_jax: XLA runs all matmuls, because the faster kernels of this project cannot be "
      "compiled here: %s",
      next((line for line in lines if "error" in line), " ".join(lines[:1])),
    )
    return None
  handlers = {
    MATMUL: library.SkinnyMatmul,
    MATMUL_INT8: library.SkinnyMatmulInt8,
    ATTENTION: library.SkinnyAttention,
    RMS_NORM: library.SkinnyRMSNorm,
    LAYER_NORM: library.SkinnyLayerNorm,
  }
  for name, handler in handlers.items():
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
  return library


def _library() -> ctypes.CDLL:
  """Return the library for this processor and jaxlib, from the cache or, if missing, compiled now.

  Its name in the cache has a hash of what it is compiled from, and a hash of its content.
  """
  compiler_command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
  try:
    compiler = shlex.split(compiler_command or "")
  except ValueError as error:
    raise OSError(f"CXX is {compiler_command!r}, which is not a command: {error}") from error
  # A short loop that crosses a cache line of instructions makes attention up to 7% slower.
  options = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-falign-loops=32"]
  options += ["-shared", "-fPIC"]
  jaxlib = importlib.metadata.version("jaxlib")  # the sources include its headers
  inputs = [*(x.read_text() for x in SOURCES), *compiler, *options, jaxlib, _processor()]
  name = f"skinny-{_hash(repr(inputs).encode())}"
  try:
    folder = pathlib.Path("~/.cache/specdec_jax/kernels").expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder.stat()):
      raise OSError(f"others may write to {folder}; make it yours, with mode 700")
    for path in sorted(folder.glob(f"{name}-*.so")):
      if (library := _loaded(path)) is not None:
        return library
    scratch = tempfile.TemporaryDirectory(dir=folder)
  except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
    logging.getLogger(__name__).warning(
      "specdec_jax: the kernels are compiled for this process only and not cached: %s", error
    )
    folder, scratch = None, tempfile.TemporaryDirectory()
  with scratch:
    sources = [str(source) for source in SOURCES if source.suffix == ".cc"]
    command = [*compiler, *options, "-isystem", jax.ffi.include_dir(), *sources, "-o", name]
    if not compiler:
      raise OSError("there is no C++ compiler (c++, g++ or $CXX)")
    subprocess.run(command, cwd=scratch.name, check=True, capture_output=True, text=True)
    compiled = pathlib.Path(scratch.name, name)
    if folder is None:
      return ctypes.CDLL(str(compiled))  # the file may be deleted once it is loaded
    content = compiled.read_bytes()
  path = folder / f"{name}-{_hash(content)}.so"
  with atomic_write(path, "wb") as file:
    os.fchmod(file.fileno(), 0o600)
    file.write(content)
  return ctypes.CDLL(str(path))


def _loaded(path: pathlib.Path) -> ctypes.CDLL | None:
  """Load a library from the cache; return None if other users can write to it or it is damaged.

  Loading a damaged library would end the process with a signal.
  """
  with open(path, "rb") as file:
    if not _is_private(os.fstat(file.fileno())) or not path.stem.endswith(_hash(file.read())):
      return None
    # Load the file that was verified, even if the path has been replaced since.
    verified = f"/proc/self/fd/{file.fileno()}"
    return ctypes.CDLL(verified if os.path.exists(verified) else str(path))


def _is_private(status: os.stat_result) -> bool:
  return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _hash(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> str:
  """Return the flags of the processor, which determine the effect of `-march=native`.

  They are part of a cache key, because machines with different processors may share the cache in a
  home directory. Without /proc/cpuinfo, return `platform.processor()` instead.
  """
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor()
  return next((line for line in lines if line.startswith(("flags", "Features"))), "")
