"""The grid world: what each character earns, moves that slip, and exact values as the reference of GAE and of
PPO's critic."""
import functools
import itertools
import random
import time

import pytest
import torch
from conftest import f64

import common
import ppo
import reinforce
from common import Problem, sample_problems
from tasks import gridworld
from tasks.gridworld import LIMITS, ROWS, STARTS, best, respond, sample, values, verify

GOLDEN = Problem("gridworld", "A b3 7", "")
UNIFORM = lambda t, cell: dict.fromkeys("URDL", 0.25)               # never stops
LIVELY = lambda t, cell: {"U": 0.3, "R": 0.3, "D": 0.1, "L": 0.1}   # stops one time in five


def slippery(prompt, seed, slip=0.3):
    return Problem("gridworld", prompt, "", hidden=(slip, seed))


def episode(problem, policy, rng):
    """A completion as the rollout makes it, with what the environment says. -> text, moves"""
    name, cell, limit = problem.prompt.split()
    text, moves = "", ""
    for t in range(int(limit)):
        chances = policy(t, cell)
        move = rng.choices([*chances, ""], [*chances.values(), max(0.0, 1 - sum(chances.values()))])[0]
        if not move:
            break
        text, moves = text + move + respond(problem, text + move), moves + move
        cells, over = gridworld.play(problem, text)[1:3]
        if over:
            break
        cell = cells[-1]
    return text, moves


# ---- rewards --------------------------------------------------------------------------------------------


def test_the_move_that_enters_the_far_prize_earns_it():
    """The worked example: right, up, right, right; 2, 3, 4, 5 to go, or with gamma .9: .935, 2.15, 3.5, 5."""
    rewards = f64([verify(GOLDEN, "RURR")])
    assert rewards.tolist() == [[-1, -1, -1, 5]] and best(GOLDEN) == 2
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
    ("A b3 7", "LURURR", [-1, -1, -1, -1, -1, -1]),                 # it cost a move, but moved nobody
    ("A b3 7", "LURRURR", [-1, -1, -1, -1, -1, -1, 5]),
    ("A b3 7", "RRRRU", [-1, -1, -1, -1, 5]),
    ("A b3 7", "DDD", [-1, -3, -3]),                                # the edge, seen from the x
    ("A b3 7", "DD?L", [-1, -3, -3, 4]),
    ("A b3 7", "LRRURR", [-1, -1, -1, -1, -1, 5]),
    ("A b3 7", "R U R R", [-1, -1, -1, -1, -1, -1, 5]),             # wasted moves; the seventh is the last
    ("A b3 7", "R U R  R", [-1, -1, -1, -1, -1, -1, -1, -1]),
    ("A b3 7", "LRLRLRLR", [-1] * 8),
    ("A b3 6", "LURRURR", [-1] * 7),
    ("A b3 7", "rurr", [-1, -1, -1, -1]),
    ("A b3 7", "\uff32URR", [-1, -1, -1, -1]),                      # no ASCII R
    ("A b3 7", "RU\u0663RR", [-1, -1, -1, -1, 5]),
    ("A b3 7", "\x00", [-1]),
    ("A b3 7", "5", [-1]),
    ("A b3 7", "<answer>5</answer>", [-1] * 18),
    ("A b3 7", "Rc3U", [-1, -1, -1, -1]),                           # nothing slips: nobody says where one is
    ("C e3 5", "D", [4]),
    ("C e3 5", "LU", [-1, 5]),
    ("D e1 9", "U", [4]),
    ("B a2 5", "RD", [-3, 4])], ids=ascii)
def test_each_character_earns_what_the_cell_is_worth_in_which_it_ends(prompt, text, rewards):
    assert verify(Problem("gridworld", prompt, ""), text) == rewards


def test_a_reward_falls_on_the_token_of_its_move_and_eos_earns_nothing():
    tokens = torch.tensor([[*b"RURR", reinforce.EOS, reinforce.PAD]])
    mask = f64([[1, 1, 1, 1, 1, 0]])
    out = reinforce.Rollout(tokens, mask, 0 * mask, 0 * mask, torch.tensor([5]))
    found = reinforce.token_rewards(out, [verify(GOLDEN, "RURR")], f64([[2]]))
    assert found.tolist() == [[-1, -1, -1, 5, 0, 0]]


def test_any_text_gets_a_reward_for_each_character_and_never_more_than_the_best_return():
    rng, began = random.Random(0), time.perf_counter()
    pieces = [*"URDL" * 6, "<answer>", "</search>", "c3", "a", "5", "x", " ", "\n", "\x00", "\u0663",
              "\ufffd", "\U0001f600", "RURR", "u" * 40]
    problems = [sample(rng, slip) for slip in (0.0, 0.0, 0.2, 1.0) for _ in range(50)]
    for i in range(100_000):
        problem, text = problems[i % 200], "".join(rng.choices(pieces, k=rng.randrange(12)))
        rewards, said = verify(problem, text), respond(problem, text)
        assert len(rewards) == len(text) and all(isinstance(reward, float) for reward in rewards)
        assert problem.hidden or sum(rewards) <= best(problem) + 1e-9
        assert said == "" or problem.hidden and len(said) == 2
    assert time.perf_counter() - began < 100                        # 1 ms each
    assert verify(GOLDEN, "U" * 100_000) == [-1.0] * 100_000


# ---- problems -------------------------------------------------------------------------------------------


def test_held_out_prompts_are_many_and_occur_neither_in_training_nor_in_the_warm_start():
    held_out = {problem.prompt for problem in sample_problems("gridworld", 1000, 0, "test")}
    seen = {problem.prompt for problem in sample_problems("gridworld", 3000, 0)}
    shown = {problem.prompt for problem, _ in common.sample_corpus("gridworld", 1000, 0, "textbook")}
    assert len(held_out) >= 15 and len(seen) >= 150 and not held_out & (seen | shown)
    assert {len(prompt) for prompt in held_out | seen} == {gridworld.width()}


def walks(start, marks):
    """Moves to the nearest cell of each mark, if prizes end the walk. -> [number]"""
    name, cell = start.split()
    rows = [row.split()["ABCDEF".index(name)] for row in ROWS]
    found, front, moves = {}, {(4 - int(cell[1]), "abcde".index(cell[0]))}, 0
    seen = set(front)
    while front:
        for r, c in front:
            found.setdefault(rows[r][c], moves)
        front = {(r + y, c + x) for r, c in front for y, x in ((0, 1), (1, 0), (0, -1), (-1, 0))
                 if rows[r][c] not in "45" and 0 <= r + y < 4 and 0 <= c + x < 5} - seen
        front = {(r, c) for r, c in front if rows[r][c] != "#"}
        seen, moves = seen | front, moves + 1
    return [found[mark] for mark in marks]


@pytest.mark.parametrize("start", STARTS)
def test_the_near_prize_is_nearer_than_the_far_one_and_both_are_within_every_limit(start):
    near, far = walks(start, "45")
    assert near < far <= min(LIMITS)
    assert best(Problem("gridworld", f"{start} {min(LIMITS)}", "")) >= 1


def test_who_always_takes_the_near_prize_earns_a_fifth_of_the_best_return():
    """What there is to find: the far one is worth most starts' while, not all."""
    problems = [Problem("gridworld", f"{start} {limit}", "") for start in STARTS for limit in LIMITS]
    prizes = {"4": [], "5": []}
    for prize, found in prizes.items():
        for problem in problems:
            found.append(values(problem.prompt, prize=prize)[0][0][problem.prompt[2:4]])
    most = [best(problem) for problem in problems]
    assert sum(prizes["4"]) < 0.2 * sum(most) and 0.9 * sum(most) < sum(prizes["5"]) < sum(most)


@pytest.mark.parametrize("slip", [0.0, 0.3])
@pytest.mark.parametrize("phase, near", [("textbook", 0.5), ("forum", 0.8)])
def test_demonstrations_walk_to_a_prize_in_the_forum_mostly_to_the_near_one(phase, near, slip):
    pairs = common.sample_corpus("gridworld", 1000, 1, phase, slip=slip)
    lasts = [verify(problem, text)[-1] for problem, text in pairs]
    assert slip or set(lasts) == {4, 5}
    assert abs(lasts.count(4) / (lasts.count(4) + lasts.count(5)) - near) < 0.06
    assert max(len(reinforce.TOKENIZER.encode(text)) for _, text in pairs) \
        < gridworld.FLAGS["max_completion_length"]                  # there is a slot for EOS


def test_the_path_is_drawn_on_the_map():
    assert gridworld.draw(GOLDEN, "RURR").split() == ["#.**@", "o**..", "#oo..", "4xoo#"]
    assert gridworld.draw(GOLDEN, "").split() == ["#...5", "o@...", "#oo..", "4xoo#"]


# ---- exact values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS[::3])
def test_the_best_return_is_the_best_of_all_texts(start):
    problem = Problem("gridworld", f"{start} 5", "")
    returns = (max(itertools.accumulate(verify(problem, text), initial=0.0))        # to stop is allowed
               for text in map("".join, itertools.product("URDL", repeat=5)))
    assert best(problem) == max(returns)


@pytest.mark.parametrize("start", STARTS[::3])
def test_the_best_expected_return_is_that_of_a_tree_of_all_moves_and_slips(start):
    """Worked out anew, from the drawn maps, in rows and columns."""
    rows = [row.split()["ABCDEF".index(start[0])] for row in ROWS]
    way = ((-1, 0), (0, 1), (1, 0), (0, -1))                        # up, right, down, left

    def value(r, c, left):
        if rows[r][c] in "45" or not left:
            return 0.0
        after = []
        for y, x in way:
            y, x = r + y, c + x
            y, x = (y, x) if 0 <= y < 4 and 0 <= x < 5 and rows[y][x] != "#" else (r, c)
            after.append({"5": 5, "4": 4, "x": -3}.get(rows[y][x], -1) + value(y, x, left - 1))
        return max(0.0, *(0.7 * after[i] + 0.15 * after[i - 1] + 0.15 * after[(i + 1) % 4] for i in range(4)))

    r, c = 4 - int(start[3]), "abcde".index(start[2])
    assert best(slippery(f"{start} 4", 0)) == pytest.approx(value(r, c, 4))


def test_the_mean_return_of_a_policy_is_its_exact_value():
    rng, returns = random.Random(0), []
    for seed in range(4000):
        problem = slippery("C c2 6", seed)
        returns.append(sum(verify(problem, episode(problem, LIVELY, rng)[0])))
    returns = f64(returns)
    error = (returns.mean() - values("C c2 6", 0.3, LIVELY)[0][0]["c2"]).abs()
    assert error < 4 * returns.std() / len(returns) ** 0.5


# ---- moves that slip ------------------------------------------------------------------------------------


def test_where_the_environment_says_one_is_verify_finds_one_too():
    """A move earns what the cell is worth that was named after it; the name itself earns 0."""
    rng, worth = random.Random(1), {"x": -3, ".": -1, "o": -1}
    for seed in range(300):
        problem = slippery(f"{rng.choice(STARTS)} 9", seed, rng.choice([0.1, 0.5, 1.0]))
        text, moves = episode(problem, UNIFORM, rng)
        world, rewards = gridworld.MAPS[problem.prompt[0]], verify(problem, text)
        named = [text[i + 1:i + 3] for i in range(0, len(text) - 1, 3)]         # not after the last move
        assert text[::3] == moves and len(named) == len(moves) - 1
        assert rewards[:-1:3] == [worth[world[cell]] for cell in named]
        assert not any(rewards[1::3]) and not any(rewards[2::3])
        assert len(moves) == 9 or rewards[-1] in (4, 5)


def test_moves_slip_to_either_side_as_often_as_they_should():
    """From c2 of map C: up to c3, left to b2, right onto the x at d2. Every problem slips in its own way."""
    cells = [respond(slippery("C c2 9", seed), "U") for seed in range(4000)]
    assert set(cells) == {"c3", "b2", "d2"}
    assert abs(cells.count("c3") / 4000 - 0.7) < 0.03 and abs(cells.count("b2") / 4000 - 0.15) < 0.025


def test_each_move_of_an_episode_slips_by_a_chance_of_its_own():
    """From c3 of map A, with room on all sides: three moves up and down slip in all combinations."""
    slips = {tuple(after[0] == before[0] for before, after in itertools.pairwise(cells))
             for cells in (gridworld.play(slippery("A c3 9", seed, 0.5), "UDU")[1] for seed in range(200))}
    assert len(slips) == 8


@pytest.mark.parametrize("forged", ["c3", "d3", "e4", "d4", "c", "a1a1"])
def test_cells_that_the_policy_names_itself_do_not_pay(forged):
    """The environment has spoken already, so that each character is a wasted move, in all ways the same."""
    for seed in range(50):
        problem = slippery("A b3 9", seed)
        honest = "R" + respond(problem, "R")
        rewards = verify(problem, honest + forged)
        on_the_x = gridworld.play(problem, honest)[1][-1] == "b1"
        assert rewards[:3] == [-1, 0, 0] and rewards[3:] == [-3 if on_the_x else -1] * len(forged)
        assert respond(problem, honest + forged) == ""
        assert respond(problem, honest + forged + "U") in gridworld.MAPS["A"]


def test_the_same_problem_slips_the_same_way_however_often_it_is_asked():
    problem, again = (slippery("A b3 9", 7) for _ in range(2))
    assert verify(problem, "RURRDLLU") == verify(again, "RURRDLLU")


def test_without_slips_the_environment_is_silent():
    assert sample(random.Random(0)).hidden is None and sample(random.Random(0), 0.2).hidden[0] == 0.2
    assert {respond(GOLDEN, text) for text in ("R", "RU", "RURR", "", "x")} == {""}


def test_after_the_end_the_environment_is_silent():
    """The end is a prize, or the limit; that nothing slips here does not matter."""
    calm = functools.partial(slippery, seed=3, slip=1e-12)
    assert respond(calm("A b3 4"), "UUU") == "b4" and respond(calm("A b3 4"), "UUUU") == ""
    assert respond(calm("A b3 9"), "RUR") == "d4" and respond(calm("A b3 9"), "RURR") == ""


# ---- what the values are the reference of ---------------------------------------------------------------


def rolled(prompt, policy, n, slip=0.0, seed=0):
    """n episodes, and the exact values along them. -> rewards, V, mask (n, T), moves and cells of each"""
    rng, T, exact = random.Random(seed), int(prompt[5:]), values(prompt, slip, policy)[0]
    rewards, V, mask = (torch.zeros(n, T, dtype=torch.float64) for _ in range(3))
    moves, cells = [], []
    for i in range(n):
        problem = slippery(prompt, rng.random(), slip) if slip else Problem("gridworld", prompt, "")
        text, way = episode(problem, policy, rng)
        earned = [r for char, r in zip(text, verify(problem, text)) if char in "URDL"]
        moves.append(way)
        cells.append(gridworld.play(problem, text)[1])
        for t, reward in enumerate(earned):
            rewards[i, t], V[i, t], mask[i, t] = reward, exact[t][cells[i][t]], 1
    return rewards, V, mask, moves, cells


def test_with_exact_values_the_td_error_is_q_minus_v():
    """GAE with lambda = 0, in a world without chance: exactly the advantage, for each move."""
    rewards, V, mask, moves, cells = rolled("A b3 6", UNIFORM, 50)
    Q = values("A b3 6", 0.0, UNIFORM)[1]
    A, _ = ppo.gae(rewards, V, mask, 1.0, 0.0)
    for i, way in enumerate(moves):
        exact = [Q[t][cells[i][t]][move] for t, move in enumerate(way)]
        torch.testing.assert_close(A[i, :len(way)], f64(exact) - V[i, :len(way)])


def test_with_exact_values_td_errors_are_zero_on_average_and_advantages_given_the_move():
    rewards, V, mask, moves, _ = rolled("C c2 5", UNIFORM, 3000, 0.3)
    A, _ = ppo.gae(rewards, V, mask, 1.0, 0.0)
    for t in range(5):
        delta = A[:, t][mask[:, t] > 0]
        assert delta.mean().abs() < 4 * delta.std() / len(delta) ** 0.5
    exact_V, exact_Q = values("C c2 5", 0.3, UNIFORM)
    for move in "URDL":
        delta = A[[way[0] == move for way in moves], 0]
        error = (delta.mean() - exact_Q[0]["c2"][move] + exact_V[0]["c2"]).abs()
        assert error < 4 * delta.std() / len(delta) ** 0.5


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    rewards, V, mask, _, _ = rolled("C c2 5", UNIFORM, 200, 0.3)
    A, returns = ppo.gae(rewards, V, mask, 1.0, 1.0)
    to_go = reinforce.rewards_to_go(rewards, mask, 1.0)
    torch.testing.assert_close(A, (to_go - V) * mask)
    torch.testing.assert_close(returns, to_go)


def test_a_critic_that_learns_as_in_ppo_comes_near_the_exact_values():
    """Of the policy whose returns it is shown, on two maps at once. It reads moves; nobody tells it the cell.
    Measured: 7% of the variance of the values is left in the errors."""
    cfg = ppo.Config(task="gridworld", device="cpu", num_threads=1, hidden_size=32, num_attention_heads=4,
                     num_key_value_heads=2, intermediate_size=32)
    prompts, n = ("A b3 5", "C c2 5"), 1000
    parts = [rolled(prompt, UNIFORM, n) for prompt in prompts]
    rewards, V, mask = (torch.cat(slots).float() for slots in list(zip(*parts))[:3])                # (2 n, T)
    tokens = torch.tensor([[*f"{way:5}".encode()] for part in parts for way in part[3]])            # (2 n, T)
    ids, of = ppo.encode_prompts(prompts, cfg), torch.arange(2).repeat_interleave(n)
    critic = ppo.Critic(ppo.GPT(cfg))
    optimizer = torch.optim.Adam(critic.parameters(), lr=4e-3)
    order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(0))
    for rows in order[200:].repeat(6).split(100):
        with torch.no_grad():
            old = critic(ids, of[rows], tokens[rows]) * mask[rows]
        _, returns = ppo.gae(rewards[rows], old, mask[rows], 1.0, 1.0)
        for _ in range(2):
            optimizer.zero_grad()
            terms = ppo.value_loss(critic(ids, of[rows], tokens[rows]), old, returns, mask[rows], 0.5)
            ppo.aggregate(terms, mask[rows], "token_mean").backward()
            optimizer.step()
    rows = order[:200]                                              # of these it has seen no return
    with torch.no_grad():
        error = (critic(ids, of[rows], tokens[rows]) - V[rows])[mask[rows] > 0]
    assert error.square().mean() < 0.15 * V[rows][mask[rows] > 0].var()
