"""Test that named configurations of families other than T5 and GPT equal the published models."""

import dataclasses

import jax
import numpy as np
import pytest

from specdec_jax.checkpoints.huggingface import open_state
from specdec_jax.errors import InputError
from specdec_jax.models.families import init_params
from specdec_jax.models.sizes import named_config, sizes_of

# Parameters of the published models. mt5, byt5: Xue et al., 2022, Table 1. ul2: Tay et al., 2023.
# bart: pretrained models of transformers, and the model cards of distilbart-cnn. pegasus: Zhang et
# al., 2020. t5gemma: labels on the Hugging Face Hub. The others: the size of the files on the Hub
# in bytes, divided by the size of their dtype; the names of m2m100 418m, nllb 1.3b, codet5 large
# (770M) and madlad 7b (7.2B) differ from these.
PUBLISHED = {
  "mt5": dict(small="300M", base="582M", large="1.23B", xl="3.74B", xxl="12.9B"),
  "byt5": dict(small="300M", base="582M", large="1.23B", xl="3.74B", xxl="12.9B"),
  "umt5": dict(small="307M", base="592M", xl="3.77B", xxl="13.0B"),
  "ul2": {"20b": "19.5B"},
  "madlad": {"3b": "2.94B", "7b": "8.30B", "10b": "10.7B"},
  "codet5": dict(small="60M", base="223M", large="738M"),
  "bart": dict(
    base="139M",
    large="406M",
    cnn_large="406M",
    distil_cnn_12_6="306M",
    distil_cnn_6_6="230M",
  ),
  "mbart": dict(large_50="611M"),
  "pegasus": dict(large="568M"),
  "marian": dict(base="74.4M"),
  "m2m100": {"418m": "484M", "1.2b": "1.24B"},
  "nllb": {"600m": "615M", "1.3b": "1.37B", "3.3b": "3.34B"},
  "whisper": dict(tiny="37.8M", base="72.6M", small="242M", medium="764M", large="1.54B"),
  "whisper_v3": dict(large="1.54B", turbo="809M", distil="756M"),
  "t5gemma": {
    "s-s": "0.3B",
    "b-b": "0.6B",
    "l-l": "1B",
    "ml-ml": "2B",
    "xl-xl": "4B",
    "2b-2b": "6B",
    "9b-2b": "12B",
    "9b-9b": "20B",
  },
}
T5 = {
  ("1.1", "small"): 76_961_152,
  ("1.1", "base"): 247_577_856,
  ("1.1", "large"): 783_150_080,
  ("1.1", "xl"): 2_849_757_184,
  ("1.1", "xxl"): 11_135_332_352,
  ("1.0", "small"): 60_506_624,
  ("1.0", "base"): 222_903_552,
  ("1.0", "large"): 737_668_096,
  ("1.0", "xl"): 2_851_598_336,
  ("1.0", "xxl"): 11_307_321_344,
}
# Families whose checkpoints tie the logits to the embeddings. This package keeps a copy, because
# the two differ by a factor.
TIED = "bart", "mbart", "pegasus", "marian", "m2m100", "nllb", "t5gemma"
TIED += "whisper", "whisper_v3"


def shapes(config):
  return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def count(tree) -> int:
  return sum(int(np.prod(x.shape, dtype=np.int64)) for x in jax.tree.leaves(tree))


def count_of(config) -> int:
  """Return the number of parameters, from a model with one layer of each kind."""
  shallow = shapes(dataclasses.replace(config, num_encoder_layers=1, num_decoder_layers=1))
  encoder, decoder = (count(shallow[part]["layers_0"]) for part in ("encoder", "decoder"))
  others = config.num_encoder_layers - 1, config.num_decoder_layers - 1
  return count(shallow) + others[0] * encoder + others[1] * decoder


@pytest.mark.slow
@pytest.mark.parametrize("family", PUBLISHED)
def test_sizes_have_the_published_number_of_parameters(family):
  assert {*sizes_of(family)} == PUBLISHED[family].keys()
  for size, text in PUBLISHED[family].items():
    config = named_config(family, size)
    total = count_of(config)
    if family in TIED:
      total -= config.emb_dim * config.table_size
    number, unit = float(text[:-1]), {"M": 1e6, "B": 1e9}[text[-1]]
    digits = len(text[:-1].partition(".")[2])
    assert round(total / unit, digits) == number or total / unit == pytest.approx(number, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("version, size", T5)
def test_sizes_of_t5_have_the_published_number_of_parameters(version, size):
  assert count_of(named_config(version, size)) == T5[version, size]


@pytest.mark.parametrize("size, millions", [("2b-2b", (590, 2024)), ("9b-2b", (918, 8324))])
def test_encoder_of_t5gemma_has_the_parameters_of_gemma_2(size, millions):
  """Gemma Team, 2024, Table 2: parameters of embeddings, and the others."""
  config = dataclasses.replace(named_config("t5gemma", size), num_decoder_layers=1)
  tree = shapes(config)
  counts = count(tree["encoder_embedder"]), count(tree["encoder"])
  assert tuple(round(x / 1e6) for x in counts) == pytest.approx(millions, abs=1)


# Fields of config.json of google/madlad400-3b-mt, google/umt5-base, google/flan-ul2,
# google/byt5-large, Salesforce/codet5p-220m, facebook/mbart-large-50-many-to-many-mmt,
# sshleifer/distilbart-cnn-12-6, google/pegasus-cnn_dailymail, Helsinki-NLP/opus-mt-en-de,
# facebook/m2m100_1.2B, facebook/nllb-200-3.3B and google/t5gemma-b-b-ul2.
T5_FIELDS = dict(model_type="t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
T5_FIELDS |= dict(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
T5_FIELDS |= dict(transformers_version="4.35.0")


def t5(**fields):
  names = "d_model", "num_heads", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "vocab_size"
  return T5_FIELDS | dict(zip(names, fields.pop("sizes"), strict=True)) | fields


def bart(kind, sizes, activation, **fields):
  width, heads, mlp, encoder, decoder, vocab_size = sizes
  return dict(
    model_type=kind,
    vocab_size=vocab_size,
    d_model=width,
    encoder_attention_heads=heads,
    decoder_attention_heads=heads,
    encoder_ffn_dim=mlp,
    decoder_ffn_dim=mlp,
    encoder_layers=encoder,
    decoder_layers=decoder,
    activation_function=activation,
    **dict(max_position_embeddings=1024, scale_embedding=True) | fields,
  )


GEMMA_B = dict(
  vocab_size=256000,
  hidden_size=768,
  intermediate_size=2048,
  num_attention_heads=12,
  num_key_value_heads=12,
  num_hidden_layers=12,
  head_dim=64,
  query_pre_attn_scalar=64,
)
CONFIGS = {
  ("madlad", "3b"): t5(sizes=(1024, 16, 128, 8192, 32, 32, 256000), pad_token_id=1, eos_token_id=2),
  ("umt5", "base"): t5(sizes=(768, 12, 64, 2048, 12, 12, 256384), model_type="umt5"),
  ("ul2", "20b"): t5(
    sizes=(4096, 16, 256, 16384, 32, 32, 32128),
    feed_forward_proj="gated-silu",
    tie_word_embeddings=True,
  ),
  ("mt5", "base"): t5(sizes=(768, 12, 64, 2048, 12, 12, 250112), model_type="mt5"),
  ("byt5", "large"): t5(sizes=(1536, 16, 64, 3840, 36, 12, 384)),
  ("codet5", "base"): t5(
    sizes=(768, 12, 64, 3072, 12, 12, 32100),
    feed_forward_proj="relu",
    tie_word_embeddings=True,
    eos_token_id=2,
  ),
  ("bart", "distil_cnn_12_6"): bart(
    "bart", (1024, 16, 4096, 12, 6, 50264), "gelu", scale_embedding=False
  ),
  ("mbart", "large_50"): bart(
    "mbart", (1024, 16, 4096, 12, 12, 250054), "relu", decoder_start_token_id=2
  ),
  ("pegasus", "large"): bart("pegasus", (1024, 16, 4096, 16, 16, 96103), "relu"),
  ("marian", "base"): bart(
    "marian", (512, 8, 2048, 6, 6, 58101), "swish", max_position_embeddings=512
  ),
  ("m2m100", "1.2b"): bart("m2m_100", (1024, 16, 8192, 24, 24, 128112), "relu"),
  ("nllb", "3.3b"): bart("m2m_100", (2048, 16, 8192, 24, 24, 256206), "relu"),
  ("whisper_v3", "turbo"): dict(
    model_type="whisper",
    d_model=1280,
    encoder_layers=32,
    decoder_layers=4,
    num_mel_bins=128,
    vocab_size=51866,
    eos_token_id=50257,
    pad_token_id=50257,
    decoder_start_token_id=50258,
    **{f"{stack}_attention_heads": 20 for stack in ("encoder", "decoder")},
    **{f"{stack}_ffn_dim": 5120 for stack in ("encoder", "decoder")},
  ),
  ("t5gemma", "b-b"): dict(model_type="t5gemma", encoder=GEMMA_B, decoder=GEMMA_B),
}


@pytest.mark.parametrize("family, size", CONFIGS)
def test_configuration_equals_that_of_the_published_file(family, size):
  want = open_state("the file", CONFIGS[family, size], {}).config
  got = named_config(family, size)
  # The reader finds padding of the table, and a bias of the logits, in other files.
  got = dataclasses.replace(got, vocab_size=got.table_size, padded_vocab_size=None)
  assert dataclasses.replace(got, logits_bias=False) == want
  assert got.logits_bias == (family == "marian")


def test_unknown_names_raise():
  with pytest.raises(InputError, match="Family 't6' is not known; use one of 1.0, 1.1, mt5, byt5"):
    named_config("t6", "small")
  with pytest.raises(InputError, match="nllb of size '54b' is not known; use one of 600m, 1.3b"):
    named_config("nllb", "54b")
