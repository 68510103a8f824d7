"""llama.cpp on the CPU: greedy decoding, through the package llama-cpp-python.

Weights are converted from the format of transformers to GGUF. llama.cpp recomputes the keys and
values of cross-attention at each decoding step, so its steps take longer for longer sources.
"""

import ctypes
import functools
import os
import sys
import tempfile
from typing import Literal

import numpy as np

from experiments.peers.comparison import Backend, Comparison, Generate
from specdec_jax.checkpoints import files, huggingface
from specdec_jax.data.pieces import EOS_ID
from specdec_jax.data.vocabulary import PAD_ID

ComputeType = Literal["float32", "bfloat16", "q8_0"]
_LOG_LEVEL_ERROR = 4  # GGML_LOG_LEVEL_ERROR of ggml.h, which llama-cpp-python does not export
_CONTEXT_STEP = 256  # sizes of contexts are multiples of this number of tokens


def greedy(compute_type: ComputeType = "float32", python: str | None = None) -> Backend:
  """Return a llama.cpp backend for greedy decoding.

  llama.cpp looks up GELU in a table of float16 values, so that outputs of T5 1.1 may differ from
  those of the float32 target where two logits are almost equal.

  Args:
    compute_type: format of all matrices. 'q8_0' is int8 with one scale per 32 weights. With
      'float32', keys and values are cached in float32, otherwise in float16.
    python: Python of a virtual environment that has the packages; see `Backend`.
  """
  is_float32 = compute_type == "float32"
  return Backend(
    "llama_cpp" if is_float32 else f"llama_cpp_{compute_type}",
    ("llama_cpp", "gguf"),
    functools.partial(_load, compute_type=compute_type),
    "llama_cpp",
    python=python,
    greedy_only=True,
    float32=False,
  )


def _convert(folder: str, path: str, compute_type: ComputeType) -> None:
  """Convert a T5 in the format of transformers to a GGUF file without a vocabulary.

  llama.cpp does not scale tied logits, as T5 1.0 does, but that does not change their argmax. It
  cannot load an encoder with fewer layers than the decoder. Such an encoder gets further layers of
  zeros, which do not change its output.
  """
  import gguf

  config = files.read_json(folder, huggingface.CONFIG)
  num_layers, num_decoder_layers = config["num_layers"], config["num_decoder_layers"]
  architecture = gguf.MODEL_ARCH.T5
  writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
  writer.add_tokenizer_model("no_vocab")
  writer.add_vocab_size(config["vocab_size"])
  writer.add_context_length(512)  # required, but without effect: positions are relative
  writer.add_embedding_length(config["d_model"])
  writer.add_feed_forward_length(config["d_ff"])
  writer.add_block_count(max(num_layers, num_decoder_layers))
  writer.add_decoder_block_count(num_decoder_layers)
  writer.add_head_count(config["num_heads"])
  writer.add_key_length(config["d_kv"])
  writer.add_value_length(config["d_kv"])
  writer.add_relative_attn_buckets_count(32)
  writer.add_layer_norm_rms_eps(1e-6)

  types = gguf.GGMLQuantizationType
  matrix_type = {"float32": types.F32, "bfloat16": types.BF16, "q8_0": types.Q8_0}[compute_type]
  names = gguf.get_tensor_name_map(architecture, max(num_layers, num_decoder_layers))

  def add(name: str, array: np.ndarray) -> None:
    is_matrix = array.ndim == 2 and "relative_attention_bias" not in name
    array_type = matrix_type if is_matrix else types.F32
    quantized = gguf.quants.quantize(array.astype(np.float32), array_type)
    writer.add_tensor(names.get_name(name, (".weight",)), quantized, raw_dtype=array_type)

  for name, array in huggingface.read_arrays(folder).items():
    add(name, array)
    if name.startswith("encoder.block.0."):
      for i in range(num_layers, num_decoder_layers):
        add(name.replace("block.0", f"block.{i}"), np.zeros_like(array))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _log(level, text, user_data):
  """Print errors, and ignore other messages of llama.cpp."""
  if level == _LOG_LEVEL_ERROR:
    sys.stderr.write(text.decode())


def _load(comparison: Comparison, compute_type: ComputeType) -> Generate:
  import llama_cpp

  llama_cpp.llama_log_set(_log, None)
  llama_cpp.llama_backend_init()
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "target.gguf")
    _convert(comparison.target, path, compute_type)
    model_params = llama_cpp.llama_model_default_params()
    model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE  # into memory, not mapped
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
  if not model:
    raise RuntimeError("llama.cpp cannot load the converted model.")
  vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

  @functools.cache
  def context_of(size: int):
    """Return a context for sources and outputs of up to `size` tokens."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = size
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to float16
    params.op_offload = False
    if compute_type == "float32":
      params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    return llama_cpp.llama_init_from_model(model, params)

  def run(function, context, tokens: list[int]) -> None:
    """Call `llama_encode` or `llama_decode` for tokens of one sequence."""
    ids = np.array(tokens, np.int32).ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token))
    if status := function(context, llama_cpp.llama_batch_get_one(ids, len(tokens))):
      raise RuntimeError(f"llama.cpp failed with status {status}.")

  def generate(source, seed, max_new_tokens, temperature):
    num_steps = -(-max(len(source), max_new_tokens) // _CONTEXT_STEP)
    context = context_of(num_steps * _CONTEXT_STEP)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
    run(llama_cpp.llama_encode, context, source)
    tokens: list[int] = []
    is_done = False
    while len(tokens) < max_new_tokens and not is_done:
      run(llama_cpp.llama_decode, context, tokens[-1:] or [PAD_ID])
      logits = llama_cpp.llama_get_logits_ith(context, -1)
      tokens.append(int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax()))
      is_done = comparison.stops_at_eos and tokens[-1] == EOS_ID
    return tokens, len(tokens)

  return generate
