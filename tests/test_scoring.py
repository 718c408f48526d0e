"""Scoring reads each prompt once, however many completions it has, and computes what reading prompt
and completion in full would."""
import dataclasses
import functools
from types import ModuleType

import pytest
import torch
from conftest import every_script, scripts

# Which of four prompts each row continues.
GROUPS = [[0], [0, 0, 0], [2, 0, 1], [1, 1, 2, 2, 2], [3]]
every_grouping = pytest.mark.parametrize("groups", GROUPS, ids=str)
close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=0)


@dataclasses.dataclass
class Case:
    script: ModuleType
    policy: torch.nn.Module     # in float64
    prompts: torch.Tensor       # (B, 10)
    tokens: torch.Tensor        # (B, T)

    def score(self, temperature=1.0):
        return self.script.score(self.policy, self.prompts, self.tokens, temperature)

    def score_in_full(self, temperature=1.0):
        """score, by reading every prompt with every completion."""
        sequences = torch.cat([self.prompts, self.tokens], dim=1)
        logits = self.policy(sequences[:, :-1])[:, self.prompts.shape[1] - 1:]
        return self.script.logprobs(logits, self.tokens, temperature)


@pytest.fixture
def case(script, config, talker):
    """case(groups, T, **changes): a Case in which row i continues prompt groups[i] by T tokens."""
    def make(groups, T, **changes):
        policy = talker(config(**changes)).double()
        generator = torch.Generator().manual_seed(T)
        tokens = torch.randint(script.VOCAB_SIZE, (len(groups), T), generator=generator)
        prompts = torch.randint(script.VOCAB_SIZE, (4, 10), generator=generator)
        return Case(script, policy, prompts[groups], tokens)
    return make


def count_reads(embedding):
    """A list that will hold the token ids (b, L) of every call of an embedding."""
    reads = []

    def remember(module, args, output):
        reads.append(args[0])
    embedding.register_forward_hook(remember)
    return reads


# ---- values and gradients --------------------------------------------------------------------

@every_script
@pytest.mark.parametrize("T", [1, 2, 3, 8])
@every_grouping
def test_scores_are_those_of_reading_prompt_and_completion_in_full(case, groups, T):
    for num_key_value_heads in (1, 2, 4):
        one = case(groups, T, num_key_value_heads=num_key_value_heads)
        logps, entropy = one.score(0.7)
        close((logps, entropy), one.score_in_full(0.7))
        assert logps.shape == one.tokens.shape
        assert (logps < 0).all()


@every_script
@pytest.mark.parametrize("T", [1, 2, 8])
@every_grouping
def test_so_are_their_gradients(case, groups, T):
    case = case(groups, T)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(2, *case.tokens.shape, generator=generator).double()
    weights = list(case.policy.parameters())

    def gradients(scores):
        return torch.autograd.grad((factors * torch.stack(scores)).sum(), weights)
    found = gradients(case.score())
    close(found, gradients(case.score_in_full()))
    assert max(gradient.abs().max() for gradient in found) > 0.1


@every_script
def test_completions_of_one_token_can_be_learned_from(script, case):
    """An EOS at once is a completion, too: a micro-batch may hold nothing else."""
    case = case([0, 1, 2, 3] * 2, 1)
    case.tokens = torch.full((8, 1), script.EOS)
    logps, entropy = case.score()
    (logps.sum() + entropy.sum()).backward()
    assert logps.shape == (8, 1)
    assert all(weight.grad.isfinite().all() for weight in case.policy.parameters())


@every_script
def test_a_token_of_probability_0_leaves_the_entropy_finite(script):
    logits = torch.zeros(1, 2, script.VOCAB_SIZE, dtype=torch.float64)
    logits[..., 4:] = -torch.inf                            # four tokens are left
    logps, entropy = script.logprobs(logits, torch.tensor([[0, 3]]), 0.7)
    expected = torch.full((1, 2), 4.0, dtype=torch.float64).log()
    close(entropy, expected)
    close(logps, -expected)


# ---- what is read ----------------------------------------------------------------------------

@every_script
@pytest.mark.parametrize("groups, T", [([0, 0, 0, 0], 5), ([2, 0, 2, 1], 5), ([3, 3], 1)])
def test_each_prompt_is_read_once_and_the_last_tokens_of_completions_not_at_all(case, groups, T):
    case = case(groups, T)
    reads = count_reads(case.policy.embed)
    case.score()
    num_prompts = len(set(groups))
    num_read = sum(ids.numel() for ids in reads)
    assert num_read == num_prompts * 10 + len(groups) * (T - 1)
    assert {tuple(row) for row in reads[0].tolist()} == {tuple(p) for p in case.prompts.tolist()}


@scripts("ppo")
def test_the_critic_reads_a_prompt_once_and_its_values_are_those_of_reading_all(script, case):
    case = case([1, 0, 1, 1], 5)
    critic = script.Critic(case.policy)
    critic.head.data.copy_(torch.linspace(-1, 1, 16))
    hidden = critic.gpt.hidden(torch.cat([case.prompts, case.tokens], dim=1))
    expected = hidden[:, 9:-1] @ critic.head
    reads = count_reads(critic.gpt.embed)
    close(critic(case.prompts, case.tokens), expected)
    assert sum(ids.numel() for ids in reads) == 2 * 10 + 4 * 4


# ---- each row on its own ---------------------------------------------------------------------

@every_script
def test_a_row_depends_on_its_own_prompt_and_completion_alone(script, case):
    case = case([1, 0, 1, 3], 6)
    logps, entropy = case.score()
    for i in range(4):
        row = slice(i, i + 1)
        alone = script.score(case.policy, case.prompts[row], case.tokens[row])
        close(alone, (logps[row], entropy[row]))


@every_script
def test_a_row_with_another_prompt_has_other_scores_and_only_that_row(script, case):
    case = case([1, 0, 1, 3], 6)
    logps, _ = case.score()
    swapped = case.prompts[[1, 0, 2, 3]]
    other_logps, _ = script.score(case.policy, swapped, case.tokens)
    is_changed = (other_logps - logps).abs().amax(dim=1) > 1e-3
    assert is_changed.tolist() == [True, True, False, False]


@every_script
def test_the_order_of_rows_does_not_matter(script, case):
    case = case([3, 1, 1, 0, 3], 5)
    logps, _ = case.score()
    order = torch.tensor([4, 2, 0, 3, 1])
    in_that_order, _ = script.score(case.policy, case.prompts[order], case.tokens[order])
    close(in_that_order, logps[order])
