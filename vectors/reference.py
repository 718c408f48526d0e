"""Compute the right answers of the vectors from the equations of the papers.

Everything here is a plain loop over numbers of 100 digits. There is no torch, no numpy and nothing
of the scripts, so that a mistake in those cannot hide here. Each function has the name of a file
and gets the inputs and parameters of a case by their names. A table is a list of rows. Where an
equation has a stop-gradient, a function also gets `sg`, a copy of logps that is not differentiated.
"""
import math

from mpmath import exp, expm1, log, mp, mpf, sqrt

import vectors

mp.dps = 100
STEP = mpf(10) ** -20                   # central differences are then exact to about 40 digits
ZERO = mpf(0)
DATA = vectors.DATA                     # inputs of the equations without a gradient


def gradient(function, x):
    """Differentiate function(x) by each number of a list or a table. A kink is an error.
    -> list or table"""
    if not isinstance(x, list):
        up, here, down = function(x + STEP), function(x), function(x - STEP)
        slope = (up - down) / (2 * STEP)
        assert abs(up + down - 2 * here) / STEP <= mpf(10) ** -12 * (1 + abs(slope)), "a kink"
        return slope if abs(slope) > STEP else ZERO     # below, it is an error of the step
    def slope(i, part):
        if not isinstance(part, list) and not mp.isfinite(part):
            return ZERO
        return gradient(lambda moved: function([*x[:i], moved, *x[i + 1:]]), part)
    return [slope(i, part) for i, part in enumerate(x)]


def mean(values):
    return sum(values, ZERO) / len(values)


def std(values, ddof=1):
    middle = mean(values)
    return sqrt(sum(((v - middle) ** 2 for v in values), ZERO) / (len(values) - ddof))


def clip(v, low, high):
    return min(max(v, low), high)


def softplus(v):
    """-log sigmoid(-v)"""
    return log(1 + exp(v))


def places(mask):
    """List the slots of each row that count."""
    return [[t for t, is_there in enumerate(row) if is_there] for row in mask]


def zeros(table):
    return [[ZERO] * len(row) for row in table]


# ---- from tokens to log-probabilities --------------------------------------------------------

def completion_mask(tokens, eos):
    mask, truncated = [], []
    for row in tokens:
        end = next((t for t, token in enumerate(row) if token in eos), None)
        mask.append([int(end is None or t <= end) for t in range(len(row))])
        truncated.append(int(end is None))
    return {"mask": mask, "truncated": truncated}


def log_softmax(row, temperature):
    scaled = [v / temperature for v in row]
    total = log(sum((exp(v) for v in scaled), ZERO))
    return [v - total for v in scaled]


def logprobs(logits, tokens, temperature):
    logps, entropy = [], []
    for table, row in zip(logits, tokens):
        log_p = [log_softmax(one, temperature) for one in table]
        logps.append([here[token] for here, token in zip(log_p, row)])
        entropy.append([-sum((exp(v) * v for v in here if mp.isfinite(v)), ZERO)
                        for here in log_p])
    return {"logps": logps, "entropy": entropy}


def sequence_logps(logits, tokens, prompt_width):
    """The logits at one place predict the token at the next place."""
    return [[log_softmax(table[t - 1], 1)[row[t]] for t in range(prompt_width, len(row))]
            for table, row in zip(logits, tokens)]


def truncated_logps(logits, sampler_logits, tokens, temperature, top_k, top_p):
    """The sampler keeps its top_k tokens (0: all), and of these the fewest that reach top_p. pi is
    compared with it on the same tokens. mass: the mean of pi / mu over samples, at pi = mu's."""
    logps, mass = zeros(tokens), zeros(tokens)
    for i, row in enumerate(tokens):
        for t, token in enumerate(row):
            z, y = logits[i][t], sampler_logits[i][t]
            order = sorted(range(len(y)), key=lambda v: -y[v])[:top_k or None]
            p = [exp(v) for v in log_softmax([y[v] for v in order], temperature)]
            kept = [v for n, v in enumerate(order) if sum(p[:n], ZERO) < top_p]
            log_p = log_softmax([z[v] for v in kept], temperature)
            logps[i][t] = log_p[kept.index(token)]
            mass[i][t] = sum(exp(log_softmax(y, 1)[v]) for v in kept)
    return {"logps": logps, "mass": mass}


# ---- advantages ------------------------------------------------------------------------------

def advantages(rewards, method, eps=ZERO, ddof=1, sq_grad_norms=None, lengths=None,
               greedy_rewards=None, more_rewards=None):
    every = [r for group in rewards for r in group]
    if method == "gdpo":
        terms = [advantages(one, "grpo", eps) for one in (rewards, more_rewards)]
        total = [[a + b for a, b in zip(*groups)] for groups in zip(*terms)]
        flat = [v for row in total for v in row]
        return [[(v - mean(flat)) / (std(flat) + eps) for v in row] for row in total]
    found = []
    for p, R in enumerate(rewards):
        G = len(R)
        if method == "none":
            b = [ZERO] * G
        elif method == "batch_mean":
            b = [mean(every)] * G
        elif method == "remax":
            b = [greedy_rewards[p]] * G
        elif method == "rloo":
            b = [(sum(R) - r) / (G - 1) for r in R]
        elif method == "optimal":               # all weights 0: the plain mean of the others
            b = []
            for g in range(G):
                others = [h for h in range(G) if h != g]
                w = [sq_grad_norms[p][h] for h in others]
                w = w if sum(w) > 0 else [mpf(1)] * (G - 1)
                b.append(sum(a * R[h] for a, h in zip(w, others)) / sum(w))
        elif method == "opo":
            b = [sum(n * r for n, r in zip(lengths[p], R)) / sum(lengths[p])] * G
        elif method == "passk":                 # what the best outputs of the others reach
            b = [max(R[:g] + R[g + 1:]) if r == max(R) else r for g, r in enumerate(R)]
        else:
            assert method in ("grpo", "batch_std", "mean", "maxrl"), method
            b = [mean(R)] * G           # of the group
        A = [r - c for r, c in zip(R, b)]
        is_equal = len(set(R)) == 1
        if is_equal and method not in ("none", "batch_mean", "remax"):
            A = [ZERO] * G
        elif method == "grpo":
            A = [a / (std(R, ddof) + eps) for a in A]
        elif method == "batch_std":
            A = [a / (std(every, ddof) + eps) for a in A]
        elif method == "maxrl":
            A = [a / mean(R) if mean(R) > 0 else ZERO for a in A]
        found.append(A)
    return found


def optimal_baseline(rewards, sq_grad_norms, weights):
    w = [a * b for a, b in zip(weights, sq_grad_norms)]
    return sum(a * r for a, r in zip(w, rewards)) / sum(w)


def whiten(x, mask, eps):
    there = [x[i][t] for i, row in enumerate(places(mask)) for t in row]
    found = zeros(x)
    for i, row in enumerate(places(mask)):
        for t in row if len(there) > 1 else []:
            found[i][t] = (x[i][t] - mean(there)) / sqrt(std(there) ** 2 + eps)
    return found


def token_advantages(rewards, mask, method, sq_grad_norms=None):
    if method.startswith("reinforce++"):
        R = advantages(rewards, "mean") if method.endswith("baseline") else rewards
        return whiten([[r] * len(mask[0]) for group in R for r in group], mask, mpf(10) ** -8)
    assert method == "otb", method          # b_t over the outputs that have a token at t
    G, found = len(rewards[0]), zeros(mask)
    for i, row in enumerate(places(mask)):
        R = rewards[i // G]
        rows = range(i // G * G, i // G * G + G)
        for t in row:
            W = {j: sum(n for n, m in zip(sq_grad_norms[j][:t + 1], mask[j]) if m)
                 for j in rows if mask[j][t]}
            b = sum(W[j] * R[j % G] for j in W) / sum(W.values())
            found[i][t] = R[i % G] - b if len(set(R)) > 1 else ZERO
    return found


def returns(rewards, mask, method, gamma=None):
    found = zeros(mask)
    for i, row in enumerate(places(mask)):
        for k, t in enumerate(row):
            if method == "to_go":
                found[i][t] = sum(gamma ** n * rewards[i][u] for n, u in enumerate(row[k:]))
            elif t == row[-1]:
                found[i][t] = rewards[i]
    return found


def gae(rewards, values, mask, gamma, lam):
    """Sum all later TD errors, instead of a recursion."""
    A, R = zeros(mask), zeros(mask)
    for i, row in enumerate(places(mask)):
        decay = gamma * (lam[i] if isinstance(lam, list) else lam)
        V = [values[i][t] for t in row] + [ZERO]
        errors = [rewards[i][t] + gamma * V[k + 1] - V[k] for k, t in enumerate(row)]
        for k, t in enumerate(row):
            A[i][t] = sum((decay ** n * e for n, e in enumerate(errors[k:])), ZERO)
            R[i][t] = A[i][t] + V[k]
    return {"advantages": A, "returns": R}


def length_adaptive_lambda(lengths, alpha):
    return [max(ZERO, 1 - 1 / (alpha * n)) for n in lengths]


# ---- losses ----------------------------------------------------------------------------------

def surrogate(r, a, epsilon_low, epsilon_high, delta=None):
    objective = min(r * a, clip(r, 1 - epsilon_low, 1 + epsilon_high) * a)
    return min(-objective, -delta * a) if delta is not None and a < 0 else -objective


def token_loss(method, a, x, x_sg, old, sequence, constants):
    """L_t of one token. sequence: log rho of the output's tokens, differentiated and not."""
    c = constants
    log_r, log_r_sg = x - old, x_sg - old
    log_s, log_s_sg = map(mean, sequence)
    if method == "reinforce":
        return -a * x
    if method == "clip":
        return surrogate(exp(log_r), a, **c)
    if method == "penalty":
        return -exp(log_r) * a + c["coef"] * (expm1(log_r) - log_r)
    if method in ("cispo", "gspo_cispo"):
        low = 1 - c["epsilon_low"] if "epsilon_low" in c else ZERO
        r = exp(log_r_sg if method == "cispo" else log_s_sg)
        return -clip(r, low, 1 + c["epsilon_high"]) * a * x
    if method in ("sapo", "gspo_sapo"):
        tau = c["tau_pos"] if a > 0 else c["tau_neg"]
        r = exp(log_r if method == "sapo" else log_s)
        return -4 / tau / (1 + exp(-tau * (r - 1))) * a
    if method == "gspo":
        return surrogate(exp(log_s), a, **c)
    if method == "gspo_token":
        return surrogate(exp(log_s_sg + x - x_sg), a, **c)
    if method == "gmpo":
        cut = [min(v, c["epsilon"]) if a > 0 else max(v, -c["epsilon"]) for v in sequence[0]]
        return -a * exp(mean(cut))
    if method in ("dppo_tv", "dppo_kl"):
        p, q = exp(x_sg), exp(old)
        distance = abs(p - q)
        if method == "dppo_kl":
            distance = q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))
        is_zero = distance > c["delta"] and (p - q) * a > 0
        return ZERO if is_zero else -exp(log_r) * a
    if method == "vespo":
        W = exp(sum(sequence[1]))
        k, lam = (c["k_pos"], c["lambda_pos"]) if a >= 0 else (c["k_neg"], c["lambda_neg"])
        return -W ** k * exp(lam * (1 - W)) * a * x
    if method == "off_policy_mask":
        others = {name: v for name, v in c.items() if name != "threshold"}
        is_stale = a < 0 and log_s_sg < -c["threshold"]
        return ZERO if is_stale else surrogate(exp(log_r), a, **others)
    assert method == "dro", method
    return c["beta"] / 2 * log_r ** 2 - a * x


def chosen_tokens(method, x, old, A, there, ratio, lb=ZERO, epsilon_low=ZERO, epsilon_high=ZERO):
    """Choose tokens by c_t: those with the highest (kl_cov), or all above `lb` that are not
    clipped (clip_cov), of which there must be no more than this ratio of all. -> (row, slot)s"""
    mean_A, mean_x = mean([A[i][t] for i, t in there]), mean([x[i][t] for i, t in there])
    c = {(i, t): (A[i][t] - mean_A) * (x[i][t] - mean_x) for i, t in there}
    count = max(1, int(ratio * len(there)))
    if method == "kl_cov":
        return sorted(there, key=c.get)[-count:]
    found = []
    for i, t in there:
        r = exp(x[i][t] - old[i][t])
        is_clipped = r > 1 + epsilon_high if A[i][t] > 0 else r < 1 - epsilon_low
        if not is_clipped and c[i, t] > lb:
            found.append((i, t))
    assert len(found) <= count, "then they are chosen at random"
    return found


def token_losses(logps, sg, old_logps, A, mask, method, constants):
    """L_t of all tokens. A: (B,) or (B, T). -> {(row, slot): L_t}"""
    A = [a if isinstance(a, list) else [a] * len(row) for a, row in zip(A, mask)]
    there = [(i, t) for i, row in enumerate(places(mask)) for t in row]
    L = {}
    if method.endswith("_cov"):
        c = dict(constants)
        coef = c.pop("coef", None)
        chosen = chosen_tokens(method, sg, old_logps, A, there, **c)
        c = {name: v for name, v in c.items() if name not in ("ratio", "lb")}
    for i, t in there:
        x, old, a = logps[i][t], old_logps[i][t], A[i][t]
        if method == "kl_cov":
            L[i, t] = -exp(x - old) * a + (coef * abs(x - old) if (i, t) in chosen else ZERO)
        elif method == "clip_cov":
            L[i, t] = ZERO if (i, t) in chosen else surrogate(exp(x - old), a, **c)
        else:
            row = places(mask)[i]
            sequence = [[table[i][u] - old_logps[i][u] for u in row] for table in (logps, sg)]
            L[i, t] = token_loss(method, a, x, sg[i][t], old, sequence, constants)
    return L


def average(x, mask, how, num_sequences=None, num_tokens=None, max_length=None):
    """x: a table, or {(row, slot): number}."""
    rows = places(mask)
    B = num_sequences or len(mask)
    x = x if isinstance(x, dict) else {(i, t): x[i][t] for i, row in enumerate(rows) for t in row}
    if how == "sequence_mean":
        return sum((v / (B * len(rows[i])) for (i, _), v in x.items()), ZERO)
    total = sum(x.values(), ZERO)
    if how == "token_mean":
        return total / (num_tokens or max(1, sum(map(len, rows))))
    if how == "sequence_sum":
        return total / B
    assert how == "constant", how
    return total / (B * (max_length or len(mask[0])))


def policy_loss(logps, sg, old_logps, advantages, mask, method, how, max_length=None,
                ref_logps=None, beta=ZERO, **constants):
    """beta: of the KL, or DRO's own."""
    if method == "dro":
        constants, beta = {"beta": beta}, ZERO
    losses = token_losses(logps, sg, old_logps, advantages, mask, method, constants)
    for i, t in losses if beta else ():
        losses[i, t] += beta * kl_of_token("k3", logps[i][t], ref_logps[i][t], old_logps[i][t])
    return average(losses, mask, how, max_length=max_length)


def kl_of_token(estimator, x, ref, old):
    d = x - ref
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d ** 2 / 2
    k3 = expm1(-d) + d
    if estimator == "k3_ratio":
        return exp(x - old) * k3
    assert estimator == "k3", estimator
    return k3


def kl(logps, ref_logps, old_logps, estimator):
    return [[kl_of_token(estimator, *three) for three in zip(*rows)]
            for rows in zip(logps, ref_logps, old_logps)]


def adaptive_kl(kl, coefficient, target, method, horizon=None, num_outputs=None):
    found = []
    for value in kl:
        if method == "double":
            factor = 1
            if value > target * 3 / 2:
                factor = 2
            elif value < target * 2 / 3:
                factor = mpf(1) / 2
        else:
            assert method == "horizon", method
            error = clip(value / target - 1, mpf("-0.2"), mpf("0.2"))
            factor = 1 + error * num_outputs / horizon
        found.append(coefficient * factor)
    return found


def value_loss(values, old_values, returns, mask, cliprange):
    errors = {}
    for i, row in enumerate(places(mask)):
        for t in row:
            V, old, R = values[i][t], old_values[i][t], returns[i][t]
            near = clip(V, old - cliprange, old + cliprange)
            errors[i, t] = max((V - R) ** 2, (near - R) ** 2) / 2
    return average(errors, mask, "token_mean")


def recipe(rewards, logps, sg, old_logps, ref_logps, entropy, mask, truncated, is_correct, method,
           how, advantage="given", token_advantages=None, eps=ZERO, beta=ZERO,
           estimator="k3", entropy_coef=ZERO, nll_coef=ZERO, mask_truncated=False,
           max_length=None, micro_batch=None, **constants):
    """micro_batch changes nothing: the parts of a step add up."""
    A = token_advantages
    if advantage != "given":
        A = [a for row in advantages(rewards, advantage, eps) for a in row]
    if mask_truncated:
        mask = [[ZERO] * len(row) if cut else row for row, cut in zip(mask, truncated)]
    B = sum(1 for cut in truncated if not (cut and mask_truncated))
    L = token_losses(logps, sg, old_logps, A, mask, method, constants)
    for i, t in L:
        token_kl = kl_of_token(estimator, logps[i][t], ref_logps[i][t], old_logps[i][t])
        L[i, t] += beta * token_kl - entropy_coef * entropy[i][t]
    right = [row if good else [ZERO] * len(row) for row, good in zip(mask, is_correct)]
    return (average(L, mask, how, num_sequences=B, max_length=max_length)
            - nll_coef * average(logps, right, "token_mean"))


# ---- distillation ----------------------------------------------------------------------------

def divergence(p, t, beta):
    """D_t between the student's and the teacher's probabilities of all events."""
    if beta in (0, 1):
        return sum(a * log(a / b) for a, b in (zip(p, t) if beta else zip(t, p)))
    m = [beta * b + (1 - beta) * a for a, b in zip(p, t)]
    return beta * divergence(t, m, 1) + (1 - beta) * divergence(p, m, 1)


def distillation(logits, teacher_logits, mask, method, temperature, beta=None, k=None, rest=False,
                 support="teacher", tokens=None, old_logps=None, advantages=None,
                 teacher_coef=None):
    """topk: the events are the k most likely tokens of the teacher, or of the student (support),
    and, as one event, the rest. mixed: with a verifier's advantages."""
    L = {}
    for i, row in enumerate(places(mask)):
        for u in row:
            p, t = ([exp(v) for v in log_softmax(x[i][u], temperature)]
                    for x in (logits, teacher_logits))
            if method in ("sampled", "mixed"):
                o = tokens[i][u]
                G = log(t[o]) - old_logps[i][u]
                if method == "mixed":
                    G = advantages[i] + teacher_coef * G
                L[i, u] = -G * log(p[o])
            else:
                liked = p if support == "student" else t
                S = sorted(range(len(t)), key=lambda v: -liked[v])[:k]
                p, t = ([x[v] for v in S] for x in (p, t))
                if rest:
                    p.append(1 - sum(p))
                    t.append(1 - sum(t))
                L[i, u] = divergence(p, t, beta)
    return average(L, mask, "token_mean")


# ---- pairs -----------------------------------------------------------------------------------

def preferences(rewards):
    """Pair rows from the outside inwards, while their rewards differ."""
    chosen, rejected = [], []
    for p, R in enumerate(rewards):
        order = sorted(range(len(R)), key=lambda g: -R[g])
        for k in range(len(R) // 2):
            if R[order[k]] > R[order[-1 - k]]:
                chosen.append(p * len(R) + order[k])
                rejected.append(p * len(R) + order[-1 - k])
    return {"chosen": chosen, "rejected": rejected}


def loss_of_pair(w, r, ref_w, ref_r, beta, method, label_smoothing=ZERO, gamma=ZERO):
    """w and r: log pi of the chosen and of the rejected output."""
    e = label_smoothing
    M = (w - ref_w) - (r - ref_r)
    if method == "dpo":                                 # with e > 0: cDPO
        return (1 - e) * softplus(-beta * M) + e * softplus(beta * M)
    if method == "robust":
        return ((1 - e) * softplus(-beta * M) - e * softplus(beta * M)) / (1 - 2 * e)
    if method == "ipo":
        return (M - 1 / (2 * beta)) ** 2
    if method == "hinge":
        return max(ZERO, 1 - beta * M)
    assert method == "simpo", method
    return softplus(gamma - beta * (w - r))


def preference_loss(chosen, rejected, ref_chosen, ref_rejected, beta, method, **constants):
    return [loss_of_pair(*four, beta, method, **constants)
            for four in zip(chosen, rejected, ref_chosen, ref_rejected)]


def whole(logps, mask, averaged):
    sums = [sum((row[t] for t in there), ZERO) for row, there in zip(logps, places(mask))]
    return [s / max(1, len(there)) if averaged else s for s, there in zip(sums, places(mask))]


def pair_loss(chosen, rejected, ref_chosen, ref_rejected, mask_chosen, mask_rejected, beta, method,
              averaged, nll_coef=ZERO, **constants):
    w, ref_w = (whole(x, mask_chosen, averaged) for x in (chosen, ref_chosen))
    r, ref_r = (whole(x, mask_rejected, averaged) for x in (rejected, ref_rejected))
    losses = preference_loss(w, r, ref_w, ref_r, beta, method, **constants)
    rewards = [[beta * (a - b) for a, b in zip(*both)] for both in ((w, ref_w), (r, ref_r))]
    return {"loss": mean(losses) - nll_coef * mean(whole(chosen, mask_chosen, True)),
            "chosen_reward": mean(rewards[0]), "rejected_reward": mean(rewards[1]),
            "accuracy": mean([mpf(a > b) for a, b in zip(*rewards)])}


# ---- weights, rewards, scores ----------------------------------------------------------------

def importance_weights(old_logps, sampler_logps, mask, mode, cap):
    found = zeros(mask)
    for i, row in enumerate(places(mask)):
        for t in row:
            used = row if mode.startswith("sequence") else [t]
            w = exp(sum(old_logps[i][u] - sampler_logps[i][u] for u in used))
            if mode.endswith("truncate"):
                found[i][t] = min(w, cap)
            elif w <= cap:
                found[i][t] = w
    return found


def has_signal(rewards):
    return [int(len(set(group)) > 1) for group in rewards]


def overlong_penalty(lengths, max_length, buffer):
    return [clip(mpf(max_length - buffer - n) / buffer, mpf(-1), ZERO) if buffer else ZERO
            for n in lengths]


def pass_at_k(n, c, k):
    return 1 - mpf(math.comb(n - c, k)) / math.comb(n, k)


def maj_at_k(answers, right, k):
    """Let each of the n // k disjoint blocks of k answers vote; null doesn't. Of answers that tie,
    the first wins."""
    wins = []
    for first in range(0, len(answers) - k + 1, k):
        cast = [answer for answer in answers[first:first + k] if answer is not None]
        wins.append(mpf(max(cast, key=cast.count, default=None) == right))
    return mean(wins)
