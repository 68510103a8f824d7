"""OpenVINO on the CPU, through Optimum: `generate` of transformers with exported models.

Sampling and beam search are those of transformers, as in `peers.huggingface`.
"""

import functools
import os

from experiments.peers.comparison import Backend, Comparison, Generate
from experiments.peers.huggingface import of_optimum


def generate(precision: str = "f32", is_int8: bool = False, python: str | None = None) -> Backend:
  """Return the backend that runs Optimum's `OVModelForSeq2SeqLM`.

  Args:
    precision: precision of arithmetic, 'f32' or 'bf16'.
    is_int8: whether matrices are quantized to int8, with one scale per column. Activations are not
      quantized.
    python: Python of a virtual environment that has Optimum; see `Backend`.
  """
  return Backend(
    "_".join(["openvino"] + ["bf16"] * (precision == "bf16") + ["int8"] * is_int8),
    ("openvino", "optimum", "torch", "transformers"),
    functools.partial(_load, precision=precision, is_int8=is_int8),
    "openvino",
    python,
    searches=True,
    float32=precision == "f32" and not is_int8,
  )


def _load(comparison: Comparison, precision: str, is_int8: bool) -> Generate:
  from optimum.intel import OVModelForSeq2SeqLM

  model = OVModelForSeq2SeqLM.from_pretrained(
    comparison.target,
    export=True,
    local_files_only=True,
    load_in_8bit=is_int8,
    ov_config={
      "PERFORMANCE_HINT": "LATENCY",
      "INFERENCE_PRECISION_HINT": precision,
      "INFERENCE_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    },
  )
  return of_optimum(model, comparison)
