"""ONNX Runtime on the CPU, through Optimum: `generate` of transformers with exported models.

Sampling and beam search are those of transformers, as in `peers.huggingface`.
"""

import functools
import os
import tempfile

from experiments.peers.comparison import Backend, Comparison, Generate
from experiments.peers.huggingface import of_optimum


def generate(is_int8: bool = False, python: str | None = None) -> Backend:
  """Return the backend that runs Optimum's `ORTModelForSeq2SeqLM`.

  Args:
    is_int8: whether matrices are quantized to int8, with one scale per column. ONNX Runtime then
      also quantizes the activations, when it runs (dynamic quantization).
    python: Python of a virtual environment that has Optimum; see `Backend`.
  """
  return Backend(
    "onnxruntime_int8" if is_int8 else "onnxruntime",
    ("onnxruntime", "optimum", "torch", "transformers"),
    functools.partial(_load, is_int8=is_int8),
    "onnxruntime",
    python,
    searches=True,
    float32=not is_int8,
  )


def _load(comparison: Comparison, is_int8: bool) -> Generate:
  import onnxruntime
  from optimum.onnxruntime import ORTModelForSeq2SeqLM

  options = onnxruntime.SessionOptions()
  options.intra_op_num_threads = len(os.sched_getaffinity(0))
  load = functools.partial(
    ORTModelForSeq2SeqLM.from_pretrained, local_files_only=True, session_options=options
  )
  with tempfile.TemporaryDirectory() as folder:
    model = load(comparison.target, export=True)
    if is_int8:
      model.save_pretrained(folder)
      del model
      _quantize(folder)
      model = load(folder)
  return of_optimum(model, comparison)


def _quantize(folder: str) -> None:
  """Replace the models in a folder by models with int8 matrices."""
  from optimum.onnxruntime import ORTQuantizer
  from optimum.onnxruntime.configuration import AutoQuantizationConfig

  settings = AutoQuantizationConfig.avx512_vnni(is_static=False, per_channel=True)
  for name in sorted(os.listdir(folder)):
    if name.endswith(".onnx"):
      ORTQuantizer.from_pretrained(folder, file_name=name).quantize(
        settings, folder, file_suffix="", use_external_data_format=True
      )
