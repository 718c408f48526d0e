"""The gridworld: what each character earns, moves that go astray, and exact values as the reference
of GAE and of PPO's critic."""
import functools
import itertools
import random
import time
from typing import NamedTuple

import pytest
import torch
from conftest import f64

import common
import grpo
import ppo
import reinforce
from common import Problem
from tasks import gridworld
from tasks.gridworld import LIMITS, ROWS, STARTS, values


def load(slip=0.0):
    """The task gridworld, in which a share of the moves goes astray."""
    return common.load_task(grpo.Config(task="gridworld", slip=slip), grpo.verify)


TASK = load()
verify = TASK.verify
respond = TASK.respond
best_return = TASK.best_return
GOLDEN = Problem("A b3 7", "")


def uniform(t, cell):
    """A policy that never stops."""
    return dict.fromkeys("URDL", 0.25)


def lively(t, cell):
    """A policy that stops one time in five."""
    return {"U": 0.3, "R": 0.3, "D": 0.1, "L": 0.1}


def slippery(prompt, seed, slip=0.3):
    return Problem(prompt, "", secret=(slip, seed))


def drawn_rows(start):
    """The four rows of the map of a start, as they are drawn, or in a mirror. -> list of str"""
    number = "ABCDEFGHIJKL".index(start[0])
    rows = [row.split()[number % 6] for row in ROWS]
    return [row[::-1] for row in rows] if number >= 6 else rows


def make_episode(problem, policy, rng):
    """A completion as the rollout makes it, with what the environment inserts. -> text, moves"""
    _, cell, limit = problem.prompt.split()
    text = ""
    moves = ""
    for t in range(int(limit)):
        chances = policy(t, cell)
        to_stop = max(0.0, 1 - sum(chances.values()))
        [move] = rng.choices([*chances, ""], [*chances.values(), to_stop])
        if not move:
            break
        text += move
        text += respond(problem, text)
        moves += move
        episode = gridworld.play(problem, text)
        if episode.is_over:
            break
        cell = episode.cells[-1]
    return text, moves


# ---- rewards ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_move_that_enters_the_far_prize_earns_it():
    """The worked example: right, up, right, right; 2, 3, 4, 5 are to come, or with a discount of
    0.9: 0.935, 2.15, 3.5, 5."""
    rewards = f64([verify(GOLDEN, "RURR")])
    assert rewards.tolist() == [[-1, -1, -1, 5]] and best_return(GOLDEN) == 2
    to_go = functools.partial(reinforce.rewards_to_go, rewards, torch.ones_like(rewards))
    torch.testing.assert_close(to_go(1.0), f64([[2, 3, 4, 5]]))
    torch.testing.assert_close(to_go(0.9), f64([[0.935, 2.15, 3.5, 5]]))


@pytest.mark.parametrize("prompt, text, rewards", [
    ("A b3 7", "", []),
    ("A b3 7", "RRRU", [-1, -1, -1, 5]),
    ("A b3 7", "DRRRUU", [-1, -1, -1, -1, -1, 5]),
    ("A b3 7", "DDL", [-1, -3, 4]),
    ("A b3 7", "RURRRR", [-1, -1, -1, 5, -1, -1]),                  # after the end
    ("A b3 7", "DDLU", [-1, -3, 4, -1]),
    ("A b3 7", "RURR\n", [-1, -1, -1, 5, -1]),
    ("A b3 7", "LL", [-1, -1]),                                     # the edge
    ("A b3 7", "LUR", [-1, -1, -1]),                                # a wall
    ("A b3 7", "LURURR", [-1, -1, -1, -1, -1, -1]),                 # it cost a move
    ("A b3 7", "LURRURR", [-1, -1, -1, -1, -1, -1, 5]),
    ("A b3 7", "RRRRU", [-1, -1, -1, -1, 5]),
    ("A b3 7", "DDD", [-1, -3, -3]),                                # the edge, at the x
    ("A b3 7", "DD?L", [-1, -3, -3, 4]),
    ("A b3 7", "LRRURR", [-1, -1, -1, -1, -1, 5]),
    ("A b3 7", "R U R R", [-1, -1, -1, -1, -1, -1, 5]),             # wasted; the seventh is last
    ("A b3 7", "R U R  R", [-1, -1, -1, -1, -1, -1, -1, -1]),
    ("A b3 7", "LRLRLRLR", [-1] * 8),
    ("A b3 6", "LURRURR", [-1] * 7),
    ("A b3 7", "rurr", [-1, -1, -1, -1]),
    ("A b3 7", "\uff32URR", [-1, -1, -1, -1]),                      # no ASCII R
    ("A b3 7", "RU\u0663RR", [-1, -1, -1, -1, 5]),
    ("A b3 7", "\x00", [-1]),
    ("A b3 7", "5", [-1]),
    ("A b3 7", "<answer>5</answer>", [-1] * 18),
    ("A b3 7", "Rc3U", [-1, -1, -1, -1]),                           # nothing is reported
    ("C e3 5", "D", [4]),
    ("C e3 5", "LU", [-1, 5]),
    ("D e1 9", "U", [4]),
    ("G d3 7", "LULL", [-1, -1, -1, 5]),                            # A b3 7 in a mirror
    ("G d3 7", "RUL", [-1, -1, -1]),                                # the edge, a wall
    ("L b1 8", "UR", [-3, -1]),
    ("B a2 5", "RD", [-3, 4])], ids=ascii)
def test_each_character_earns_what_the_cell_is_worth_in_which_it_ends(prompt, text, rewards):
    assert verify(Problem(prompt, ""), text) == rewards


@pytest.mark.quick
def test_a_reward_falls_on_the_token_of_its_move_and_eos_earns_nothing():
    tokens = torch.tensor([[*b"RURR", reinforce.EOS, reinforce.PAD]])
    mask = f64([[1, 1, 1, 1, 1, 0]])
    zeros = torch.zeros_like(mask)
    batch = common.Batch(
        tokens=tokens, mask=mask, logps=zeros, entropy=zeros, lengths=torch.tensor([5]),
        problems=[GOLDEN], prompts=torch.zeros(1, 6).long(), texts=["RURR"],
        verdicts=[verify(GOLDEN, "RURR")], rewards=f64([[2]]), is_correct=torch.tensor([[True]]),
        is_truncated=torch.tensor([False]), pass_rates={})
    assert common.token_rewards(batch, reinforce.decode).tolist() == [[-1, -1, -1, 5, 0, 0]]


@pytest.mark.quick
def test_where_moves_slip_nothing_is_correct_or_wrong():
    """Else an optimal walk would be wrong where a move went astray, and a bad one right by luck."""
    assert TASK.is_judged and not load(0.3).is_judged
    problem = slippery("A b3 7", 1)
    for rewards in ([-1.0, -1.0, -1.0, 5.0], [-1.0] * 7, []):
        assert load(0.3).is_correct(problem, rewards) is None
        assert TASK.is_correct(GOLDEN, rewards) == (sum(rewards) == 2)


@pytest.mark.quick
def test_an_episode_is_correct_if_it_earns_the_best_return():
    assert TASK.is_correct(GOLDEN, verify(GOLDEN, "RURR"))
    assert not TASK.is_correct(GOLDEN, verify(GOLDEN, "RURRR"))
    assert not TASK.is_correct(GOLDEN, verify(GOLDEN, "DDL"))       # 0, to the near prize
    assert not TASK.is_correct(GOLDEN, [])


@pytest.mark.quick
def test_any_text_gets_a_reward_for_each_character_and_never_more_than_the_best_return():
    rng = random.Random(0)
    pieces = [*"URDL" * 6, "<answer>", "</search>", "c3", "a", "5", "x", " ", "\n", "\x00",
              "\u0663", "\ufffd", "\U0001f600", "RURR", "u" * 40]
    tasks = [load(slip) for slip in (0.0, 0.0, 0.2, 1.0)]
    problems = [task.sample(rng) for task in tasks for _ in range(50)]
    start = time.process_time()
    for i in range(20_000):
        problem = problems[i % 200]
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        rewards = verify(problem, text)
        response = respond(problem, text)
        assert len(rewards) == len(text) and all(isinstance(reward, float) for reward in rewards)
        assert problem.secret or sum(rewards) <= best_return(problem) + 1e-9
        assert response == "" or problem.secret and len(response) == 2
    assert time.process_time() - start < 20                         # 1 ms each
    assert verify(GOLDEN, "U" * 100_000) == [-1.0] * 100_000


# ---- problems --------------------------------------------------------------------------------


def test_held_out_prompts_are_many_and_occur_neither_in_training_nor_in_the_warm_start():
    held_out = {problem.prompt for problem in common.sample_problems(TASK, 1000, 0, "test")}
    trained = {problem.prompt for problem in common.sample_problems(TASK, 3000, 0)}
    pairs = common.sample_demonstrations(TASK, 1000, 0, "textbook")
    shown = {problem.prompt for problem, _ in pairs}
    assert len(held_out) >= 100 and len(trained) >= 250 and not held_out & (trained | shown)
    assert {len(prompt) for prompt in held_out | trained} == {TASK.prompt_width}


def test_no_start_is_held_out_with_all_of_its_limits():
    """The policy reads no map: of a start that it never began at, it could only guess the way."""
    for start in STARTS:
        problems = [Problem(f"{start} {limit}", "") for limit in LIMITS]
        assert not all(map(TASK.is_held_out, problems)), start


def test_each_map_has_a_mirror_image_in_which_left_is_right():
    """With the same rewards for the mirrored walk from the mirrored start."""
    rng = random.Random(2)
    cells = str.maketrans("ABCDEFabcde", "GHIJKLedcba")
    walks = str.maketrans("LR", "RL")
    mirrored = [start.translate(cells) for start in STARTS[:len(STARTS) // 2]]
    assert sorted(mirrored) == sorted(STARTS[len(STARTS) // 2:]) and len(set(STARTS)) == 74
    for start in STARTS[:len(STARTS) // 2]:
        walk = "".join(rng.choices("URDL", k=8))
        image = Problem(f"{start.translate(cells)} 8", "")
        assert verify(image, walk.translate(walks)) == verify(Problem(f"{start} 8", ""), walk)


def neighbors(rows, r, c):
    """The cells of a drawn map next to one, walls left out."""
    for y, x in ((0, 1), (1, 0), (0, -1), (-1, 0)):
        if 0 <= r + y < 4 and 0 <= c + x < 5 and rows[r + y][c + x] != "#":
            yield r + y, c + x


def distances(start):
    """The number of moves to the nearest cell of each mark, if prizes end the walk. -> dict"""
    rows = drawn_rows(start)
    here = (4 - int(start[3]), "abcde".index(start[2]))
    found = {}
    front = {here}
    seen = {here}
    moves = 0
    while front:
        following = set()
        for r, c in front:
            mark = rows[r][c]
            found.setdefault(mark, moves)
            if mark not in "45":
                following |= set(neighbors(rows, r, c))
        front = following - seen
        seen |= front
        moves += 1
    return found


@pytest.mark.parametrize("start", STARTS)
def test_the_near_prize_is_nearer_than_the_far_one_and_both_are_within_every_limit(start):
    found = distances(start)
    assert found["4"] < found["5"] <= min(LIMITS)
    assert best_return(Problem(f"{start} {min(LIMITS)}", "")) >= 1


def test_who_always_takes_the_near_prize_earns_a_fifth_of_the_best_return():
    """What there is to find: from most starts, but not from all, the far prize is worth the way."""
    total = {"4": 0.0, "5": 0.0, "best": 0.0}
    for start in STARTS:
        for limit in LIMITS:
            problem = Problem(f"{start} {limit}", "")
            total["best"] += best_return(problem)
            for prize in ("4", "5"):
                V, _ = values(problem.prompt, prize=prize)
                total[prize] += V[0][start[2:]]
    assert total["4"] < 0.2 * total["best"]
    assert 0.9 * total["best"] < total["5"] < total["best"]


@pytest.mark.parametrize("slip", [0.0, 0.3])
@pytest.mark.parametrize("phase, share_of_near", [
    ("textbook", 0.5), ("forum", 0.8), ("cold_start", 0.5)])
def test_demonstrations_walk_to_a_prize_in_the_forum_mostly_to_the_near_one(
        phase, share_of_near, slip):
    task = load(slip)
    pairs = common.sample_demonstrations(task, 1000, 1, phase)
    lasts = [verify(problem, text)[-1] for problem, text in pairs]
    assert slip or set(lasts) == {4, 5}
    near, far = lasts.count(4), lasts.count(5)
    assert abs(near / (near + far) - share_of_near) < 0.06
    longest = max(len(reinforce.TOKENIZER.encode(text)) for _, text in pairs)
    assert longest < task.defaults["max_completion_length"]         # there is a slot for EOS


@pytest.mark.quick
def test_the_path_is_drawn_on_the_map():
    assert gridworld.draw(GOLDEN, "RURR").split() == ["#.**@", "o**..", "#oo..", "4xoo#"]
    mirrored = Problem("G d3 7", "")
    assert gridworld.draw(mirrored, "LULL").split() == ["@**.#", "..**o", "..oo#", "#oox4"]
    assert gridworld.draw(GOLDEN, "").split() == ["#...5", "o@...", "#oo..", "4xoo#"]


# ---- exact values ----------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS[::3])
def test_the_best_return_is_the_best_of_all_texts(start):
    problem = Problem(f"{start} 5", "")
    returns = [0.0]
    for moves in itertools.product("URDL", repeat=5):
        rewards = verify(problem, "".join(moves))
        returns.append(max(itertools.accumulate(rewards)))          # it may stop at any time
    assert best_return(problem) == max(returns)


def tree_value(rows, r, c, left):
    """The best expected return from a cell of a drawn map, by a tree of all moves, of which 0.3 go
    astray."""
    if rows[r][c] in "45" or left == 0:
        return 0.0
    after = []
    for y, x in ((-1, 0), (0, 1), (1, 0), (0, -1)):                 # up, right, down, left
        end = (r + y, c + x)
        if end not in neighbors(rows, r, c):
            end = (r, c)
        reward = {"5": 5, "4": 4, "x": -3}.get(rows[end[0]][end[1]], -1)
        after.append(reward + tree_value(rows, *end, left - 1))
    returns = [0.7 * after[i] + 0.15 * after[i - 1] + 0.15 * after[(i + 1) % 4] for i in range(4)]
    return max(0.0, *returns)


@pytest.mark.parametrize("start", STARTS[::3])
def test_the_best_expected_return_is_that_of_a_tree_of_all_moves_and_slips(start):
    expected = tree_value(drawn_rows(start), 4 - int(start[3]), "abcde".index(start[2]), 4)
    assert best_return(slippery(f"{start} 4", 0)) == pytest.approx(expected)


def test_the_mean_return_of_a_policy_is_its_exact_value():
    rng = random.Random(0)
    returns = []
    for seed in range(4000):
        problem = slippery("C c2 6", seed)
        text, _ = make_episode(problem, lively, rng)
        returns.append(sum(verify(problem, text)))
    returns = f64(returns)
    V, _ = values("C c2 6", 0.3, lively)
    error = (returns.mean() - V[0]["c2"]).abs()
    assert error < 4 * returns.std() / len(returns) ** 0.5


# ---- moves that go astray --------------------------------------------------------------------


def test_the_cell_that_the_environment_reports_is_the_one_whose_worth_the_move_earns():
    rng = random.Random(1)
    worth = {"x": -3, ".": -1, "o": -1}
    for seed in range(300):
        problem = slippery(f"{rng.choice(STARTS)} 9", seed, rng.choice([0.1, 0.5, 1.0]))
        text, moves = make_episode(problem, uniform, rng)
        world = gridworld.MAPS[problem.prompt[0]]
        rewards = verify(problem, text)
        reported = [text[i + 1:i + 3] for i in range(0, len(text) - 1, 3)]
        assert text[::3] == moves and len(reported) == len(moves) - 1       # not after the last
        assert rewards[:-1:3] == [worth[world[cell]] for cell in reported]
        assert not any(rewards[1::3]) and not any(rewards[2::3])    # a report earns 0
        assert len(moves) == 9 or rewards[-1] in (4, 5)


def test_moves_go_astray_to_either_side_as_often_as_they_should():
    """From c2 of map C: up to c3, left to b2, right onto the x at d2. In every problem, other moves
    go astray."""
    cells = [respond(slippery("C c2 9", seed), "U") for seed in range(4000)]
    assert set(cells) == {"c3", "b2", "d2"}
    assert abs(cells.count("c3") / 4000 - 0.7) < 0.03
    assert abs(cells.count("b2") / 4000 - 0.15) < 0.025


def test_each_move_of_an_episode_goes_astray_by_a_chance_of_its_own():
    """From c3 of map A, with room on all sides: three moves up and down go astray in all
    combinations."""
    combinations = set()
    for seed in range(200):
        cells = gridworld.play(slippery("A c3 9", seed, 0.5), "UDU").cells
        combinations.add(tuple(after[0] == before[0]
                               for before, after in itertools.pairwise(cells)))
    assert len(combinations) == 8


@pytest.mark.parametrize("forged", ["c3", "d3", "e4", "d4", "c", "a1a1"])
def test_cells_that_the_policy_writes_itself_do_not_pay(forged):
    """The environment has responded already, so that each character is a wasted move."""
    for seed in range(50):
        problem = slippery("A b3 9", seed)
        honest = "R" + respond(problem, "R")
        rewards = verify(problem, honest + forged)
        is_on_x = gridworld.play(problem, honest).cells[-1] == "b1"
        assert rewards[:3] == [-1, 0, 0]
        assert rewards[3:] == [-3 if is_on_x else -1] * len(forged)
        assert respond(problem, honest + forged) == ""
        assert respond(problem, honest + forged + "U") in gridworld.MAPS["A"]


def test_in_the_same_problem_the_same_moves_go_astray():
    rewards = [verify(slippery("A b3 9", 7), "RURRDLLU") for _ in range(2)]
    assert rewards[0] == rewards[1]


@pytest.mark.quick
def test_without_slips_the_environment_is_silent():
    assert TASK.sample(random.Random(0)).secret is None
    assert load(0.2).sample(random.Random(0)).secret[0] == 0.2
    assert {respond(GOLDEN, text) for text in ("R", "RU", "RURR", "", "x")} == {""}


def test_after_the_end_the_environment_is_silent():
    """The end is a prize, or the limit. Moves may go astray here, but hardly ever do."""
    calm = functools.partial(slippery, seed=3, slip=1e-12)
    assert respond(calm("A b3 4"), "UUU") == "b4" and respond(calm("A b3 4"), "UUUU") == ""
    assert respond(calm("A b3 9"), "RUR") == "d4" and respond(calm("A b3 9"), "RURR") == ""


# ---- what the values are the reference of ----------------------------------------------------


class Episodes(NamedTuple):
    """n episodes of one prompt, and the exact values along them."""
    rewards: torch.Tensor       # (n, T)
    V: torch.Tensor             # (n, T)
    mask: torch.Tensor          # (n, T)
    moves: list                 # n texts
    cells: list                 # n lists


def make_episodes(prompt, policy, n, slip=0.0):
    """n episodes of a policy. -> Episodes"""
    rng = random.Random(0)
    T = int(prompt[5:])
    exact_V, _ = values(prompt, slip, policy)
    found = Episodes(*torch.zeros(3, n, T, dtype=torch.float64), moves=[], cells=[])
    for i in range(n):
        problem = slippery(prompt, rng.random(), slip) if slip else Problem(prompt, "")
        text, moves = make_episode(problem, policy, rng)
        cells = gridworld.play(problem, text).cells
        earned = [reward for character, reward in zip(text, verify(problem, text))
                  if character in "URDL"]
        for t, reward in enumerate(earned):
            found.rewards[i, t] = reward
            found.V[i, t] = exact_V[t][cells[t]]
            found.mask[i, t] = 1
        found.moves.append(moves)
        found.cells.append(cells)
    return found


def test_with_exact_values_the_td_error_is_q_minus_v():
    """GAE with lambda = 0, in a world without chance: exactly the advantage, for each move."""
    episodes = make_episodes("A b3 6", uniform, 50)
    _, Q = values("A b3 6", 0.0, uniform)
    A, _ = ppo.gae(episodes.rewards, episodes.V, episodes.mask, 1.0, 0.0)
    for i, moves in enumerate(episodes.moves):
        exact_Q = [Q[t][episodes.cells[i][t]][move] for t, move in enumerate(moves)]
        n = len(moves)
        torch.testing.assert_close(A[i, :n], f64(exact_Q) - episodes.V[i, :n])


def test_with_exact_values_td_errors_are_zero_on_average_and_advantages_given_the_move():
    episodes = make_episodes("C c2 5", uniform, 3000, 0.3)
    A, _ = ppo.gae(episodes.rewards, episodes.V, episodes.mask, 1.0, 0.0)
    for t in range(5):
        delta = A[:, t][episodes.mask[:, t] > 0]
        assert delta.mean().abs() < 4 * delta.std() / len(delta) ** 0.5
    V, Q = values("C c2 5", 0.3, uniform)
    for move in "URDL":
        delta = A[[moves[0] == move for moves in episodes.moves], 0]
        error = (delta.mean() - Q[0]["c2"][move] + V[0]["c2"]).abs()
        assert error < 4 * delta.std() / len(delta) ** 0.5


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    episodes = make_episodes("C c2 5", uniform, 200, 0.3)
    A, returns = ppo.gae(episodes.rewards, episodes.V, episodes.mask, 1.0, 1.0)
    to_go = reinforce.rewards_to_go(episodes.rewards, episodes.mask, 1.0)
    torch.testing.assert_close(A, (to_go - episodes.V) * episodes.mask)
    torch.testing.assert_close(returns, to_go)


def test_a_critic_that_learns_as_in_ppo_comes_near_the_exact_values():
    """Of the policy whose returns it learns from, on two maps at once. It reads moves; nobody tells
    it the cell. Measured: 7% of the variance of the values is left in the errors."""
    cfg = ppo.Config(task="gridworld", device="cpu", num_threads=1, hidden_size=32,
                     num_attention_heads=4, num_key_value_heads=2, intermediate_size=32)
    n = 1000
    prompts = ["A b3 5"] * n + ["C c2 5"] * n
    parts = [make_episodes(prompts[0], uniform, n), make_episodes(prompts[-1], uniform, n)]
    rewards = torch.cat([part.rewards for part in parts]).float()                   # (2 n, T)
    V = torch.cat([part.V for part in parts]).float()                               # (2 n, T)
    mask = torch.cat([part.mask for part in parts]).float()                         # (2 n, T)
    moves = parts[0].moves + parts[1].moves
    completions = torch.tensor([[*f"{text:5}".encode()] for text in moves])         # (2 n, T)
    ids = ppo.encode_prompts(prompts, TASK, "cpu")                                  # (2 n, W)
    critic = ppo.Critic(ppo.GPT(cfg))
    optimizer = torch.optim.Adam(critic.parameters(), lr=4e-3)
    order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(0))
    for rows in order[200:].repeat(6).split(100):
        with torch.no_grad():
            old = critic(ids[rows], completions[rows]) * mask[rows]
        _, returns = ppo.gae(rewards[rows], old, mask[rows], 1.0, 1.0)
        for _ in range(2):
            optimizer.zero_grad()
            predicted = critic(ids[rows], completions[rows])
            token_loss = ppo.value_loss(predicted, old, returns, mask[rows], 0.5)
            ppo.aggregate(token_loss, mask[rows], "token_mean").backward()
            optimizer.step()
    rows = order[:200]                                              # it has seen no return of these
    is_token = mask[rows] > 0
    with torch.no_grad():
        error = (critic(ids[rows], completions[rows]) - V[rows])[is_token]
    assert error.square().mean() < 0.15 * V[rows][is_token].var()


def test_there_is_an_environment_only_where_moves_may_slip(capsys):
    assert TASK.call_tokens == () and set(load(slip=0.1).call_tokens) == set("URDL")
    cfg = grpo.Config(task="gridworld", mask_tool_tokens=False)
    with pytest.raises(SystemExit):
        common.load_task(cfg, grpo.verify)
    assert "gridworld has no tools" in capsys.readouterr().err
    slippery_cfg = grpo.Config(task="gridworld", mask_tool_tokens=False, slip=0.1)
    assert common.load_task(slippery_cfg, grpo.verify).call_tokens
