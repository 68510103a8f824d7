"""Test which draft tokens are realigned, and that they raise the acceptance length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair

from experiments.summaries.replay import ReplayModel, ReplayParams
from specdec_jax.contrib.realigned import RealignedDraft, realigned_draft
from specdec_jax.core.arrays import gather
from specdec_jax.core.decode import Decoder, unpacked_rounds
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import branching, chain
from specdec_jax.core.types import DraftOptions, Params
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.errors import InputError
from specdec_jax.load import checkpoint_draft
from specdec_jax.models.t5 import T5Model

pytestmark = pytest.mark.slow

GREEDY = Sampling(0.0)
CONFIG = tiny.config(vocab_size=24, layers=1)
V, LIMIT = CONFIG.vocab_size, 16
TEXT = [*range(2, 2 + LIMIT)]  # the output of the target: 2, 3, 4, ...
WRONG = 20  # a token that is not in the output


def decode(draft, draft_params):
  """Decode TEXT in each row of the parameters of the draft."""
  batch = len(draft_params)
  prompt = jnp.full((batch, 2), 1)
  params = ReplayParams(tiny.params(CONFIG, 0), prompt, jnp.tile(jnp.array(TEXT), (batch, 1)))
  target, keys = ReplayModel(T5Model(CONFIG), V), jax.random.split(jax.random.key(0), batch)
  out = tiny.speculative_decode(
    *(target, draft, params, draft_params, prompt, keys),
    max_new_tokens=LIMIT,
    verifier=TokenVerifier(GREEDY),
  )
  assert np.asarray(out.tokens).tolist() == [TEXT] * batch
  return out


# The proposal of the first round, and the tokens that are realigned after it.
ALIGNED = {
  "a wrong token is replaced": ([2, WRONG, 4, 5], [4, 5, 0]),
  "the first token is wrong": ([WRONG, 3, 4, 5], [3, 4, 5]),
  "the last token is wrong": ([2, 3, 4, WRONG], [0, 0, 0]),
  "there is an extra token": ([2, WRONG, 3, 4], [4, 0, 0]),
  "there are two extra tokens": ([WRONG, WRONG, 2, 3], [3, 0, 0]),
  "the correction occurs twice": ([WRONG, 2, 5, 2], [5, 2, 0]),
  "the correction is the last token": ([2, WRONG, 5, 3], [0, 0, 0]),
  "the correction occurs among accepted tokens": ([2, 3, WRONG, 2], [2, 0, 0]),
  "all tokens are accepted": ([2, 3, 4, 5], [0, 0, 0]),
}


def test_rest_of_the_proposal_is_aligned_with_the_correction():
  script = np.zeros((len(ALIGNED), LIMIT), np.int32)
  script[:, 1:5] = [proposal for proposal, _ in ALIGNED.values()]
  draft = RealignedDraft(tiny.ScriptedDraft(chain(4)), 3, V)
  draft_tokens = np.asarray(decode(draft, jnp.asarray(script)).rounds.draft_tokens)
  assert not draft_tokens[0, :, 1::2].any()  # the first round has nothing to realign
  realigned = dict(zip(ALIGNED, draft_tokens[1, :, 1::2].tolist()))
  assert realigned == {name: expected for name, (_, expected) in ALIGNED.items()}


def second_token_is_wrong(params, proposal):
  return proposal._replace(tokens=proposal.tokens.at[:, 1].set(WRONG))


def test_realigned_tokens_are_accepted_where_the_draft_is_wrong_again():
  """The draft proposes five tokens, of which the second is always wrong.

  Alone it emits two tokens per round. The three tokens after the wrong one are right in the next
  round. One of the three is left if that round emits four tokens, and the draft proposes it too.
  """
  draft = tiny.ChangedDraft(tiny.ScriptedDraft(chain(5)), second_token_is_wrong)
  params = jnp.array([[0, *TEXT]])
  alone, realigned = (decode(each, params) for each in (draft, RealignedDraft(draft, 4, V)))
  assert np.asarray(alone.rounds.num_emitted)[:, 0].tolist() == [2] * 8 + [0] * 8
  assert np.asarray(realigned.rounds.num_emitted)[:, 0].tolist() == [2, 4, 2, 4, 2, 2] + [0] * 10


def test_draft_model_rereads_the_tokens_that_it_did_not_propose():
  """In rounds that accept realigned tokens, the model proposes as after rereading the whole text.

  To accept realigned tokens in each round, they are replaced by the next tokens of the target.
  """
  config = tiny.config(layers=1)
  target, params, draft_params = T5Model(config), tiny.params(config, 0), tiny.params(config, 1)
  prompt, keys = tiny.sources(config, 0, 6), jax.random.split(jax.random.key(0), 6)
  text = tiny.autoregressive_decode(
    target, params, prompt, keys, max_new_tokens=LIMIT, sampling=GREEDY, eos_id=-1
  ).tokens
  draft = ModelDraft(target, GREEDY, chain(4), DraftOptions(reread=5))
  draft = RealignedDraft(draft, 3, config.vocab_size)
  decoder = Decoder(target, draft, TokenVerifier(GREEDY), eos_id=-1)
  step = jax.jit(functools.partial(decoder.round, Params(params, draft_params)))
  state = tiny.start(target, draft, params, draft_params, prompt, LIMIT)
  of_prompt = state.draft_state.draft
  whole = ModelDraft(target, GREEDY, chain(4), DraftOptions(reread=state.tokens.shape[1]))
  propose = jax.jit(lambda context: whole.propose(draft_params, of_prompt, context, keys)[0].tokens)
  for r in range(3):
    following = gather(text, state.length[:, None] - 1 + jnp.arange(3))
    expected = propose(state.context)
    state = step(state._replace(draft_state=state.draft_state._replace(realigned=following)))
    rounds = unpacked_rounds(draft.tree, state.rounds)
    np.testing.assert_array_equal(rounds.draft_tokens[r][:, [0, 2, 4, 6]], expected)
    assert (rounds.num_accepted[r] >= 3).all()


def test_realigned_draft_of_a_pair():
  target = tiny_pair.pair().target
  near = functools.partial(checkpoint_draft, model=str(tiny_pair.folder() / "near"))
  factory = realigned_draft(target, near)
  assert factory.name == "near, realigned"
  assert factory.build(GREEDY, chain(3)).tree.parents == (0, 0, 1, 2, 3)
  assert factory.build(GREEDY, chain(1)).tree == chain(1)
  assert realigned_draft(target, near, 1).build(GREEDY, chain(3)).num_realigned == 1
  with pytest.raises(InputError, match="num_realigned is 0"):
    realigned_draft(target, near, 0)
  with pytest.raises(InputError, match="proposes chains"):
    realigned_draft(target, prompt_lookup).build(GREEDY, branching(2, 1))
  with pytest.raises(InputError, match="cannot be one of several"):
    realigned_draft(target, lambda target: factory).build(GREEDY, chain(1))
