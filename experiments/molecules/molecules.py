"""Speculative decoding of ANNalog (PyPI: annalog), which proposes analogues of molecules:

pip install -e '.[molecules]'
python -m experiments.molecules.molecules

This writes ANNalog as a checkpoint, trains a draft head on its outputs, and measures drafts on the
drugs in `drugs.txt`. Every output is compared with that of ANNalog's own code. An interrupted run
resumes.
"""

import argparse
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from experiments.lib import script
from specdec_jax.commands.train import train_speculator
from specdec_jax.contrib.prompt_lookup_or_ngrams import prompt_lookup_or_ngrams
from specdec_jax.contrib.retrieval import retrieval
from specdec_jax.core.decode import DecodeSettings
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import LoadsDraft
from specdec_jax.drafts.backoff import backoff_ngrams
from specdec_jax.drafts.composed import forest_draft
from specdec_jax.drafts.heads import new_head
from specdec_jax.drafts.layer_skip import layer_skip
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.load import cache_programs, load_pair, speculator
from specdec_jax.measure.speed import speed_steps
from specdec_jax.measure.sweep import sweep
from specdec_jax.measure.tables import speed_table
from specdec_jax.pair import Pair
from specdec_jax.train.trainer import TrainSettings

DRUGS = pathlib.Path(__file__).with_name("drugs.txt")
MAX_NEW_TOKENS = 101  # ANNalog has 102 positions, and the first is that of <sos>
GAMMAS = 5, 10

# Parts of the names in ANNalog's state_dict, and in that of transformers' Marian.
RENAMED = {
  "tok_embedding": "embed_tokens",
  "pos_embedding": "embed_positions",
  "self_attention.": "self_attn.",
  "encoder_attention.": "encoder_attn.",
  "fc_q": "q_proj",
  "fc_k": "k_proj",
  "fc_v": "v_proj",
  "fc_o.": "out_proj.",
  "enc_attn_layer_norm": "encoder_attn_layer_norm",
  "ff_layer_norm": "final_layer_norm",
  "positionwise_feedforward.fc_": "fc",
  "decoder.fc_out.weight": "lm_head.weight",
  "decoder.fc_out.bias": "final_logits_bias",
}
# ANNalog has the layers of a Marian, but learned positions, and 8 heads that its files do not name.
CONFIG = dict(
  model_type="marian",
  activation_function="relu",
  encoder_attention_heads=8,
  decoder_attention_heads=8,
  scale_embedding=True,
  share_encoder_decoder_embeddings=False,
  tie_word_embeddings=False,
)


def open_annalog() -> Any:
  """Return the packaged model with its vocabulary, as `annalog.SMILESModelHandler`."""
  import annalog

  folder = pathlib.Path(annalog.__file__).parent / "ckpt_and_vocab"
  words = str(folder / "stereo_experiment_vocab_ttf.pkl")
  return annalog.SMILESModelHandler(words, words, str(folder / "Lev_extended.pt"), device="cpu")


def write_checkpoint(handler: Any, folder: pathlib.Path) -> None:
  """Write ANNalog to a folder, in the format of Hugging Face."""
  folder.mkdir(parents=True, exist_ok=True)
  arrays = {}
  for name, array in handler.model.state_dict().items():
    for old, new in RENAMED.items():
      name = name.replace(old, new)
    arrays[name] = array.numpy()
  ids = {token: i for i, token in enumerate(handler.SRC.vocab.itos)}
  sizes = dict(vocab_size=len(ids), d_model=arrays["lm_head.weight"].shape[1])
  sizes["max_position_embeddings"] = len(arrays["decoder.embed_positions.weight"])
  for stack in ("encoder", "decoder"):
    sizes[f"{stack}_layers"] = sum(name.startswith(stack) and "fc1.bias" in name for name in arrays)
    sizes[f"{stack}_ffn_dim"] = len(arrays[f"{stack}.layers.0.fc1.bias"])
  special = dict(
    decoder_start_token_id=ids["<sos>"], eos_token_id=ids["<eos>"], pad_token_id=ids["<pad>"]
  )
  (folder / "config.json").write_text(json.dumps(CONFIG | sizes | special, indent=2))
  save_file(arrays, folder / "model.safetensors")

  tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
  tokens = Regex(r"\[[^\]]*\]|%\d{2}|Br|Cl|.")  # as SMILESTokenizer of ANNalog
  tokenizer.pre_tokenizer = pre_tokenizers.Split(tokens, "isolated")
  tokenizer.post_processor = processors.TemplateProcessing(
    single="<sos> $A <eos>", special_tokens=[(name, ids[name]) for name in ("<sos>", "<eos>")]
  )
  tokenizer.decoder = decoders.Fuse()
  tokenizer.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')


def package_outputs(handler: Any, molecules: Sequence[str]) -> list[str]:
  """Return the outputs of ANNalog's own greedy decoding: its beam search with one beam.

  The tokens of a text are unambiguous, so that equal texts have equal tokens. An output that does
  not end within the positions of the model is returned as ''.
  """
  import annalog

  generator = annalog.SMILESGenerator(handler)
  found = (generator.generate_smiles(molecule, 1, "beam") for molecule in molecules)
  return [outputs[0][0] if outputs else "" for outputs in found]


def write_outputs(pair: Pair, molecules: Sequence[str], folder: pathlib.Path) -> None:
  """Write analogues that ANNalog samples for molecules, and its greedy output for each of them.

  The first 8 molecules are left out, to validate the head. Samples of the second round are
  analogues of analogues.
  """
  settings: dict[str, Any] = dict(gamma=0, batch_size=32, max_new_tokens=MAX_NEW_TOKENS)
  sources = [*molecules[8:]]
  for count in (8, 2):
    found = pair.generate(sources, temperature=1.0, num_return_sequences=count, **settings)
    new = dict.fromkeys([*sources, *map(str, found)])
    sources = [text for text in new if text and pair.cut(text) is None]
  outputs = map(str, pair.generate(sources, **settings))
  folder.mkdir(parents=True, exist_ok=True)
  for name, lines in (
    ("valid.source", molecules[:8]),
    ("train.source", sources),
    ("train.target", outputs),
  ):
    (folder / name).write_text("\n".join(lines) + "\n")


def train_head(target: pathlib.Path, data: pathlib.Path, output: pathlib.Path) -> None:
  """Train a head that proposes all draft tokens in one pass on outputs of the target."""
  train_speculator(
    data=str(data),
    sources=["train.source"],
    targets=["train.target"],
    valid_source="valid.source",
    head=functools.partial(
      new_head, kind="parallel", gamma=max(GAMMAS), emb_dim=128, mlp_dim=256, num_decoder_layers=1
    ),
    settings=TrainSettings(epochs=4, tokens_per_batch=1024, warmup_steps=50, label_smoothing=0.0),
    vocabulary=str(target / "tokenizer.json"),
    target=str(target),
    output=str(output),
    work_dir=f"{output}_training",
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--output", default="runs/molecules", help="folder to write")
  output = pathlib.Path(parser.parse_args().output)
  target, head, data = (output / name for name in ("annalog", "head", "data"))
  cache_programs()
  handler = open_annalog()
  write_checkpoint(handler, target)
  pair = load_pair(str(target), prompt_lookup, task="molecules")
  drugs = [line.split()[0] for line in DRUGS.read_text().splitlines()]
  measured, others = drugs[::3], [drug for i, drug in enumerate(drugs) if i % 3]
  if not (data / "train.target").exists():
    write_outputs(pair, others, data)
  if not (head / "params.msgpack").exists():
    train_head(target, data, head)
  path = str(data / "train.target")
  drafts: list[LoadsDraft] = [
    prompt_lookup,
    functools.partial(backoff_ngrams, target_text=path),
    functools.partial(retrieval, target_text=path),
    functools.partial(prompt_lookup_or_ngrams, target_text=path),
    functools.partial(
      forest_draft, drafts=[prompt_lookup, functools.partial(retrieval, target_text=path)]
    ),
    functools.partial(speculator, path=str(head)),
    functools.partial(layer_skip, layers=(0, 1)),
  ]
  settings = [DecodeSettings(Sampling(0.0), 1, MAX_NEW_TOKENS)]
  expected = package_outputs(handler, measured)
  sweep(
    str(output),
    [
      step
      for draft in drafts
      for step in speed_steps(
        pair.with_draft(draft(pair.target)),
        measured,
        settings,
        GAMMAS,
        repeats=3,
        references=expected,
        metric="exact match",
      )
    ],
    lambda records: [speed_table(records)],
  )


if __name__ == "__main__":
  script.run(main)
