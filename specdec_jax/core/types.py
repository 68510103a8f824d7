"""Contracts of models, drafts and verifiers, and the named tuples that they exchange.

Axis letters, for the whole project:

  B  batch rows              K  nodes of a block: N draft tokens and the token before them
  N  draft tokens per round  D  depth of a tree; gamma for a chain
  P  prompt tokens           C  tokens committed before the first round
  T  cache or text slots     R  rounds
  E  embedding               V  vocabulary
  H  attention heads         S  source tokens
  L  layers                  W  width of a tree: maximum number of children of a node

A model, a draft or a verifier is a frozen dataclass that describes what it computes. Equal
instances have equal hashes, so they share compiled programs. Parameters and state are arguments,
never fields.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jax import Array
from jaxtyping import Float, Int, Key

from specdec_jax.core.arrays import Keys
from specdec_jax.core.context import Context, Prompt
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.settings import Settings
from specdec_jax.core.trees import AnyTree, DynamicTree, NodeLayout
from specdec_jax.errors import InputError

AnyArray = Array | np.ndarray  # on the device or on the host

# Types of arguments of `Model.extend` and `Model.commit`, and of the result of `extend`.
Tokens = Int[Array, "B K"]
First = Int[Array, ""] | int
Extended = tuple[Float[Array, "B K V"], Float[Array, "B K E"], Any]
Length = Int[Array, " B"]
Path = Int[Array, "B D"] | None

FILLER = 0  # id proposed where a table or a text has none; -1 is a token that was not proposed


class Params(NamedTuple):
  """Parameters of a target and of its draft, as arguments of compiled programs."""

  target: Any
  draft: Any = ()


@runtime_checkable
class Model(Protocol):
  """Autoregressive model that processes a block of tokens at each row's own position.

  Invariant: a cache of length n holds every committed token except the last one, which is the first
  token of the next block. `extend` writes the slots from n on and does not change the length; only
  `commit` changes it. Slots from n on are masked until they are overwritten. That is how rejected
  tokens are rolled back. Each array of a cache has the batch rows as its first axis.

  Attributes:
    vocab_size: V, the number of tokens in the vocabulary.
    eos_id: default id of the token that ends a text.
  """

  @property
  def vocab_size(self) -> int: ...
  @property
  def eos_id(self) -> int: ...

  def prompt_tokens(self, prompt: Prompt) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """Return the tokens committed before the first round, and their number in each row.

    For T5, this is the start token; for a decoder-only model, the start token (if it has one) and
    the prompt without EOS. A row of `prompt` is a result of `Vocabulary.encode`, padded. Sources
    that are not texts are `Encoded`.
    """

  def prefill(
    self, params: Any, prompt: Prompt, num_slots: int
  ) -> tuple[Float[Array, "B C E"], Any]:
    """Process the prompt.

    Args:
      num_slots: number of slots of the cache. It includes room for a block past the end of the
        text, so that no write is clamped into slots in use.

    Returns:
      Hidden states of the committed tokens (zeros for T5), and the cache, which has a `length` [B]
      and holds all committed tokens except the last.
    """

  def extend(
    self, params: Any, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    """Run the model over a block of tokens.

    Args:
      cache: keys and values of the tokens before the block.
      tokens: nodes `first` to `first + K - 1` of `tree`. The cache has the earlier nodes in the
        slots from `cache.length` on.
      tree: positions and visibility of the nodes; None for a chain.
      first: index of the first node. For a chain it may be a traced value.

    Returns:
      Logits of the token that follows each node, hidden states of the nodes, and the cache with the
      block in the slots from `cache.length + first` on.
    """

  def commit(
    self, cache: Any, length: Length, tree: AnyTree | None = None, path: Path = None
  ) -> Any:
    """Return the cache with length `length` in each row.

    If `path` is given, its nodes of the last block are first moved to the slots after the first
    node of the block. The accepted tokens of a chain are already in place.
    """


@dataclasses.dataclass(frozen=True)
class WrappedModel:
  """Base class of a model that wraps another model and changes some of its methods."""

  model: Model

  @property
  def vocab_size(self) -> int:
    return self.model.vocab_size

  @property
  def eos_id(self) -> int:
    return self.model.eos_id

  def prompt_tokens(self, prompt: Prompt) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    return self.model.prompt_tokens(prompt)

  def prefill(
    self, params: Any, prompt: Prompt, num_slots: int
  ) -> tuple[Float[Array, "B C E"], Any]:
    return self.model.prefill(params, prompt, num_slots)

  def extend(
    self, params: Any, cache: Any, tokens: Tokens, tree: NodeLayout | None = None, first: First = 0
  ) -> Extended:
    return self.model.extend(params, cache, tokens, tree, first)

  def commit(
    self, cache: Any, length: Length, tree: AnyTree | None = None, path: Path = None
  ) -> Any:
    return self.model.commit(cache, length, tree, path)


class Proposal(NamedTuple):
  """Draft tokens, and the distributions that they were sampled from.

  Attributes:
    tokens: draft tokens; -1 for a token that was not proposed.
    q: distribution that each draft token was sampled from, given its ancestors and its earlier
      siblings. Exactness depends on it. It has no effect for a token that was not proposed. None
      stands for one-hots, if all tokens were selected deterministically.
    tree: tree of this round, if the draft's tree is dynamic; None if it is static.
  """

  tokens: Int[Array, "B N"]
  q: Float[Array, "B N V"] | None = None
  tree: DynamicTree | None = None


class Verification(NamedTuple):
  """Result of verifying one proposal.

  Attributes:
    num_accepted: n, the number of accepted draft tokens, 0 to D.
    next_token: the token after the accepted ones: a bonus token after a leaf, else a correction.
    path: the n accepted nodes, then zeros. None for a chain, whose accepted nodes are 1 to n.
  """

  num_accepted: Int[Array, " B"]
  next_token: Int[Array, " B"]
  path: Int[Array, "B D"] | None = None


class Outcome(NamedTuple):
  """Everything a draft can learn from a round.

  Attributes:
    logits: logits of the target at each node, after logits processors.
    hidden: hidden states of the target at each node.
    num_emitted: number of tokens added to the text; those past EOS or the limit are dropped.
    length: number of committed tokens after the round.
  """

  proposal: Proposal
  logits: Float[Array, "B K V"]
  hidden: Float[Array, "B K E"]
  verification: Verification
  num_emitted: Int[Array, " B"]
  length: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class DraftOptions(Settings):
  """Options that the builder of a draft is given; a draft ignores those that it cannot apply.

  Attributes:
    processors: logits processors of the target. A draft that has logits applies them to its own.
      The tokens of other drafts are verified against the processed p.
    coupled: whether a draft that samples shares the noise of the target's samples
      (`core.verify.gumbel`).
    independent_siblings: whether siblings are sampled independently, with replacement (SpecInfer,
      SpecTr), instead of without replacement.
    reread: number of committed tokens, the last one included, that a draft with a cache processes
      at the start of a round. 2 suffices unless rounds commit tokens of other drafts.
    may_stop: whether the verifier takes draft tokens of -1 (not proposed).
  """

  processors: Processors = ()
  coupled: bool = False
  independent_siblings: bool = False
  reread: int = 2
  may_stop: bool = True


class Draft(Settings, abc.ABC):
  """Approximation model M_q (Section 3.6), which proposes a tree of tokens, each with its q.

  Attributes:
    tree: tree of the proposals. A dynamic tree has only a number of tokens and a depth here.
    depends_on_outcomes: whether proposals depend on outcomes of earlier rounds, not only on the
      text. If they do, the acceptance rate on a given text is undefined.
    independent_siblings: whether siblings are sampled independently, with replacement.
  """

  tree: AnyTree
  depends_on_outcomes: bool = False
  independent_siblings: bool = False

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    """Return the state of the draft before the first round; by default it is empty.

    Args:
      hidden: hidden states of the target at the committed tokens.
    """
    return ()

  @abc.abstractmethod
  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    """Propose tokens that follow the committed ones.

    Args:
      state: state of the draft. A draft with a cache rolls back rejected tokens itself; see
        `Model`.
      rng: one key per row, which no other round has.
    """

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    """Return the state of the draft after a round; by default it does not change."""
    return state


@dataclasses.dataclass(frozen=True)
class WrappedDraft(Draft):
  """Base class of a draft that wraps another draft, uses its state and changes some methods."""

  draft: Draft

  @property
  def tree(self) -> AnyTree:  # type: ignore[override]
    return self.draft.tree

  @property
  def depends_on_outcomes(self) -> bool:  # type: ignore[override]
    return self.draft.depends_on_outcomes

  @property
  def independent_siblings(self) -> bool:  # type: ignore[override]
    return self.draft.independent_siblings

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return self.draft.init(params, context, hidden)

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    return self.draft.propose(params, state, context, rng)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return self.draft.observe(params, state, outcome)


class Verifier(Settings, abc.ABC):
  """Method that accepts or rejects draft tokens.

  Attributes:
    sampling: sampling method, which turns the target's logits into p.
    exact: whether emitted tokens have the target's distribution.
    needs_independent_siblings: whether siblings must be sampled independently.
    allows_short_proposals: whether draft tokens may be -1 (not proposed).
    uses_position_keys: whether `rng` of `verify` has one key per token position, [B, D + 1], which
      does not depend on the round, instead of one key per row.
  """

  sampling: Sampling
  exact: bool = True
  needs_independent_siblings: bool = False
  allows_short_proposals: bool = False
  uses_position_keys: bool = False

  @abc.abstractmethod
  def verify(
    self,
    rng: Key[Array, " B *depths"],
    tree: AnyTree,
    proposal: Proposal,
    logits: Float[Array, "B K V"],
  ) -> Verification:
    """Verify a proposal with the target's logits at the nodes of its tree."""

  def round_target(self, target: Model) -> Model:
    """Return the model whose `extend` and `commit` a round calls; by default the target itself."""
    return target

  def with_lenience(self, lenience: float) -> "Verifier":
    """Return this verifier with a lenience (Appendix A.5); for lenience 1, return it unchanged.

    A verifier that does not support lenience raises InputError.
    """
    if lenience == 1:
      return self
    raise InputError(
      f"lenience is {lenience}, but the verifier is {type(self).__name__}; lenience below 1 goes "
      "with TokenVerifier."
    )


class Rounds(NamedTuple):
  """Data of all rounds in arrays of fixed shape; num_emitted is 0 once a row has ended.

  Attributes:
    draft_tokens: draft tokens; -1 for those that were not proposed.
    num_accepted: n, the number of accepted draft tokens.
    next_token: the token after the accepted ones.
    num_emitted: number of tokens added to the text: n + 1 without those past EOS or the limit.
    path: the n accepted nodes, then zeros; None for chains.
    parents: node that each draft token of a dynamic tree follows; None for static trees.
  """

  draft_tokens: Int[Array, "R B N"]
  num_accepted: Int[Array, "R B"]
  next_token: Int[Array, "R B"]
  num_emitted: Int[Array, "R B"]
  path: Int[Array, "R B D"] | None = None
  parents: Int[Array, "R B N"] | None = None

  def acceptance_counts(self) -> tuple[Int[AnyArray, " B"], Int[AnyArray, " B"]]:
    """Return the numbers of accepted and of rejected draft tokens of each row.

    accepted / (accepted + rejected) estimates alpha. Tokens after a rejected one, past EOS or past
    the limit count as neither. In a tree, an accepted token and its earlier siblings count as one
    accepted token, and a round that accepts fewer than D tokens adds one rejected token.
    """
    n, emitted = self.num_accepted, self.num_emitted
    depth = (self.draft_tokens >= 0).sum(axis=-1) if self.path is None else self.path.shape[-1]
    rejected = (n < depth) & (emitted == n + 1)
    return n.clip(None, emitted).sum(axis=0), rejected.sum(axis=0)


class DecodeResult(NamedTuple):
  """Result of decoding a batch.

  Attributes:
    tokens: new tokens, EOS included; 0 past the end of a row.
    lengths: number of new tokens of each row, EOS included.
    num_rounds: number of rounds until the last row ended; each has one target forward pass.
    not_finite: index of the first new token that could not be decoded, because the target's logits
      had NaN, +inf or no finite value, or q was not finite; -1 if none. The row ends before it.
    log_probs: the target's log-probabilities of each new token in nats: [..., 0] before processors,
      [..., 1] after them, and [..., 2] after the sampling method too, if it is not argmax. None if
      not recorded.
  """

  tokens: Int[Array, "B T"]
  lengths: Int[Array, " B"]
  rounds: Rounds
  num_rounds: Int[Array, ""]
  not_finite: Int[Array, " B"]
  log_probs: Float[Array, "B T 3"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
  """Loaded target: the argument of functions that load drafts.

  Attributes:
    name: name of the target in records.
    model: M_p.
    vocabulary: vocabulary of target and draft.
    path: checkpoint, for records; None if there is none.
    generation: generation settings of the checkpoint, fields of `GenerationConfig`.
    tasks: `task_specific_params` of the checkpoint: for each task, its generation settings and the
      `prefix` of its sources.
    speech: tokens of prompts, if the target is a Whisper (`models.whisper.SpeechTokens`).
  """

  name: str
  model: Model
  params: Any
  vocabulary: Any
  path: str | None = None
  generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tasks: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
  speech: Any = None


class BuildDraft(Protocol):
  """Function that returns a draft for a sampling method, a tree and options."""

  def __call__(
    self, sampling: Sampling, tree: AnyTree, options: DraftOptions = DraftOptions()
  ) -> Draft: ...


@dataclasses.dataclass(frozen=True, eq=False)
class DraftSpec:
  """Draft that is loaded but not yet built for a sampling method and a tree.

  Attributes:
    name: name of the draft in records.
    build: function of (sampling, tree, options) that returns the draft; the default of `options`
      is `DraftOptions()`.
    path: checkpoint, for records; None if there is none, or several.
    features: decoder layers of the target whose outputs the draft reads as the target's hidden
      states; by default, it reads the states after the final norm, or none.
    encoder: model whose encoder reads speech for the draft; None if it reads the target's encoding.
  """

  name: str
  build: BuildDraft
  params: Any = ()
  path: str | None = None
  features: tuple[int, ...] = ()
  encoder: Any = None


LoadsDraft = Callable[[Loaded], DraftSpec]


class AnyPair(Protocol):
  """A `pair.Pair`, as modules below it see it; its methods are described there."""

  @property
  def target(self) -> Loaded: ...

  @property
  def draft(self) -> DraftSpec: ...

  @property
  def params(self) -> Params: ...

  @property
  def vocabulary(self) -> Any: ...

  @property
  def max_source_tokens(self) -> int: ...

  @property
  def task(self) -> str | None: ...

  @property
  def dtype(self) -> str: ...

  @property
  def kernels(self) -> str: ...

  @property
  def simulated_alpha(self) -> float | None: ...

  @property
  def continues(self) -> bool: ...

  @property
  def verifier_name(self) -> str: ...

  def with_draft(self, draft: DraftSpec) -> Any: ...

  def decoder(self, *args: Any, **kwargs: Any) -> Any: ...

  def decode_fn(self, *args: Any, **kwargs: Any) -> Callable[..., DecodeResult]: ...

  def beam_searcher(self, *args: Any, **kwargs: Any) -> Any: ...

  def processors_of(self, generation: Any, eos_ids: tuple[int, ...]) -> Processors: ...

  def proposed_tree(self, sampling: Sampling, tree: AnyTree) -> AnyTree: ...

  def verifier_for(self, sampling: Sampling, lenience: float = 1.0) -> Verifier: ...

  def require_batch_size(self, batch_size: object) -> None: ...

  def prompt(self, texts: Sequence[str], width: int | None = None) -> Prompt: ...

  def encode(self, text: str) -> list[int]: ...
