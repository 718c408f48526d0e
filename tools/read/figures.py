"""Which drawings stand where, and the numbers of a lesson that they show."""
import torch

from tools.read import draw, example

NAMES = ["".join(tokens[:-1]) for tokens in example.ANSWERS]


def opening(lesson):
    """The drawings with which a page opens. -> list of pairs: SVG, caption"""
    return {"reinforce": of_reinforce, "ppo": of_ppo, "grpo": of_grpo, "gspo": of_gspo,
            "dpo": of_dpo}[lesson.name](lesson)


def of(lesson, names):
    """The drawing of a section, if it has one. -> HTML"""
    for name, draws in (("policy_loss", of_clip), ("kl", of_estimators), ("dpo_loss", of_sigmoid),
                        ("gae", of_second_output)):
        if name in names:
            pictures, caption = draws(lesson)
            if pictures:
                return (f'<figure class={name}><div>{"".join(pictures)}</div>'
                        f"<figcaption>{caption}</figcaption></figure>")
    return ""


def legend(lesson):
    """What marks mean in the rows of numbers. -> HTML"""
    if not lesson.clipped():
        return ""
    return (" Ratios outside the range are <b>bold</b>; <i class=hit>ringed</i> is what the clip "
            "has taken the gradient from.")


def of_reinforce(lesson):
    A = {f"b: {name}": lesson.script.advantages(
            example.RIGHT, name, example.SQUARED_GRADIENTS)[0].tolist()
         for name in ("none", "mean", "rloo", "optimal")}
    picture = draw.baselines(example.QUESTIONS["reinforce"], NAMES, example.RIGHT[0].tolist(), A)
    return [(picture, "The example of this page: one question, four outputs, and the advantage of "
                      "each, by --baseline. By default there is none.")]


def of_grpo(lesson):
    rewards = example.RIGHT[0]
    picture = draw.group(
        example.QUESTIONS[lesson.name], NAMES, rewards.tolist(), (rewards - rewards.mean()).tolist(),
        [x for (x,) in lesson.rows("advantages", "->advantages")], rewards.std().item())
    low, high = 1 - lesson.cfg.epsilon, 1 + lesson.cfg.epsilon_high
    return [(picture, "The example of this page: one question, four outputs. What sticks out above "
                      "the mean is as much as what is missing below it."),
            (draw.ratios(lesson.tokens(), low, high),
             "Each dot is a token. Its ratio is its probability now, after one step, divided by what "
             f"it was when it was sampled. The clip has a range for it, {low:g} to {high:g}; of a "
             "hollow dot it has taken the gradient.")]


def of_gspo(lesson):
    ratios = (example.MOVED * example.MASK).exp().tolist()
    tokens = lesson.tokens()
    s = [of_row[0] for of_row in lesson.rows("policy_loss", "ratio")]
    for token in tokens:
        token.ratio = ratios[token.row - 1][token.place - 1]
    picture = draw.sequences(tokens, s, 1 - lesson.cfg.epsilon, 1 + lesson.cfg.epsilon_high,
                             (0.8, 1.28))
    return [(picture, "Each row is an output, each dot a token at its own ratio, which is what GRPO "
                      "clips. The diamond is their geometric mean: the one ratio that GSPO has for "
                      "all of them. Its range is no wider than the line. Hollow: clipped.")]


def gae_of(lesson, row):
    V, delta, A = (lesson.rows("gae", name)[row] for name in ("V", "delta", "A"))
    factor = lesson.cfg.gamma * lesson.cfg.lam
    return draw.gae(example.ANSWERS[row], V, example.RIGHT[0, row].item(), delta, A, factor)


def of_ppo(lesson):
    return [(gae_of(lesson, 2), "The third output of the example of this page, 13, which is right. "
                                "Below each token, its advantage: its own surprise, and in paler "
                                "colours .95 of the next one’s, .95² of the one after.")]


def of_second_output(lesson):
    return [gae_of(lesson, 1)], ("The second output, which is wrong: the critic had hoped for it. "
                                 "Below each token, its surprise.")


def of_clip(lesson):
    """A panel for each sign of the advantage. Where advantages differ by token, each is 1."""
    if not lesson.clipped():
        return [], ""
    tokens = lesson.tokens()
    if lesson.name == "gspo":
        tokens = [token for token in tokens if token.place == 1]
        for token in tokens:
            token.text = f"o_{token.row}"
    panels = []
    for sign in (1, -1):
        own = [token for token in tokens if token.A * sign > 0]
        sizes = {abs(token.A) for token in own}
        size = sizes.pop() if len(sizes) == 1 else 1
        for token in own:
            token.loss *= size / abs(token.A)
        panels.append(draw.clip(own, curve(lesson, sign * size), sign * size,
                                1 - lesson.cfg.epsilon, 1 + lesson.cfg.epsilon_high))
    return panels, ("The loss against the ratio, by the script’s own <code>policy_loss</code>, and "
                    "the example on it; the arrow says where to, by A. Dashed: without the clip. "
                    "Hollow: the curve is flat, so there is no gradient.")


def curve(lesson, A):
    """The loss of a token against its ratio, for one advantage. -> pairs"""
    low, high = 1 - lesson.cfg.epsilon, 1 + lesson.cfg.epsilon_high
    ratios = sorted({*(0.5 + 0.02 * i for i in range(66)), low, high})
    logps = torch.tensor([ratios]).log().T              # a row for each: GSPO takes means over rows
    loss = lesson.script.policy_loss(
        logps, torch.zeros_like(logps), torch.full_like(logps, A), torch.ones_like(logps),
        epsilon=lesson.cfg.epsilon, epsilon_high=lesson.cfg.epsilon_high)
    return list(zip(ratios, loss[:, 0].tolist()))


def of_estimators(lesson):
    x = torch.linspace(-1.05, 1.05, 61)
    curves = {name: list(zip(x.tolist(), lesson.script.kl(x, 0 * x, name).tolist()))
              for name in ("k1", "k2", "k3")}
    points = []
    if "kl" in lesson.called:
        for row, xs, ys in zip((1, 2, 3, 4), lesson.rows("kl", "x"), lesson.rows("kl", "->kl")):
            points += [(x, y, f"dot {draw.side(example.RIGHT[0, row - 1] - 0.5)} t{row}{t}")
                       for t, (x, y) in enumerate(zip(xs, ys), start=1)]
    return [draw.estimators(curves, points)], (
        "Three estimates of the KL from one token, against log π/π<sub>ref</sub>, by the script’s "
        "own <code>kl</code>. k1 is that log itself: right on average, but below 0 wherever a token "
        "has become rarer. k2, half its square, is not right on average. k3 is, and never below 0.")


def of_dpo(lesson):
    rows = {name: [x for of_row in lesson.rows("dpo_loss", name) for x in of_row]
            for name in ("h_chosen", "h_rejected", "M")}
    picture = draw.pairs(pairs(lesson), *rows.values())
    return [(picture, "The example of this page: two pairs of outputs. h is by how much the log-"
                      "probability of an output is above that of the base.")]


def pairs(lesson):
    """The outputs that are chosen, and rejected, which count from 1. -> two lists"""
    return [(rows + 1).tolist() for rows in lesson.script.preferences(example.GRADED)]


def of_sigmoid(lesson):
    M = torch.linspace(-14, 14, 57)
    zero = torch.zeros_like(M)
    loss = lesson.script.dpo_loss(M, zero, zero, zero, lesson.cfg.beta)
    points = []
    found = (lesson.rows("dpo_loss", name) for name in ("M", "->dpo_loss", "∂L/∂logπ"))
    margins, losses, slopes = found
    for chosen, rejected in zip(*pairs(lesson)):
        row = chosen - 1
        points.append((f"o_{chosen} over o_{rejected}", margins[row][0], losses[row][0],
                       slopes[row][0]))
    return [draw.sigmoid(list(zip(M.tolist(), loss.tolist())), points)], (
        "The loss of a pair against its margin M, by the script’s own <code>dpo_loss</code>. Its "
        "slope is the gradient at every token of the chosen output, with the other sign at those of "
        "the rejected one: a pair that is the wrong way round pulls hardest, a won one hardly.")
