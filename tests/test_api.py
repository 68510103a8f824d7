"""Test the public interface of `specdec_jax`, as a user's program uses it."""

import copy
import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_pair

import specdec_jax
from specdec_jax import registry
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import Tree, chain
from specdec_jax.core.verify.blocks import BlockVerifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.pieces import SentencePieces
from specdec_jax.data.text import read_lines
from specdec_jax.data.tokenizer_config import TokenizerConfig
from specdec_jax.errors import InputError
from specdec_jax.measure import calibrate

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXTS = [tiny_pair.SENTENCES[i] for i in (0, 14, 60)]
SHORT = dict(max_new_tokens=16)


def own_pair():
  return tiny_pair.pair()


@pytest.mark.slow
def test_import_loads_no_package_of_an_extra():
  heavy = "{'tensorflow', 'seqio', 'pandas', 'matplotlib', 'torch'} & {*sys.modules}"
  code = f"import sys, specdec_jax; print(specdec_jax.__version__, {heavy})"
  said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert said.stdout.split() == [specdec_jax.__version__, "set()"]
  with pytest.raises(AttributeError, match="no attribute 'loadpair'"):
    specdec_jax.loadpair  # noqa: B018


@pytest.mark.slow
def test_loading_a_pair_enables_the_compilation_cache(tmp_path, monkeypatch):
  """The test runs in a subprocess, because the settings of jax apply to a whole process."""
  paths = [str(tiny_pair.folder() / name) for name in ("target", "near", "vocabulary.model")]
  code = (
    "import sys, jax, specdec_jax; pair = specdec_jax.load_pair(*sys.argv[1:], dtype='auto'); "
    "print(jax.config.jax_compilation_cache_dir, pair.target.name, pair.dtype)"
  )
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "kept"))
  said = subprocess.run(
    [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True
  )
  assert said.stdout.split() == [str(tmp_path / "kept"), "target", "float32"]


def test_generate_returns_the_texts_of_the_target(batch_size=2):
  pair = own_pair()
  ours = pair.generate(TEXTS, gamma=2, batch_size=batch_size, **SHORT)
  plain = pair.decode_fn(Sampling(temperature=0.0), chain(0))(
    pair.prompt(TEXTS), row_keys(0, 0, len(TEXTS)), **SHORT
  )
  assert [*map(str, ours)] == [pair.vocabulary.decode(row) for row in np.asarray(plain.tokens)]
  for text, row, length in zip(ours, np.asarray(plain.tokens), plain.lengths):
    assert text.text == str(text) and text.tokens.tolist() == row[:length].tolist()
    assert text.rounds.num_emitted.sum() == length and (text.rounds.num_emitted > 0).all()
    assert text.acceptance_length == length / len(text.rounds.draft_tokens) > 1


@pytest.mark.parametrize(
  "settings",
  [
    dict(temperature=1.0, top_p=0.9, tree=(0, 0, 1), seed=-3, batch_size=2, logprobs=True),
    dict(num_beams=2, sequence_bias={(5, 6): 1.5}, min_length=3, no_repeat_ngram_size=2),
  ],
)
@pytest.mark.parametrize(
  "setting",
  [
    pytest.param(lambda: jax.enable_x64(True), marks=pytest.mark.slow, id="x64"),
    pytest.param(lambda: jax.numpy_rank_promotion("raise"), id="rank"),
  ],
)
def test_outputs_do_not_depend_on_settings_of_jax(settings, setting):
  want = own_pair().generate(TEXTS, **settings, **SHORT)
  with setting():
    ours = own_pair().generate(TEXTS, **settings, **SHORT)
  assert [x.tokens.tolist() for x in ours] == [x.tokens.tolist() for x in want]
  if want[0].logprobs is not None:
    assert ours[0].logprobs.dtype == np.float32
    np.testing.assert_allclose(ours[0].logprobs, want[0].logprobs, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [dict(gamma=3), dict(tree=(0, 0, 1, 1))])
def test_passes_of_equal_width_give_equal_bits(shape, dtype):
  pair, settings = tiny_pair.pair(dtype=dtype, kernels="xla"), dict(shape, logprobs=True, **SHORT)
  ours = pair.generate(TEXTS, batch_size=3, **settings)
  fixed = pair.generate(TEXTS, batch_size=3, fixed_width=True, **settings)
  for one, other in zip(ours, fixed, strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert (other.rounds.num_emitted == 1).all() and len(one.tokens) > len(one.rounds.num_emitted)


def test_output_shows_its_rounds(capsys, monkeypatch):
  (output,) = own_pair().generate(TEXTS[:1], tree=(0, 0, 1), **SHORT)
  assert "".join(w for r in output.round_texts for w in r.emitted).strip()[:4] == output.text[:4]
  output.show()
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == sum(1 + len(r.branches) for r in output.round_texts)
  assert "[+" in lines[0] and len(output.round_texts) == len(output.rounds.num_emitted)
  monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
  monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("displayed twice"))
  shown = output._repr_html_()
  assert shown.startswith("<pre>") and "<span style=" in shown and "<script" not in shown


@pytest.mark.slow
def test_samples_depend_on_the_seed_and_the_index_of_the_text():
  sampled = dict(gamma=2, temperature=1.0, top_k=20, **SHORT)

  def generate(texts, **settings):
    return [output.text for output in own_pair().generate(texts, **settings)]

  first = generate(TEXTS, seed=1, batch_size=2, **sampled)
  assert first == generate(TEXTS, seed=1, batch_size=2, **sampled)
  assert first[2] != generate(TEXTS[2:], seed=1, batch_size=2, **sampled)[0]  # another index
  assert first != generate(TEXTS, seed=2, batch_size=2, **sampled)


def test_auto_chooses_the_fastest_and_logs_why(monkeypatch, caplog):
  tree = Tree((0, 0, 1))

  def found(pair, texts, *rest, branching):
    return type("Found", (), dict(tree=tree))()

  monkeypatch.setattr(calibrate, "calibrate", found)
  monkeypatch.setattr(calibrate, "get_or_compute", lambda find, *rest, **more: (find(), "; so"))
  caplog.set_level("INFO", "specdec_jax")
  for how in (dict(gamma="auto"), dict(tree="auto")):
    (output,) = own_pair().generate(TEXTS[:1], **how, **SHORT)
    assert output.rounds.draft_tokens.shape[-1] == tree.num_draft_tokens
  assert sum(message.endswith("; so.") for message in caplog.messages) == 2


@pytest.mark.parametrize("how", [dict(gamma=3), dict(gamma=2, num_beams=2)], ids=str)
def test_compilation_is_logged_once(caplog, how):
  caplog.set_level("INFO", "specdec_jax")
  pair = own_pair()
  for _ in range(2):
    pair.generate(TEXTS[:1], max_new_tokens=150, **how)  # no other test has programs of this size
  (message,) = caplog.messages
  assert message.startswith("Compiling for a batch of 1 with ") and "max_new_tokens 256" in message


def test_calibration_is_logged_before_it_begins(caplog, monkeypatch):
  def begin(pair, texts, settings):
    raise InputError(caplog.text)

  monkeypatch.setattr(calibrate, "_Calibrator", begin)
  caplog.set_level("INFO", "specdec_jax")
  with pytest.raises(InputError, match="Calibrating gamma"):
    own_pair().generate(TEXTS[:1], gamma="auto", **SHORT)


@pytest.mark.slow
@pytest.mark.parametrize(
  "how, verifier",
  [
    (dict(gamma=0), TokenVerifier),
    (dict(tree=(0, 0, 1), temperature=1.0), BlockVerifier),
  ],
  ids=str,
)
def test_pieces_of_a_stream_concatenate_to_the_output(how, verifier):
  pair = dataclasses.replace(own_pair(), verifier=verifier)
  (whole,) = pair.generate(TEXTS[1:2], **how, **SHORT)
  pieces = [*pair.stream(TEXTS[1], **how, **SHORT)]
  assert "".join(pieces) == whole.text
  assert 1 < len(pieces) <= len(whole.rounds.num_emitted)


class Spaced(SentencePieces):
  """A vocabulary whose texts change as they grow: spaces and incomplete characters vanish."""

  PIECES = b" '", b"s", b" n", b"'t", b"\xe2\x82", b"\xac", b" ' "

  def decode(self, ids):
    text = b"".join(self.PIECES[i % len(self.PIECES)] for i in self.until_eos(ids))
    config = TokenizerConfig(fields={"clean_up_tokenization_spaces": True})
    return config.clean_up(text.decode(errors="replace"))


@pytest.mark.slow
def test_stream_and_stop_strings_with_a_text_that_changes():
  vocabulary = copy.copy(own_pair().vocabulary)
  vocabulary.__class__ = Spaced
  pair = tiny_pair.changed(own_pair(), vocabulary=vocabulary)
  how = dict(gamma=1, temperature=1.5, min_new_tokens=30, max_new_tokens=30)
  texts = ""
  for seed in range(5):
    (whole,) = pair.generate(["A man"], seed=seed, **how)
    pieces = [*pair.stream("A man", seed=seed, **how)]
    assert "".join(pieces) == whole.text and len(pieces) > 5
    for start in range(0, len(whole.text), 3):
      stop = whole.text[start : start + 2]
      if "\ufffd" in stop:  # bytes that are no character match no stop string
        continue
      (cut,) = pair.generate(["A man"], seed=seed, stop_strings=[stop, "never"], **how)
      assert "".join(pair.stream("A man", seed=seed, stop_strings=stop, **how)) == cut.text
      assert cut.finish_reason == "stop_string" and cut.text == vocabulary.decode(cut.tokens)
      assert cut.text.index(stop) == whole.text.index(stop)
    texts += whole.text
  assert "\u20ac" in texts and "'t" in texts and " n" in texts


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(texts="A man"), "texts is one string"),
    (dict(gamma=-1), "gamma is -1"),
    (dict(temperature="cold"), "temperature is 'cold'"),
    (dict(do_sample="False"), "do_sample is 'False'"),
    (dict(do_sample=0), "do_sample is 0"),
    (dict(beam_scorer="hff"), "beam_scorer is 'hff'"),
    (dict(texts=["a", "b\0c"]), r"texts\[1\] has a NUL character at position 1"),
    (dict(texts=["\ud83d"]), r"texts\[0\] has half of a surrogate pair \('\\ud83d'\) at position"),
    (dict(temperature=math.nan), "temperature is nan"),
    (dict(temperature=-1.0), "temperature is -1"),
    (dict(top_p=2.0, temperature=1.0), "top_p is 2"),
    (dict(top_k=-1), "top_k is -1"),
    (dict(lenience=math.nan), "lenience is nan"),
    (dict(lenience=1.5), "lenience is 1.5"),
    (dict(seed=2**40), "seed is 1099511627776"),
    (dict(tree=[0] * 70), "The tree has 70 children of a node"),
    (dict(tree=(1,)), "level order"),
    (dict(seed=1.5), "seed is 1.5"),
    (dict(batch_size=0), "batch_size is 0"),
    (dict(max_new_tokens=0), "max_new_tokens is 0"),
    (dict(sequence_bias={(1, 2.5): 1.0}), r"sequence_bias has the sequence \[1, 2.5\]"),
    (dict(sequence_bias={(): 1.0}), r"sequence_bias has the sequence \[\]"),
    (dict(sequence_bias={(1,): math.inf}), "a bias of sequence_bias is inf"),
    (dict(sequence_bias={(1,): 1e300}), r"a bias of sequence_bias is 1e\+300"),
    (dict(bad_words_ids=[[3.0]]), r"bad_words_ids has the sequence \[3.0\]"),
    (dict(suppress_tokens=[0.5]), r"suppress_tokens has the sequence \[0.5\]"),
    (dict(repetition_penalty=1e-310), "repetition_penalty is 1e-310"),
    (dict(encoder_repetition_penalty=1e39), r"encoder_repetition_penalty is 1e\+39"),
    (dict(tree="Auto"), "tree is 'Auto'; give 'auto'"),
    (dict(stop_strings=[""]), "stop_strings has ''"),
    (dict(stop_strings=["a", 3]), "stop_strings has 3"),
    (dict(texts=["a", None]), r"texts\[1\] is None; it must be a string"),
    (dict(texts=["a", math.nan]), r"texts\[1\] is nan"),
    (dict(decoder_texts=["a", "b", None]), r"decoder_texts\[2\] is None"),
    (dict(decoder_input_ids=[[], [], [0, 2.5]]), r"decoder_input_ids has the sequence \[2.5\]"),
  ],
  ids=str,
)
def test_invalid_arguments_raise(changes, words):
  with pytest.raises(InputError, match=words):
    own_pair().generate(**{"texts": TEXTS, **changes})


def test_unknown_argument_raises():
  with pytest.raises(TypeError, match="sped"):
    own_pair().generate(TEXTS, sped=4)
  with pytest.raises(TypeError, match="no argument decoder_start_token_id"):
    own_pair().generate(TEXTS, decoder_start_token_id=4)


def test_paths_are_paths_or_strings(tmp_path):
  folder = tiny_pair.folder()
  paths = folder / "target", folder / "near", folder / "vocabulary.model"
  pair = specdec_jax.load_pair(*paths)
  assert repr(pair) == repr(specdec_jax.load_pair(*map(str, paths)))
  (tmp_path / "words.txt").write_text("a b\n")
  assert read_lines(tmp_path / "words.txt") == ["a b"]


@pytest.mark.parametrize("name", ["unigram", "bigram", "ngrams"])
def test_drafts_refuse_an_empty_file(name, tmp_path):
  (tmp_path / "empty.txt").touch()
  with pytest.raises(InputError, match="There are no texts to count"):
    registry.draft(name, target_text=str(tmp_path / "empty.txt"))(own_pair().target)


@pytest.mark.parametrize("of", [np.array, jnp.array])
def test_decoder_prefixes_may_be_arrays(of):
  ids = [[0, 5], [0, 7], [0, 9]]
  want = own_pair().generate(TEXTS, decoder_input_ids=ids, **SHORT)
  ours = own_pair().generate(TEXTS, decoder_input_ids=of(ids), **SHORT)
  assert [x.tokens.tolist() for x in ours] == [x.tokens.tolist() for x in want]


@dataclasses.dataclass(frozen=True)
class StackingDraft(specdec_jax.Draft):
  """A draft that samples each position by itself, as docs/drafts.md says."""

  tree: Tree
  sampling: Sampling
  vocab_size: int

  def propose(self, params, state, context, rng):
    keys = jax.vmap(lambda key: jax.random.split(key, self.tree.depth), out_axes=1)(rng)
    logits = jax.nn.one_hot(context.last_token, self.vocab_size)
    samples = [specdec_jax.sample_logits(key, logits, self.sampling) for key in keys]
    tokens, q = (jnp.stack(each, axis=1) for each in zip(*samples))
    return specdec_jax.Proposal(tokens, q), state


def test_draft_may_stack_the_distributions_of_its_samples():
  def build(sampling, tree, options=None):
    return StackingDraft(tree, sampling, own_pair().target.model.vocab_size)

  pair = own_pair().with_draft(specdec_jax.DraftSpec("stacking", build))
  ours, plain = (pair.generate(TEXTS, gamma=gamma, **SHORT) for gamma in (2, 0))
  assert [*map(str, ours)] == [*map(str, plain)]
  assert len(pair.generate(TEXTS, gamma=2, temperature=1.0, **SHORT)) == len(TEXTS)


def test_repr_of_a_pair_is_one_line():
  shown = repr(own_pair())
  assert len(shown) < 300 and "\n" not in shown
  assert shown.startswith("Pair(target='") and "/near' (0.0M parameters)" in shown
  assert shown.endswith("task='tiny', dtype='float32')")


@pytest.mark.slow
def test_notebook_runs_from_top_to_bottom(capsys, monkeypatch):
  """A pair with random weights compiles faster; `test_bundled.py` tests the bundled pair."""
  monkeypatch.setattr(specdec_jax, "load_pair", own_pair)
  cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text())["cells"]
  namespace = {}
  for cell in cells:
    if cell["cell_type"] == "code":
      exec("".join(cell["source"]), namespace)
  said = capsys.readouterr().out
  assert said.count("tokens per target call") == 3
  assert "times as fast as autoregressive decoding" in said
  assert [*map(str, namespace["plain"])] == [*map(str, namespace["outputs"])]
  assert "<pre>" in namespace["branched"]._repr_html_()


@pytest.mark.slow
def test_beam_search_returns_the_best_text_first():
  pair = own_pair()
  how = dict(num_beams=3, num_return_sequences=3, beam_scorer="t5x", **SHORT)
  found = [pair.generate([text], gamma=2, batch_size=2, **how) for text in TEXTS]
  plain = [pair.generate([text], gamma=0, **how) for text in TEXTS]
  assert [*map(str, pair.generate(TEXTS, gamma=2, **how))] == [str(x) for of in found for x in of]
  assert [[*map(str, texts)] for texts in found] == [[*map(str, texts)] for texts in plain]
  assert {*map(len, found)} <= {2, 3}  # fewer if fewer ended
  for texts, same in zip(found, plain):
    scores = [text.score for text in texts]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([text.score for text in same], abs=1e-5)
    assert texts[0].text == pair.vocabulary.decode(texts[0].tokens)
    assert texts[0].acceptance_length > same[0].acceptance_length


@pytest.mark.parametrize(
  "how, said",
  [
    (dict(num_beams=0), "num_beams is 0"),
    (dict(num_beams=3, draft_beams=2), "The draft has 2 beams and the search 3"),
    (dict(num_beams=4, gamma=-1), "gamma is -1"),
    (dict(num_beams=64), "more than the vocabulary's"),
    (dict(draft_beams=4), "draft_beams and nodes are for a beam search"),
  ],
)
def test_unsupported_beam_search_raises(how, said):
  with pytest.raises(InputError, match=said):
    own_pair().generate(TEXTS, **how, **SHORT)
