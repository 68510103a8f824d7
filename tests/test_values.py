"""Test that invalid settings are rejected with a one-line error before any work is done."""

import dataclasses
import fractions
import functools
import math
import sys
import types

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from tiny import autoregressive_decode, speculative_decode

from experiments.beams.beams import beams
from experiments.gamma.adaptive import AdaptiveDecoder
from experiments.gamma.gamma import gamma
from experiments.model_free_drafts.given_outputs import RecitingModel
from experiments.table3.acceptance import acceptance
from specdec_jax.commands.check import check_exactness
from specdec_jax.commands.quickstart import quickstart
from specdec_jax.commands.speedup import speedup
from specdec_jax.commands.train import fit_vocabulary
from specdec_jax.commands.translate import translate
from specdec_jax.core import memory
from specdec_jax.core.decode import NullDraft
from specdec_jax.core.sampling import Sampling, split_keys
from specdec_jax.core.trees import DynamicTree, Tree, branching, chain
from specdec_jax.core.types import Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.drafts.composed import (
  draft_sampling,
)
from specdec_jax.errors import InputError, require_types, shown
from specdec_jax.generate import Pair
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.t5 import T5Model
from specdec_jax.pairs import checkpoint_draft, load_pair, random_pair
from specdec_jax.run import main
from specdec_jax.serve.decode import decode
from specdec_jax.train.trainer import TrainSettings
from specdec_jax.user_errors import format_error

# Python 3.12 and newer reject the file before gin does.
NUL_IN_GIN = "Unexpected token (zeros.gin, line 1: )."
if sys.version_info >= (3, 12):
  NUL_IN_GIN = "'zeros.gin' cannot be read: source code cannot contain null bytes."

COUNT = "it must be a whole number, from 1 to 2147483647."
SEED = "it must be a whole number from -2147483648 to 4294967295."
GAMMAS = "it must be a list (each a whole number or 'auto') or 'auto'."
TREE = "it must be a list (each a whole number) or 'auto' or None."
HUGE, HUGE_SHOWN = 10**400, "1" + "0" * 99
DIGITS = 123456789012345678901234567890


@pytest.fixture
def machine(monkeypatch):
  """Make the device memory 16 GB."""
  monkeypatch.setattr(memory, "_device_memory", lambda mesh: 16e9)


def error_of(function, *args, **settings) -> str:
  """Return the message of the InputError that the call raises."""
  with pytest.raises(InputError) as caught:
    function(*args, **settings)
  return str(caught.value)


# Settings of the functions that gin configures.


@pytest.mark.parametrize(
  "settings, sentence",
  [
    (dict(gamma=True), "gamma is True; it must be a whole number or 'auto'."),
    (dict(gamma="x"), "gamma is 'x'; it must be a whole number or 'auto'."),
    (dict(tree="x"), f"tree is 'x'; {TREE}"),
    (dict(tree=5), f"tree is 5; {TREE}"),
    (dict(tree=[0, True]), f"tree is [0, True]; {TREE}"),
    (dict(tree=[0, 0.5]), f"tree is [0, 0.5]; {TREE}"),
    (dict(max_new_tokens=True), "max_new_tokens is True; it must be a whole number."),
    (dict(max_new_tokens=10**30), f"max_new_tokens is {10**30}; {COUNT}"),
    (dict(batch_size=10**12), f"batch_size is 1000000000000; {COUNT}"),
    (
      dict(batch_size=2**31 - 1),
      "batch_size 2147483647 would take at least 618.5 GB of memory, and there are 16.0 GB; ask "
      "for less.",
    ),
    (dict(seed="x"), "seed is 'x'; it must be a whole number."),
    (dict(seed=1.5), "seed is 1.5; it must be a whole number."),
    (dict(seed=DIGITS), f"seed is {DIGITS}; {SEED}"),
    (dict(input=5), "input is 5; it must be a string or None."),
    (dict(output=5), "output is 5; it must be a string."),
    (dict(prefix=5), "prefix is 5; it must be a string."),
    (dict(sampling=5), "sampling is 5; it must be a Sampling."),
    (dict(pair=5), "pair is 5; it must be a LoadedPair."),
    (dict(num_texts=-1), f"num_texts is -1; {COUNT}"),
  ],
  ids=str,
)
def test_translate_rejects_a_setting_before_reading_input(machine, settings, sentence):
  assert error_of(translate, **{"pair": tiny_pair.pair(), "input": "gone", **settings}) == sentence


@pytest.mark.parametrize("value", [10**9, 2**31 - 1])
@pytest.mark.parametrize("name", ["gamma", "max_new_tokens"])
@pytest.mark.parametrize("pair", [tiny_pair.pair, tiny_pair.gpt_pair])
def test_setting_that_exceeds_memory_is_rejected(machine, tmp_path, pair, name, value):
  (tmp_path / "in.txt").write_text("A man runs.\n")
  message = error_of(translate, pair(), str(tmp_path / "in.txt"), **{name: value})
  if "positions" not in message:  # the number of positions may limit a GPT model before memory does
    assert message.startswith("a batch of 1 with max_new_tokens ")
    assert f"{name} {value} " in message
    assert " would take at least " in message and message.endswith("GB; ask for less.")


def test_batch_that_exceeds_memory_is_rejected(monkeypatch, tmp_path):
  """The estimate includes the caches of all rows, and nothing is computed for the 10,000 rows."""
  monkeypatch.setattr(memory, "_device_memory", lambda mesh: 50e6)
  (tmp_path / "in.txt").write_text("A man runs.\n")
  message = error_of(translate, tiny_pair.pair(), str(tmp_path / "in.txt"), batch_size=10_000)
  expected = "a batch of 10000 with max_new_tokens 128 and gamma 5 would take at least"
  assert message.startswith(expected)


def test_device_memory_is_that_of_the_devices_that_run():
  assert 1e8 < memory._device_memory(None) < 1e14
  tpu_mesh = types.SimpleNamespace(abstract_device=types.SimpleNamespace(platform="tpu"), size=4)
  assert memory._device_memory(tpu_mesh) == math.inf


@pytest.mark.parametrize(
  "experiment, settings, sentence",
  [
    (speedup, dict(output_dir=5), "output_dir is 5; it must be a string."),
    (speedup, dict(texts=5), "texts is 5; it must be a list (each a string)."),
    (speedup, dict(texts="A man."), "texts is 'A man.'; it must be a list (each a string)."),
    (speedup, dict(gammas=5), f"gammas is 5; {GAMMAS}"),
    (speedup, dict(gammas=(True,)), f"gammas is (True,); {GAMMAS}"),
    (speedup, dict(gammas=(10**12,)), f"gamma is 1000000000000; {COUNT}"),
    (speedup, dict(temperatures=1.0), "temperatures is 1.0; it must be a list (each a number)."),
    (speedup, dict(temperatures=("x",)), "temperatures is ('x',); it must be a list (each a nu"),
    (speedup, dict(lenience="x"), "lenience is 'x'; it must be a number."),
    (speedup, dict(lenience=True), "lenience is True; it must be a number."),
    (speedup, dict(seed=DIGITS), f"seed is {DIGITS}; {SEED}"),
    (speedup, dict(max_new_tokens=0), f"max_new_tokens is 0; {COUNT}"),
    (decode, dict(seed=DIGITS), f"seed is {DIGITS}; {SEED}"),
    (decode, dict(tree="x"), f"tree is 'x'; {TREE}"),
    (decode, dict(tree=[3]), "A tree has parents (3,); they must be in ascending"),
    (decode, dict(tree=[0], gamma="auto"), "gamma is 'auto' and tree is [0]: a tree leaves no"),
    (decode, dict(output_dir=5), "output_dir is 5; it must be a string."),
    (decode, dict(texts=5), "texts is 5; it must be a string or a list (each a string)."),
    (decode, dict(num_shards=0), f"num_shards is 0; {COUNT}"),
    (decode, dict(pipeline_options="-x"), "pipeline_options is '-x'; it must be a list (each a st"),
    (decode, dict(batch_size=10**12), f"batch_size is 1000000000000; {COUNT}"),
    (acceptance, dict(leniences=("x",)), "leniences is ('x',); it must be a list (each a number)."),
    (acceptance, dict(gamma=True), "gamma is True; it must be a whole number."),
    (acceptance, dict(seed=1.5), "seed is 1.5; it must be a whole number."),
    (check_exactness, dict(level="x"), "level is 'x'; it must be a number."),
    (check_exactness, dict(num_texts=True), "num_texts is True; it must be a whole number."),
    (check_exactness, dict(gammas=(0,)), f"gamma is 0; {COUNT}"),
    (check_exactness, dict(batch_sizes=(10**12,)), f"batch_size is 1000000000000; {COUNT}"),
    (check_exactness, dict(max_new_tokens=0), f"max_new_tokens is 0; {COUNT}"),
    (gamma, dict(repeats=0), f"repeats is 0; {COUNT}"),
    (gamma, dict(batch_sizes=("x",)), "batch_sizes is ('x',); it must be a list (each a whole "),
    (gamma, dict(seed="x"), "seed is 'x'; it must be a whole number."),
    (quickstart, dict(gammas=(0,)), f"gamma is 0; {COUNT}"),
    (quickstart, dict(show_rounds="x"), "show_rounds is 'x'; it must be a whole number."),
  ],
  ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_experiments_reject_invalid_settings(machine, tmp_path, experiment, settings, sentence):
  texts = "sentences" if experiment is quickstart else "texts"
  pair = {"load_pair": tiny_pair.pair} if experiment is decode else {"pair": tiny_pair.pair()}
  valid = {**pair, texts: ["A man runs."]}
  if experiment is check_exactness or experiment is acceptance:
    valid["samplings"] = [Sampling(0.0)]
  if experiment is not check_exactness:
    valid["output_dir"] = str(tmp_path / "out")
  assert error_of(experiment, **{**valid, **settings}).startswith(sentence)
  assert not list(tmp_path.rglob("*.jsonl")) or (tmp_path / "out/results.jsonl").read_bytes() == b""


def test_decode_names_the_extra_that_is_missing(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "apache_beam", None)
  monkeypatch.delitem(sys.modules, "specdec_jax.serve.beam_pipeline", raising=False)
  monkeypatch.delattr("specdec_jax.serve.beam_pipeline", raising=False)
  message = error_of(decode, tiny_pair.pair, ["A man runs."], str(tmp_path))
  assert message.startswith("decode needs Apache Beam, which is not installed; run pip install 'sp")


@pytest.mark.parametrize(
  "settings, sentence",
  [
    (dict(temperature="x"), "temperature is 'x'; it must be a number."),
    (dict(temperature=True), "temperature is True; it must be a number."),
    (dict(temperature=math.nan), "temperature is nan; it must be 0 (argmax) or positive"),
    (dict(top_k=True), "top_k is True; it must be a whole number."),
    (dict(top_k=1.5), "top_k is 1.5; it must be a whole number."),
    (dict(top_p="x"), "top_p is 'x'; it must be a number."),
    (dict(top_p=True), "top_p is True; it must be a number."),
    (dict(top_p=math.nan), "top_p is nan; it must lie in (0, 1], with 1 to keep all."),
    (dict(temperature=HUGE), f"temperature is {HUGE_SHOWN}; it must be a number of at most 1.8e"),
    (dict(temperature=-HUGE), f"temperature is -{HUGE_SHOWN[:-1]}; it must be a number of at m"),
    (dict(top_k=-HUGE), f"top_k is -{HUGE_SHOWN[:-1]}; it must be a positive count, or 0 to keep"),
    (dict(top_p=HUGE), f"top_p is {HUGE_SHOWN}; it must be a number of at most 1.8e+308."),
  ],
  ids=str,
)
def test_invalid_sampling_is_rejected(settings, sentence):
  assert error_of(Sampling, **settings).startswith(sentence)


def test_invalid_trees_are_rejected():
  for wrong in ([0, 0], b"\0\0", ["00"], None, np.zeros((2, 2), int)):
    assert error_of(Tree.from_paths, wrong).startswith(
      f"paths is {shown(wrong)}; it must be a list (each a "
    )
  for size in ("x", None, 1.5, HUGE, -1):
    assert error_of(DynamicTree, size, 2).startswith("num_guesses is ")
    assert error_of(DynamicTree, 3, size).startswith("depth is ")
  chain(1)
  assert error_of(chain, True) == "gamma is True; " + COUNT.replace("from 1", "from 0")
  assert error_of(branching, 10**9, 10).startswith("a tree of 1000000001 nodes would take at least")
  assert Tree(np.array([0, 0, 1])) == Tree((0, 0, 1)) and Tree(np.arange(3)) == chain(3)


def test_invalid_sampling_of_a_draft_is_rejected():
  build = functools.partial(draft_sampling, tiny_pair.pair().loaded_target, lambda _: None)
  assert error_of(build, top_k=-1).startswith("top_k is -1; it must be a positive count")
  assert error_of(build, top_p=2.0) == "top_p is 2.0; it must lie in (0, 1], with 1 to keep all."
  near = functools.partial(checkpoint_draft, model=str(tiny_pair.folder() / "near"))
  build = functools.partial(draft_sampling, tiny_pair.pair().loaded_target, near)
  assert build(top_k=HUGE, top_p=0.5).name == f"near (top_k {HUGE_SHOWN}, top_p 0.5)"


@pytest.mark.parametrize("number", [fractions.Fraction(1, 2), np.float32(0.5), 0.5])
def test_numbers_of_any_type_become_python_numbers(number):
  """Values of other types cannot be traced, or do not share a program with an equal number."""
  sampling = Sampling(number, np.int64(3), number)
  assert [*map(type, dataclasses.astuple(sampling))] == [float, int, *[float] * 5]
  assert sampling == Sampling(0.5, 3, 0.5) and hash(sampling) == hash(Sampling(0.5, 3, 0.5))
  assert type(TokenVerifier(sampling, number).lenience) is float
  assert Sampling(2**31).temperature == 2.0**31  # does not fit 32 bits


@pytest.mark.parametrize(
  "call, settings, sentence",
  [
    (
      "generate",
      dict(temperature=HUGE),
      f"temperature is {HUGE_SHOWN}; it must be None or a number of at",
    ),
    (
      "generate",
      dict(lenience=math.nan),
      "lenience is nan; it must lie in (0, 1], with 1 for exac",
    ),
    ("generate", dict(lenience=HUGE), f"lenience is {HUGE_SHOWN}; it must be a number of at most"),
    ("generate", dict(seed=10**5000), f"seed is <int>; {SEED}"),
    ("generate", dict(tree=np.array([0, 0])), f"tree is array([0, 0]); {TREE}"),
    (
      "generate",
      dict(tree=np.zeros((40, 2))),
      "tree is array([[0., 0.], [0., 0.], [0., 0.], [0., ",
    ),
    ("generate", dict(tree=b"\0\0\1"), f"tree is b'\\x00\\x00\\x01'; {TREE}"),
    ("generate", dict(tree=bytearray(2)), f"tree is bytearray(b'\\x00\\x00'); {TREE}"),
    ("generate", dict(tree=[0] * 5000), "The tree has 5000 children of a node, each of which"),
    (
      "generate",
      dict(tree=[0] * 70),
      "The tree has 70 children of a node, each of which is compil",
    ),
    (
      "generate",
      dict(tree=[0, 0, *range(1, 139)]),
      "The tree has 70 levels, each of which is compi",
    ),
    (
      "generate",
      dict(texts=["a", "b\ud800"]),
      "texts[1] has half a surrogate pair, '\\ud800', at p",
    ),
    (
      "generate",
      dict(texts=["a\0b"]),
      "texts[0] has a NUL character at position 1, where the librari",
    ),
    (
      "stream",
      dict(text="\udcff"),
      "text has half a surrogate pair, '\\udcff', at position 0, whic",
    ),
    ("stream", dict(text="\0"), "text has a NUL character at position 0, where the libraries th"),
    (
      "stream",
      dict(temperature=HUGE),
      f"temperature is {HUGE_SHOWN}; it must be None or a number of at mo",
    ),
    (
      "beam_search",
      dict(texts=["\ud800"]),
      "texts[0] has half a surrogate pair, '\\ud800', at posit",
    ),
    ("beam_search", dict(texts=["a", "\0"]), "texts[1] has a NUL character at position 0, where"),
    ("beam_search", dict(draft_beams=0), f"draft_beams is 0; {COUNT}"),
    ("beam_search", dict(draft_beams=1000), "The draft has 1000 beams, more than the 72 tokens of"),
    (
      "beam_search",
      dict(gamma=200),
      "gamma is 200, and each step that a beam search drafts is com",
    ),
    ("beam_search", dict(length_penalty=-5), "length_penalty is -5; it must lie in [0, 22.2]."),
    (
      "beam_search",
      dict(length_penalty=math.nan),
      "length_penalty is nan; it must lie in [0, 22.2",
    ),
    (
      "beam_search",
      dict(length_penalty=math.inf),
      "length_penalty is inf; it must lie in [0, 22.2",
    ),
    ("beam_search", dict(length_penalty=23), "length_penalty is 23; it must lie in [0, 22.2]."),
    (
      "beam_search",
      dict(length_penalty=HUGE),
      f"length_penalty is {HUGE_SHOWN}; it must be a numb",
    ),
  ],
  ids=lambda value: f"{value!r:.40}" if value != dict(seed=10**5000) else "seed",
)
def test_api_rejects_invalid_arguments_before_compilation(call, settings, sentence):
  valid = dict(text="A man.") if call == "stream" else dict(texts=["A man."])
  method = getattr(Pair(*tiny_pair.pair()), call)
  assert error_of(lambda: [*method(**{**valid, **settings})]).startswith(sentence)


def test_commands_reject_the_draft_beams_that_the_api_rejects(tmp_path):
  (tmp_path / "in.txt").write_text("A man runs.\n")
  search = functools.partial(translate, tiny_pair.pair(), str(tmp_path / "in.txt"), beams=2)
  search = functools.partial(search, gamma=2, output=str(tmp_path / "out.txt"))
  assert error_of(search, draft_beams=0) == f"draft_beams is 0; {COUNT}"
  assert error_of(search, draft_beams=1000).startswith("The draft has 1000 beams, more than")
  benchmark = functools.partial(beams, tiny_pair.pair(), ["A man."], str(tmp_path), beam_sizes=[2])
  assert error_of(benchmark, draft_beam_factors=[0]) == f"draft_beams is 0; {COUNT}"
  assert error_of(benchmark, draft_beam_factors=[500]).startswith(
    "The draft has 1000 beams, more than"
  )


@pytest.mark.parametrize(
  "settings, sentence",
  [
    (dict(vocabulary=5), "vocabulary is 5; it must be a string"),
    (dict(extra_ids="x"), "extra_ids is 'x'; it must be a whole number or 'auto'."),
    (dict(extra_ids=-1), "extra_ids is -1; it must be a whole number, from 0"),
    (dict(weights="int4"), "weights is 'int4'; it must be 'float' or 'stored' or 'int8'."),
    (dict(max_source_tokens=True), "max_source_tokens is True; it must be a whole number."),
    (dict(max_source_tokens=10**30), f"max_source_tokens is {10**30}; {COUNT}"),
    (dict(dtype=5), "dtype is 5; it must be a string."),
    (dict(kernels=5), "kernels is 5; it must be a string."),
    (dict(task=5), "task is 5; it must be a string or None."),
    (dict(shardings="x"), "shardings is 'x'; it must be a function or None."),
    (dict(draft_shardings=5), "draft_shardings is 5; it must be a function or None."),
    (dict(verifier="x"), "verifier is 'x'; it must be a function."),
  ],
  ids=str,
)
def test_load_pair_rejects_invalid_settings(settings, sentence):
  assert error_of(load_pair, **settings).startswith(sentence)
  if "alpha" not in settings and settings.keys() <= {"dtype", "max_source_tokens", "vocabulary"}:
    random = functools.partial(random_pair, target="tiny", draft="tiny", alpha=0.5)
    assert error_of(random, **settings).startswith(sentence)


@pytest.mark.parametrize(
  "settings, sentence",
  [
    (dict(epochs=0), f"epochs is 0; {COUNT}"),
    (dict(epochs=1.5), "epochs is 1.5; it must be a whole number."),
    (dict(tokens_per_batch=-1), f"tokens_per_batch is -1; {COUNT}"),
    (dict(save_every=0), f"save_every is 0; {COUNT}"),
    (dict(warmup_steps=-1), "warmup_steps is -1 and"),
    (dict(peak_learning_rate="x"), "peak_learning_rate is 'x'; it must be a number."),
    (dict(peak_learning_rate=-1), "warmup_steps is 500 and peak_learning_rate is -1;"),
    (dict(label_smoothing=2), "label_smoothing is 2; it must lie in [0, 1)."),
    (dict(seed=-1), "seed is -1;"),
  ],
  ids=str,
)
def test_invalid_training_settings_are_rejected(settings, sentence):
  assert error_of(TrainSettings, **settings).startswith(sentence)


@pytest.mark.parametrize(
  "settings, sentence",
  [
    (dict(num_heads=True), "num_heads is True; it must be a whole number."),
    (dict(num_encoder_layers=1.5), "num_encoder_layers is 1.5; it must be a whole number."),
    (dict(dropout_rate=2.0), "dropout_rate is 2.0; it must lie in [0, 1)."),
    (
      dict(activation=5),
      "activation is 5; it must be 'gelu' or 'gelu_exact' or 'relu' or 'silu'.",
    ),
  ],
  ids=str,
)
def test_invalid_model_configuration_is_rejected(settings, sentence):
  assert error_of(tiny.config, **settings) == sentence


def test_invalid_vocabulary_settings_are_reported(tmp_path):
  assert error_of(open_vocabulary, 5) == "path is 5; it must be a string."
  fit = functools.partial(fit_vocabulary, str(tmp_path), [], vocabulary="v.model")
  assert error_of(fit, size="x") == "size is 'x'; it must be a whole number."
  assert error_of(fit, size=-1) == f"size is -1; {COUNT}"


def test_require_types_checks_arguments_against_annotations():
  def function(a: list[tuple[str, int]] | None, b: float, *, c: bool = True, d=None):
    require_types(function, locals())

  function([("x", 1)], 1)
  function((), np.float32(2), c=False, d=object())
  function([["x", np.int64(3)]], 0.5)
  expected = "it must be a list (each (a string, a whole number)) or None."
  for wrong in ("x", [("x", 1.0)], [("x", 1, 2)], ["xy"], 5):
    assert error_of(function, wrong, 1) == f"a is {wrong!r}; {expected}"
  assert error_of(function, None, "1") == "b is '1'; it must be a number."
  assert error_of(function, None, 1, c=1) == "c is 1; it must be True or False."


# The command line.


@pytest.mark.parametrize(
  "file, flags, sentence",
  [
    ("binary.gin", [], "'binary.gin', or a file that it includes, is not UTF-8 text."),
    ("zeros.gin", [], NUL_IN_GIN),
    ("gin/runs/translate.gin", ["SEED='x'"], "seed is 'x'; it must be a whole number."),
    ("gin/runs/translate.gin", ["GAMMA=2000000000"], "a batch of 1 with max_new_tokens 128 and "),
  ],
  ids=str,
)
def test_command_prints_a_one_line_error_and_exits_with_status_2(
  tmp_path, monkeypatch, capsys, file, flags, sentence
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "in.txt").write_text("A man runs.\n")
  (tmp_path / "zeros.gin").write_bytes(bytes(9))
  (tmp_path / "binary.gin").write_bytes(b"\x7fELF\x02\x01\xd0\xff")
  pair = dict(target="target", draft="near", vocabulary="vocabulary.model")
  bindings = [f"load_pair.{part}='{tiny_pair.folder() / name}'" for part, name in pair.items()]
  bindings = ["INPUT='in.txt'", *bindings, *flags] if file.startswith("gin/") else flags
  try:
    status = main(["run", f"--gin_file={file}", *(f"--gin.{binding}" for binding in bindings)])
  finally:
    gin.clear_config()
  stderr = capsys.readouterr().err.strip()
  assert status == 2 and stderr.startswith(f"error: {sentence}") and "\n" not in stderr


def test_out_of_memory_is_reported():
  exhausted = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of 9 bytes.\nDetails")
  assert format_error(exhausted) == "there is not enough memory: Out of 9 bytes; ask for less."
  assert format_error(MemoryError()) == "there is not enough memory; ask for less."
  assert format_error(jax.errors.JaxRuntimeError("INTERNAL: a bug")) is None


# Decoding from Python.

V, END = 12, 5


def recite(decode=autoregressive_decode, rng=None, temperature=1.0, **settings):
  """Decode two rows of a target whose text is 3 4 5 6 7 8 9 and whose EOS is 5."""
  texts = np.array([[3, 4, 5, 6, 7, 8, 9]] * 2, np.int32)
  settings = dict(max_new_tokens=6, sampling=Sampling(temperature), **settings)
  rng = jax.random.key(0) if rng is None else rng
  return decode(RecitingModel(V, eos_id=END), texts, jnp.zeros((2, 1), int), rng, **settings)


def speculate(model, params, *args, sampling, **settings):
  """Decode with a draft without parameters; arguments are those of `autoregressive_decode`."""
  settings["verifier"] = TokenVerifier(sampling)
  return speculative_decode(model, NullDraft(chain(1)), params, (), *args, **settings)


def adapt(model, params, *args, sampling, **settings):
  """Decode with adaptive gamma; arguments are those of `autoregressive_decode`."""
  eos_id = settings.pop("eos_id", None)
  decoder = AdaptiveDecoder(model, (NullDraft(chain(1)),), TokenVerifier(sampling), eos_id)
  return decoder.run(Params(params), *args, jnp.ones(1), jnp.ones(2), **settings)


def test_text_ends_at_the_eos_of_its_model():
  assert recite(temperature=0.0).tokens[0].tolist() == [3, 4, 5, 0, 0, 0]
  assert recite(temperature=0.0, eos_id=-1).tokens[0].tolist() == [3, 4, 5, 6, 7, 8]
  gpt = GPTModel(tiny.gpt_config(V, eos_id=V - 1))
  assert (gpt.eos_id, T5Model(tiny.config()).eos_id) == (V - 1, 1)


def test_typed_and_legacy_keys_give_the_same_text():
  typed = jax.random.key(7), jax.random.split(jax.random.key(7), 2)
  legacy = jax.random.PRNGKey(7), jax.random.split(jax.random.PRNGKey(7), 2)
  rows = typed[1]  # one key is split
  for rng in (*typed, *legacy, *map(np.asarray, legacy)):
    assert (jax.random.key_data(split_keys(rng, 2)) == jax.random.key_data(rows)).all()
  for decode_it in (autoregressive_decode, speculate):
    one, *others = (recite(decode_it, rng).tokens for rng in (rows, *legacy))
    np.testing.assert_array_equal(others, [one, one])
