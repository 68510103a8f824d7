"""Download of data sets: checksums, folders, and what is said without a network."""

import gzip
import hashlib
import http.server
import threading

import pytest

from specdec_jax import run
from specdec_jax.commands.data_sets import CONTENTS, TFDS, RemoteFile, fetch, remote_files
from specdec_jax.data import tfds
from specdec_jax.errors import InputError

TEXT = "Zwei Männer laufen.\n".encode()
PACKED = gzip.compress(b"Two men are running.\n")


@pytest.fixture
def server():
  """Return the address of a server on this machine, and the paths that were requested."""
  served = {"/plain.txt": TEXT, "/packed.gz": PACKED}
  requested = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      requested.append(self.path)
      self.send_response(200 if self.path in served else 404)
      self.end_headers()
      self.wfile.write(served.get(self.path, b""))

    def log_message(self, *_):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", requested
    httpd.shutdown()
    thread.join()


def files_of(address, checksum=None):
  plain, packed = (hashlib.sha256(content).hexdigest() for content in (TEXT, PACKED))
  return [
    RemoteFile("tatoeba", "tatoeba/a.de.gz", f"{address}/plain.txt", checksum or plain),
    RemoteFile("tatoeba", "tatoeba/a.en.gz", f"{address}/packed.gz", packed),
    RemoteFile("multi30k", "multi30k/a.txt", f"{address}/gone.txt", packed),
  ]


def test_files_are_downloaded_once(server, tmp_path, monkeypatch, capsys):
  address, requested = server
  monkeypatch.setenv("SPECDEC_DATA", str(tmp_path / "texts"))
  fetch(["tatoeba"], files_of(address))
  folder = tmp_path / "texts" / "tatoeba"
  assert gzip.decompress((folder / "a.de.gz").read_bytes()) == TEXT
  assert (folder / "a.en.gz").read_bytes() == PACKED
  assert requested == ["/plain.txt", "/packed.gz"]
  capsys.readouterr()
  fetch(["tatoeba"], files_of(address))
  assert capsys.readouterr().out.count("is there") == 2 and len(requested) == 2
  (folder / "a.en.gz").write_bytes(b"damaged")
  fetch(["tatoeba"], files_of(address))
  assert (folder / "a.en.gz").read_bytes() == PACKED and len(requested) == 3


def test_wrong_content_and_missing_network_are_reported(server, tmp_path, monkeypatch):
  address, _ = server
  monkeypatch.chdir(tmp_path)
  with pytest.raises(InputError, match="plain.txt has changed: its checksum is .* but 0 was expec"):
    fetch(["tatoeba"], files_of(address, "0"))
  with pytest.raises(InputError, match="gone.txt cannot be downloaded: Not Found. If this machine"):
    fetch(["multi30k"], files_of(address))
  with pytest.raises(InputError, match="cannot be downloaded: .* copy its folder data."):
    fetch(["tatoeba"], files_of("http://127.0.0.1:9"))
  assert not (tmp_path / "data").exists()
  with pytest.raises(InputError, match="There is no data set wmt99; there are multi30k, "):
    fetch(["wmt99"])


def test_data_set_of_tfds_alone_needs_it(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(tfds.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(InputError, match="cnn_dailymail:3.4.0 is read by TensorFlow Datasets, which"):
    fetch(["cnn_dm"])


def test_every_data_set_has_files():
  files = remote_files()
  assert {file.data_set for file in files} | {*TFDS} == {*CONTENTS}
  assert all(file.url.startswith("https://") and len(file.sha256) == 64 for file in files)
  assert len({file.path for file in files}) == len(files) == 36


def test_command_lists_data_sets_and_takes_names(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert run.main(["specdec", "data"]) == 0
  said = capsys.readouterr().out
  assert "into the folder data" in said and all(name in said for name in CONTENTS)
  run.gin.clear_config()
  assert run.main(["specdec", "data", "wmt99", "--debug"]) == 2
  run.gin.clear_config()
  assert "There is no data set wmt99" in capsys.readouterr().err
