"""The policy of pretrained/train.py: a model, its tokenizer and chat template, and what it scores.
Prompts have different lengths, so the shorter ones are padded on the left."""
import copy
import json
import math
import re

import torch
import transformers
from torch import nn

import common
import grpo
from pretrained import models
from pretrained import run as processes
from tasks import problems as problem_files

NO_TOKEN = -1                           # pads prompts on the left, completions on the right


class Policy:
    """A causal language model, its tokenizer, and `ends`, the tokens that end a completion."""

    def __init__(self, path, cfg):
        self.cfg = cfg
        self.model, self.tokenizer = models.load(path)
        self.num_tokens = len(self.model.get_input_embeddings().weight)
        self.ends = models.end_tokens(self.model, self.tokenizer)
        if not self.ends:
            common.fail(f"--model {path}: has no token that ends a text; choose another model")
        if models.is_quantized(self.model) and cfg.lora_rank == 0:
            common.fail(f"--model {path}: its weights are quantized, so only an adapter can be "
                        "trained: add --lora_rank 8, or choose a model that is not quantized")
        # Both files go into checkpoints. A top_p or repetition_penalty in the second would change
        # the distribution, and score() would not know.
        self.config = copy.deepcopy(self.model.config)
        self.generation_config = models.generation_config(path)
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=self.ends[0])
        room = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        self.room = room - cfg.max_completion_length    # largest number of prompt tokens
        models.remove_dropout(self.model)
        if cfg.lora_rank > 0:
            models.add_adapter(self.model, cfg.lora_rank, cfg.lora_alpha, cfg.dtype)
        if cfg.gradient_checkpointing:
            models.checkpoint_activations(self.model)
        self.model.to(cfg.device).train()               # checkpointing works only in this mode
        self.head = models.Head(self.model)
        self.autocast = lambda: torch.autocast(
            cfg.device, dtype=torch.bfloat16, enabled=cfg.dtype == "bfloat16")
        self.engine = None                              # None: transformers samples
        self.is_warned = False                          # that prompts lack a token

    def text_of(self, prompt):
        """Write a prompt as the model reads it, in its chat template if it has one. Exits with one
        line if the template fails. -> str"""
        cfg = self.cfg
        chat = problem_files.messages(prompt) if cfg.data else []
        more = json.loads(cfg.chat_template_kwargs)
        if not self.has_template():
            if chat or more or cfg.system_prompt:
                common.fail("--system_prompt, --chat_template_kwargs and conversations in --data "
                            f"need a chat template: {cfg.model} has none, or --no-chat_template "
                            "turns it off")
            return cfg.instruction + prompt
        chat = chat or [{"role": "user", "content": prompt}]
        chat[-1]["content"] = cfg.instruction + chat[-1]["content"]
        if cfg.system_prompt and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": cfg.system_prompt})
        try:
            return self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False, **more)
        except Exception as error:                      # a template may raise anything
            common.fail(f"--model {cfg.model}: its chat template fails, try --no-chat_template: "
                        f"{models.one_line(error)}")

    def has_template(self):
        return self.cfg.chat_template and self.tokenizer.chat_template is not None

    def ids_of(self, text, **options):
        """Encode a text. Exits with one line if the model has no embedding of a token. -> list"""
        ids = self.tokenizer(text, **options).input_ids
        if max(ids, default=0) >= self.num_tokens:
            token = self.tokenizer.decode([max(ids)])
            common.fail(f"--model {self.cfg.model}: its tokenizer has the token {token!a}, but the "
                        f"model has only {self.num_tokens} embeddings: call transformers' "
                        "resize_token_embeddings, and save the model again")
        return ids

    def token_ids(self, prompt):
        """Encode a prompt. Exits with one line if it has no token. -> list"""
        text = self.text_of(prompt)
        ids = bare = self.ids_of(text, add_special_tokens=False)
        if not self.has_template():                     # a template writes special tokens itself
            ids = self.ids_of(text)
            while bare and ids[-1] != bare[-1]:         # a token that ends texts was appended
                ids.pop()
        if not ids:
            common.fail(f"--model {self.cfg.model}: the prompt {prompt!a} has no token; leave it "
                        "out, or put an --instruction before it")
        has_bos = self.tokenizer.bos_token_id in (None, ids[0], *self.ends)
        if not (has_bos or self.has_template() or self.is_warned):
            self.is_warned = True
            bos = self.tokenizer.bos_token
            print(f"warning: prompts do not begin with {bos}. If the texts that the model has "
                  f"learned do, add it: --instruction '{bos}'", flush=True)
        return ids

    def encode(self, problems):
        """Encode prompts. Exits with one line if one is too long. -> token ids (B, W)"""
        rows = [self.token_ids(problem.prompt) for problem in problems]
        W, longest = max((len(row), problem.prompt) for row, problem in zip(rows, problems))
        if self.room < W:
            T = self.cfg.max_completion_length
            common.fail(f"--max_completion_length {T}: the prompt {longest[:40]!a} has {W} tokens, "
                        f"and the model reads {self.room + T} in all; lower it, or take this "
                        "prompt out of the data")
        rows = [[NO_TOKEN] * (W - len(row)) + row for row in rows]
        return torch.tensor(rows, device=self.cfg.device)

    def longest(self, task):
        """Find how many tokens the longest prompt has. -> int"""
        if self.cfg.data:
            return max(self.encode([one]).shape[1] for one in (*task.train, *task.test))
        shortest = self.encode([common.Problem("0", "")]).shape[1]
        return shortest + task.prompt_width + 2         # a character is at most one token

    def decode(self, ids):
        """Decode token ids, except those that end a text. -> str"""
        ids = [i for i in ids if i not in self.ends]
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def opening(self, prompt):
        """Find the tag at the end of a prompt with which its completion begins: some templates
        open a thought, or leave it empty. -> str, "" if there is none"""
        found = re.search(r"(<think>\s*(</think>\s*)?|<answer>\s*)$", self.text_of(prompt))
        return found[0].rstrip() if found else ""


def score(policy, prompts, completions, temperature=1.0, kernel="auto", with_entropy=True):
    """Compute log-probabilities of completions, and entropies, 0.0 where there is no token.
    (B, W), (B, T) -> (B, T) and, if with_entropy, (B, T)"""
    T = completions.shape[1]
    prompts, completions = (ids[:, (ids != NO_TOKEN).any(dim=0)] for ids in (prompts, completions))
    ids = torch.cat([prompts, completions], dim=1)              # (B, w + t)  without empty columns
    is_token = (ids != NO_TOKEN).long()
    positions = (is_token.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {"input_ids": ids.clamp(min=0), "attention_mask": is_token, "position_ids": positions,
              "use_cache": False, "logits_to_keep": completions.shape[1] + 1}

    def read(logits, tokens):
        tokens = tokens.clamp(min=0)
        is_triton = common.kernels and common.kernels.applies(kernel, logits)
        logits = logits if is_triton else logits.float()
        if with_entropy or is_triton:
            return grpo.logprobs(logits, tokens, temperature, kernel)[:1 + with_entropy]
        logits = logits.div(temperature).flatten(0, 1)                          # (n, V)
        return [-nn.functional.cross_entropy(
            logits, tokens.flatten(), reduction="none").view_as(tokens)]
    with policy.autocast():
        is_large = policy.head.is_large(policy.model, completions)
    with policy.autocast():         # a new one: older versions of torch keep casts without gradient
        if is_large:
            with policy.head.scoring(read, completions):
                found = policy.model(**inputs).logits.unbind(dim=-1)
        else:
            found = read(policy.model(**inputs).logits[:, :-1], completions)
    unused = completions == NO_TOKEN
    return [nn.functional.pad(x.masked_fill(unused, 0.0), (0, T - x.shape[1])) for x in found]


@torch.no_grad()
def score_all(policy, prompts, completions, temperature=1.0, kernel="auto"):
    """Do the same as score without a gradient, in all processes, a few rows at a time."""
    pairs = [score(policy, prompts[rows], completions[rows], temperature, kernel)
             for rows in processes.share(len(prompts)).split(policy.cfg.micro_batch_size)]
    logps, entropy = [processes.merged(torch.cat(parts), len(prompts)) for parts in zip(*pairs)]
    return logps, entropy
