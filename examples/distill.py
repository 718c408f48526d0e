"""Distillation: a teacher says at each token what it would have written (GKD, 2306.13649). With
--teacher self, the policy teaches itself, because as the teacher it sees a hint.

A verifier gives one number for a whole output, and the same number to all outputs of a group if the
policy is weak. A teacher pi_T is a policy that already can do the task. At each prefix, it gives a
probability to every token v of the vocabulary, and the student pi learns to give the same. A
divergence D_t measures how far apart the two are:

  KL(p || q) = sum_v p(v) log(p(v) / q(v))                                           (1)
  m     = beta pi_T + (1 - beta) pi                                                  (2)
  D_t   = beta KL(pi_T || m) + (1 - beta) KL(pi || m)                                (3)
  D_t   = KL(pi_T || pi) if beta = 0,   KL(pi || pi_T) if beta = 1                   (4)
  L     = 1/N sum_t D_t                                                              (5)

N counts the tokens of the step. With --beta 0 (forward KL), tokens that only the teacher likes cost
most, so the student learns to write all that the teacher writes. With --beta 1 (reverse KL), tokens
that only the student likes cost most, so it gives them up. In between, (3) is the generalized
Jensen-Shannon divergence. Divided by beta or by 1 - beta, it approaches (4) near either end.

The teacher's own outputs never show what to do after a mistake of the student. So --lmbda is the
probability that the student writes a batch, and not the teacher.

If the teacher runs elsewhere, its whole vocabulary is too much to send. --distillation_mode
topk_logits only uses its k most likely tokens S (or the student's, with --topk_support), and all
others as one event, the rest:

  pi(rest) = 1 - sum_{v in S} pi(v)                                                  (6)

With --no-distillation_add_tail, (1) only adds up over S, so it is not a divergence. With beta 1
it is least at pi = pi_T / e, where at least 63% of the probability lies outside S (verl#5041); our
short runs kept 98% in S. With beta 0, it is least where everything lies in S.

Even less is the probability of the sampled token alone. --distillation_mode sampled_token is
REINFORCE with a reward whose mean is -KL(pi || pi_T), and with the G_t of reinforce.py:

  r_t   = log pi_T(o_t | q, o_<t) - log pi(o_t | q, o_<t)                            (7)
  L_t   = -G_t log pi(o_t | q, o_<t)                                                 (8)

L_t replaces D_t in (5). If it is added up over tokens, it has on average the gradient of (4) with
beta 1, or with --gamma 1 that of the KL between whole outputs. With --beta 0 --lmbda 0, G_t is 1,
so the student imitates outputs of the teacher (1606.07947). On average, this has the gradient of
(4) with beta 0. A verifier may join in: with --teacher_coef lambda, an output's advantage over its
group (KDRL, 2506.02208) is added to what the teacher says about its tokens:

  L_t   = -(A + lambda G_t) log pi(o_t | q, o_<t)                                    (9)

Who is the teacher, if nobody is better? With --teacher self, it is the policy itself, but it reads
a hint h before the question, and the student learns to write without the hint what it would write
with it (OPSD 2601.18734, SDFT 2601.19897, SDPO 2601.20802):

  pi_T(v | q, o_<t) = pi_theta'(v | h, q, o_<t)                                      (10)

--hint answer shows the right answer, so no verifier is needed. --hint sibling shows the answer of
another output of the group, which the verifier found right; rows without one have no D_t, and their
tokens do not count in N. theta' never has a gradient. It is the base's (--teacher_model_kind base),
the student's own of each step (live), or an average that follows the student (ema):

  theta' <- (1 - a) theta' + a theta   after each optimizer step                     (11)

The student takes over all that the hint brings about, also a habit that nobody wants: a policy that
only copies an answer it is shown stops to think. docs/lab/hints.md measures both.

Departures: GKD averages over the tokens of each output first, but (5) over all tokens, as TRL and
verl do. GKD mixes the student's outputs with a data set. Samples serve for several steps. As in
GKD, the gradient ignores that pi also chooses the prefixes, except with --gamma above 0. KDRL takes
GRPO's ratios and A, which is divided by a standard deviation. OPSD shows a worked solution, and
SDPO the whole right output or an error message; our hint is one answer, since a prompt of the
textbook has no more. SDPO's teacher is an average (ema), SDFT's as well, and OPSD's is the base.
Both OPSD (siyan-zhao/OPSD#14) and SDFT (idanshen/Self-Distillation#5) first wrote of the reverse KL
and took the forward KL, --beta 0, in their runs.

Usage: python examples/distill.py --teacher runs/grpo-arithmetic-s0
       python examples/distill.py --task key --teacher self
"""
import dataclasses
import math
import sys
from pathlib import Path
from typing import Literal

if not __package__:     # started as a file: the scripts are in the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # isort: split

import torch
import torch.nn.functional as F
from torch import nn

import plumbing
import reinforce

# Shapes: as in reinforce.py; k is the number of tokens in S.
UNUSED = ("view", "method", "entropy_coef")
TOPK = ("distillation_topk", "distillation_add_tail", "topk_support")
OF_SELF = ("hint", "teacher_model_kind", "teacher_update_rate")
OF_REWARD = ("gamma", "teacher_coef")
OF_GRADES = ("baseline", "reward")
COLUMNS = {"reward": "reward", "teacher": "teacher_kl", "length": "completions/mean_length",
           "entropy": "entropy", "grad": "grad_norm"}


@dataclasses.dataclass(frozen=True)
class Config(reinforce.Config):
    teacher: str = common.flag(
        "runs/grpo-arithmetic-s0", "run folder of the teacher (pi_T), or self")
    hint: Literal["answer", "sibling"] = common.flag(
        "answer", "what the teacher sees, with --teacher self")
    teacher_model_kind: Literal["base", "live", "ema"] = common.flag(
        "base", "whose weights it has (theta')")
    teacher_update_rate: float = common.flag(0.05, "rate of the average, with ema (a)")
    teacher_coef: float = common.flag(0.0, "weight of G_t in (9) (lambda); 0: (8), without rewards")
    baseline: Literal["none", "batch", "mean", "rloo"] = common.flag("rloo", "for A in (9)")
    beta: float = common.flag(1.0, "0: forward KL; 1: reverse KL; between: (3)")
    lmbda: float = common.flag(1.0, "probability that the student writes a batch")
    distillation_mode: Literal["full_logits", "topk_logits", "sampled_token"] = common.flag(
        "full_logits", "tokens that are compared")
    distillation_topk: int = common.flag(8, "number of tokens in S (k)")
    distillation_add_tail: bool = common.flag(True, "whether the rest is an event")
    topk_support: Literal["teacher", "student"] = common.flag(
        "teacher", "whose most likely tokens are S")
    gamma: float = common.flag(0.0, "discount of later r_t, with sampled_token")

    def rules(self):
        yield from super().rules()
        yield self.beta <= 1, f"--beta {self.beta}: must be at most 1"
        yield self.lmbda <= 1, f"--lmbda {self.lmbda}: must be at most 1"
        few = self.distillation_topk < common.VOCAB_SIZE
        yield few, f"--distillation_topk {self.distillation_topk}: the vocabulary is not larger"
        mode = self.distillation_mode
        has_mean = mode != "sampled_token" or self.beta == self.lmbda in (0, 1)
        yield has_mean, "--distillation_mode sampled_token: needs --beta 1 --lmbda 1, or both 0"
        has_reward = mode == "sampled_token" and self.beta == 1
        is_self = self.teacher == "self"
        yield not is_self or self.lmbda == 1, "--teacher self: needs --lmbda 1"
        yield self.teacher_update_rate <= 1, "--teacher_update_rate: must be at most 1"
        parts = [(UNUSED, False, f"with --distillation_mode {mode}"),
                 (TOPK, mode == "topk_logits", f"with --distillation_mode {mode}"),
                 (OF_REWARD, has_reward, "without --distillation_mode sampled_token --beta 1"),
                 (OF_GRADES, self.teacher_coef > 0, "without --teacher_coef"),
                 (OF_SELF, is_self, "without --teacher self"),
                 (OF_SELF[-1:], self.teacher_model_kind == "ema", "without an average (ema)")]
        for names, is_used, when in parts:
            for name in names:
                is_fine = is_used or getattr(self, name) == getattr(Config, name)
                yield is_fine, f"--{name}: has no effect {when}"


# ---- 1. the loss -----------------------------------------------------------------------------

def kl(log_p, log_q):
    """Compute KL(p || q) from log-probabilities. (..., V) each -> (...)"""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)                          # eq. (1)


def divergence(log_p, log_t, beta):
    """Compute D_t from log pi and log pi_T of all events. (..., V) each -> (...)"""
    if beta == 0:
        return kl(log_t, log_p)                                                 # eq. (4)
    if beta == 1:
        return kl(log_p, log_t)                                                 # eq. (4)
    log_m = torch.logaddexp(math.log(beta) + log_t, math.log(1 - beta) + log_p)     # eq. (2)
    return beta * kl(log_t, log_m) + (1 - beta) * kl(log_p, log_m)              # eq. (3)


def events(log_p, S, add_tail=True):
    """Compute the log-probabilities of the tokens S (..., k), and of the rest if add_tail.
    (..., V) -> (..., k + 1) or (..., k)"""
    chosen = log_p.gather(-1, S)                                                # (..., k)
    rest = log_p.scatter(-1, S, -torch.inf).logsumexp(dim=-1, keepdim=True)     # (..., 1)  eq. (6)
    if not add_tail:
        return chosen
    return torch.cat([chosen, rest], dim=-1)


def support(log_p, log_t, cfg):
    """Choose S, the k most likely tokens of the teacher or of the student. -> (..., k)"""
    of = log_t if cfg.topk_support == "teacher" else log_p
    return of.topk(cfg.distillation_topk, dim=-1).indices


def token_losses(log_p, log_t, tokens, old_logps, mask, cfg, A=0.0, has_hint=1.0):
    """Compute D_t, or L_t of (8) or (9), from log pi and log pi_T (b, T, V). The advantages A and
    has_hint, 0.0 for outputs about which the teacher says nothing, are (b, 1). -> (b, T)"""
    if cfg.distillation_mode == "topk_logits":
        S = support(log_p, log_t, cfg)                                          # (b, T, k)
        log_p = events(log_p, S, cfg.distillation_add_tail)                     # (b, T, k + 1)
        log_t = events(log_t, S, cfg.distillation_add_tail)
    if cfg.distillation_mode != "sampled_token":
        return divergence(log_p, log_t, cfg.beta)
    teacher_logps = log_t.gather(-1, tokens[..., None])[..., 0]                 # (b, T)
    G = mask
    if cfg.beta == 1:
        r = (teacher_logps - old_logps) * has_hint                              # (b, T)  eq. (7)
        G = reinforce.rewards_to_go(r, mask, cfg.gamma)
    if cfg.teacher_coef > 0:
        G = A + cfg.teacher_coef * G                                            # for (9)
    logps = log_p.gather(-1, tokens[..., None])[..., 0]                         # (b, T)
    return reinforce.policy_loss(logps, G, mask)                                # eq. (8), eq. (9)


# ---- 2. the hint -----------------------------------------------------------------------------

def right_siblings(is_correct):
    """Find for each output the first other output of its group that is right. (P, G) -> its row
    (B,), whether there is one (B,)"""
    P, G = is_correct.shape
    is_other = ~torch.eye(G, dtype=torch.bool)                                  # (G, G)
    is_right = is_correct[:, None].bool() & is_other                            # (P, G, G)
    rows = torch.arange(P)[:, None] * G + is_right.int().argmax(dim=-1)         # (P, G)
    return rows.flatten(), is_right.any(dim=-1).flatten()


def add_hints(task, batch, cfg):
    """Write the prompts that the teacher reads. Both kinds have the same width, so the tokens of an
    output have the same positions. -> prompts (B, W), has_hint (B,)"""
    if cfg.teacher != "self":
        return batch.prompts, torch.ones_like(batch.mask[:, 0])
    rows, has_hint = right_siblings(batch.is_correct)
    texts = [batch.texts[row] for row in rows.tolist()]
    if cfg.hint == "answer":
        texts = [f"<answer>{problem.answer}</answer>" for problem in batch.problems]
        has_hint = torch.ones_like(has_hint)
    problems = [task.hinted(problem, text) if is_hinted else problem for problem, text, is_hinted
                in zip(batch.problems, texts, has_hint.tolist())]
    prompts = common.encode_prompts(problems, task, cfg.device)                 # h, q of (10)
    return prompts, has_hint.to(batch.mask)


# ---- 3. the update ---------------------------------------------------------------------------

def log_probs(policy, prompts, tokens, temperature):
    """Compute the log-probabilities of all tokens in the vocabulary. -> (b, T, V)"""
    hidden = reinforce.completion_states(policy, prompts, tokens)               # (b, T, D)
    return F.log_softmax(F.linear(hidden, policy.embed.weight) / temperature, dim=-1)


def backward(policy, teacher, batch, hints, A, rows, cfg):
    """Accumulate the gradient of (5) over `rows`, in micro-batches. hints: what add_hints returns;
    A: (B, 1). -> metrics, of which the last two are about tokens with a hint"""
    prompts, has_hint = hints[0], hints[1][:, None]                             # (B, W), (B, 1)
    is_taught = batch.mask * has_hint                                           # (B, T)
    counted = batch.mask if cfg.teacher_coef > 0 else is_taught                 # (B, T)
    num_tokens = counted[rows].sum().clamp(min=1)
    num_taught = is_taught[rows].sum().clamp(min=1)
    metrics = {"loss": 0.0, "teacher_kl": 0.0, "student_mass": 0.0}
    for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size):
        T = int(batch.lengths[part].max())
        tokens = batch.tokens[part, :T]                                         # (b, T)
        mask = counted[part, :T]
        log_p = log_probs(policy, batch.prompts[part], tokens, cfg.temperature)     # (b, T, V)
        with torch.no_grad():
            log_t = log_probs(teacher, prompts[part], tokens, cfg.temperature)          # eq. (10)
        token_loss = token_losses(log_p, log_t, tokens, batch.logps[part, :T], mask, cfg,
                                  A[part], has_hint[part])
        loss = reinforce.aggregate(token_loss, mask, "token_mean", num_tokens=num_tokens)
        loss.backward()                                                         # eq. (5)

        with torch.no_grad():
            in_S = log_p.gather(-1, support(log_p, log_t, cfg)).exp().sum(dim=-1)   # (b, T)
            metrics["loss"] += loss.item()
            for name, x in {"teacher_kl": kl(log_p, log_t), "student_mass": in_S}.items():
                metrics[name] += ((x * is_taught[part, :T]).sum() / num_taught).item()
    return metrics


@torch.no_grad()
def follow(teacher, policy, rate):
    """Move the teacher's weights towards the student's, eq. (11)."""
    for average, weight in zip(teacher.parameters(), policy.parameters()):
        average.lerp_(weight, rate)


def update(policy, teacher, optimizer, batch, hints, A, cfg, step):
    """Pass over the batch num_iterations times, in num_mini_batches steps each. -> metrics"""
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        optimizer.zero_grad()
        metrics = backward(policy, teacher, batch, hints, A, rows, cfg)
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm or torch.inf)
        optimizer.step()
        if cfg.teacher_model_kind == "ema":
            follow(teacher, policy, cfg.teacher_update_rate)
        history.append(metrics | {"grad_norm": grad_norm.item()})
    return common.mean_metrics(history)


# ---- 4. training -----------------------------------------------------------------------------

def load_teacher(run, cfg):
    """Load the teacher, whose sizes may differ from the student's. Checkpoints store it, too. -> a
    model, or None with --teacher self"""
    if cfg.teacher == "self":
        if not hasattr(run.task, "hinted"):
            common.fail(f"--teacher self: the examples of {cfg.task} show no hints; those of "
                        "--task key do")
        return None
    if not run.resumed:
        _, flags = plumbing.read_config(cfg.teacher)
        run.state["teacher"] = {
            name: flags.get(name, getattr(cfg, name)) for name in common.Base.__annotations__}
    teacher = reinforce.GPT(dataclasses.replace(cfg, **run.state["teacher"])).to(cfg.device)
    if not run.resumed:
        plumbing.load_policy(teacher, f"{cfg.teacher}/checkpoint.pt")
    run.parts["teacher"] = teacher
    return teacher


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    task = common.load_task(cfg, reinforce.verify)
    policy = reinforce.GPT(cfg).to(cfg.device)
    with plumbing.Run(cfg, task, policy, COLUMNS, reinforce.observers(cfg)) as run:
        teacher = load_teacher(run, cfg)
        base = run.begin(reinforce.sample_batch)
        if cfg.teacher == "self":
            teacher = policy if cfg.teacher_model_kind == "live" else base
        if cfg.teacher_model_kind == "ema":
            run.parts["teacher"] = teacher
        optimizer = plumbing.AdamW(policy.parameters(), lr=cfg.learning_rate)

        run.start(reinforce.evaluate, policy=policy, optimizer=optimizer)
        for step in range(run.step, cfg.max_steps):
            uniform = torch.rand((), generator=common.generator(cfg.seed, "lmbda", step))
            is_own = uniform.item() < cfg.lmbda             # whether the student writes
            batch = reinforce.sample_batch(policy if is_own else teacher, task, cfg, step)
            hints = add_hints(task, batch, cfg)
            A = reinforce.advantages(batch.rewards, cfg.baseline).view(-1, 1).to(batch.mask)
            metrics = update(policy, teacher, optimizer, batch, hints, A, cfg, step)
            share = hints[1].mean().item()
            run.log(batch, (A if cfg.teacher_coef > 0 else 1) * batch.mask, metrics | {
                "on_policy": float(is_own), "self_distillation/reprompt_sample_fraction": share})
        return run.finish()


if __name__ == "__main__":
    main()
