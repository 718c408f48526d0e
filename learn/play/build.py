"""Build the page of the playground, and check that the policies in it answer as before.

The base is stored in half precision, and the trained policy as its difference from the base, in 8
bits. On 200 held-out problems, both must give the same greedy answers as the run's own weights.
"""
import base64
import hashlib
import json
import re
import string
import subprocess
from pathlib import Path

import torch

import common
import plumbing
from learn import look
from report.ask import load_policy, read_run
from report.logs import read_summary

FOLDER = Path(__file__).parent
PAGE = common.HERE / "docs/play.html"
ENGINE = ("engine.js", "arithmetic.js", "loop.js", "experiments.js")     # these do not use the page
SCRIPTS = (*ENGINE, "view.js", "top.js", "train.js", "settings.js", "hand.js", "passk.js", "ask.js")
DATA = re.compile('<script id="data" type="application/json">(.*?)</script>', re.DOTALL)


# ---- 1. the weights --------------------------------------------------------------------------

def pack(base, trained):
    """Pack the weights of two policies, which have the same names and shapes, as text. A vector is
    stored as a matrix with one column. -> dict for JSON"""
    flat_base, flat_trained = (torch.cat([weight.detach().flatten() for weight in weights.values()])
                               for weights in (base, trained))
    halves = flat_base.half()
    difference = flat_trained - halves.float()
    scale = max(difference.abs().max().item(), 1e-12) / 127
    return {"shapes": [[name, len(weight), weight[0].numel()] for name, weight in base.items()],
            "scale": scale,
            "base": encode(halves),
            "difference": encode((difference / scale).round().to(torch.int8))}


def encode(numbers):
    """Encode numbers as text. Their bytes are little-endian, as on nearly all computers. -> str"""
    return base64.b64encode(numbers.numpy().tobytes()).decode()


def decode(text, dtype):
    """Decode the text of encode() to float32. -> (n,)"""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype).float()


def unpack(packed):
    """Unpack the weights of the base and of the trained policy, as the page does. -> two dicts"""
    base = decode(packed["base"], torch.float16)
    trained = base + decode(packed["difference"], torch.int8) * packed["scale"]
    sizes = [rows * columns for _, rows, columns in packed["shapes"]]
    return [{name: part.view((rows, columns) if columns > 1 else rows)
             for (name, rows, columns), part in zip(packed["shapes"], numbers.split(sizes))}
            for numbers in (base, trained)]


def answers(script, cfg, task, weights):
    """Answer 200 held-out problems greedily with these weights. -> tokens (200, T)"""
    policy = script.GPT(cfg)
    policy.load_state_dict(policy.state_dict() | weights)
    return script.complete(policy, task, cfg, common.held_out_problems(task, 200)).tokens


# ---- 2. the run ------------------------------------------------------------------------------

def sizes(script, cfg, task):
    """The sizes of the policy, the tokenizer and the task that the engine needs. Letters are as in
    the scripts; F is the width of the MLP. -> dict"""
    return {"D": cfg.hidden_size, "H": cfg.num_attention_heads, "KV": cfg.num_key_value_heads,
            "F": cfg.intermediate_size, "T": cfg.max_completion_length,
            "promptWidth": task.prompt_width,
            "EOS": script.EOS, "PAD": script.PAD, "specialTokens": common.SPECIAL_TOKENS,
            "eps": torch.finfo(torch.float32).eps,      # the default of nn.RMSNorm
            "minOperands": task.min_operands, "maxOperands": task.max_operands,
            "learningRate": cfg.learning_rate}


def read(folder):
    """Read everything that the page needs from a run. Exits with one line if the texts of the page
    would be wrong about it. -> dict for JSON"""
    script, cfg = read_run(folder)
    name, flags = plumbing.read_config(folder)
    for flag, value in {"task": "arithmetic", "reward": "accuracy", "init_from": ""}.items():
        if flags[flag].partition(":")[0] != value:          # arithmetic:3-7 is arithmetic
            common.fail(f"{folder}: was trained with --{flag} {flags[flag]}; choose a run on "
                        "arithmetic that starts from the base and rewards only right answers")
    if name == "dpo.py":
        common.fail(f"{folder}: this run of dpo.py learned from pairs; choose a run of a script "
                    "that learns from rewards")
    summary = read_summary(folder)
    if summary is None or "greedy" not in summary["base"]:
        common.fail(f"{folder}: summary.json has no greedy scores; resume the run")
    run = {"script": name, "batch_size": cfg.num_prompts * cfg.num_generations,
           "num_updates": cfg.num_iterations * cfg.num_mini_batches, "steps": summary["steps"],
           "problems": summary["base"]["problems"],
           **{end: summary[end]["greedy"] for end in ("base", "trained")}}
    task = common.load_task(cfg, script.verify)
    policies = [dict(load_policy(folder, script, cfg, name).named_parameters())
                for name in ("base.pt", "checkpoint.pt")]
    packed = pack(*policies)
    for weights, unpacked in zip(policies, unpack(packed)):
        if not torch.equal(*(answers(script, cfg, task, part) for part in (weights, unpacked))):
            common.fail(f"{folder}: its policies answer differently after packing; choose a "
                        "different run")
    return {"cfg": sizes(script, cfg, task), "run": run, "packed": packed, "measured": None}


# ---- 3. measurements in Node.js --------------------------------------------------------------

def measure(data):
    """Measure with measure.js what the experiments do to the base, with several seeds. This takes a
    quarter of an hour on one core. Exits with one line without Node.js. -> dict for JSON"""
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in (*ENGINE, "measure.js")]
    program = "\n".join(['"use strict";', f"const stored = {json.dumps(data)};", *texts])
    try:
        done = subprocess.run(["node", "-"], input=program, stdout=subprocess.PIPE,
                              encoding="utf-8", check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        common.fail(f"node could not run measure.js: {error}; --measure needs Node.js")
    return json.loads(done.stdout)


# ---- 4. the page -----------------------------------------------------------------------------

def sha256(text):
    """The hash by which a content security policy allows this text to run. -> str"""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def assemble(data):
    """Put the page together. -> HTML"""
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = "\n".join(['\n"use strict";', look.SCRIPT, *texts])
    style = f"\n{look.LOOK}{(FOLDER / 'page.css').read_text(encoding='utf-8')}"
    template = string.Template((FOLDER / "page.html").read_text(encoding="utf-8"))
    run = data["run"]
    size = sum(rows * columns for _, rows, columns in data["packed"]["shapes"])
    data_text = json.dumps(data).replace("<", r"\u003c")       # keeps </script> out of the data
    return template.substitute(
        header=look.header("../", "Play"), icon=look.ICON, style=style, style_hash=sha256(style),
        script_text=script, script_hash=sha256(script),
        script=run["script"], steps=run["steps"],
        base=f"{100 * run['base']:.1f}", trained=f"{100 * run['trained']:.1f}",
        num_problems=run["problems"], num_weights=f"{size:,}", batch_size=run["batch_size"],
        num_updates="1 step" if run["num_updates"] == 1 else f"{run['num_updates']} steps",
        layers=sum(name.endswith(".query.weight") for name, *_ in data["packed"]["shapes"]),
        width=data["cfg"]["D"], data=data_text)


def data_of(path):
    """Read the data of assemble() from a page. -> dict, or None if there is no such page"""
    found = DATA.search(path.read_text(encoding="utf-8")) if path.exists() else None
    return json.loads(found[1]) if found else None
