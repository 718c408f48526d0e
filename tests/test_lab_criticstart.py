"""lab/criticstart.py: critics, what they are held against, and what the verdicts follow from."""
import math

import pytest
import torch
from conftest import f64

import common
import ppo
from lab import criticstart
from lab.criticstart import BASE, HEAD, PLACES, RANDOM, REWARD, SHARED, WHOLE
from lab.entry import CONTRADICTED, NOT_SHOWN, SHOWN
from tasks import preferences

TINY = ["--num_prompts", "4", "--num_generations", "4", "--hidden_size", "16",
        "--max_completion_length", "5"]


@pytest.fixture
def script():
    return ppo


@pytest.fixture
def sampled(talker):
    """A policy, a task whose verifier likes completions with a character under 64, Config, and a
    batch of the policy."""
    cfg = common.parse_flags(ppo.Config, TINY)
    task = common.load_task(cfg, lambda problem, text: float(any(ord(c) < 64 for c in text)))
    policy = talker(cfg)
    return policy, task, cfg, ppo.sample_batch(policy, task, cfg, 0)


@pytest.fixture
def model(sampled):
    """A reward model that has learned nothing, but says something."""
    model = preferences.RewardModel(sampled[0])
    torch.nn.init.normal_(model.head.weight, generator=common.generator("head"))
    torch.nn.init.constant_(model.head.bias, 0.7)
    return model


# ---- critics ---------------------------------------------------------------------------------

def test_a_critic_from_a_reward_model_says_at_first_what_that_one_rates(sampled, model):
    _, _, _, batch = sampled
    ratings = criticstart.ratings(model, batch)
    critic = criticstart.FromRewards(model)
    values = critic(batch.prompts, batch.tokens).detach()
    torch.testing.assert_close(ratings[:, :-1], values, atol=1e-4, rtol=0)
    at_end = ratings[torch.arange(len(ratings)), batch.lengths]
    whole = model.rewards(batch).flatten()
    torch.testing.assert_close(at_end, whole, atol=1e-4, rtol=0)


def test_a_head_leaves_the_policys_body_alone_and_a_shared_body_is_moved(sampled, model):
    policy, _, cfg, batch = sampled
    before = criticstart.distributions(policy, batch)
    critics = criticstart.make_critics(policy, cfg, model)
    for name, (critic, rate) in critics.items():
        at_first = critic.head.detach().clone()
        criticstart.train(critic, rate, [batch], cfg, lambda critic: None)
        after = criticstart.distributions(critic.gpt, batch)
        assert not torch.equal(critic.head, at_first), name
        assert torch.equal(before, after) == (name == HEAD), name
    assert torch.equal(before, criticstart.distributions(policy, batch))
    assert critics[SHARED][1] == cfg.learning_rate != critics[BASE][1]


def test_the_return_of_all_tokens_is_the_reward_at_the_end(sampled):
    *_, batch = sampled
    returns = criticstart.returns_of(batch)
    assert 0 < batch.rewards.mean() < 1
    torch.testing.assert_close(returns, batch.rewards.view(-1, 1) * batch.mask)


def test_the_best_head_leaves_an_error_that_no_head_explains(sampled):
    policy, _, _, batch = sampled
    head = criticstart.best_head(policy, [batch])
    is_token = batch.mask > 0
    states = ppo.completion_states(policy, batch.prompts, batch.tokens)[is_token].detach()
    rest = criticstart.returns_of(batch)[is_token] - states @ head
    torch.testing.assert_close(states.T @ rest, torch.zeros(16), atol=1e-3, rtol=0)


# ---- what they are held against --------------------------------------------------------------

def test_reference_values_end_with_the_reward_and_keep_what_is_decided(sampled):
    policy, task, cfg, batch = sampled
    reference = criticstart.reference_values(policy, task, cfg, batch)
    undecided = []
    for row, length in enumerate(batch.lengths.tolist()):
        assert reference[row, length] == batch.rewards.flatten()[row]
        assert (reference[row, length + 1:] == 0).all()
        for t in range(length):
            ids = [i for i in batch.tokens[row, :t].tolist() if i != ppo.EOS]
            if task.verify(None, ppo.decode(ids)):
                assert reference[row, t] == 1
            else:
                undecided.append(reference[row, t].item())
    assert 0 < min(undecided) < max(undecided) < 1


def test_the_error_of_the_mean_is_one_and_masked_slots_have_none():
    reference = f64([[0.2, 0.8, 0.5, 9.0], [0.6, 7.0, 7.0, 7.0]])   # the last of a row: no token
    mask = f64([[1, 1, 1], [1, 0, 0]])
    wanted = reference[:, :-1]
    mean = torch.full_like(wanted, (0.2 + 0.8 + 0.5 + 0.6) / 4)
    assert criticstart.error(mean, reference, mask) == pytest.approx(1)
    assert criticstart.error(wanted + 5 * (1 - mask), reference, mask) == 0


def test_ratings_are_compared_place_by_place():
    places = [criticstart.place(t, 6) for t in range(7)]
    assert places == [PLACES[0], *[PLACES[1]] * 3, PLACES[2], *PLACES[3:]]
    rated = torch.arange(7.0).repeat(2, 1)
    reference = torch.tensor([[1.0] * 7, [3.0] * 7])
    found = criticstart.by_place(rated, reference, torch.tensor([6, 6]))
    assert found[PLACES[1]] == {"rating": 2, "value": 2, "error": pytest.approx(10 / 6, abs=1e-5)}
    assert found[WHOLE] == {"rating": 6, "value": 2, "error": (25 + 9) / 2}


def test_the_distance_is_the_kl_from_the_first_to_the_second():
    before = f64([[0.5, 0.5], [0.9, 0.1]]).log()
    after = f64([[0.25, 0.75], [0.9, 0.1]]).log()
    exact = (0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2
    assert criticstart.distance(before, after) == pytest.approx(exact)


# ---- the verdicts ----------------------------------------------------------------------------

def made_up(first=None, last=None, best=0.5, whole=(0.5, 0.25), passed=0.3):
    """Five seeds in which all is alike, but for what is said."""
    errors = {}
    for name in (BASE, RANDOM, REWARD, HEAD, SHARED):
        late = (last or {}).get(name, 0.5)
        errors[name] = [(first or {}).get(name, 0.5)] + [late] * 10
    places = {name: {"rating": 0.5, "value": 0.5, "error": 0.25} for name in PLACES}
    places[WHOLE] = {"rating": whole[0], "value": 0.5, "error": whole[1]}
    one = {"errors": errors, "moved": {name: [0.0] * 11 for name in errors}, "places": places,
           "best head": best, "pass@1": {HEAD: 0.3, SHARED: passed}, "accuracy": 0.9, "tokens": 50,
           "problems": 12}
    return {"of seeds": [one] * 5}


ALIKE = [NOT_SHOWN] * 8
S = SHOWN
N = NOT_SHOWN
C = CONTRADICTED


@pytest.mark.parametrize("changes, expected", [
    ({}, ALIKE),
    ({"first": {REWARD: 0.4}}, [S, S, N, N, C, N, N, N]),
    ({"first": {REWARD: 0.6}}, [C, C, N, N, S, N, N, N]),
    ({"last": {REWARD: 0.4}}, [N, S, N, N, S, N, N, N]),
    ({"last": {BASE: 0.4}}, [N, C, N, N, N, S, S, N]),
    ({"last": {BASE: 0.6}}, [N, S, N, N, N, C, C, N]),
    ({"last": {RANDOM: 0.6}}, [N, N, N, N, N, S, N, N]),
    ({"best": 0.6}, [N, N, N, N, N, N, S, N]),
    ({"best": 0.4}, [N, N, N, N, N, N, C, N]),
    ({"whole": (0.6, 0.2)}, [N, N, S, S, N, N, N, N]),
    ({"whole": (0.4, 0.3)}, [N, N, C, C, N, N, N, N]),
    ({"passed": 0.2}, [N, N, N, N, N, N, N, S]),
    ({"passed": 0.4}, [N, N, N, N, N, N, N, C])])
def test_a_claim_goes_by_the_two_numbers_that_it_names(changes, expected):
    assert [claim.verdict for claim in criticstart.claims(made_up(**changes))] == expected


def test_tables_and_note_tell_what_was_found():
    found = made_up(last={RANDOM: 0.7})
    (_, rows), (_, places) = criticstart.tables(found)
    assert [row[0] for row in rows[:5]] == [BASE, RANDOM, REWARD, HEAD, SHARED]
    assert rows[1][3] == "0.700" and [row[0] for row in places] == list(PLACES)
    assert "12" in criticstart.note(found)
