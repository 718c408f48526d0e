"""The drawings of a page, which are made from the numbers of its lesson."""
import torch

from tools.read import draw, example

NAMES = ["".join(tokens[:-1]) for tokens in example.ANSWERS]
# Of scripts, with which drawings their pages open, and of functions, beside which one stands.
PLACES = {"reinforce": ["baselines"], "ppo": ["gae"], "grpo": ["group", "ratios"],
          "gspo": ["sequences"], "dpo": ["pairs"],
          "policy_loss": ["clip"], "kl": ["estimators"], "dpo_loss": ["logistic"],
          "gae": ["disappointed"]}


def drawings(lesson, place):
    """The drawings of a place. -> list of pairs: name, list of SVGs"""
    found = [(name, globals()[name](lesson)) for name in PLACES.get(place, ())]
    return [(name, pictures) for name, pictures in found if pictures]


def limits(lesson):
    """The range of the clip. -> pair of floats"""
    return 1 - lesson.cfg.epsilon, 1 + lesson.cfg.epsilon_high


def baselines(lesson):
    A = {name: lesson.script.advantages(example.RIGHT, name, example.SQUARED_GRADIENTS)[0].tolist()
         for name in ("none", "mean", "rloo", "optimal")}
    return [draw.baselines(example.QUESTIONS["reinforce"], NAMES, example.RIGHT[0].tolist(), A)]


def group(lesson):
    rewards = example.RIGHT[0]
    A = [x for (x,) in lesson.rows("advantages", "->advantages")]
    return [draw.group(example.QUESTIONS[lesson.name], NAMES, rewards.tolist(),
                       (rewards - rewards.mean()).tolist(), A, rewards.std().item())]


def ratios(lesson):
    return [draw.ratios(lesson.tokens(), *limits(lesson))]


def sequences(lesson):
    tokens = lesson.tokens()
    s = [of_row[0] for of_row in lesson.rows("policy_loss", "ratio")]
    for token in tokens:
        token.ratio = example.MOVED[token.row - 1, token.place - 1].exp().item()
    return [draw.sequences(tokens, s, *limits(lesson), wide=(0.8, 1.28))]


def gae(lesson, row=2):
    V, delta, A = (lesson.rows("gae", name)[row] for name in ("V", "delta", "A"))
    factor = lesson.cfg.gamma * lesson.cfg.lam
    return [draw.gae(example.ANSWERS[row], V, example.RIGHT[0, row].item(), delta, A, factor)]


def disappointed(lesson):
    return gae(lesson, row=1)


def clip(lesson):
    """A panel for each sign of the advantage. Where advantages differ by token, each is 1."""
    tokens = lesson.tokens() if lesson.clipped() else []
    if lesson.name == "gspo":
        tokens = [token for token in tokens if token.place == 1]
        for token in tokens:
            token.text = f"o_{token.row}"
    panels = []
    for sign in (1, -1) if tokens else ():
        own = [token for token in tokens if token.A * sign > 0]
        sizes = {abs(token.A) for token in own}
        size = sizes.pop() if len(sizes) == 1 else 1
        for token in own:
            token.loss *= size / abs(token.A)
        panels.append(draw.clip(own, curve(lesson, sign * size), sign * size, *limits(lesson)))
    return panels


def curve(lesson, A):
    """The loss of a token against its ratio, for one advantage. -> pairs"""
    ratios = sorted({*(0.5 + 0.02 * i for i in range(66)), *limits(lesson)})
    logps = torch.tensor([ratios]).log().T              # a row for each: GSPO takes means over rows
    loss = lesson.script.policy_loss(
        logps, torch.zeros_like(logps), torch.full_like(logps, A), torch.ones_like(logps),
        epsilon=lesson.cfg.epsilon, epsilon_high=lesson.cfg.epsilon_high)
    return list(zip(ratios, loss[:, 0].tolist()))


def estimators(lesson):
    x = torch.linspace(-1.05, 1.05, 61)
    curves = {name: list(zip(x.tolist(), lesson.script.kl(x, 0 * x, name).tolist()))
              for name in ("k1", "k2", "k3")}
    points = []
    if "kl" in lesson.called:
        for row, xs, ys in zip((1, 2, 3, 4), lesson.rows("kl", "x"), lesson.rows("kl", "->kl")):
            points += [(x, y, f"dot {draw.side(example.RIGHT[0, row - 1] - 0.5)} t{row}{t}")
                       for t, (x, y) in enumerate(zip(xs, ys), start=1)]
    return [draw.estimators(curves, points)]


def names_of_pairs(lesson):
    """The outputs that are chosen, and rejected, which count from 1. -> two lists"""
    return [(rows + 1).tolist() for rows in lesson.script.preferences(example.GRADED)]


def pairs(lesson):
    rows = [[x for of_row in lesson.rows("dpo_loss", name) for x in of_row]
            for name in ("h_chosen", "h_rejected", "M")]
    return [draw.pairs(names_of_pairs(lesson), *rows)]


def logistic(lesson):
    M = torch.linspace(-14, 14, 57)
    loss = lesson.script.dpo_loss(M, *3 * [torch.zeros_like(M)], lesson.cfg.beta)
    values = [lesson.rows("dpo_loss", name) for name in ("M", "->dpo_loss", "∂L/∂logπ")]
    points = [(f"o_{chosen} over o_{rejected}", *(rows[chosen - 1][0] for rows in values))
              for chosen, rejected in zip(*names_of_pairs(lesson))]
    return [draw.logistic(list(zip(M.tolist(), loss.tolist())), points)]
