"""Plausible mistakes, each of which the tests have to see: make mutants, or python tests/mutants.py WORD ...

One at a time, in a copy of the repository, the old text of a mistake is replaced by the new, and the tests
named with it run until one fails: the mistake is killed. One that survives is a test that is missing. It is
an error if the old text does not occur exactly once, if the mistake breaks the import (that, anyone sees), or
if its tests fail without it. A function that several scripts share is changed in the one that tests look at;
tests/test_sync.py, which would see any change of it, is not asked. A WORD is of the script, name or tests.

In MISTAKES, `== script | tests` says whose mistakes follow and who should see them: a file, and an expression
for pytest -k. Then, of each, its name, the lines that are replaced (-), those that take their place (+).
"""
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 120                                           # a mistake that makes the tests hang is killed, too
FORK = sys.platform == "linux"                          # elsewhere each process imports torch itself
PRELOAD = ("torch", "torch._dynamo")    # the second by the first optimizer step; here once, for all forks


class Mutant(NamedTuple):
    script: str
    mistake: str
    old: str
    new: str
    tests: str


def parse(text):
    """The mutants of a text like MISTAKES."""
    mutants, script, tests = [], "", ""
    for line in text.strip().split("\n"):
        mark, rest = line[:2].strip(), line[2:]
        if mark == "==":
            script, tests = rest.strip().split(" | ")
        elif mark == "-":
            mutants[-1] = mutants[-1]._replace(old=f"{mutants[-1].old}\n{rest}".removeprefix("\n"))
        elif mark == "+":
            mutants[-1] = mutants[-1]._replace(new=f"{mutants[-1].new}\n{rest}".removeprefix("\n"))
        elif line:
            mutants.append(Mutant(script, line, "", "", tests))
    return mutants


def put(mutant, folder):
    """Make the mistake in the copy. -> None, or what is wrong with the mutant"""
    path = folder / mutant.script
    source = path.read_text() if path.is_file() else ""
    if source.count(mutant.old) != 1 or mutant.old == mutant.new:
        return f"the old text occurs {source.count(mutant.old)} times"
    path.write_text(source.replace(mutant.old, mutant.new))


class Watch:
    """A plugin that remembers the first test that failed."""
    failed = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.failed:
            self.failed = report.nodeid.split("::")[-1]


def run_tests(folder, tests):
    """In a process of its own: run them in the folder, and leave in result.json [exit code, what failed]."""
    import pytest
    with open(folder / "output.txt", "w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.chdir(folder)
    # the copy's modules, not ours; but what is installed in ROOT/.venv stays
    sys.path[:] = [path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests")]
    file, _, words = tests.partition(" ")
    watch = Watch()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder / "tmp"),
                        f"tests/{file}", "-k", words], plugins=[watch])
    (folder / "result.json").write_text(json.dumps([int(code), watch.failed]))


def start(folder, tests):
    """A process that runs the tests."""
    context = multiprocessing.get_context("fork" if FORK else "spawn")
    process = context.Process(target=run_tests, args=(folder, tests))
    gc.freeze()                     # else each fork would look for garbage in all of torch, ten times
    process.start()
    gc.unfreeze()
    return process


def verdict(process, folder, seconds):
    """What came of the tests: None while they run, else (passed, failed or broken; which test, or why)."""
    if process.is_alive() and seconds < SECONDS:
        return None
    if process.is_alive():
        process.kill()
        process.join()
        return "failed", f"no end after {SECONDS} s"
    if not (folder / "result.json").is_file():
        return "failed", f"the process died with {process.exitcode}"
    code, failed = json.loads((folder / "result.json").read_text())
    if code == 0:
        return "passed", ""
    return ("failed", failed) if code == 1 and failed else ("broken", f"pytest ends with {code}")


def each(jobs, base, scratch):
    """Run the jobs, (mutant or None, tests), as many at a time as there are cores. Yields as they end:
    (mutant, tests, *verdict, seconds, what was printed)"""
    waiting, running = list(enumerate(jobs)), []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            number, (mutant, tests) = waiting.pop(0)
            folder = scratch / str(number)
            shutil.copytree(base, folder)
            wrong = put(mutant, folder) if mutant else None
            if wrong:
                yield mutant, tests, "broken", wrong, 0.0, ""
            else:
                running.append((mutant, tests, folder, start(folder, tests), time.perf_counter()))
        for job in list(running):
            mutant, tests, folder, process, clock = job
            seconds = time.perf_counter() - clock
            if found := verdict(process, folder, seconds):
                running.remove(job)
                yield mutant, tests, *found, seconds, (folder / "output.txt").read_text()
                shutil.rmtree(folder)
        time.sleep(0.01)


def main(words):
    """-> exit code, 1 if a mutant survives or is broken, or if its tests fail without it"""
    mutants = [m for m in parse(MISTAKES) if all(w in f"{m.script} {m.mistake} {m.tests}" for w in words)]
    if not mutants:
        print(f"no mistake has all of these words: {' '.join(words)}")
        return 1
    begin, killed, ready = time.perf_counter(), 0, True
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}      # no pools, which forks break
    for name in PRELOAD if FORK else ():
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        base, scratch = Path(folder, "base"), Path(folder, "work")
        shutil.copytree(ROOT, base, ignore=shutil.ignore_patterns(".*", "runs", "docs", "__pycache__"))
        no_mistake = [(None, tests) for tests in dict.fromkeys(mutant.tests for mutant in mutants)]
        for _, tests, word, detail, seconds, output in each(no_mistake, base, scratch):
            print(f"{word:9}{seconds:5.1f} s  no mistake: {tests}  {detail}", flush=True)
            if word != "passed":
                ready = print(output)
        if not ready:
            print("tests have to be there, and to pass, before a mistake tells anything")
            return 1
        for mutant, tests, word, detail, seconds, _ in each([(m, m.tests) for m in mutants], base, scratch):
            killed += word == "failed"
            word = {"failed": "killed", "passed": "SURVIVED", "broken": "BROKEN"}[word]
            line = f"{word:9}{seconds:5.1f} s  {mutant.script}: {mutant.mistake}  [{detail or tests}]"
            print(line[:160], flush=True)
    print(f"{killed}/{len(mutants)} killed, {time.perf_counter() - begin:.0f} s")
    return int(killed < len(mutants))


MISTAKES = r"""
== reinforce.py | test_reinforce_math.py
the sign of the loss
- torch.where(mask > 0, -A * logps, 0.0)
+ torch.where(mask > 0, A * logps, 0.0)
the loss has the probability, not its logarithm
- torch.where(mask > 0, -A * logps, 0.0)
+ torch.where(mask > 0, -A * logps.exp(), 0.0)
an advantage per row is taken as one per token
- A = advantages if advantages.dim() == 2 else advantages[:, None]
+ A = advantages
the baseline of RLOO has the own return in it
- "rloo": plain,
+ "rloo": rewards.mean(1, keepdim=True),
the others' sum is divided by G
- plain = rewards @ others / others.sum(0)
+ plain = rewards @ others / len(others)
the group's mean is that of the batch
- "mean": rewards.mean(1, keepdim=True)
+ "mean": rewards.mean()
the batch's mean is that of the group
- "batch": rewards.mean(),
+ "batch": rewards.mean(1, keepdim=True),
the optimal baseline has the own return in it
- (w * rewards) @ others / (w @ others)
+ (w * rewards).sum(1, keepdim=True) / w.sum(1, keepdim=True)
the optimal baseline is not weighted
- (w * rewards) @ others / (w @ others)
+ plain
the optimal baseline is 0 / 0 where nothing weighs
- torch.where(w @ others > 0, (w * rewards) @ others / (w @ others), plain)
+ (w * rewards) @ others / (w @ others)
groups of equals get rounding errors
- torch.where(has_signal(rewards) | (baseline in ("none", "batch")), rewards - b, 0.0)
+ rewards - b
groups of equals get nothing from the mean of the batch
- (baseline in ("none", "batch"))
+ (baseline == "none")
the population's optimal baseline divides by the weights alone
- / (weights * sq_grad_norms).sum()
+ / weights.sum()
the population's optimal baseline knows no probabilities
- (weights * sq_grad_norms * rewards).sum() / (weights * sq_grad_norms).sum()
+ (sq_grad_norms * rewards).sum() / sq_grad_norms.sum()
the reward-to-go is not discounted
- r + gamma * G, G)
+ r + G, G)
the reward of the token itself is discounted
- r + gamma * G, G)
+ gamma * (r + G), G)
the rewards so far in place of those to come
- in zip(rewards.T.flip(0), mask.T.flip(0)):
+ in zip(rewards.T, mask.T):
the reward-to-go is backwards
- return torch.stack(slots[::-1], 1)
+ return torch.stack(slots, 1)
masked slots are steps that discount
- torch.where(m > 0, r + gamma * G, G)
+ r * m + gamma * G

== reinforce.py | test_gradient.py reinforce and not flag
1/B counts the rows that are not skipped
- count = len(rows) if
+ count = len(used) if
rejection sampling averages over the wrong ones, too
- count = len(rows) if cfg.method == "reinforce" else max(1, batch.right.view(-1)[rows].sum().item())
+ count = len(rows)
rejection sampling counts all rows that move the policy
- max(1, batch.right.view(-1)[rows].sum().item())
+ max(1, signal.sum().item())
a row of which one token has no advantage is skipped
- (A[rows].view(len(rows), -1) != 0).any(1)
+ (A[rows].view(len(rows), -1) != 0).all(1)
rows without advantage are left out although there is a bonus
- used = rows if entropy_coef else rows[signal]
+ used = rows[signal]
a mean over the tokens favours short answers
- part_loss = aggregate(terms, m, "sequence_sum", count)
+ part_loss = aggregate(terms, m, "sequence_mean", count)
the bonus is a penalty
- m) - entropy_coef * entropy
+ m) + entropy_coef * entropy
the KL raises the reward
- rewards = rewards - cfg.beta * kl(
+ rewards = rewards + cfg.beta * kl(
the KL in the reward is k3
- kl(logps, ref_logps, "k1") * mask
+ kl(logps, ref_logps, "k3") * mask
the KL in the reward is upside down
- kl(logps, ref_logps, "k1") * mask
+ kl(ref_logps, logps, "k1") * mask
the discount is forgotten
- to_go = rewards_to_go(rewards, mask, cfg.gamma)
+ to_go = rewards_to_go(rewards, mask, 1.0)
each token has the return of the whole
- (cfg.view == "token"))
+ 0)
a verdict comes with the first token
- (out.mask * torch.arange(1, out.mask.shape[1] + 1).to(found)).argmax(
+ out.mask.argmax(
a move is rewarded a token late
- zip(ends, ends[1:])]
+ zip([0, *ends], ends)][:-1]
bytes are counted for characters
- ends = [len(decode(ids[:t])) for t in range(n + 1)]
+ ends = list(range(n + 1))
rejection sampling takes a reward above 1 for right, and one below for wrong
- else ((), batch.right)
+ else ((), batch.rewards >= 1)
rejection sampling has rewards for moves
- else ((), batch.right)
+ else (batch.verdicts, batch.right)

== reinforce.py | test_survivors.py reinforce
the KL is not detached
- @torch.no_grad()
- def credit(
+ def credit(
the token view has no baseline
- (A + (to_go - to_go[:, :1]) * (cfg.view == "token"))
+ (to_go if cfg.view == "token" else A)
the norms of gradients are not squared
- gradient.square().sum() for
+ gradient.abs().sum() for
the padding has a part in the norms
- "torch")[0] * mask).sum()
+ "torch")[0]).sum()
norms of the gradient of the probability
- "torch")[0] * mask).sum()
+ "torch")[0] * mask).sum().exp()

== ppo.py | test_ppo_math.py
GAE takes V of now for V of next
- r + gamma * V - v + gamma * lam * A, A)
+ r + gamma * v - v + gamma * lam * A, A)
GAE takes V of next twice
- r + gamma * V - v + gamma * lam * A, A)
+ r + gamma * V - V + gamma * lam * A, A)
GAE counts masked slots as steps
- A = torch.where(m > 0, r + gamma * V - v + gamma * lam * A, A)
+ A = (r + gamma * V - v) * m + gamma * lam * A
GAE takes V of a masked slot for that of the next token
- V = torch.where(m > 0, v, V)
+ V = v
GAE does not discount what comes later
- gamma * lam * A, A)
+ lam * A, A)
GAE without lambda
- gamma * lam * A, A)
+ gamma * A, A)
GAE backwards
- A = torch.cat(slots[::-1], 1) * mask
+ A = torch.cat(slots, 1) * mask
returns are the advantages
- return A, (A + values) * mask
+ return A, A * mask
whitening counts the padding
- n = mask.sum()
+ n = torch.ones_like(mask).sum()
whitening does not shift
- x = (x - (x * mask).sum() / n.clamp(min=1)) * mask
+ x = x * mask
whitening row by row
- x = (x - (x * mask).sum() / n.clamp(min=1)) * mask
+ x = (x - (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)) * mask
whitening with ddof 0
- x.square().sum() / (n - 1).clamp(min=1)
+ x.square().sum() / n.clamp(min=1)
whitened padding is not 0
- x = (x - (x * mask).sum() / n.clamp(min=1)) * mask
+ x = x - (x * mask).sum() / n.clamp(min=1)
lambda below 0
- (1 - 1 / (alpha * lengths[:, None])).clamp(min=0)
+ (1 - 1 / (alpha * lengths[:, None]))
lambda with alpha upside down
- (1 - 1 / (alpha * lengths[:, None]))
+ (1 - alpha / lengths[:, None])
the clip of the critic is no pessimist: min for max
- return torch.max((values - returns)
+ return torch.min((values - returns)
the critic is not clipped
- return torch.max((values - returns).square(), (near - returns).square()) / 2 * mask
+ return (values - returns).square() / 2 * mask
the critic's loss is not halved
- (near - returns).square()) / 2 * mask
+ (near - returns).square()) * mask
the critic is clipped around 0
- near = old_values + (values - old_values).clamp(
+ near = values.clamp(
the critic learns the padding
- (near - returns).square()) / 2 * mask
+ (near - returns).square()) / 2
max for min in the clip
- return -torch.min(ratio * A,
+ return -torch.max(ratio * A,
epsilon and epsilon_high are swapped
- ratio.clamp(1 - epsilon, 1 + epsilon_high)
+ ratio.clamp(1 - epsilon_high, 1 + epsilon)
the penalty is that of KL(new || old)
- torch.expm1(log_rho) - log_rho
+ torch.expm1(-log_rho) + log_rho
the penalty rewards distance
- * A + beta * (torch
+ * A - beta * (torch
the penalty has no weight
- * A + beta * (torch
+ * A + (torch
a critic that explains all has explained variance 0
- return (1 - (returns - values)[mask > 0].var() / variance).item()
+ return ((returns - values)[mask > 0].var() / variance).item()
explained variance of the padding, too
- (returns - values)[mask > 0].var()
+ (returns - values).var()
the coefficient adapts the wrong way
- 2.0 if kl > 1.5 * target > 0 else 0.5 if target and
+ 0.5 if kl > 1.5 * target > 0 else 2.0 if target and
the coefficient never falls
- else 0.5 if target and kl < target / 1.5 else 1.0
+ else 1.0
a coefficient without a target adapts
- 1.5 * target > 0 else 0.5 if target and kl
+ 1.5 * target else 0.5 if kl

== ppo.py | test_ppo_math.py step or conjugate or natural or weights_stay or second_derivative
TRPO steps without a look at the KL
- if divergence <= max_kl and surrogate > before:
+ if surrogate > before:
TRPO steps without a look at the surrogate
- if divergence <= max_kl and surrogate > before:
+ if divergence <= max_kl:
TRPO has no damping
- retain_graph=True)) + damping * v
+ retain_graph=True))
TRPO's step lacks the 2 under the root
- step = (2 * max_kl /
+ step = (max_kl /
TRPO's step lacks the root
- (s @ fisher(s)).clamp(min=1e-20)).sqrt() * s
+ (s @ fisher(s)).clamp(min=1e-20)) * s
TRPO goes downhill
- move(start + step * 0.8
+ move(start - step * 0.8
TRPO along the plain gradient
- s = conjugate_gradients(fisher, gradient)
+ s = gradient
TRPO keeps a step that did not help
- move(start + step * 0.8 ** backtracks if backtracks < 10 else start)
+ move(start + step * 0.8 ** backtracks)
conjugate gradients that stop after one
- def conjugate_gradients(product, b, iterations=10):
+ def conjugate_gradients(product, b, iterations=1):
conjugate gradients that are not conjugate
- direction = residual + size / before.clamp(min=1e-30) * direction
+ direction = residual
TRPO maximises the loss
- return -aggregate(terms, mask, "token_mean"), aggregate(
+ return aggregate(terms, mask, "token_mean"), aggregate(
TRPO's KL is that of new from old
- divergence = (first["logp"].exp() * (first["logp"] - logp)).sum(-1)
+ divergence = (logp.exp() * (logp - first["logp"])).sum(-1)
TRPO's KL at another temperature
- logp = torch.log_softmax(logits / cfg.temperature, -1)                                  # (B, T, V)
+ logp = torch.log_softmax(logits, -1)

== ppo.py | test_gradient.py credit_of and ppo
the KL raises the reward
- rewards - beta * to_base
+ rewards + beta * to_base
the KL in the reward is k3
- *cfg.scoring)[0], "k1") * mask
+ *cfg.scoring)[0], "k3") * mask
the critic's targets are whitened
- returns=returns,
+ returns=whiten(returns, mask),
the critic's targets are made of whitened advantages
- returns=returns,
+ returns=whiten(A, mask) + values,
advantages are not whitened
- advantages=whiten(A, mask)
+ advantages=A
the critic has the actor's lambda
- lam if critic_lam < 0 else critic_lam)
+ lam)
the actor has the critic's lambda
- A, _ = gae(rewards, values, mask, cfg.gamma, lam)
+ A, _ = gae(rewards, values, mask, cfg.gamma, lam if critic_lam < 0 else critic_lam)
lambda never adapts to the length
- if cfg.length_adaptive == "yes" else
+ if cfg.length_adaptive == "always" else
the verdict comes with the first token
- (out.mask * torch.arange(1, out.mask.shape[1] + 1).to(found)).argmax(
+ out.mask.argmax(

== ppo.py | test_gradient.py is_cut and ppo
actor and critic share their weights
- self.gpt, self.head = copy.deepcopy(gpt), nn
+ self.gpt, self.head = gpt, nn
the policy's counts are those of the micro-batch
- part_loss = aggregate(terms, m, "token_mean", num_tokens=mask[rows].sum())
-         part_loss.backward()                                                                    # eq. (5)
+ part_loss = aggregate(terms, m, "token_mean")
+         part_loss.backward()
the critic's counts are those of the micro-batch
- part_loss = aggregate(terms, m, "token_mean", num_tokens=mask[rows].sum())
-         part_loss.backward()
-         loss += part_loss.item()
+ part_loss = aggregate(terms, m, "token_mean")
+         part_loss.backward()
+         loss += part_loss.item()
the policy keeps the gradient of the step before
- policy.zero_grad()
+ pass
the entropy is lowered
- return terms - coefs["entropy"] * entropy
+ return terms + coefs["entropy"] * entropy
right answers are unlearned
- - cfg.nll_coef * right * logps
+ + cfg.nll_coef * right * logps
wrong answers are learned by heart, too
- - cfg.nll_coef * right * logps
+ - cfg.nll_coef * logps
the likelihood is averaged over all tokens
- right = right * (mask[rows].sum() / (mask * right)[rows].sum().clamp(min=1))        # their mean, in (5)
+ pass
the critic's clip is around what it says now
- terms = value_loss(values, credit.values[part, :T],
+ terms = value_loss(values, values.detach(),

== ppo.py | test_gradient.py means_over_the_optimizer and ppo
how far the policy moved leaves the last step out
- moved = seen[-1]["policy_kl"] if trpo else
+ moved = seen[-1]["policy_kl"] if True else

== ppo.py | test_gradient.py too_far or critic_says
the passes never end early
- 0 < 1.5 * cfg.target_kl < metrics["policy_kl"]
+ False
the passes end early without a target
- 0 < 1.5 * cfg.target_kl < metrics["policy_kl"]
+ 1.5 * cfg.target_kl < metrics["policy_kl"]
the value is that of the token, not of what comes before it
- self.gpt.states(prompts, of, tokens) @ self.head
+ self.gpt.states(prompts, of, torch.cat([tokens, tokens], 1))[:, 1:tokens.shape[1] + 1] @ self.head

== common.py | test_run.py add_up
a reward that grows is logged for the next step
- cfg.reward, n - 1)
+ cfg.reward, n)

== tasks/mix.py | test_preferences.py added
the reward model's word replaces the other rewards
- "rewards": batch.rewards + rewards,
+ "rewards": rewards,

== tasks/mix.py | test_cli.py not_spoken
dynamic sampling goes by a reward that is not there yet
- if not named and cfg.dynamic_sampling:
+ if False:

== ppo.py | test_preferences.py hears
the critic that learns alone does not hear the reward model
- batch = common.tasks.judged(sample_batch(policy, cfg, f"critic {i}"), parts)
+ batch = sample_batch(policy, cfg, f"critic {i}")

== ppo.py | test_survivors.py critic or passes or coefficients
the coefficient of the penalty adapts where there is none
- cfg.trust_region == "penalty" and cfg.target_kl
+ cfg.target_kl
advantages carry a gradient to the critic
- @torch.no_grad()
- def assign_credit(
+ def assign_credit(
the critic keeps the gradient of the step before
- critic.zero_grad()
+ pass
the passes end early with a penalty, too
- if trpo or cfg.trust_region == "clip" and 0 < 1.5
+ if trpo or 0 < 1.5
beta adapts to the KL of the step, not to that from the base
- adapted(beta, credit.kl, cfg.kl_target)
+ adapted(beta, metrics["policy_kl"], cfg.kl_target)
the penalty adapts to the KL from the base
- adapted(penalty_coef, metrics["policy_kl"], cfg
+ adapted(penalty_coef, credit.kl, cfg
before training, the critic learns the actor's returns
- credit = assign_credit(critic, ref, batch, cfg, cfg.beta, critic_lam=1.0)
+ credit = assign_credit(critic, ref, batch, cfg, cfg.beta, cfg.critic_lam)

== grpo.py | test_grpo_math.py
the group's std has ddof 0
- rewards.std(1, keepdim=True) + eps
+ rewards.std(1, keepdim=True, correction=0) + eps
eps inside the square root
- rewards.std(1, keepdim=True) + eps
+ (rewards.var(1, keepdim=True) + eps).sqrt()
the std is the batch's
- "group": rewards.std(1, keepdim=True)
+ "group": rewards.std()
no eps
- rewards.std(1, keepdim=True) + eps
+ rewards.std(1, keepdim=True)
the mean is the batch's
- (rewards - rewards.mean(1, keepdim=True)) /
+ (rewards - rewards.mean()) /
groups of equals get rounding errors
- torch.where(has_signal(rewards), A, 0.0)
+ A
max for min in the clip
- -torch.min(ratio * A
+ -torch.max(ratio * A
the clip bounds good and bad alike
- -torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon_high) * A)
+ -ratio.clamp(1 - epsilon, 1 + epsilon_high) * A
epsilon and epsilon_high are swapped
- ratio.clamp(1 - epsilon, 1 + epsilon_high)
+ ratio.clamp(1 - epsilon_high, 1 + epsilon)
the policy is pushed away from what is good
- "clip": -torch.min
+ "clip": torch.min
CISPO's weight is not detached
- ratio.clamp(max=1 + epsilon_high).detach()
+ ratio.clamp(max=1 + epsilon_high)
CISPO has a lower bound
- ratio.clamp(max=1 + epsilon_high).detach()
+ ratio.clamp(1 - epsilon, 1 + epsilon_high).detach()
SAPO's temperatures are swapped
- (A <= 0).to(A)
+ (A > 0).to(A)
SAPO without its 4 / tau
- -4 / tau * torch.sigmoid
+ -torch.sigmoid
the ratio is upside down
- mask > 0, logps - old_logps.detach(), 0.0
+ mask > 0, old_logps.detach() - logps, 0.0
masked slots have a loss
- return torch.where(mask > 0, surrogate[LOSS_TYPES[loss_type][0]], 0.0)
+ return surrogate[LOSS_TYPES[loss_type][0]]
the old log-probs get a gradient
- logps - old_logps.detach(), 0.0
+ logps - old_logps, 0.0
k1 has the wrong sign
- "k1": x}
+ "k1": -x}
k3 is upside down
- torch.expm1(-x) + x
+ torch.expm1(x) - x
k3 without expm1: rounding makes it negative
- torch.expm1(-x) + x
+ torch.exp(-x) - 1 + x
k2 is not halved
- x.square() / 2
+ x.square()
k2 is the default estimator
- def kl(logps, ref_logps, estimator="k3")
+ def kl(logps, ref_logps, estimator="k2")
sequence_mean divides by the slots
- (x.sum(1) / lengths).sum() / N
+ x.mean(1).sum() / N
token_mean is a mean of means
- "token_mean": x.sum() / M
+ "token_mean": (x.sum(1) / lengths).mean()
the default token count is that of the slots
- M = mask.sum().clamp(min=1) if
+ M = mask.numel() if
Dr. GRPO divides by the longest row
- x.sum() / (N * (max_length or x.shape[1]))
+ x.sum() / (N * lengths.max())
sequence_sum counts rows that have a token
- "sequence_sum": x.sum() / N
+ "sequence_sum": x.sum() / (mask.sum(1) > 0).sum().clamp(min=1)
masked slots are averaged in
- x, lengths = x * mask, mask
+ x, lengths = x, mask
the overlong penalty is a reward
- .clamp(-1.0, 0.0)
+ .clamp(-1.0, 0.0).abs()
the overlong penalty begins too late
- (max_length - buffer - lengths)
+ (max_length - lengths)

== tools/scores.py | test_grpo_math.py majority or pass_at
an empty answer has a vote
- for answer in answers if answer is not None]
+ for answer in answers]
the last of tied answers wins
- return max(votes, key
+ return max(votes[::-1], key
pass@k is the biased estimator
- 1 - math.comb(n - c, k) / math.comb(n, k)
+ 1 - (1 - c / n) ** k

== tools/scores.py | test_grpo_math.py vote
problems without an answer are voted on
- if problems[first].answer]
+ if problems[first]]

== tools/scores.py | test_rollout.py evaluation
pass@k counts the first k of other problems
- hits = [sum(right[i:i + k]) for i in range(0, len(right), k)]
+ hits = [sum(right[i::len(right) // k]) for i in range(len(right) // k)]
the blocks of maj@k overlap
- first + n - k + 1, k)]
+ first + n - k + 1)]
the last block of maj@k is of two problems
- range(first, first + n - k + 1, k)]
+ range(first, first + n, k)]
maj@k takes the first block only
- range(first, first + n - k + 1, k)]
+ range(first, first + 1)]

== grpo.py | test_gradient.py is_cut and grpo-grpo]
the counts are those of the micro-batch
- aggregate(terms, m, averaging, len(rows), mask[rows].sum(), cfg.max_completion_length)
+ aggregate(terms, m, averaging, max_length=cfg.max_completion_length)
the rows of the micro-batch are counted
- averaging, len(rows), mask[rows]
+ averaging, len(part), mask[rows]
the entropy is lowered
- - entropy_coef * entropy)
+ + entropy_coef * entropy)
the KL pushes away from the reference
- (cfg.beta and cfg.beta * kl(
+ (cfg.beta and -cfg.beta * kl(
the gradient of the step before is kept
- weight.grad = torch.zeros_like(weight)
+ weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
only the last micro-batch's loss is logged
- loss, largest = loss + part_loss.item()
+ loss, largest = part_loss.item()
scored at another temperature than sampled
- logps, entropy = score(policy, batch.prompts, of, tokens, *cfg.scoring)
+ logps, entropy = score(policy, batch.prompts, of, tokens)
a row has the reference of another one
- batch.ref_logps[part, :T] * m
+ batch.ref_logps[part.flip(0), :T] * m

== grpo.py | test_gradient.py is_cut and dr_grpo-grpo]
Dr. GRPO divides by the longest row of the micro-batch
- mask[rows].sum(), cfg.max_completion_length)
+ mask[rows].sum(), T)

== grpo.py | test_gradient.py (skipping or without_advantage or bnpo) and grpo]
tokens of skipped rows are not counted
- mask[rows].sum(), cfg
+ mask[used].sum(), cfg
skipped rows are not counted
- averaging, len(rows), mask[rows]
+ averaging, len(used), mask[rows]
BNPO's rows are sorted by length
- cfg.micro_batch_size, averaging != "micro_batch_mean")
+ cfg.micro_batch_size)
BNPO leaves rows out
- used = rows if cfg.beta or entropy_coef or averaging == "micro_batch_mean" else
+ used = rows if cfg.beta or entropy_coef else
rows without advantage are left out although there is a KL
- used = rows if cfg.beta or entropy_coef or
+ used = rows if entropy_coef or
rows without advantage are left out although there is a bonus
- used = rows if cfg.beta or entropy_coef or
+ used = rows if cfg.beta or

== grpo.py | test_gradient.py (long_gradient or new_order or warms_up or falls or metrics) and grpo
the gradient is not clipped
- nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
+ nn.utils.clip_grad_norm_(policy.parameters(), math.inf)
the warm-up begins at 0
- (step + 1) / max(1, cfg.warmup_steps)
+ step / max(1, cfg.warmup_steps)
every pass has the same order
- common.generator(cfg.seed, *purpose, i))
+ common.generator(cfg.seed, *purpose))
every step has the same order
- common.generator(cfg.seed, *purpose, i))
+ common.generator(cfg.seed, i))
one step per pass, whatever num_mini_batches says
- groups.tensor_split(min(cfg.num_mini_batches, len(groups)))
+ groups.tensor_split(1)
the rows of a group are not together
- (some.sort()[0][:, None] * cfg.num_generations + torch.arange(cfg.num_generations)).view(-1)
+ (some.sort()[0][:, None] + len(groups) * torch.arange(cfg.num_generations)).view(-1).sort()[0]
the entropy bonus never falls
- max(0.0, 1 - step / (cfg.entropy_decay_steps or math.inf))
+ 1.0
the entropy bonus becomes a penalty
- max(0.0, 1 - step / (cfg.entropy_decay_steps or math.inf))
+ (1 - step / (cfg.entropy_decay_steps or math.inf))
the clip fraction counts what is clipped on either side
- (A > 0) & (log_rho.exp() > 1 + epsilon_high) | (A < 0) & (log_rho.exp() < 1 - epsilon)
+ (log_rho.exp() > 1 + epsilon_high) | (log_rho.exp() < 1 - epsilon)
metrics average over slots
- (sums[1:] / sums[0].clamp(min=1))
+ (sums[1:] / mask.numel())

== grpo.py | test_kl_metric.py grpo
the reference scores at another temperature
- batch.out.tokens[every], *cfg.scoring)
+ batch.out.tokens[every])
the reference scores other prompts
- score(ref, batch.prompts, batch.of[every], batch.out
+ score(ref, batch.prompts, batch.of[every] * 0, batch.out
the KL of every eighth row is averaged over all
- ((away * mask).sum() / mask.sum())
+ ((away * mask).sum() / batch.out.mask.sum())
the KL of all rows is that of some, although it is in the loss
- slice(None, None, 1 if cfg.beta else 8)
+ slice(None, None, 8)
the KL is that of the base from the policy
- kl(batch.out.logps[every], ref_logps, "k1")
+ kl(ref_logps, batch.out.logps[every], "k1")
the KL counts inserted tokens
- mask, away = batch.out.mask[every], kl(
+ mask, away = (batch.out.mask[every].cumsum(1) > 0).double(), kl(

== grpo.py | test_gradient.py dynamic_sampling_fills or dynamic_sampling_adds or penalty_on
dynamic sampling keeps groups without signal
- signal.int().argsort(descending=True
+ signal.int().argsort(descending=False
dynamic sampling draws the same problems again
- (cfg.seed, step, attempt), split
+ (cfg.seed, step), split
the penalty counts as accuracy
- accuracy=mean(right.view(-1).tolist()))
+ accuracy=rewards.mean().item())

== grpo.py | test_rollout.py
the answer of one prompt for another
- rows += [(some[i // G], text)
+ rows += [(some[i % P], text)
prompts are tiled, completions are not
- of=torch.arange(P * G) // G
+ of=torch.arange(P * G) % P
sampled at another temperature than scored
- torch.softmax(logits / cfg.temperature, -1).cumsum(-1)
+ torch.softmax(logits, -1).cumsum(-1)
log-probs kept at another temperature
- token[:, None], cfg.temperature, cfg.kernel)
+ token[:, None], 1.0, cfg.kernel)
log-probs off by one slot
- torch.cat([first, self.hidden(tokens[:, :-1], cache)], 1) if
+ self.hidden(tokens, cache) if
the EOS is not in the mask
-         for slots, value in zip(out[1:4]
+         active = active & (token != EOS)
+         for slots, value in zip(out[1:4]
the mask goes by the pad's id
- (value * active).to(slots)
+ (value * (active & (token != PAD))).to(slots)
what follows the EOS counts
- (value * active).to(slots)
+ value.to(slots)
the uniform is not scaled to the end of the CDF
- uniforms[rows, t, None] * cdf[:, -1:], right=True
+ uniforms[rows, t, None], right=True
a token of probability 0 can be drawn
- cdf[:, -1:], right=True)
+ cdf[:, -1:], right=False)
all rows have the uniforms of the first
- uniforms[rows, t, None]
+ uniforms[rows * 0, t, None]
uniforms of the row's place in the cache
- uniforms[rows, t, None]
+ uniforms[:len(rows), t, None]
each slot has the same uniform
- uniforms[rows, t, None]
+ uniforms[rows, 0, None]
positions begin at 0 with a cache, too
- torch.arange(start, start + L)
+ torch.arange(L)
positions do not matter
- [:, None] * self.frequencies      # (L
+ [:, None] * 0 * self.frequencies      # (L
later tokens are seen
- .tril(start) > 0
+ .tril(start) >= 0
a token is seen from the next but one on
- .tril(start) > 0
+ .tril(start - 1) + torch.eye(L, start + L) * (start == 0) > 0
the cache keeps the order of finished rows
- cache = {block: kv[:, active] for block, kv in cache.items()}
+ cache = {block: kv[:, :left] for block, kv in cache.items()}
copies of a prompt are not side by side
- cache = {block: kv.repeat_interleave(copies, 1) for
+ cache = {block: kv.repeat(1, copies, 1, 1, 1) for
the entropy has the wrong sign
- squeeze(-1), -plogp.sum(-1)
+ squeeze(-1), plogp.sum(-1)
a token of probability 0 makes the entropy nan
- logp.exp() * logp.clamp(min=-1e4)
+ logp.exp() * logp
evaluation on training problems
- "evaluation", "test", **cfg.options)
+ "evaluation", "train", **cfg.options)

== tasks/__init__.py | test_rollout.py each_move
a reward per move counts only once
- return float(sum(verdict) if
+ return float(verdict[-1] if

== tasks/mix.py | test_rollout.py each_move
right is who earned anything at all
- best(problem) - 1e-6
+ best(problem) * 0 + 1e-6

== grpo.py | test_survivors.py grpo
the reference is the policy
- ref = copy.deepcopy(policy)
+ ref = policy
rotary positions mirror one half
- left * sin + right * cos
+ left * sin - right * cos
every step draws the same uniforms
- "rollout", step, attempt)
+ "rollout", attempt)
every seed draws the same uniforms
- generator(cfg.seed, "rollout"
+ generator("rollout"
the warm start learns the padding, too
- (torch.arange(T) < lengths[rows, None])
+ (torch.arange(T) <= lengths[rows, None])
what a tool says is learned in the warm start
- .to(told) & ~told[rows, :T]
+ .to(told)
demonstrations do not end
- allowed_special="all") + [EOS] for text in texts]
+ allowed_special="all") for text in texts]
the warm start's loss is a mean of its halves
- / lengths.sum().item()).backward()
+ / mask.sum() / 2).backward()
the warm start reads the forum first
- "textbook" if step < cfg.textbook
+ "textbook" if step >= cfg.textbook
a step that is not finite is taken
- if not math.isfinite(
+ if math.isnan(

== grpo.py | test_tokenizer_verifier.py right_answer or anything_else or hostile or prompt
numbers are compared as texts
- int(number[0]) == int(problem.answer)
+ number[0] == problem.answer
two answers in a text, one of them right
- text.count("<answer>") == text.count("</answer>") == 1
+ "<answer>" in text
anything around the number
- number = re.fullmatch("-?
+ number = re.search("-?
prompts are padded on the right
- [PAD] * (width - len(ids)) + ids for
+ ids + [PAD] * (width - len(ids)) for
a prompt can hold special tokens
- map(TOKENIZER.encode_ordinary, prompts)
+ map(lambda p: TOKENIZER.encode(p, allowed_special="all"), prompts)

== gspo.py | test_gspo_math.py
a sum for the mean
- log_rho.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
+ log_rho.sum(1, keepdim=True)
the mean is over the slots
- / mask.sum(1, keepdim=True).clamp(min=1)
+ / mask.shape[1]
an arithmetic mean of the ratios
- log_s = log_rho.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
+ log_s = ((log_rho.exp() * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).log()
GSPO-token lets the gradient into s
- log_s = log_s.detach() + log_rho - log_rho.detach()
+ log_s = log_s + log_rho - log_rho.detach()
GSPO-token clips by token
- log_s = log_s.detach() + log_rho - log_rho.detach()
+ log_s = log_rho
GSPO-token has no gradient
- log_s = log_s.detach() + log_rho - log_rho.detach()
+ log_s = log_s.detach() + 0 * log_rho
the level is not passed on
- log_ratio(logps, old_logps, mask, level).exp()
+ log_ratio(logps, old_logps, mask).exp()

== dpo.py | test_dpo_math.py
chosen and rejected are swapped
- M = (chosen - ref_chosen) - (rejected - ref_rejected)
+ M = (rejected - ref_rejected) - (chosen - ref_chosen)
the reference is left out
- M = (chosen - ref_chosen) - (rejected - ref_rejected)
+ M = chosen - rejected
the reference is added
- M = (chosen - ref_chosen) - (rejected - ref_rejected)
+ M = (chosen - rejected) + (ref_chosen - ref_rejected)
no beta in the sigmoid
- -(1 - e) * log_sigmoid(beta * M)
+ -(1 - e) * log_sigmoid(M)
the loss is the sigmoid, not its logarithm
- nn.functional.logsigmoid
+ torch.sigmoid
smoothing on the wrong side
- -(1 - e) * log_sigmoid(beta * M) - e * log_sigmoid(-beta * M)
+ -e * log_sigmoid(beta * M) - (1 - e) * log_sigmoid(-beta * M)
smoothing that only scales
- - e * log_sigmoid(-beta * M)
+ - e * log_sigmoid(beta * M)
IPO aims at 0
- (M - 1 / (2 * beta)).square()
+ M.square()
IPO aims at 1 / beta
- (M - 1 / (2 * beta)).square()
+ (M - 1 / beta).square()
IPO scales the margin
- (M - 1 / (2 * beta)).square()
+ (beta * M - 1 / 2).square()
the hinge has no beta
- (1 - beta * M).clamp(min=0)
+ (1 - M).clamp(min=0)
the hinge never shuts
- (1 - beta * M).clamp(min=0)
+ (1 - beta * M)
a completion's log-prob is a mean
- return torch.where(mask > 0, logps, 0.0).sum(1)
+ return torch.where(mask > 0, logps, 0.0).sum(1) / mask.sum(1)
the padding counts
- return torch.where(mask > 0, logps, 0.0).sum(1)
+ return logps.sum(1)

== dpo.py | test_gradient.py dpo
the reference is the policy
- ref_logps, _ = score(ref, batch
+ ref_logps, _ = score(policy, batch
the mean is that of the micro-batch
- (loss.sum() / len(longer)).backward()
+ loss.mean().backward()
the gradient of the step before is kept
- weight.grad = torch.zeros_like(weight)
+ weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
scored at another temperature than sampled
- logps, _ = score(policy, batch.prompts, of, tokens, *cfg.scoring)
+ logps, _ = score(policy, batch.prompts, of, tokens)
implicit rewards without beta
- good, bad = cfg.beta * (c - ref_c), cfg.beta * (r - ref_r)
+ good, bad = c - ref_c, r - ref_r
the KL is taken over samples of the wrong policy
- if cfg.online == "yes" else (ref_logps, logps)
+ if cfg.online == "no" else (ref_logps, logps)
the smoothing is forgotten
- cfg.loss_type, cfg.label_smoothing)
+ cfg.loss_type)
every pass has the same order
- "shuffle", step, iteration)
+ "shuffle", step)
one step per pass, whatever num_mini_batches says
- max(1, min(cfg.num_mini_batches, N))
+ 1
completions are cut at the shortest of the pairs
- int(batch.out.lengths[rows].max())
+ int(batch.out.lengths[rows].min())

== dpo.py | test_survivors.py dpo
pairs of different prompts
- order.flip(1)[:, :G // 2].flatten()
+ order.flip(0, 1)[:, :G // 2].flatten()
all pairs are of the first prompt
- torch.arange(P)[:, None] * G
+ torch.arange(P)[:, None] * 0
the worst is chosen
- descending=True, stable=True) + torch
+ descending=False, stable=True) + torch
the best is paired with the best of the worse half
- order.flip(1)[:, :G // 2].flatten()
+ order[:, G - G // 2:].flatten()
pairs of equals
- rewards.flatten()[chosen] > rewards.flatten()[rejected]
+ rewards.flatten()[chosen] >= rewards.flatten()[rejected]
the share of ordered pairs counts those whose chosen one gained
- (good > bad).to(loss)
+ (good > 0).to(loss)
held-out pairs are those of the training problems
- cfg, "pairs", split="test")
+ cfg, "pairs")
offline answers are the policy's
- sample_batch(policy if cfg.online == "yes" else ref, cfg, step, run.weights)
+ sample_batch(policy, cfg, step, run.weights)
online answers are the base's
- sample_batch(policy if cfg.online == "yes" else ref, cfg, step, run.weights)
+ sample_batch(ref, cfg, step, run.weights)

== common.py | test_tokenizer_verifier.py both_splits and 2]
the held-out problems are trained on
- (zlib.crc32(problem.prompt.encode()) % 10 == 0) == held_out
+ True
demonstrations of held-out problems
- problems = sample_problems(task, n, (seed, phase), **options,
+ problems = sample_problems(task, n, (seed, phase), "test", **options,

== common.py | test_tokenizer_verifier.py 0_to_20 or textbook or generator
values above 20
- if 0 <= result <= 20:
+ if 0 <= result <= 25:
the steps of the work are not in order
- str(value), ";".join(work)
+ str(value), ";".join(sorted(work))
a generator ignores its step
- random.Random(repr(purpose))
+ random.Random(repr(purpose[:2]))

== common.py | test_run.py five_and_five and defaults and grpo
the optimizer begins anew after a resume
- part.load_state_dict(self.resumed[name])
+ name == "optimizer" or part.load_state_dict(self.resumed[name])
a resumed run forgets its step
- saved, self.state | saved["state"]
+ saved, self.state | saved["state"] | {"steps": 0}

== common.py | test_run.py stays_as and grpo
a resumed run forgets its last accuracies
- saved, self.state | saved["state"]
+ saved, self.state | saved["state"] | {"recent": []}

== common.py | test_run.py cut_off or stops_when or otherwise
log lines behind the checkpoint stay
- log.truncate(min(log.tell(), self.resumed["logs"][name] if self.resumed else 0))
+ pass
a run stops after one accurate batch
- sum(state["recent"]) < 5 * cfg.stop_at
+ state["recent"][-1:] < [cfg.stop_at]

== common.py | test_learning.py grpo
the trained policy is not evaluated
- "trained": self.both() if state["steps"] else state["base"]
+ "trained": state["base"]

== tools/bases.py | test_run.py each_base_flag and base_steps
a base of other flags is taken from the cache
- if f.metadata["group"] == common.GROUPS[-1]]
+ if False]

== common.py | test_run.py damaged_cached and flipped
a damaged base is taken from the cache
- if zipfile.ZipFile(path).testzip():
+ if False:

== common.py | test_cli.py not_finite and (learning_rate or max_steps)
a flag may be nan
- m.low is None or m.low <= value <= m.high and value < math.inf
+ m.low is None or not (value < m.low or value > m.high or value == math.inf)
a flag may be infinite
- m.low is None or m.low <= value <= m.high and value < math.inf
+ m.low is None or m.low <= value <= m.high

== common.py | test_gradient.py match_a_hand and grpo
the entropy metric averages over slots
- ((out.entropy * out.mask).sum() / lengths.sum())
+ out.entropy.mean()

== common.py | test_insertion.py metrics_are and grpo
the entropy of what an environment said is averaged in
- (out.entropy * out.mask).sum()
+ out.entropy.sum()
what an environment said counts as length
- lengths = batch.rewards, batch.out, batch.out.mask.sum(1)
+ lengths = batch.rewards, batch.out, batch.out.lengths

== common.py | test_mix.py weights or curriculum
the weights of the curriculum are upside down
- rng.random() < weights.get(
+ rng.random() >= weights.get(
what the curriculum knows nothing of is left out
- weights.get(f"{problem.task}-{problem.difficulty}", 1.0)
+ weights.get(f"{problem.task}-{problem.difficulty}", 0.0)
the curriculum takes all difficulties for one
- weights.get(f"{problem.task}-{problem.difficulty}", 1.0)
+ weights.get(f"{problem.task}-3", 1.0)

== common.py | test_mix.py range or warm or self_check
a range of operands lacks its end
- return low, high
+ return low, high - (high > low)
a self-check repairs a right step with a wrong one
- steps[slip] = f"{left}={(int(right) + rng.randint(1, 20)) % 21};wait,{steps[slip]}"
+ steps[slip] = f"{steps[slip]};wait,{left}={(int(right) + rng.randint(1, 20)) % 21}"
the wrong step of a self-check may be right
- rng.randint(1, 20)) % 21
+ rng.randint(0, 5)) % 21

== grpo.py | test_insertion.py not (reinforce or ppo or gspo or dpo)
answers are swapped between the rows of a batch
- queues[i] = TOKENIZER.encode(
+ queues[i - 1] = TOKENIZER.encode(
the copies of a prompt get the answers of other problems
- problems[i // copies], decode(
+ problems[i % len(problems)], decode(
the environment sees nothing of the token that calls it
- decode(out.tokens[i, :t + 1].tolist())
+ decode(out.tokens[i, :t].tolist())
the answer is said last token first
- queues[i].pop(0) if queues[i]
+ queues[i].pop() if queues[i]
queues go by the row's place in the cache
- for i in rows.tolist()])
+ for i in range(len(rows))])
inserted tokens are in the mask
- own | (cfg.mask_tool_tokens == "no")
+ own | True
sampled tokens are not in the mask either once an environment spoke
- own | (cfg.mask_tool_tokens == "no")
+ own & torch.tensor([not queues[i] for i in rows.tolist()])
the mask of what is inserted is off by one
- said < 0, torch.where(said < 0, token, said)
+ rows.new_tensor([not queues[i] for i in rows.tolist()]) > 0, torch.where(said < 0, token, said)
the flag that unmasks what is inserted does nothing
- own | (cfg.mask_tool_tokens == "no")
+ own
an inserted token calls the environment again
- asks = active & own & (token == EOS), active & own & torch.isin
+ asks = active & own & (token == EOS), active & torch.isin
the log-probs are those of what would have been sampled
- logprobs(logits[:, None], token[:, None], cfg
+ logprobs(logits[:, None], logits.argmax(-1)[:, None], cfg
a row ends when it asks
- active = active & ~ends
+ active = active & ~ends & ~asks
a graph samples what an environment has a say in
- prompts.is_cuda and not len(calls):
+ prompts.is_cuda:
the log-probs of inserted tokens count in the largest ratio
- log_rho = (logps - old_logps) * m
+ log_rho = (logps - old_logps) * (old_logps != 0)
the entropy bonus counts inserted tokens
- x, lengths = x * mask, mask.sum(1).clamp(min=1)
+ x, lengths = x * (x != 0), mask.sum(1).clamp(min=1)
the overlong penalty counts what is inserted
- lengths = torch.cat([out.mask.sum(1) for out in outs])
+ lengths = torch.cat([out.lengths for out in outs])
verdicts of other rows
- verdicts=[verdicts[i] for i in chosen]
+ verdicts=[verdicts[i - 1] for i in chosen]
right answers of other groups
- right=right[kept]
+ right=right[kept.flip(0)]

== reinforce.py | test_insertion.py reinforce
a reward for a move lands on the token behind it
- zip(ends, ends[1:])])
+ zip([0, *ends], ends)][:-1])
rewards for what was inserted are lost
- rewards.view(-1, 1).to(found) - found.sum(1, keepdim=True)
+ 0 * rewards.view(-1, 1).to(found)
rewards stay where text was inserted
- row[:n] = mask[:n] * torch.tensor(
+ row[:n] = torch.tensor(
the characters of inserted text are not counted
- ends = [len(decode(ids[:t])) for t in range(n + 1)]
+ ends = [len(decode([i for i, m in zip(ids[:t], mask) if m])) for t in range(n + 1)]

== ppo.py | test_insertion.py ppo
the critic learns what is inserted
- rewards, values = rewards - beta * to_base, critic(*texts) * mask
+ mask, rewards, values = torch.ones_like(mask), rewards - beta * to_base, critic(*texts)

== grpo.py | test_states.py grpo
the states of another prompt
- first = self.hidden(prompts[used], cache, keep=1)[of]
+ first = self.hidden(prompts[used], cache, keep=1)[of.flip(0)]
the keys and values of another prompt
- cache = {block: kv[:, of] for block, kv in cache.items()}
+ cache = {block: kv[:, of.flip(0)] for block, kv in cache.items()}
all prompts are read, wanted or not
- (used, of), cache = of.unique(return_inverse=True), {}
+ (used, of), cache = (torch.arange(len(prompts)), of), {}
a prompt is read for each of its completions
- (used, of), cache = of.unique(return_inverse=True), {}
+ (used, of), cache = (of, torch.arange(len(of))), {}
completions of one token cannot be scored
- if tokens.shape[1] > 1 else first
+ if True else first
prompts get no gradient
- first = self.hidden(prompts[used], cache, keep=1)[of]
+ first = self.hidden(prompts[used], cache, keep=1)[of].detach()
heads share the wrong keys and values
- q = q.reshape(B, self.KV, -1, D // self.H)
+ q = q.reshape(B, -1, self.KV, L, D // self.H).transpose(1, 2).reshape(B, self.KV, -1, D // self.H)

== ppo.py | test_states.py critic and ppo
the critic reads the wrong prompt
- self.gpt.states(prompts, of, tokens)
+ self.gpt.states(prompts, 0 * of, tokens)

== tasks/mix.py | test_mix.py
the curriculum prefers what is solved always or never
- max(0.05, 4 * p * (1 - p))
+ max(0.05, 1 - 4 * p * (1 - p))
the curriculum forgets what is solved
- max(0.05, 4 * p * (1 - p))
+ 4 * p * (1 - p)
rates are those of the last step
- 0.8 * before.get(name, rate) + 0.2 * rate
+ rate
groups all wrong and all right are swapped
- for end in (0, 1))
+ for end in (1, 0))
the frontier counts completions, not groups
- for problem, share in zip(problems, right.float().mean(1).tolist()):
+ for problem, share in zip([p for p in problems for _ in right[0]], right.view(-1).float().tolist()):
the frontier is of the task, not of the difficulty
- return f"{problem.task}-{problem.difficulty}"
+ return f"{problem.task}-"
a check counts as a repair, right or wrong
- sum(checks) / len(checks) if checks else None
+ 1.0 if checks else None
one task has all the problems of a mix
- name = rng.choice(names)
+ name = names[-1]
the width of a mix is the first task's
- return max(part.width(**pick(name, options)) for name, part in parts.items())
+ return next(part.width(**pick(name, options)) for name, part in parts.items())
a mix is as short as the shortest wants
- getattr(common.Config, name, 0)) for some in flags)
+ 0) or 1 for some in flags[:1])
any problem may call the tool of another
- for task in {problem.task for problem in problems}
+ for task in ("lookup",)
who has no tool is answered
- task = common.load_task(problem.task)
-     token = any(
+ task = common.load_task("lookup")
+     token = any(

== tasks/countdown.py | test_countdown.py anything_else or often_as_it_is_given or rank or hits_the_target
a number may be used again
- numbers.remove(tokens[-1])
+ numbers.index(tokens[-1])
what follows the expression is not read
- == int(target) and not tokens)
+ == int(target))
signs bind from the right
- sign, operand = tokens.pop(), value(tokens, numbers, level + 1)
+ sign, operand = tokens.pop(), value(tokens, numbers, level)
products bind no closer than sums
- in ("+-", "*")[level]:
+ in "+-*":
a parenthesis need not be closed
- if tokens.pop() != ")":
+ if tokens and tokens.pop() != ")":

== tasks/lookup.py | test_lookup.py limit or call or malformed or four
one call more than the limit is answered
- > CALL_LIMIT:
+ > CALL_LIMIT + 1:
one call less than the limit is answered
- > CALL_LIMIT:
+ >= CALL_LIMIT:
malformed calls are free
- if text.count("</search>") > CALL_LIMIT:
+ if text.count("<search>") > CALL_LIMIT:
the key of the call before is looked up
- tail = text.removesuffix("</search>").rpartition("</search>")[2]
+ tail = text.removesuffix("</search>")
"""

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
