"""Test vocabularies and the reading of lines: round trips, special ids and errors."""

import gzip
import io
import os
import sys

import pytest
import tiny_pair

from specdec_jax.data.pieces import EOS_ID, train_sentence_pieces, train_word_pieces
from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import PAD_ID, padded
from specdec_jax.errors import InputError
from specdec_jax.load import BUNDLED


@pytest.fixture(scope="module")
def words():
  return open_vocabulary(str(tiny_pair.folder() / "vocabulary.model"))


# SentencePiece vocabularies.


def test_encoded_text_decodes_to_itself(words):
  for text in [*tiny_pair.SENTENCES, "Fuß [3]", ""]:
    ids = words.encode(text)
    assert ids[-1] == EOS_ID and EOS_ID not in ids[:-1] and PAD_ID not in ids
    assert all(0 <= i < len(words) for i in ids)
    assert words.decode(ids) == text


def test_names_of_control_tokens_in_a_text_are_not_encoded_as_such(words):
  for text in ("</s>", "<pad>"):
    assert not {EOS_ID, PAD_ID} & set(words.encode(text)[:-1])


def test_decoding_stops_at_eos(words):
  ids = words.encode("A man")
  assert words.decode(ids + words.encode("Two dogs")) == "A man"
  assert words.decode([EOS_ID, *ids]) == ""


def test_decoding_skips_padding_and_ids_outside_of_the_vocabulary(words):
  one, *rest = words.encode("A man")
  assert words.decode([PAD_ID, one, len(words), PAD_ID, 10**6, *rest, PAD_ID]) == "A man"
  assert words.decode([]) == words.decode([PAD_ID]) == ""


def test_pieces_concatenate_to_the_text(words):
  ids = words.encode("A man runs")
  pieces = words.pieces(ids)
  assert len(pieces) == len(ids) and pieces[-1] == "</s>"
  assert "".join(pieces[:-1]).strip() == "A man runs"


def test_pieces_outside_of_the_vocabulary_are_numbers(words):
  size = len(words)
  assert words.pieces([size, EOS_ID, size + 31]) == [f"<{size}>", "</s>", f"<{size + 31}>"]


def test_sentinels_are_numbered_from_the_last_id_down(words):
  more, size = open_vocabulary(words.path, extra_ids=3), len(words)
  assert len(more) == size + 3 and more.fingerprint() != words.fingerprint()
  ids = more.encode("A <extra_id_0> runs <extra_id_2>")
  assert ids[-2] == size and size + 2 in ids
  assert more.decode(ids) == "A runs"
  assert more.pieces([size, size + 1, size + 2, size + 3]) == [
    *(f"<extra_id_{i}>" for i in (2, 1, 0)),
    f"<{size + 3}>",
  ]
  assert more.encode("A man runs") == words.encode("A man runs")


def test_fingerprint_identifies_a_vocabulary(words, tmp_path):
  again, other = str(tmp_path / "again.model"), str(tmp_path / "other.model")
  for path, texts in ((again, tiny_pair.SENTENCES), (other, tiny_pair.SENTENCES[::2])):
    train_sentence_pieces(texts, path, 50)
  assert open_vocabulary(again).fingerprint() != words.fingerprint()
  assert open_vocabulary(again).fingerprint() != open_vocabulary(other).fingerprint()
  train_sentence_pieces(tiny_pair.SENTENCES, other, 50)
  assert open_vocabulary(again).fingerprint() == open_vocabulary(other).fingerprint()


def test_control_tokens_have_the_ids_of_t5(words):
  assert words.pieces([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]


@pytest.mark.parametrize("name", ["gone.model", "gone.txt"])
def test_missing_vocabulary_is_reported(tmp_path, name):
  with pytest.raises(InputError, match=f"no vocabulary at .*{name}"):
    open_vocabulary(str(tmp_path / name))


@pytest.mark.parametrize("content", [b"", b"this is no SentencePiece model"], ids=["empty", "text"])
def test_invalid_vocabulary_file_is_reported(tmp_path, content):
  path = tmp_path / "bad.model"
  path.write_bytes(content)
  with pytest.raises(InputError, match="bad.model"):
    open_vocabulary(str(path))


def test_impossible_vocabulary_size_is_reported_and_leaves_no_file(tmp_path):
  with pytest.raises(InputError, match="5000"):
    train_sentence_pieces(["a b c"], str(tmp_path / "v.model"), 5000)
  assert not list(tmp_path.iterdir())


# BERT's word pieces.


@pytest.fixture(scope="module")
def pieces():
  """Vocabulary of [PAD], [END], [UNK], the characters of the sentences and some of their words."""
  return open_vocabulary(str(tiny_pair.gpt_folder() / "vocabulary.txt"))


def bert(tmp_path, *lines):
  """Write a vocabulary file with these lines and return its path."""
  path = tmp_path / "vocab.txt"
  path.write_text("".join(f"{line}\n" for line in lines))
  return str(path)


def test_decoded_word_pieces_equal_the_text_except_for_case_accents_and_spaces(pieces):
  for text in [*tiny_pair.SENTENCES, ""]:
    ids = pieces.encode(text)
    assert ids[-1] == pieces.eos_id == 1 and not {pieces.eos_id, PAD_ID} & {*ids[:-1]}
    assert all(0 <= i < len(pieces) for i in ids)
    plain = text.lower().replace("ä", "a").replace("ü", "u")
    assert pieces.decode(ids) == plain.replace(".", " .").replace("!", " !")
    assert pieces.encode(pieces.decode(ids)) == ids


def test_word_pieces_have_a_space_where_a_word_starts(tmp_path):
  words = open_vocabulary(bert(tmp_path, "[PAD]", "[END]", "[UNK]", "it", "run", "##s", "'", "."))
  ids = words.encode("It's runs.")
  assert words.pieces(ids) == [" it", " '", " [UNK]", " run", "s", " .", " [END]"]
  assert words.decode(ids) == "it ' [UNK] runs ."
  assert words.pieces([PAD_ID, 8, 39]) == [" [PAD]", "<8>", "<39>"]


def test_unknown_characters_are_encoded_as_unknown(pieces):
  ids = pieces.encode("two 日本 dogs \U0001f600")
  assert pieces.decode(ids) == "two [UNK] [UNK] dogs [UNK]"


def test_names_of_control_tokens_are_not_encoded_as_such_by_word_pieces(pieces):
  for text in ("[END]", "[SEP]", "[PAD]", "a [UNK] b"):
    assert not {PAD_ID, pieces.eos_id} & {*pieces.encode(text)[:-1]}


def test_word_pieces_decode_up_to_eos_without_padding_and_unknown_ids(pieces):
  one, *rest = pieces.encode("A man")
  assert pieces.decode([PAD_ID, one, len(pieces), 10**6, PAD_ID, *rest, one]) == "a man"
  assert pieces.decode([]) == pieces.decode([pieces.eos_id, one]) == ""


def test_vocabulary_file_of_bert(tmp_path):
  """[SEP] with id 102 ends a text, and id 0 starts a text, as for the models of this project."""
  special = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
  words = open_vocabulary(bert(tmp_path, *special, "a", "man"))
  assert (words.start_id, words.eos_id, len(words)) == (0, 102, 106)
  assert words.encode("A man [SEP]") == [104, 105, 100, 100, 100, 102]
  assert words.decode([104, 105, 102, 104]) == "a man"
  assert open_vocabulary(bert(tmp_path, *special, "man", "a")).fingerprint() != words.fingerprint()


def test_only_a_newline_ends_a_word_piece(tmp_path):
  words = open_vocabulary(bert(tmp_path, "[PAD]", "[UNK]", "[SEP]", "a\u2028b", "c"))
  assert len(words) == 5 and words.encode("c") == [4, 2]


@pytest.mark.parametrize(
  "lines, message",
  [
    ([], "is not a file of BERT's word pieces"),
    (["some", "words"], "is not a file of BERT's word pieces"),
    (["[UNK]", "[PAD]", "[SEP]", "a"], "is not a file of BERT's word pieces"),
    (["[PAD]", "[SEP]", "a"], "is not a file of BERT's word pieces"),
    (["[PAD]", "[UNK]", "a"], "is not a file of BERT's word pieces"),
  ],
  ids=["empty", "text", "padding not first", "no unknown", "no end"],
)
def test_invalid_file_of_word_pieces_is_reported(tmp_path, lines, message):
  with pytest.raises(InputError, match=f"vocab.txt .*{message}"):
    open_vocabulary(bert(tmp_path, *lines))


def test_word_pieces_reject_sentinels_and_invalid_utf8(tmp_path):
  path = bert(tmp_path, "[PAD]", "[UNK]", "[SEP]", "a")
  with pytest.raises(InputError, match="extra_ids is 100"):
    open_vocabulary(path, extra_ids=100)
  (tmp_path / "vocab.txt").write_bytes("[PAD]\n[UNK]\n[SEP]\nä\n".encode("latin-1"))
  with pytest.raises(InputError, match="vocab.txt is not UTF-8"):
    open_vocabulary(path)


def test_training_word_pieces_is_deterministic(pieces, tmp_path):
  """The trainer of the library tokenizers reads words in a random order."""
  for again in range(4):
    train_word_pieces(iter(tiny_pair.SENTENCES), str(tmp_path / f"{again}.txt"), 100)
  files = {path.read_bytes() for path in tmp_path.iterdir()}
  assert len(files) == 1
  again = open_vocabulary(str(tmp_path / "0.txt"))
  assert again.fingerprint() == pieces.fingerprint() and len(again) == 100
  train_word_pieces(tiny_pair.SENTENCES[::2], str(tmp_path / "other.txt"), 100)
  assert open_vocabulary(str(tmp_path / "other.txt")).fingerprint() != pieces.fingerprint()


def test_size_below_the_number_of_characters_is_reported_and_leaves_no_file(tmp_path):
  with pytest.raises(InputError, match="are 6 pieces, not 5"):  # a, b, ##b and three special pieces
    train_word_pieces(["a b ab"], str(tmp_path / "v.txt"), 5)
  assert not list(tmp_path.iterdir())


def test_padded_fills_rows_with_the_padding_id():
  assert padded([[5, 1], [], [2, 3, 1]], 3).tolist() == [[5, 1, 0], [0, 0, 0], [2, 3, 1]]


# Lines.


@pytest.fixture
def lines_of(tmp_path, monkeypatch):
  """Return a function that reads raw bytes from a file, gzipped file, pipe or standard input."""

  def read(way, raw):
    if way == "stdin":
      monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
      return read_lines("-")
    if way == "pipe":  # like <(...) in a shell
      end, start = os.pipe()
      with open(start, "wb") as file:
        file.write(raw)
      with open(end):
        return read_lines(f"/dev/fd/{end}")
    path = tmp_path / ("text.gz" if way == "gzip" else "text")
    path.write_bytes(gzip.compress(raw) if way == "gzip" else raw)
    return read_lines(str(path))

  return read


def test_single_letter_share():
  """The share is 0 in the vocabulary's language, larger for capitals, and 1 in other scripts."""
  share = open_vocabulary(str(BUNDLED / "vocabulary.model")).single_letter_share
  assert share("Two dogs are playing in the snow.") == share("") == share("12, 3.") == 0
  assert 0.5 < share("TWO DOGS ARE PLAYING IN THE SNOW") < 1
  assert share("Две собаки играют в снегу.") == share("两只狗在雪地里玩耍") == 1


WAYS = ("file", "gzip", "pipe", "stdin")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
  "raw, lines",
  [
    (b"one\ntwo\n", ["one", "two"]),
    (b"one\ntwo", ["one", "two"]),
    (b"one\r\ntwo\r\n", ["one", "two"]),
    (b"\n\none\n \n\n", ["", "", "one", " ", ""]),
    (b"", []),
    (b"\n", [""]),
    ("Mädchen \U0001f600\n".encode(), ["Mädchen \U0001f600"]),
    ("a\u0085b\u2028c\x0cd\x1ee\n".encode(), ["a\u0085b\u2028c\x0cd\x1ee"]),
    (b"a\rb\n", ["a\rb"]),
  ],
  ids=["plain", "no last newline", "CRLF", "empty lines", "empty", "a newline"]
  + ["beyond ASCII", "other line separators", "carriage return inside"],
)
def test_only_a_newline_ends_a_line(lines_of, way, raw, lines):
  assert lines_of(way, raw) == lines


@pytest.mark.parametrize("way", WAYS)
def test_invalid_utf8_is_reported(lines_of, way):
  with pytest.raises(InputError, match="not UTF-8"):
    lines_of(way, b"good\nM\xe4dchen\n")


@pytest.mark.parametrize("name", ["gone.txt", "gone.txt.gz", "folder"])
def test_missing_text_file_is_reported(tmp_path, name):
  (tmp_path / "folder").mkdir()
  with pytest.raises(InputError, match=f"no text file at .*{name}"):
    read_lines(str(tmp_path / name))


GZIPPED = gzip.compress(b"hello\nworld\n" * 50, mtime=0)


@pytest.mark.parametrize(
  "raw",
  [
    b"plain text",
    GZIPPED[:-12],
    GZIPPED[:20] + b"\xff\xff" + GZIPPED[22:],
    GZIPPED[:-8] + b"x" * 8,
  ],
  ids=["not gzipped", "truncated", "damaged inside", "wrong checksum"],
)
def test_damaged_gzip_file_is_reported(tmp_path, raw):
  path = tmp_path / "text.gz"
  path.write_bytes(raw)
  with pytest.raises(InputError, match="text.gz"):
    read_lines(str(path))


def test_limit_returns_the_first_lines(tmp_path):
  (tmp_path / "text").write_text("one\ntwo\nthree\n")
  assert read_lines(str(tmp_path / "text"), limit=2) == ["one", "two"]
  assert read_lines(str(tmp_path / "text"), limit=9) == ["one", "two", "three"]
  with pytest.raises(InputError, match="limit is 0"):
    read_lines(str(tmp_path / "text"), limit=0)


def test_prefix_is_prepended_to_lines_that_are_not_blank(tmp_path):
  (tmp_path / "text").write_text("one\r\n\ntwo\n")
  assert read_lines(str(tmp_path / "text"), prefix="say: ") == ["say: one", "", "say: two"]
