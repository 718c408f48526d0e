"""Text that an environment inserts into completions: its position, its mask, and what lookup
says."""
from types import SimpleNamespace

import pytest
import torch
from conftest import load_named

import common
import grpo
import tasks

# Tokens that the policy never samples: digits, capitals, bytes outside ASCII, tags, PAD, and ids
# without a token. Echo's usual responses consist only of such tokens.
NEVER_SAMPLED = torch.tensor([*range(48, 58), *range(65, 91), *range(128, 264), grpo.PAD,
                              *range(266, grpo.VOCAB_SIZE)])
ASK = ord("?")


class Echo(tasks.Task):
    """A task that responds to each ? with the letter of the problem and a 1 for every ? so far. So
    the second ? is followed by <information>B11</information>."""
    prompt_width = 4
    call_tokens = ("?",)
    reply = None            # replaces every response, if it is not None

    def sample(self, rng):
        return common.Problem(f"{rng.randint(0, 999)}=", chr(rng.randint(65, 90)))

    def respond(self, problem, text):
        if self.reply is not None:
            return self.reply
        return f"<information>{problem.answer}{'1' * text.count('?')}</information>"


@pytest.fixture
def played(config, talker):
    """played(greedy, reply): a rollout of Echo, four rows for each of six problems, or one greedy
    row for each, and what it was made from. The policy sometimes samples ?, and never a token of
    Echo's usual responses."""
    def make(greedy=False, reply=None):
        cfg = config(max_completion_length=24, num_prompts=6, temperature=0.8)
        policy = talker(cfg).double()
        bias = policy.embed.weight.data[:, 0]
        bias[NEVER_SAMPLED] = -40.0
        bias[ASK] = 4.0
        bias[grpo.EOS] = 3.0
        task = Echo(cfg)
        task.reply = reply
        problems = [problem for problem in common.sample_problems(task, cfg.num_prompts, 0)
                    for _ in range(1 if greedy else 4)]
        prompts = grpo.encode_prompts(problems, task, "cpu")
        generator = torch.Generator().manual_seed(0)
        shape = (len(problems), cfg.max_completion_length)
        uniforms = None if greedy else torch.rand(shape, generator=generator).double()
        out = grpo.rollout(policy, prompts, problems, cfg, uniforms,
                           task.responder(prompts, problems))
        return SimpleNamespace(cfg=cfg, task=task, policy=policy, problems=problems,
                               prompts=prompts, uniforms=uniforms, out=out)
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
        played, greedy, reply):
    """The response is cut at the end of the row, and an EOS or a ? in it has no effect. The warm
    start computes the same mask from a finished text."""
    game = played(greedy, reply)
    num_inserted = 0
    for problem, ids, mask in rows_of(game):
        expected = []                                   # the rest of the current response
        for t, token in enumerate(ids):
            assert mask[t] == (not expected)
            if expected:
                assert token == expected.pop(0)
                num_inserted += 1
            elif token == ASK:
                response = game.task.respond(problem, grpo.decode(ids[:t + 1]))
                expected = common.TOKENIZER.encode(response, allowed_special="all")
            else:
                assert token != grpo.EOS or t == len(ids) - 1
        assert len(ids) == 24 or ids[-1] == grpo.EOS and mask[-1] == 1
        [found] = game.task.masks([problem], [torch.tensor(ids)])
        assert found.tolist() == mask
    assert num_inserted > 20 or reply == "" or greedy


@greedy_or_not
def test_every_other_token_is_what_the_policy_says_to_all_that_stands_before_it(
        played, greedy):
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
    scored, H = grpo.score(game.policy, game.prompts, tokens, game.cfg.temperature)
    torch.testing.assert_close(logps * mask, scored * mask, atol=1e-10, rtol=0)
    torch.testing.assert_close(entropy * mask, H * mask, atol=1e-10, rtol=0)


# ---- the calls of lookup ----------------------------------------------------------------------

LOOKUP = load_named("lookup")
PEOPLE = ("ka", "mi", "to", "re", "su", "no")
TABLE = tuple(zip(PEOPLE, PEOPLE[1:] + PEOPLE[:1]))
PROBLEM = common.Problem("boss of boss of ka?", "to", "", 2, TABLE)
ASKED = "<search>ka</search><information>mi</information>"


@pytest.mark.parametrize("words, texts", [
    ("mi", ["<search>ka</search>", "<search> ka </search>",
            "<information>zz</information><search>ka</search>"]),
    ("su", ["\x00\u0663<search>re</search>"]),
    ("to", [ASKED + "<search>mi</search>", 3 * ASKED + "<search>mi</search>",
            3 * "</search>" + "<search>mi</search>"]),
    ("re", ["<answer>xx</answer><search>to</search>",
            "<search></search><information>empty</information><search>to</search>",
            "<search>ka<search></search><information>nested</information><search>to</search>"]),
    # malformed calls count, too
    ("no more", [4 * ASKED + "<search>mi</search>", 50 * ASKED + "<search>mi</search>",
                 4 * "</search>" + "<search>mi</search>"]),
    ("unknown", ["<search>xx</search>", "<search>KA</search>", "<search>\u043aa</search>",
                 "<search>ka\x00</search>", "<search>" + "x" * 20 + "</search>"]),
    ("empty", ["<search></search>", "<search>  \n </search>"]),
    ("too long", ["<search>" + "x" * 21 + "</search>", "<search>" + "ka" * 50_000 + "</search>",
                  "<search>ka<information>mi</information></search>"]),
    ("unopened", ["</search>", "<Search>ka</search>", ASKED + "</search>"]),
    ("unclosed", ["<search>ka", "<think><search>ka</think>", "<search>" + "ka" * 50_000,
                  9 * ASKED + "<search>ka"]),
    ("nested", ["<search>ka<search>mi</search>", "<search>" * 5_000 + "ka</search>",
                "<search>ka<information>xx</information><search>ka</search>"]),
    (None, ["", "ka", "<think></think>", "<think>" + ASKED + "</think>", 9 * ASKED, "\x00",
            "<answer>to</answer>", "<information>", "</search>ka"])])
def test_a_call_is_answered_with_the_value_of_its_key_or_what_is_wrong_with_it(words, texts):
    for text in texts:
        expected = f"<information>{words}</information>" if words else ""
        assert LOOKUP.respond(PROBLEM, text) == expected, ascii(text[:40])
