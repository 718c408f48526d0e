"""GRPO on a pretrained model that calls a tool: an output is an episode of several turns.

  A_i   = (r_i - mean(r)) / (std(r) + 1e-4)                                          (1)
  rho_t = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)                                  (2)
  L_t   = -min(rho_t A, clip(rho_t, 1 - eps_low, 1 + eps_high) A)                    (3)
  L     = 1/B sum_i 1/n_i sum_t m_t L_t                                              (5)

A turn ends with a call, such as <calc>3 + 4</calc>. The tool's answer follows, and the policy
continues. m_t is 0 for the tool's tokens, and 1 for the policy's, of which output i has n_i. For a
tool of your own, change CALL, FRAME, `respond` and, as in real.py, the problems and `verify`.
To run it, see real.py: python THIS_FILE MODEL [FILE.jsonl]
"""
import atexit
import copy
import functools
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import sys
import time
from decimal import Decimal
from multiprocessing.pool import ThreadPool

if __name__ == "__main__" and os.path.isdir(os.path.join(sys.path[0], "kernels")):
    sys.path.pop(0)             # transformers would take this folder for a package of that name
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
P = 32              # questions in a step
G = 8               # outputs to each question; an update uses half of the P * G outputs
W = 512             # tokens in a question, at most
T = 256             # tokens in an output, at most
K = 4               # turns in an output, at most: the tool answers K - 1 times
CALL = None         # the end of a call, or several ends in a tuple; None: see `framed`
FRAME = None        # two texts around an answer, which may contain control tokens
PATIENCE = 60       # seconds for the calls that end at the same time
M = max(1, int(torch.cuda.mem_get_info()[0] / 5e9)) if DEVICE == "cuda" else 4
N = None            # outputs to sample at a time, None: 16 * M; M are scored at a time
TEMPERATURE = 1.0
STEPS = 100         # of P * G outputs, with two updates each
SAVE_STEPS = 10     # steps after which the model is saved
SEED = 0            # of the problems and the samples
RATE = 1e-6         # learning rate in the first step, from which it falls to 0
HELD_OUT = 100      # questions in an evaluation, at most a tenth of all
PAD = -1            # fills a row before its question and after its output; no model has this token
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32   # of products, not of weights
GAP = 1e-3 if DEVICE == "cpu" else 0.05         # largest difference of sampler and trainer in nats
torch.backends.cuda.enable_cudnn_sdp(False)     # which would plan again for each length
SIGNALS = {getattr(signal, "SIG" + x, 2) for x in ("INT", "TERM", "HUP", "USR1", "XCPU")}
PROBLEMS = []                           # to train on
UNUSED = []                             # those of PROBLEMS that are left over in this pass
METRICS = {}                            # in TRL's names; sample and descend set them, main logs
POOL = ThreadPool(64)                   # runs calls that end at the same time side by side
atexit.register(POOL.terminate)
CALLS = []                              # of this sampling: the error of each, or none
NAMED = {}                              # rewards with a name since the last line of the log
DRAWS = torch.Generator()               # of its own, because your verify may seed torch's

# ---- questions, verifier, tokenizer ----------------------------------------------------------
def make_up_problem(rng):
    """A question such as (17 + 5) * 3 - 8, and its answer. -> str, str"""
    a, b, c, d = rng.randint(2, 30), rng.randint(2, 30), rng.randint(2, 9), rng.randint(2, 30)
    question = f"What is ({a} + {b}) * {c} - {d}? Use <calc>3 + 4</calc>, and end with the number."
    return question, str((a + b) * c - d)

def sample_problem(rng):
    """The next problem to train on; each comes once before one comes again. -> question, answer"""
    if not UNUSED:
        UNUSED.extend(rng.sample(PROBLEMS, len(PROBLEMS)))
    return UNUSED.pop()

def number(text):
    """Read -7, 7.0, 1,200 or 1e-5 exactly. -> Decimal, or None if it is no number, such as 1,2"""
    text = text.strip().replace("\u2212", "-")                  # U+2212 is a minus, too
    form = r"-?([0-9]+|[0-9]{1,3}(,[0-9]{3})+)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?"
    return Decimal(text.replace(",", "")) if re.fullmatch(form, text) else None

def verify(answer, text):
    """Whether the last number of a text is the answer. Write your own. -> 1.0 or 0.0"""
    right = number(str(answer))
    refuse(right is None, f"the answer {answer!r} is not a number: write your own verify")
    like_numbers = r"(?:(?<![0-9])[-\u2212])?[0-9]+(?:[.,/][0-9]+)*(?:[eE][+-]?[0-9]+)?"
    numbers = re.findall(like_numbers, text)
    return float(numbers != [] and number(numbers[-1]) == right)

def respond(question, text):
    """The tool's answer to the call that ends a text, or "". Write your own. -> str"""
    text = re.sub(r"</calc>(<[^<>]*>)?\s*$", "</calc>", text)      # without the end of a turn
    call = re.search(r"<calc>([1-9][0-9]{0,8} ?[-+*] ?[1-9][0-9]{0,8})</calc>$", text)
    hint = "a call looks like <calc>3 + 4</calc>" * text.endswith("</calc>")
    return str(eval(call[1])) if call else hint

def judge(answer, text):
    """What verify returns: a reward, or several as {name: reward}, which are added. -> float"""
    found = verify(answer, text)
    rewards = found if isinstance(found, dict) else {"": found}
    for name, reward in rewards.items():
        refuse(not hasattr(reward, "__float__") or not math.isfinite(reward),
               f"verify has to return a number, not {found!r}: {answer!r}, {text!r}")
        NAMED.setdefault(name, []).append(float(reward))
    return sum(map(float, rewards.values()))

def encode(questions, L):
    """The tokens of each question, in the model's chat template, after PAD. -> (B, L)"""
    control = {i for i, token in TOKENIZER.added_tokens_decoder.items() if token.special}
    rows = TOKENIZER(list(questions), add_special_tokens=False).input_ids
    for question, row in zip(questions, rows):
        for token in TOKENIZER.convert_ids_to_tokens([*control.intersection(row)]):
            refuse(token in question,   # an unknown word is also a token, but is not written so
                   f"{token!r} is a control token: remove it from {question[:200]!r}")
    texts = questions
    if TOKENIZER.chat_template:         # it also writes BOS; for Qwen3, add enable_thinking=False
        chats = [[{"role": "user", "content": question}] for question in questions]
        try:
            texts = TOKENIZER.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        except Exception as error:      # a template is a program
            sys.exit(f"the chat template fails: {error}: mend TOKENIZER.chat_template in `load`")
    rows = TOKENIZER(list(texts), add_special_tokens=not TOKENIZER.chat_template).input_ids
    refuse(len({*map(tuple, rows)}) < len({(*question.lower().split(),) for question in questions}),
           f"different questions become one prompt, such as {TOKENIZER.decode(rows[0])!r}: "
           "the chat template leaves them out, or the tokenizer lacks their characters")
    for question, row in zip(questions, rows):
        if row[-1:] == [TOKENIZER.eos_token_id]:                # some tokenizers append an end
            row.pop()
        refuse(not 0 < len(row) <= L,
               f"a prompt of {len(row)} tokens, not 1 to W = {L}: {question[:200]!r}")
    return torch.tensor([[PAD] * (L - len(row)) + row for row in rows])

def decode(tokens):
    """What the policy itself wrote, without ends and special tokens. (B, W + T) -> list of str"""
    rows = [[token for token in row if token > PAD] for row in tokens[:, W:].tolist()]
    rows = [row[:-1] if ENDS.intersection(row[-1:]) else row for row in rows]
    return TOKENIZER.batch_decode(rows, skip_special_tokens=True)

# ---- the tool: its tokens are below PAD, so that no loss can take them for the policy's --------
def ids(tokens):
    """The ids of all tokens; the tool's token i is stored as PAD - 1 - i."""
    return torch.where(tokens < PAD, PAD - 1 - tokens, tokens)

def framed():
    """CALL and FRAME; where they are None, as the chat template writes them around an answer."""
    thought = "<think>\n1\n</think>\n\n"
    turns = [{"role": "assistant", "content": f"{thought}a call"},
             {"role": "tool", "content": "an answer"}] * 2
    try:
        chat = TOKENIZER.apply_chat_template([{"role": "user", "content": "1"}, *turns],
                                             tokenize=False, add_generation_prompt=True)
        start, between, again, _, after = re.split("a call|an answer", chat)
    except Exception:           # it has no template, or its template no tools
        return CALL or "</calc>", FRAME or ("<result>", "</result>")
    words = [CALL] if isinstance(CALL, str) else CALL or map(TOKENIZER.decode, ENDS)
    call = min((word for word in words if word in between), key=between.index, default="")
    own = between[between.index(call) + len(call):], after          # the policy writes the call
    if tuple(FRAME or own) != own:
        say(f"FRAME is {FRAME!r}, but the chat template writes {own!r}")
    if not start.endswith(thought) or again != after.removesuffix("<think>\n") + thought:
        say("the chat template changes or drops thoughts of earlier turns, but an episode does not")
    return CALL or call or "</calc>", FRAME or own

say = functools.cache(print)            # each line once

def answer_calls(tokens, column, questions, may_end):
    """Write an answer after each row in which a call ends at this column. (N, W + T), in place"""
    calls, end = [], time.monotonic() + PATIENCE
    for row, token in enumerate(tokens[:, column].tolist()):
        if token > PAD and may_end(token):
            turn = 1 + (tokens[row] < PAD).diff().sum() // 2    # each answer begins and ends once
            before, text = (TOKENIZER.decode(ids(tokens[row, W:column + i])) for i in (0, 1))
            if turn < K and any(text.count(word) > before.count(word) for word in may_end(token)):
                calls.append((row, text, POOL.apply_async(respond, (questions[row], text))))
    for row, text, call in calls:
        try:
            answer = "".join([call.get(max(0, end - time.monotonic()))])
        except Exception as error:              # of respond, of a None, or of its time
            CALLS.append(f"{error!r} after {text[-60:]!r}")
            continue
        CALLS.extend([""] if answer else [])
        first, last = TOKENIZER([*framed()[1]], add_special_tokens=False).input_ids
        inner = TOKENIZER(answer, add_special_tokens=False, split_special_tokens=True).input_ids
        said = [*first, *inner, *last][:W + T - 1 - column] if answer else []
        tokens[row, column + 1:][:len(said)] = PAD - 1 - tokens.new_tensor(said)

# ---- the policy: a causal language model of transformers -------------------------------------
def load(model):
    """Load a model, and TOKENIZER. The generation_config of the model will list all its ends."""
    global TOKENIZER, STORED, ENDS, CALL, FRAME
    try:
        TOKENIZER = AutoTokenizer.from_pretrained(model)
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(DEVICE)
        STORED = type(policy.config).from_pretrained(model).dtype or (      # of few, config.json
            AutoModelForCausalLM.from_pretrained(model, dtype="auto").dtype)        # lacks it
    except Exception as error:                  # of the network, or of a package
        sys.exit(f"{model}: cannot be loaded: {str(error).strip().splitlines()[0]}")
    refuse(getattr(policy, "_hf_peft_config_loaded", False),
           f"{model} is an adapter: merge it into its model, with merge_and_unload")
    refuse(hasattr(policy.config, "quantization_config"),
           f"{model} has quantized weights, which cannot be trained")
    ends = policy.generation_config.eos_token_id                # one id, or several, or None
    ENDS = {*(ends if isinstance(ends, list) else [ends]), TOKENIZER.eos_token_id} - {None}
    refuse(not ENDS, f"{model} has no eos_token_id")
    policy.generation_config = GenerationConfig(    # without settings that cannot be saved again
        eos_token_id=sorted(ENDS), pad_token_id=TOKENIZER.pad_token_id, do_sample=True)
    CALL, FRAME = framed()
    return policy.eval()                        # without dropout, or the first ratios were not 1

def logits_after(policy, tokens, n, cache=None, at=slice(None)):
    """Logits after the last n of columns `at`; the model never sees PAD. (B, L) -> (B, n, V)"""
    is_token = tokens != PAD                                                # (B, L)
    positions = (is_token.cumsum(1) - 1).clamp(min=0)                       # (B, L)
    return policy(                              # earlier columns are in the cache
        input_ids=ids(tokens[:, at]).clamp(min=0), position_ids=positions[:, at],
        attention_mask=is_token.long(), use_cache=cache is not None,
        logits_to_keep=n, cache=cache).logits

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernels", "logprob.py")
KERNEL = runpy.run_path(PATH) if os.path.exists(PATH) else None     # does not copy the logits

@torch.autocast(DEVICE, DTYPE, enabled=DEVICE == "cuda")
def logprobs_of_few(policy, tokens):
    """log pi(o_t | q, o_<t), and 0.0 where there is PAD. (M, W + T) -> (M, T)"""
    n = int((tokens[:, W:] != PAD).any(0).sum())                # tokens of the longest output
    tokens = tokens[:, (tokens != PAD).any(0)]                  # without empty columns
    logits = logits_after(policy, tokens[:, :-1], n).flatten(0, 1)          # (M * n, V)
    outputs = tokens[:, -n:].clamp(min=PAD).flatten()     # (M * n,), the tool's as PAD
    if KERNEL and KERNEL["can_run"](DEVICE):
        logps, *_ = KERNEL["logprob"](logits, outputs, temperature=TEMPERATURE)
    else:
        y = logits.float() / TEMPERATURE
        logps = -F.cross_entropy(y, outputs, reduction="none", ignore_index=PAD)
    return F.pad(logps.view(-1, n), (0, T - n))

def logprobs(policy, tokens):
    """log pi(o_t | q, o_<t), and a mask: 1.0 for the policy's tokens. (B, W + T) -> 2 x (B, T)"""
    order = (tokens != PAD).sum(1).argsort(descending=True)     # a part's rows are about as long
    parts = tokens[order].to(DEVICE).split(M)           # the backward pass computes a part again
    parts = [checkpoint(logprobs_of_few, policy, few, use_reentrant=False) for few in parts]
    return torch.cat(parts).cpu()[order.argsort()], (tokens[:, W:] > PAD).float()

def sample_few(policy, questions, uniforms, greedy, texts):
    """Questions with outputs, and log pi of their tokens. (N, W) -> (N, W + T), (N, T)"""
    first = int((questions == PAD).sum(1).min()) // 16 * 16     # columns before it have no token
    tokens = F.pad(questions, (0, T), value=PAD)
    logps = torch.zeros_like(uniforms)
    ends = torch.tensor(policy.generation_config.eos_token_id, device=DEVICE)
    layers = DynamicCache(config=policy.config).layers
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)           # others cannot have a fixed size
    is_fixed = all(type(layer) in kinds for layer in layers)
    cache = Cache(layers=[StaticLayer(W + T - first) for _ in layers] if is_fixed else layers)
    at = torch.arange(W - first, device=DEVICE)     # columns to read after `first`: the questions
    words = [CALL] if isinstance(CALL, str) else CALL
    may_end = functools.cache(lambda token: [       # \ufffd is a part of a letter
        word for word in words if {word[-1], "\ufffd"} & {*TOKENIZER.decode([token])}])

    def write():                                # reads the columns `at`, and writes the next one
        seen = tokens[:, first:] if is_fixed else tokens[:, first:first + at[-1] + 1]
        logits = logits_after(policy, seen, 1, cache, at)[:, 0].float()             # (N, V)
        pi = (logits / TEMPERATURE).softmax(-1)
        cdf = pi.cumsum(-1)
        t = at[-1:] + 1 + first - W
        drawn = torch.searchsorted(cdf, uniforms[:, t] * cdf[:, -1:])               # (N, 1)
        token = logits.argmax(-1, keepdim=True) if greedy else drawn
        last, said = tokens[:, W + t - 1], tokens[:, W + t]     # said by the tool, or PAD
        has_ended = (torch.isin(last, ends) | (last == PAD)) & (t > 0)          # (N, 1)
        logps[:, t] = pi.gather(1, token).log()
        tokens[:, W + t] = torch.where(said < PAD, said, token.masked_fill(has_ended, PAD))

    run = write
    for t in range(T):
        run()
        answer_calls(tokens, W + t, texts, may_end)
        at = at[-1:].add_(1)                    # in place, where a recording looks for it
        if t == 1 and DEVICE == "cuda":         # Python starts kernels more slowly than they run
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    write()
                run = graph.replay
            except RuntimeError as error:
                if greedy:                      # an evaluation comes first
                    print("Sampling is slow, because it cannot be recorded:", error)
        if (t % 16 == 0 or DEVICE == "cpu") and (tokens[:, W + t] == PAD).all():
            break
    return tokens.cpu(), logps.cpu()

def rounded(policy, dtype):
    """Copy a policy, but round its weights, not its buffers. deepcopy looks them up in a dict."""
    return copy.deepcopy(policy, {id(weight): weight.to(dtype) for weight in policy.parameters()})

@torch.no_grad()
def sample(policy, questions, greedy=False):
    """Write an output after each question; PAD follows its end. B texts -> (B, W + T)"""
    model = rounded(policy, DTYPE)
    uniforms = 1 - torch.rand(len(questions), T, generator=DRAWS)       # the same ones for any N
    n = N or 16 * M
    rows = zip(*[x.to(DEVICE).split(n) for x in (encode(questions, W), uniforms)])
    parts = [sample_few(model, *few, greedy, questions[i * n:]) for i, few in enumerate(rows)]
    tokens, sampled_logps = map(torch.cat, zip(*parts))         # (B, W + T), (B, T)
    logps, mask = logprobs(policy, tokens[::8])     # it should agree with the sampler, to rounding
    gap = ((logps - sampled_logps[::8]) * mask).abs().sum() / mask.sum()
    refuse(greedy and not gap <= GAP,               # in the evaluation before the first step
           f"gap {gap:.1e}: this model samples from other probabilities than it computes")
    cut = (tokens[:, -1] != PAD).float().mean()     # outputs without an end, nearly always
    failed = [*filter(None, CALLS)]
    METRICS.update({"completions/mean_length": (tokens[:, W:] > PAD).sum().item() / len(tokens),
                    "entropy": -sampled_logps[tokens[:, W:] > PAD].mean().item(),
                    "tools/call_frequency": len(CALLS) / len(tokens),
                    "tools/failure_frequency": len(failed) / max(1, len(CALLS)),
                    "completions/clipped_ratio": cut.item(),
                    "sampling/sampling_logp_difference/mean": gap.item()})
    print(f"sampled: cut {cut:.3f}, gap {gap:.1e}, calls {len(CALLS) / len(tokens):.2f}, "
          f"failed {len(failed)}", *failed[:1], flush=True)
    CALLS.clear()
    return tokens

# ---- training --------------------------------------------------------------------------------
def advantages(rewards):
    """How much better each output did than its group. (P, G) -> (P, G)"""
    A = rewards - rewards.mean(1, keepdim=True)
    return A / (rewards.std(1, keepdim=True) + 1e-4)                        # eq. (1)

def surrogate_loss(logps, old_logps, A, mask, eps_low=0.2, eps_high=0.28):
    """The mean over outputs of the mean over their tokens. (B, T), but A is (B, 1) -> scalar"""
    log_rho = (logps - old_logps).clamp(max=80)     # exp(89) is inf, and its gradient nan
    ratio = log_rho.exp()                                                   # eq. (2)
    clipped_ratio = ratio.clamp(1 - eps_low, 1 + eps_high)
    token_loss = -torch.min(ratio * A, clipped_ratio * A)                   # eq. (3)
    means = (token_loss * mask).sum(1) / mask.sum(1)                        # (B,)
    return means.mean()                                                     # eq. (5)

def descend(policy, optimizer, loss, learning_rate):
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    METRICS.update(loss=loss.item(), grad_norm=norm.item(), learning_rate=learning_rate)

def evaluate(policy, problems, folder, step):
    """Log the mean reward for problems. -> str, with one greedy output"""
    questions, answers = zip(*problems)
    texts = decode(sample(policy, questions, greedy=True))
    reward = sum(map(judge, answers, texts)) / len(texts)
    log(folder, step, eval_reward=reward)
    return f"{reward:.3f}, {questions[0]!r} {texts[0]!r}"

def train(policy, rng, steps):
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=DEVICE == "cuda")
    for step in range(steps):
        problems = [sample_problem(rng) for _ in range(P)]
        questions, answers, *_ = zip(*[problem for problem in problems for _ in range(G)])
        tokens = sample(policy, questions)                                  # (B, W + T)
        rewards = torch.tensor(list(map(judge, answers, decode(tokens)))).float()  # (B,)
        A = advantages(rewards.view(P, G)).view(-1, 1)                      # (B, 1)
        with torch.no_grad():
            old_logps, mask = logprobs(policy, tokens)                      # (B, T)
        for rows in torch.randperm(P * G, generator=DRAWS).chunk(2):        # two updates
            logps, _ = logprobs(policy, tokens[rows])
            loss = surrogate_loss(logps, old_logps[rows], A[rows], mask[rows])
            descend(policy, optimizer, loss, RATE * (1 - step / steps))
        print(f"step {step}: reward {rewards.mean():.3f}, tokens {mask.mean() * T:.1f}", flush=True)
        yield step + 1, rewards.view(P, -1)

def main(model, file=None, seed=None, steps=None):
    seed = SEED if seed is None else seed
    steps = STEPS if steps is None else steps
    for name in ("P", "G", "W", "T", "M", "TEMPERATURE", "SAVE_STEPS"):
        refuse(not globals()[name] > 0, f"{name} = {globals()[name]}: has to be above 0")
    torch.manual_seed(seed)             # of an adapter's weights
    DRAWS.manual_seed(seed)
    rng, fixed = random.Random(seed), random.Random("held out")     # all seeds hold out the same
    problems = read_problems(file) if file else [make_up_problem(fixed) for _ in range(10_000)]
    once = {}
    for question, answer in problems:
        _, other = once.setdefault(question.strip(), (question, answer))
        refuse(answer != other,
               f"{file}: {question[:200]!r} has two answers, {other!r} and {answer!r}")
    problems = fixed.sample([*once.values()], len(once))                    # shuffled
    refuse(len(problems) < 10, f"{file}: fewer than 10 different prompts")
    n = min(max(1, HELD_OUT), len(problems) // 10)
    held_out, PROBLEMS[:] = problems[:n], problems[n:]
    UNUSED.clear()
    empty, right = (sum(judge(answer, text and str(answer)) for _, answer in problems)
                    for text in ("", "answer"))     # one that verify cannot read ends the run now
    NAMED.clear()
    if right <= empty:
        print(f"Look at verify: the answers as texts get {right / len(problems):.3f}, empty texts "
              f"{empty / len(problems):.3f}; numbers in a file are texts, such as '7'")
    refuse(not os.access(".", os.W_OK), f"{os.getcwd()}: nothing can be saved in this folder")
    policy = load(model)
    most = int((encode([question for question, _ in problems], W) != PAD).sum(1).max()) + T
    refuse(most > getattr(policy.config.get_text_config(), "max_position_embeddings", most),
           f"{most} tokens, {T} of them of an output, exceed the model's context; lower T")
    names = ["trained", *[f"trained-{number}" for number in range(2, 10_000)]]
    taken = {name.partition("-unfinished")[0] for name in os.listdir()}
    folder = os.path.abspath(next(name for name in names if name not in taken))
    place = f"{folder}-unfinished"
    os.mkdir(place)                         # now, so that no other run takes it
    done, has_learned = 0, False
    try:
        save(policy, place)                 # before the first step, because it may fail
        print("held-out questions, before:", evaluate(policy, held_out, place, 0), flush=True)
        for done, groups in train(policy, rng, steps):
            if groups.shape[1] > 1:
                METRICS.update(reward_std=groups.std(1).mean().item(), frac_reward_zero_std=(
                    groups.amax(1) == groups.amin(1)).float().mean().item())
            log(place, done, reward=groups.mean().item(), **METRICS)
            has_learned |= METRICS["grad_norm"] > 0 or (groups != groups[:, :1]).any().item()
            if done % SAVE_STEPS == 0 or done == steps:
                save(policy, place)
    except torch.OutOfMemoryError:
        sys.exit(f"step {done}: out of memory: lower N = {N or 16 * M} or M = {M}, or use LoRA")
    except RuntimeError as error:
        refuse("is non-finite" in str(error), f"step {done}: the gradient is not finite")
        raise
    finally:                # after Ctrl-C, SIGTERM or an error; again, if one has ended a save
        save(policy, place)
        if done == steps > 0:
            place = shutil.move(place, folder)
        print(f"after {done} steps, the model is in {place}", flush=True)
        if done and not has_learned:
            print("no group had two different rewards, so nothing was learned", flush=True)
    print("held-out questions, after: ", evaluate(policy, held_out, place, done))

# ---- what watches over a run: its input, its log, its folder, signals ------------------------
def refuse(is_bad, why):
    """End the program with a line if something cannot work."""
    if is_bad:
        sys.exit(why)

def read_problems(file):
    """Yield the prompts in a file of JSON lines, and their answers, with all their digits."""
    n, line = 0, b""
    try:
        with open(file, "rb") as lines:
            for n, line in enumerate(lines, start=1):       # noqa: B007 (the message needs n)
                if line.strip(b"\xef\xbb\xbf \t\r\n"):
                    row = json.loads(line, parse_int=str, parse_float=str, parse_constant=str)
                    str.encode(row["prompt"])       # JSON can hold half of a character
                    yield row["prompt"], row["answer"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        why = f"the key {error} is missing" if isinstance(error, KeyError) else error
        sys.exit(f'{file}, line {n}: {why}: {line.decode(errors="replace")[:60]!r}; '
                 'write {"prompt": "a text", "answer": "..."}')

def log(folder, step, **metrics):
    """Append a line to the metrics in a folder, which `python -m report.check FOLDER` reads."""
    start = "eval_" * ("eval_reward" in metrics)
    metrics |= {f"{start}rewards/{name}/mean": sum(x) / len(x) for name, x in NAMED.items() if name}
    NAMED.clear()
    with open(f"{folder}/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step} | metrics) + "\n")

@torch.no_grad()
def save(policy, folder):
    """Replace the model in a folder or, on a full disk, nothing. A kill leaves a whole file."""
    new = f"{folder}.new"
    try:
        model = rounded(policy, STORED)
        if hasattr(model, "merge_and_unload"):      # an adapter, which the policy keeps
            model = copy.deepcopy(model).merge_and_unload()
        model.save_pretrained(new)
        TOKENIZER.save_pretrained(new)
        shutil.copytree(new, folder, copy_function=os.replace, dirs_exist_ok=True)
    except Exception as error:                  # OSError, or what safetensors makes of it
        sys.exit(f"{folder}: the model cannot be saved: {error}")
    finally:
        shutil.rmtree(new, ignore_errors=True)

def stop(number, _):
    """Handle the SIGNALS: end the training, and save. A second one has no effect."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)

if __name__ == "__main__":
    getattr(sys.stdout, "reconfigure", dict)(errors="backslashreplace")    # not in a notebook
    if len(sys.argv) not in (2, 3) or sys.argv[-1].startswith("-"):
        sys.exit(__doc__)
    for each in SIGNALS:
        if signal.getsignal(each) != signal.SIG_IGN:            # under nohup, SIGHUP is ignored
            signal.signal(each, stop)
    main(*sys.argv[1:])
