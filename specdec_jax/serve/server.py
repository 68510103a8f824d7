"""HTTP server of a pair, with the completions API of OpenAI, or its audio API for a Whisper."""

import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.errors import InputError, require_count, require_number, require_text
from specdec_jax.pair import Pair
from specdec_jax.serve.engine import Limits

_LOG = logging.getLogger("specdec_jax")


def serve(
  load_pair: Callable[[], Pair],
  host: str = "127.0.0.1",
  port: int = 8000,
  gamma: int = 5,
  tree: Sequence[int] | None = None,
  prefix: str = "",
  generation: GenerationConfig | None = None,
  limits: Limits = Limits(),
  model_name: str | None = None,
  shutdown_seconds: float = 30.0,
  keep_alive_seconds: float = 5.0,
) -> None:
  """Serve a pair over HTTP until SIGINT or SIGTERM arrives.

  Requests and the shutdown are logged to the logger 'specdec_jax', and printed to stderr unless
  logging is already configured.

  Args:
    load_pair: function that returns the pair. It is called if the port is free.
    host: name or address to listen at; '::' for all addresses, of IPv4 too. There is no
      authentication: any client that reaches it is served.
    port: port to listen at; 0 for a free one, which is printed.
    gamma: number of draft tokens per round; 0 for autoregressive decoding.
    tree: parents of the nodes of a tree of draft tokens; None for a chain.
    prefix: text before each prompt, except in requests with a task, which has its own prefix.
    generation: defaults of requests, which take precedence over those of the checkpoint.
    limits: limits of requests, of the queue and of the texts that are decoded together.
    model_name: name of the model in requests; None for the last two parts of the target's path.
    shutdown_seconds: time after a signal for requests that have begun.
    keep_alive_seconds: time after which a connection without a request is closed.

  Raises:
    InputError: an argument is invalid, or the extra `serve` is not installed.
    OSError: the address cannot be used.
  """
  require_text("prefix", prefix)
  require_count("port", port, 0)
  require_number("port", port, 0, 65535)
  require_number("shutdown_seconds", shutdown_seconds, 0, float("inf"))
  require_number("keep_alive_seconds", keep_alive_seconds, 0, float("inf"))
  try:
    from specdec_jax.serve.app import Server
    from specdec_jax.serve.service import Service
  except ModuleNotFoundError as error:
    raise InputError(
      f"specdec serve needs {error.name}, which is not installed; run pip install "
      "'specdec_jax[serve]' (in a checkout, '.[serve]')."
    ) from error
  _listen(host, port).close()  # raises an error before models are loaded
  pair = load_pair()
  given = vars(generation or GenerationConfig())
  merged = vars(GenerationConfig.merged(pair.target.generation, given))
  defaults = {name: value for name, value in merged.items() if value is not None}
  served = pair.with_target(generation=defaults)
  logging.basicConfig(format="%(asctime)s %(message)s")
  _LOG.setLevel(logging.INFO)
  service = Service(served, gamma, tree, limits, model_name, prefix)
  _LOG.info("Compiling the programs of requests with default settings.")
  service.warm_up()
  with _listen(host, port) as listener:
    server = Server(service, listener, keep_alive_seconds)
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listener.getsockname()[1]}/v1"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it raises KeyboardInterrupt
    print(f"Serving {service.name!r} at {address}. Ctrl-C stops.", file=sys.stderr, flush=True)
    try:
      while server.is_running:
        time.sleep(0.2)
    except KeyboardInterrupt:
      _LOG.info(
        "Shutting down; requests that have begun are completed within %g s.", shutdown_seconds
      )
      server.close(shutdown_seconds)
      _LOG.info("The server has ended.")
    else:
      raise RuntimeError("A thread of the server has ended.")


def _listen(host: str, port: int) -> socket.socket:
  """Return a socket that listens; of a name with several addresses, at the first one of IPv4."""
  found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
  family, _, _, _, address = min(found)
  both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
  return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)
