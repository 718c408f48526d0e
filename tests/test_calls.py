"""Text that an environment inserts into completions: its position and its mask."""
import dataclasses
import functools

import pytest
import torch

import common
import grpo
import tasks
from tasks import calls

# Tokens that the policy never samples: digits, capitals, bytes outside ASCII, tags, PAD, and ids
# without a token. Echo's usual responses consist only of such tokens.
NEVER_SAMPLED = torch.tensor([*range(48, 58), *range(65, 91), *range(128, 264), grpo.PAD,
                              *range(266, grpo.VOCAB_SIZE)])
ASK = ord("?")


class Echo(tasks.Task):
    """A task that responds to each ? with the letter of the problem and a 1 for every ? so far. So
    the second ? is followed by <information>B11</information>. Every ? gets a reward of 1."""
    prompt_width = 4
    call_tokens = ("?",)

    def __init__(self, cfg):
        super().__init__(cfg)
        self.rollout = functools.partial(calls.rollout, self)       # as tasks.load does

    def sample(self, rng):
        return common.Problem(f"{rng.randint(0, 999)}=", chr(rng.randint(65, 90)))

    reply = None            # replaces every response, if it is not None

    def respond(self, problem, text):
        if self.reply is not None:
            return self.reply
        return f"<information>{problem.answer}{'1' * text.count('?')}</information>"

    def verify(self, problem, text):
        return [float(character == "?") for character in text]

    def is_correct(self, problem, verdict):
        return sum(verdict) >= 2


@pytest.fixture
def asker(script, config, talker):
    """asker(**changes) -> cfg, and a policy that sometimes samples ? and never samples a token of
    Echo's usual responses."""
    def make(**changes):
        flags = {"max_completion_length": 24, "num_prompts": 6, "temperature": 0.8}
        cfg = config(**(flags | changes))
        policy = talker(cfg).double()
        bias = policy.embed.weight.data[:, 0]
        bias[NEVER_SAMPLED] = -40.0
        bias[ASK] = 4.0
        bias[script.EOS] = 3.0
        return cfg, policy
    return make


@dataclasses.dataclass
class Played:
    """A rollout of Echo: four rows for each of six problems, or one greedy row for each."""
    cfg: common.Config
    task: tasks.Task
    policy: torch.nn.Module
    problems: list                      # B
    prompts: torch.Tensor               # (B, W)
    uniforms: torch.Tensor | None       # (B, T)
    out: tuple                          # tokens, mask, logps, entropy, lengths


@pytest.fixture
def played(script, asker):
    """played(greedy, reply): a Played"""
    def make(greedy=False, reply=None):
        cfg, policy = asker()
        task = Echo(cfg)
        task.reply = reply
        copies = 1 if greedy else 4
        problems = common.sample_problems(task, cfg.num_prompts, 0)
        problems = [problem for problem in problems for _ in range(copies)]
        prompts = script.encode_prompts(problems, task, "cpu")
        generator = torch.Generator().manual_seed(0)
        shape = (len(problems), cfg.max_completion_length)
        uniforms = None if greedy else torch.rand(shape, generator=generator).double()
        out = calls.rollout(task, policy, prompts, problems, cfg, uniforms)
        return Played(cfg, task, policy, problems, prompts, uniforms, out)
    return make


greedy_or_not = pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])


def rows_of(game):
    """Yield (problem, tokens, mask) of each row, up to its end, and check the padding after it."""
    tokens, mask, _, _, lengths = game.out
    for problem, ids, sampled, n in zip(
            game.problems, tokens.tolist(), mask.tolist(), lengths.tolist()):
        assert ids[n:] == [grpo.PAD] * (24 - n) and sampled[n:] == [0.0] * (24 - n)
        yield problem, ids[:n], sampled[:n]


# ---- the position of a response --------------------------------------------------------------

@greedy_or_not
@pytest.mark.parametrize("reply", [None, "AB" * 20, "A?B", "A<|eos|>B", ""])
def test_the_response_to_a_call_stands_behind_it_in_its_own_row_and_is_not_in_the_mask(
        script, played, greedy, reply):
    """The response is cut at the end of the row, and an EOS or a ? in it has no effect. The warm
    start computes the same mask from a finished text."""
    game = played(greedy, reply)
    game.task.machinery = script
    num_inserted = 0
    for problem, ids, mask in rows_of(game):
        expected = []                                   # the rest of the current response
        for t, token in enumerate(ids):
            assert mask[t] == (not expected)
            if expected:
                assert token == expected.pop(0)
                num_inserted += 1
            elif token == ASK:
                response = game.task.respond(problem, script.decode(ids[:t + 1]))
                expected = common.TOKENIZER.encode(response, allowed_special="all")
            else:
                assert token != script.EOS or t == len(ids) - 1
        assert len(ids) == 24 or ids[-1] == script.EOS and mask[-1] == 1
        [found] = calls.sampled_masks(game.task, [problem], [torch.tensor(ids)])
        assert found.tolist() == mask
    assert num_inserted > 20 or reply == "" or greedy


@greedy_or_not
def test_every_other_token_is_what_the_policy_says_to_all_that_stands_before_it(
        script, played, greedy):
    """Its log-prob and entropy are equal to those that score() computes."""
    game = played(greedy)
    tokens, mask, logps, entropy, _ = game.out
    sequences = torch.cat([game.prompts, tokens], dim=1)
    logits = game.policy(sequences[:, :-1])[:, game.prompts.shape[1] - 1:]          # (B, T, V)
    expected = logits.argmax(dim=-1)
    if not greedy:
        cdf = (logits / 0.8).softmax(dim=-1).cumsum(dim=-1)
        expected = (cdf <= game.uniforms[..., None] * cdf[..., -1:]).sum(dim=-1)
    assert torch.equal(expected[mask == 1], tokens[mask == 1]) and mask.sum() > 20
    scored, H = script.score(game.policy, game.prompts, tokens, game.cfg.temperature)
    torch.testing.assert_close(logps * mask, scored * mask, atol=1e-10, rtol=0)
    torch.testing.assert_close(entropy * mask, H * mask, atol=1e-10, rtol=0)
