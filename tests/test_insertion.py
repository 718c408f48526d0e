"""What an environment inserts into a completion: where it stands, and that no mask has it."""
from types import SimpleNamespace

import pytest
import torch
from conftest import every_script
from echo_task import ASK, Echo, is_inserted

import common
import grpo
import kernels
from tasks.mix import Mix

greedy_or_not = pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])


def check_row(problem, task, ids):
    """Check that the response to each call stands behind it. -> the mask that the row has to have
    """
    expected = []               # what is still to come of a response
    mask = []
    for t, token in enumerate(ids):
        if expected:
            assert token == expected.pop(0), (t, ids)
            mask.append(0.0)
            continue
        mask.append(1.0)
        if grpo.decode([token]) in task.call_tokens:
            response = task.respond(problem, grpo.decode(ids[:t + 1]))
            expected = grpo.TOKENIZER.encode(response, allowed_special="all")
    return mask


# ---- rows ------------------------------------------------------------------------------------

@every_script
@greedy_or_not
def test_the_response_to_a_call_stands_behind_it_in_its_own_row_and_is_not_in_the_mask(
        script, played, greedy):
    game = played(greedy)
    out = game.out
    for row, problem in enumerate(game.problems):
        ids = out.tokens[row].tolist()
        mask = out.mask[row].tolist()
        n = out.lengths[row].item()
        assert mask[:n] == check_row(problem, game.task, ids[:n])
        assert mask[n:] == [0.0] * (24 - n)
        assert ids[n:] == [script.PAD] * (24 - n)
        assert n == 24 or ids[n - 1] == script.EOS
        assert script.EOS not in ids[:n - 1]
    is_padding = torch.arange(24) >= out.lengths[:, None]
    assert torch.equal(is_inserted(out.tokens) | is_padding, out.mask == 0)


def test_the_rows_of_these_tests_are_as_different_as_rows_can_be(played):
    """Else the tests would show little."""
    game = played()
    num_responses = [text.count("<information>") for text in game.texts()]
    assert max(num_responses) >= 3
    assert min(num_responses) == 0
    inserted = is_inserted(game.out.tokens)
    lengths = game.out.lengths.tolist()
    ends = [n - 1 for n in lengths if n < 24]
    assert any(inserted[:, t].any() for t in ends)      # one row ends, another is in a response
    is_full = game.out.lengths == 24
    assert inserted[is_full, 23].any()                  # a response is cut at the end of its row
    median = sorted(lengths)[12]                        # now the others have moved up in the cache
    assert inserted[:, median:].any()


@every_script
@greedy_or_not
def test_every_other_token_is_what_the_policy_says_to_all_that_stands_before_it(played, greedy):
    game = played(greedy)
    out = game.out
    sequences = torch.cat([game.prompts, out.tokens], dim=1)
    logits = game.policy(sequences[:, :-1])[:, game.prompts.shape[1] - 1:]          # (B, T, V)
    if greedy:
        expected = logits.argmax(dim=-1)
    else:
        cdf = (logits / 0.8).softmax(dim=-1).cumsum(dim=-1)
        expected = (cdf <= game.uniforms[..., None] * cdf[..., -1:]).sum(dim=-1)
    is_sampled = out.mask == 1
    assert torch.equal(expected[is_sampled], out.tokens[is_sampled])
    assert is_sampled.sum() > 20


@every_script
@greedy_or_not
def test_the_log_probs_of_sampled_tokens_are_those_that_scoring_finds(script, played, greedy):
    game = played(greedy)
    out = game.out
    logps, entropy = script.score(game.policy, game.prompts, out.tokens, game.cfg.temperature)
    torch.testing.assert_close(out.logps * out.mask, logps * out.mask, atol=1e-10, rtol=0)
    torch.testing.assert_close(out.entropy * out.mask, entropy * out.mask, atol=1e-10, rtol=0)
    assert (out.logps[out.mask == 1] < 0).all()
    assert is_inserted(out.tokens).any()


def test_no_row_depends_on_another_nor_on_what_is_inserted_there(played):
    game = played()
    for i in range(24):
        row = slice(i, i + 1)
        alone = grpo.rollout(game.policy, game.prompts[row], game.problems[row], game.task,
                             game.cfg, game.uniforms[row])
        expected = {name: values[row] for name, values in vars(game.out).items()}
        torch.testing.assert_close(vars(alone), expected, atol=1e-10, rtol=0)


# ---- responses -------------------------------------------------------------------------------

class LongResponses(Echo):
    def respond(self, problem, text):
        return "AB" * 20


def test_a_response_longer_than_what_is_left_is_cut_and_does_not_end_the_row(played):
    out = played(task_class=LongResponses).out
    num_asked = 0
    for ids, mask, n in zip(out.tokens.tolist(), out.mask.tolist(), out.lengths.tolist()):
        if ASK in ids:
            num_asked += 1
            t = ids.index(ASK)
            assert n == 24
            assert grpo.decode(ids[t + 1:]) == ("AB" * 20)[:23 - t]
            assert mask == [1.0] * (t + 1) + [0.0] * (23 - t)
    assert 5 < num_asked < 24


class Questions(Echo):
    def respond(self, problem, text):
        return "A?B"


def test_a_call_token_in_a_response_is_no_call(played):
    texts = [text for text in played(task_class=Questions).texts() if "?" in text[:-4]]
    assert len(texts) > 5
    for text in texts:
        assert "?A?B" in text
        assert "?A?BA" not in text
        if len(text) < 20:
            assert "A" not in text.replace("?A?B", "")


class Ends(Echo):
    def respond(self, problem, text):
        return "A<|eos|>B"


def test_an_eos_in_a_response_is_no_end(played):
    out = played(task_class=Ends).out
    num_whole = 0
    for ids in out.tokens.tolist():
        if ASK in ids[:-4]:
            t = ids.index(ASK)
            assert ids[t + 1:t + 4] == [ord("A"), grpo.EOS, ord("B")]
            num_whole += ids[t + 4] != grpo.PAD
    assert num_whole > 5


def test_two_calls_in_a_row_are_answered_one_after_the_other(played):
    game = played()
    game.policy.embed.weight.data[ASK, 0] = 60.0        # it does nothing but ask
    out = grpo.rollout(game.policy, game.prompts, game.problems, game.task, game.cfg, game.uniforms)
    for problem, text in zip(game.problems, grpo.completion_texts(out)):
        responses = [f"?<information>{problem.answer}{n}</information>" for n in range(1, 6)]
        assert text == "".join(responses)[:-14]
    assert out.mask.tolist() == [[1.0, 0, 0, 0, 0] * 4 + [1.0, 0, 0, 0]] * 24


class Silent(Echo):
    def respond(self, problem, text):
        return ""


@every_script
@pytest.mark.parametrize("task_class", [Echo, LongResponses, Questions, Ends, Silent])
def test_the_mask_of_a_text_that_is_given_is_that_of_the_same_tokens_where_they_are_sampled(
        script, played, task_class):
    """As the warm start needs it for its examples."""
    game = played(task_class=task_class)
    out = game.out
    for row, problem in enumerate(game.problems):
        n = out.lengths[row].item()
        found = script.sampled_mask(game.task, problem, out.tokens[row, :n].tolist())
        assert found == out.mask[row, :n].tolist()


def test_nothing_is_inserted_where_the_environment_has_nothing_to_say(played):
    game = played(task_class=Silent)
    out = game.out
    assert "?" in "".join(game.texts())
    assert not is_inserted(out.tokens).any()
    assert torch.equal(out.lengths, out.mask.sum(dim=1).long())
    game.task.call_tokens = ()
    without = grpo.rollout(
        game.policy, game.prompts, game.problems, game.task, game.cfg, game.uniforms)
    torch.testing.assert_close(vars(out), vars(without), atol=0, rtol=0)


def test_an_environment_is_asked_once_for_each_call_with_all_that_stands_before(played):
    asked = []

    class Remembering(Echo):
        def respond(self, problem, text):
            asked.append((problem, text))
            return super().respond(problem, text)
    game = played(task_class=Remembering)
    expected = []
    for problem, text in zip(game.problems, game.texts()):
        for t, character in enumerate(text):
            if character == "?":
                expected.append((problem, text[:t + 1]))
    assert sorted(asked, key=str) == sorted(expected, key=str)
    assert len(asked) > 10


def test_in_a_mix_only_problems_of_a_task_with_an_environment_are_answered(played):
    game = played()
    mix = Mix(game.cfg, [common.Arithmetic(game.cfg, grpo.verify), game.task])
    problems = []
    for row, problem in enumerate(game.problems):
        name = "echo" if row // 4 % 2 == 1 else "arithmetic"
        problems.append(problem._replace(task=name))
    out = grpo.rollout(game.policy, game.prompts, problems, mix, game.cfg, game.uniforms)
    has_response = is_inserted(out.tokens).any(dim=1).view(6, 4).any(dim=1)         # (P,)
    assert has_response.tolist() == [False, True] * 3
    assert "?" in "".join(grpo.completion_texts(out)[:4])


def test_on_cuda_a_batch_with_an_environment_is_not_sampled_by_a_graph(played):
    game = played()
    on_cuda = SimpleNamespace(is_cuda=True)             # all that `captures` asks of prompts
    assert not kernels.captures(on_cuda, game.task, game.cfg)
    assert kernels.captures(on_cuda, common.Arithmetic(game.cfg, grpo.verify), game.cfg)


# ---- batches ---------------------------------------------------------------------------------

def test_verdicts_prompts_and_responses_of_a_row_are_those_of_its_problem(asker):
    cfg, policy = asker()
    task = Echo(cfg)
    batch = grpo.sample_batch(policy, task, cfg, 0)
    assert batch.texts == grpo.completion_texts(batch)
    for row, text in enumerate(batch.texts):
        problem = batch.problems[row]
        assert problem == batch.problems[row - row % 4]
        assert batch.verdicts[row] == [float(character == "?") for character in text]
        responses = text.count(f"<information>{problem.answer}")
        assert responses >= text.count("</information>")
        prompt = grpo.encode_prompts([problem.prompt], task, "cpu")[0]
        assert torch.equal(batch.prompts[row], prompt)
    num_calls = torch.tensor([text.count("?") for text in batch.texts]).view(6, 4)
    assert torch.equal(batch.is_correct, num_calls >= 2)
    assert torch.equal(batch.rewards, num_calls.float())
    assert batch.pass_rates == {"echo-0": (num_calls >= 2).double().mean(dim=1).tolist()}
    is_ended = (batch.tokens == grpo.EOS).any(dim=1)
    assert torch.equal(batch.is_truncated, ~is_ended)
    assert 0 < batch.is_truncated.sum() < 24
