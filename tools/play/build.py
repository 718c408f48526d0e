"""The page of the playground: what it holds, and that the policies in it answer as before.

The base is stored in half precision, the trained policy as its difference from that, in whole steps
of a size that each tensor has. Of 200 held-out problems all greedy answers of both must be those of
the run's own weights.
"""
import base64
import hashlib
import json
import re
import string
from pathlib import Path

import torch

import common
from tools.ask import load_policy, read_run
from tools.runs import DOCS

FOLDER = Path(__file__).parent
PAGE = DOCS / "play.html"
SCRIPTS = ("engine.js", "arithmetic.js", "view.js", "ask.js", "group.js", "train.js", "passk.js")
NUM_CHECKED = 200
MOST_BYTES = 600_000
DATA = re.compile('<script id="data" type="application/json">(.*?)</script>', re.DOTALL)


# ---- 1. the weights --------------------------------------------------------------------------

def pack(base, trained):
    """The weights of two policies, which have the same names and shapes, as text. A vector is a
    matrix of one column. -> dict for JSON"""
    halves = {}
    steps = {}
    scales = []
    for name, weight in base.items():
        halves[name] = weight.half()
        difference = trained[name] - halves[name].float()
        scale = max(difference.abs().max().item(), 1e-12) / 127
        steps[name] = (difference / scale).round().to(torch.int8)
        scales.append(scale)
    return {"shapes": [[name, *shape(weight)] for name, weight in base.items()],
            "scales": scales,
            "base": encode(halves, "<f2"),
            "difference": encode(steps, "i1")}


def shape(weight):
    """Rows and columns of a weight."""
    return [len(weight), weight[0].numel()]


def num_weights(packed):
    """How many numbers each policy has."""
    return sum(rows * columns for _, rows, columns in packed["shapes"])


def encode(weights, kind):
    """All tensors, one behind the other, as text. kind: of a number, as numpy calls it"""
    flat = torch.cat([weight.flatten() for weight in weights.values()])
    numbers = flat.numpy().astype(kind)
    return base64.b64encode(numbers.tobytes()).decode()


def decode(text, dtype):
    """What encode() wrote. -> (n,)"""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


def unpack(packed):
    """The weights as the page computes with them: of the base, and of the trained policy. -> two
    dicts of float32"""
    halves = decode(packed["base"], torch.float16)
    steps = decode(packed["difference"], torch.int8)
    base = {}
    trained = {}
    start = 0
    for (name, rows, columns), scale in zip(packed["shapes"], packed["scales"]):
        part = slice(start, start + rows * columns)
        size = (rows,) if columns == 1 else (rows, columns)
        base[name] = halves[part].float().view(size)
        trained[name] = base[name] + steps[part].float().view(size) * scale
        start = part.stop
    return base, trained


def count_changed(script, cfg, task, weights, packed_weights):
    """Of NUM_CHECKED held-out problems, how many the same GPT answers otherwise with other weights,
    greedily. -> int"""
    problems = common.held_out_problems(task, NUM_CHECKED)
    answers = []
    for state in (weights, packed_weights):
        policy = script.GPT(cfg)
        policy.load_state_dict(policy.state_dict() | state)
        answers.append(script.complete(policy, task, cfg, problems).tokens)
    is_changed = (answers[0] != answers[1]).any(dim=1)
    return int(is_changed.sum())


# ---- 2. the run ------------------------------------------------------------------------------

def read_weights(folder, script, cfg):
    """The weights of the base and of the trained policy of a run. -> two dicts"""
    policies = [load_policy(folder, script, cfg, name) for name in ("base.pt", "checkpoint.pt")]
    return [{name: weight.detach() for name, weight in policy.named_parameters()}
            for policy in policies]


def check_run(folder, name, flags):
    """ValueError for a run of which the page would not tell the truth."""
    wanted = {"task": "arithmetic", "reward": "accuracy", "init_from": ""}
    for flag, value in wanted.items():
        if flags[flag].partition(":")[0] != value:          # arithmetic:3-7 is arithmetic
            raise ValueError(f"{folder}: was trained with --{flag} {flags[flag]}; name a run of "
                             "arithmetic, from the base, that was rewarded for right answers alone")
    if name == "dpo.py":
        raise ValueError(f"{folder}: is a run of dpo.py, which learns from pairs; name a run of a "
                         "script that learns from rewards")


def read_summary(folder):
    """How long a run took, and what its policies got right. ValueError if it does not say."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return {"steps": int(summary["steps"]), "problems": int(summary["base"]["problems"]),
                "base": float(summary["base"]["greedy"]),
                "trained": float(summary["trained"]["greedy"])}
    except OSError:
        raise ValueError(f"{folder}: has not ended; resume it") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{folder}: its summary.json is damaged; name another run") from None


def sizes(script, cfg, task):
    """What the engine has to know of the policy, the tokenizer and the task; letters as in the
    shapes of the scripts, F is the width of the MLP. -> dict"""
    return {"D": cfg.hidden_size, "H": cfg.num_attention_heads, "KV": cfg.num_key_value_heads,
            "F": cfg.intermediate_size, "numLayers": cfg.num_hidden_layers,
            "T": cfg.max_completion_length, "promptWidth": task.prompt_width,
            "EOS": script.EOS, "PAD": script.PAD, "specialTokens": script.SPECIAL_TOKENS,
            "eps": torch.finfo(torch.float32).eps,      # of nn.RMSNorm
            "minOperands": task.min_operands, "maxOperands": task.max_operands,
            "learningRate": cfg.learning_rate}


def read(folder):
    """All that the page has to know of a run. ValueError if there is no page to make of it. ->
    dict for JSON"""
    script, cfg = read_run(folder)
    name, flags = common.read_config(folder)
    check_run(folder, name, flags)
    run = {"script": name, "batch_size": cfg.num_prompts * cfg.num_generations,
           "num_updates": cfg.num_iterations * cfg.num_mini_batches, **read_summary(folder)}
    task = common.load_task(cfg, script.verify)
    weights = read_weights(folder, script, cfg)
    packed = pack(*weights)
    for policy, state, packed_state in zip(("base", "trained"), weights, unpack(packed)):
        changed = count_changed(script, cfg, task, state, packed_state)
        if changed > 0:
            raise ValueError(f"{folder}: packed, the policy {policy} answers {changed} of "
                             f"{NUM_CHECKED} problems otherwise; name another run")
    return {"cfg": sizes(script, cfg, task), "run": run, "packed": packed}


# ---- 3. the page -----------------------------------------------------------------------------

def sha256(text):
    """What a content security policy calls this text, which alone may run."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def assemble(data):
    """The text of the page. ValueError if it is too large."""
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = '\n"use strict";\n' + "\n".join(texts)
    style = "\n" + (FOLDER / "page.css").read_text(encoding="utf-8")
    template = string.Template((FOLDER / "page.html").read_text(encoding="utf-8"))
    run = data["run"]
    cfg = data["cfg"]
    low = cfg["minOperands"]
    high = cfg["maxOperands"]
    size = num_weights(data["packed"])
    data_text = json.dumps(data).replace("<", r"\u003c")       # so that it cannot end its element
    text = template.substitute(
        style=style, style_hash=sha256(style),
        script_text=script, script_hash=sha256(script),
        script=run["script"], steps=run["steps"],
        base=round(100 * run["base"]), trained=round(100 * run["trained"]),
        num_problems=run["problems"],
        num_weights=f"{size:,}", learning_rate=cfg["learningRate"],
        max_tokens=cfg["T"], batch_size=run["batch_size"],
        num_updates=f"{run['num_updates']} step{'s' * (run['num_updates'] > 1)}",
        operands=high if low == high else f"{low} to {high}",
        data=data_text)
    num_bytes = len(text.encode())
    if num_bytes > MOST_BYTES:
        raise ValueError(f"the page would have {num_bytes // 1000} kB, more than "
                         f"{MOST_BYTES // 1000}; name a run of a smaller policy")
    return text


def data_of(page):
    """What assemble() made a page of. -> dict"""
    return json.loads(DATA.search(page)[1])


def made_anew(path):
    """The text of the page with the policies that it has. ValueError for another page."""
    try:
        return assemble(data_of(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no page that tools/play has made, or a damaged one; "
                         f"name a run ({type(error).__name__})") from None
