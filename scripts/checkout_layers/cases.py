"""Cases that `compare_checkouts.py` runs in one checkout, which is the current folder.

  python cases.py LAYER FOLDER write           # write the files that both checkouts read
  python cases.py LAYER FOLDER SIDE GROUP ...  # write the values of all cases to FOLDER/SIDE.json

LAYER is the module with the names of this checkout. The value of a case has named parts: numbers,
texts, and hashes of the exact bits of arrays.
"""
# mypy: ignore-errors

import contextlib
import functools
import gzip
import hashlib
import importlib.util
import io
import json
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import unicodedata
import urllib.request

import jax
import numpy as np

import specdec_jax

MOST_MAPS = 25_000  # of memory; Linux allows a process 65,530, and each compiled program has many
STEPS = dict(max_steps=3, warmup_steps=1, tokens_per_batch=128)
SIZES = dict(emb_dim=32, num_heads=2, head_dim=16, mlp_dim=64, vocab_size=72)
SIZES |= dict(num_encoder_layers=1, num_decoder_layers=1)


def tables(layer, files, work):
  pages = ["README.md", *sorted(pathlib.Path().glob("docs/**/*.md"))]
  for page in [*pages, *sorted(pathlib.Path().glob("experiments/**/*.md"))]:
    for words in re.findall(r"<!-- table: ([^\n]*?) -->", pathlib.Path(page).read_text("utf-8")):
      name, *paths = words.split()
      case = " ".join([name, *("/".join(pathlib.Path(path).parts[-2:]) for path in paths)])
      yield case, functools.partial(cells, layer, name, paths)


def cells(layer, name, paths):
  columns, rows = layer.table(name, paths)
  parts = [
    {f"row {i}, {column}": x for column, x in zip(columns, row)} for i, row in enumerate(rows)
  ]
  return functools.reduce(dict.__or__, parts, {"columns": " | ".join(columns)})


def tokenizers(layer, files, work):
  codes = {
    path: code(path.read_bytes())[:8] for path in tracked("*vocabulary.model", "*vocabulary.txt")
  }
  paths = {f"bundled {path.name} {content}": path for path, content in codes.items()}
  paths |= {f"tiny{path.suffix}": path for path in sorted((files / "pair").rglob("vocabulary.*"))}
  paths |= {path.name: path for path in sorted((files / "tokenizers").iterdir())}
  texts = json.loads((files / "texts.json").read_text())
  for name, path in paths.items():
    yield name, functools.partial(encoded, layer, path, texts)


def encoded(layer, path, texts):
  words = layer.open_tokenizer(str(path), path.suffix != ".txt" and path.name != "gpt2")
  parts = {
    "size": len(words),
    "eos": words.eos_id,
    "pad": words.pad_id,
    "pieces": words.all_pieces(),
  }
  for i, ids in enumerate(map(words.encode, texts)):
    parts |= {f"text {i}": ids, f"text {i}, decoded": words.decode(ids)}
  return parts


def checkpoints(layer, files, work):
  paths = {f"bundled {path.parent.name}": path.parent for path in tracked("*params.msgpack")}
  paths |= {path.name: path for path in sorted((files / "checkpoints").iterdir())}
  for name, path in paths.items():
    inside = [*path.iterdir()]  # a checkpoint of a training step is alone in its folder
    yield (
      name,
      functools.partial(layer.read_checkpoint, str(inside[0] if len(inside) == 1 else path)),
    )


def quickstart(layer, files, work):
  texts = (files / "sentences.txt").read_text().splitlines()[:6]
  settings = {"greedy": dict(gamma=3), "sampled": dict(gamma=3, temperature=1.0, seed=5)}
  settings["top-k, batch"] = dict(gamma=3, temperature=0.7, top_k=20, top_p=0.9, batch_size=3)
  settings["tree"] = dict(temperature=1.0, tree=[0, 0, 1, 1, 2], batch_size=2)
  for weights in ("float", "stored"):
    for name, chosen in settings.items():
      given = dict(texts=texts, logprobs=True, **chosen)
      yield f"{name}, weights {weights}", functools.partial(generated, weights, **given)
  beams = functools.partial(
    generated, "float", texts=texts[:3], num_beams=2, num_return_sequences=2
  )
  yield "beam search", beams
  yield "stream", lambda: {"text": [*specdec_jax.load_pair().stream(texts[0], gamma=3)]}


def generated(weights, texts, **settings):
  outputs = specdec_jax.load_pair(weights=weights).generate(texts, **settings)
  names = ("text", "tokens", "finish_reason", "rounds", "logprobs", "model_logprobs", "score")
  return {str(i): {name: getattr(x, name) for name in names} for i, x in enumerate(outputs)}


def contract(layer, files, work):
  for case, decode in layer.decodings():
    yield case, functools.partial(decoded, decode)


def decoded(decode):
  result = jax.device_get(decode())
  ran = int(result.num_rounds)  # the other rounds are unused
  return result._asdict() | {"rounds": jax.tree.map(lambda x: x[:ran], result.rounds)}


def commands(layer, files, work):
  captions, pair, out = files / "captions.txt", files / "pair", "--output=OUT/out.jsonl"
  words, data = f"--pair_vocabulary={pair}/vocabulary.model", f"--data={files}/data"
  own = [f"--target={pair}/target", f"--draft={pair}/near", f"--vocabulary={pair}/vocabulary.model"]
  short, sampled = [f"--input={captions}", "--max_new_tokens=24"], ["--temperature=1.0", "--seed=3"]
  measure = ["--gammas=(3,)", "--repeats=1", "--temperatures=(1.0,)", "--output_dir=OUT"]
  learn = [data, "--work_dir=OUT", words]
  learn += [f"--gin.trainer.TrainSettings.{name}={value}" for name, value in STEPS.items()]
  sizes = [f"--gin.config.T5Config.{name}={value}" for name, value in SIZES.items()]
  draft = [f"--pair_target={pair}/target", "--gin.train.train_draft.new_sources=2"]
  head = [f"--pair_target={pair}/target", "--gin.train.train_speculator.new_sources=2"]
  head += [f"--gin.heads.speculator_config.{name}" for name in ("emb_dim=16", "num_layers=1")]
  fit = [data, "--gin.train.fit_vocabulary.size=80"]
  fit += ["--gin.train.fit_vocabulary.sources=['train.en.gz']"]
  check = ["--samplings=[@argmax/sampling.Sampling(), @top_k/sampling.Sampling()]"]
  check += ["--gammas=(3,)", "--max_new_tokens=16", "--trees=((0, 0, 1),)", "--batch_sizes=(4,)"]
  for setting in ("num_tokens=400", "num_guesses=200", "long_tokens=24"):
    check.append(f"--gin.check_exactness.check_exactness.{setting}")
  runs = {
    "translate, greedy": [*short, "--gamma=3", out],
    "translate, sampled": [*short, *sampled, "--top_k=50", out],
    "translate, beams": [*short, "--beams=2", "--gamma=2", out],
    "translate, tree": [*short, *sampled, "--tree=[0, 0, 1]", out],
    "translate, batch": [*short, "--batch_size=4", out],
    "translate, tiny": [*short, *sampled, *own, out],
    "generate": ["--num_texts=3", "--max_new_tokens=24", out],
    "check": [f"--input={captions}", *own, *check],
    "speedup": [*short, "--num_texts=2", *measure],
    "quickstart": ["--sentences=['Two dogs run.', 'A man sleeps.']", *measure],
    "train_vocabulary": [*fit, "--pair_vocabulary=OUT/words.model"],
    "train_gpt_vocabulary": [*fit, "--pair_vocabulary=OUT/words.txt"],
    "train_target": [*learn, *sizes, "--pair_target=OUT/model"],
    "train_draft": [*learn, *sizes, *draft, "--pair_draft=OUT/model"],
    "train_speculator": [
      *learn,
      *head,
      "--kind=conditioned",
      "--distillation_data=None",
      "--output=OUT/model",
    ],
  }
  if importlib.util.find_spec("apache_beam"):
    runs["decode"] = [*short, "--output_dir=OUT", "--num_shards=2", "--num_texts=4"]
  for name, flags in runs.items():
    folder = work / name.replace(", ", "_")
    flags = [name.split(",")[0], *(flag.replace("OUT", str(folder)) for flag in flags)]
    yield name, functools.partial(written, layer, folder, flags)
  if importlib.util.find_spec("starlette"):
    yield "serve", functools.partial(served, {"prompt": "A man runs.", "max_tokens": 16, "seed": 1})


def written(layer, folder, arguments):
  """Run a command, and return what it wrote into its folder, or else what it printed."""
  import gin
  from flax import serialization

  from specdec_jax.run import main

  for old, new in layer.RENAMED.items():
    arguments = [argument.replace(old, new) for argument in arguments]
  gin.clear_config()
  folder.mkdir()
  with contextlib.redirect_stdout(io.StringIO()) as said:
    status = main(["specdec", *arguments])
  if status:
    raise RuntimeError(f"specdec {' '.join(arguments)} ended with status {status}")
  parts = {}
  for path in sorted(path for path in folder.rglob("*") if "checkpoints" not in path.parts):
    if path.suffix == ".jsonl":
      for i, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        parts[f"{path.name}, line {i}"] = layer.untimed(json.loads(line))
    elif path.suffix == ".msgpack":
      parts[path.name] = serialization.msgpack_restore(path.read_bytes())
    elif path.suffix == ".npz":
      parts[path.name] = dict(np.load(path))
    elif path.suffix in (".model", ".txt"):
      parts[path.name] = np.frombuffer(path.read_bytes(), np.uint8)
  return parts or {f"line {i}": line for i, line in enumerate(said.getvalue().splitlines())}


def served(request):
  """Return the answers of a server at temperature 0 and 1."""
  command = [sys.executable, "-m", "specdec_jax.run", "serve", "--port=0"]
  server, parts = subprocess.Popen(command, stderr=subprocess.PIPE, text=True), {}
  try:
    said = next(line for line in server.stderr if "http://" in line)
    model, url = re.search(r"'(.*)' at (http://\S+)\. ", said).groups()
    for temperature in (0, 1):
      body = json.dumps(dict(model=model, temperature=temperature, **request)).encode()
      header = {"Content-Type": "application/json"}
      asked = urllib.request.Request(f"{url}/completions", body, header)
      with urllib.request.urlopen(asked, timeout=600) as answer:
        parts[str(temperature)] = without(json.load(answer), ("id", "created"))
    return parts
  finally:
    server.send_signal(signal.SIGINT)
    server.wait(60)


def tracked(*patterns):
  """Return the files of the checkout whose paths match a pattern."""
  listed = subprocess.run(
    ["git", "ls-files", *patterns], capture_output=True, text=True, check=True
  )
  return [pathlib.Path(path) for path in sorted(listed.stdout.split())]


def code(content):
  return hashlib.sha256(content).hexdigest()[:16]


def without(fields, names):
  return {name: value for name, value in fields.items() if name not in names}


def flat(value, name=""):
  """Yield (name, value) of each part of nested mappings. Arrays and long values are hashed."""
  value = value._asdict() if hasattr(value, "_asdict") else value
  if isinstance(value, dict):
    for key, part in value.items():
      key = re.sub("draft.tokens", "guesses", str(key))  # as they were called before
      yield from flat(part, f"{name}/{key}" if name else key)
  elif hasattr(value, "dtype"):
    array = np.asarray(value)
    yield name, f"{array.dtype}{[*array.shape]} {code(array.tobytes())}"
  else:
    text = json.dumps(value, ensure_ascii=False)
    yield name, text if len(text) < 80 else f"{text[:60]}... {code(text.encode())}"


def write_texts(files):
  """Write 1,000 texts for tokenizers, texts to translate, and texts to train on."""
  tasks = pathlib.Path("gin/tasks")
  known = [line for path in sorted(tasks.glob("*.txt")) for line in path.read_text().splitlines()]
  signs = [
    "  ",
    "\t",
    "\u00a0",
    "\u200b",
    "e\u0301",
    "ß",
    "日本語",
    "Привет",
    "🎉",
    "\u2581",
    "İ",
    "'m",
  ]
  signs += ["</s>", "<pad>", "<unk>", "<extra_id_0>", ">>fra<< ", "12345.67", "“q”", "\ufb01", "…"]
  changes = [str, str.upper, str.title, " {} ".format, lambda text: text.replace(" ", "   ")]
  changes.append(functools.partial(unicodedata.normalize, "NFD"))
  rng = random.Random(0)
  texts = ["", " ", *signs, *rng.sample(known, 500)]
  while len(texts) < 1000:
    text = rng.choice(changes)(rng.choice(known)[:300])
    for _ in range(rng.randrange(1, 4)):
      at = rng.randrange(len(text) + 1)
      text = text[:at] + rng.choice(signs) + text[at:]
    texts.append(text)
  (files / "texts.json").write_text(json.dumps(texts))
  shutil.copy(tasks / "sentences.txt", files)
  (files / "data").mkdir()
  for language in ("de", "en"):
    lines = (tasks / f"captions.{language}.txt").read_text().splitlines(keepends=True)
    for name, some in {"train": lines[:60], "val": lines[60:70]}.items():
      with gzip.open(files / "data" / f"{name}.{language}.gz", "wt", encoding="utf-8") as file:
        file.writelines(some)
  (files / "captions.txt").write_text("".join(lines[:8]))


GROUPS = (tables, tokenizers, checkpoints, quickstart, commands, contract)


def main(layer_name, folder, side, *groups):
  files, work, values = pathlib.Path(folder) / "files", pathlib.Path(folder) / side, {}
  if not pathlib.Path(specdec_jax.__file__).is_relative_to(pathlib.Path.cwd()):
    sys.exit(f"The package is that of {specdec_jax.__file__}, not of {pathlib.Path.cwd()}.")
  layer = importlib.import_module(layer_name)
  if side == "write":
    files.mkdir()
    write_texts(files)
    return layer.write_files(files)
  shutil.rmtree(work, ignore_errors=True)
  work.mkdir()
  for group in [group for group in GROUPS if group.__name__ in groups]:
    since, found = time.monotonic(), {}
    cases = dict(group(layer, files, work))
    # The second side begins with the last case, so that each side compiles half of the programs.
    for case in [*cases][:: -1 if side == "after" else 1]:
      print(f"{time.monotonic() - since:.0f} s: {group.__name__}, {case}", flush=True)
      try:
        found[case] = dict(flat(cases[case]()))
      except (Exception, SystemExit) as error:
        traceback.print_exc()
        found[case] = {"error": repr(error)}
      if pathlib.Path("/proc/self/maps").read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
    values[group.__name__] = {case: found[case] for case in cases}
    work.with_suffix(".json").write_text(json.dumps(values, ensure_ascii=False))
    print(f"{group.__name__}: {len(cases)} cases in {time.monotonic() - since:.0f} s", flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
