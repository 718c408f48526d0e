"""Completions into which an environment inserts text, after the call tokens of a task.

The response replaces the tokens that would be sampled next. The policy did not choose these tokens,
so they do not count in a loss: the mask is 0.0 there. `rollout` does the same as the rollout of the
script that defines the model, with the functions of this script.
"""
import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import common
from common import EOS, PAD, TOKENIZER, decode
from tasks import Task


class Turn(NamedTuple):
    """What the policy wrote between two responses, and what came of it."""
    state: Any              # of the environment before the turn; turns in equal states compare
    end: int                # number of characters of the completion up to the end of the turn
    response: str = ""      # "" if the policy stopped without a call, or is not done
    reward: float = 0.0


class Turns(Task):
    """A task in which policy and environment take turns. Besides sample and demonstration, a
    subclass defines

      open(problem)         begins an episode. -> state: any hashable value except None
      step(state, action)   takes a turn; action is the text since the last response, and ends with
                            a call. -> next state, or None at the end; response, not ""; reward

    The state follows from the completion alone, so nothing has to be stored or closed. A text has
    the sum of its rewards as its score. After the end, the environment no longer responds.
    """

    def play(self, problem, text):
        """Replay a completion. Text in which the policy imitates responses is part of its actions.
        If no response follows a call, the policy wrote it letter by letter, and nobody heard it:
        the episode ends before that turn. -> list of Turn"""
        turns = []
        state = self.open(problem)
        start = 0
        while state is not None and start <= len(text):     # not within the last response
            ends = [text.find(call, start) + len(call) for call in self.call_tokens
                    if call in text[start:]]
            if not ends:
                return turns + [Turn(state, len(text))]
            end = min(ends)
            after, response, reward = self.step(state, text[start:end])
            if not response:
                common.fail(f"--task {self.name}: step returned an empty response, after which the "
                            "next turn could not be told from this one")
            start = end + len(response)
            if not response.startswith(text[end:start]):
                break
            turns.append(Turn(state, end, response, float(reward)))
            state = after
        return turns

    def written(self, problem, act):
        """Write an episode in which act(state) chooses the actions. -> problem with completion"""
        state = self.open(problem)
        text = ""
        while state is not None:
            action = act(state)
            state, response, _ = self.step(state, action)
            text += action + response
        return problem._replace(completion=text)

    def respond(self, problem, text):
        """Return the response if the last turn ends here, and "" after the end of the episode."""
        turns = self.play(problem, text)
        return turns[-1].response if turns and turns[-1].end == len(text) else ""

    def verify(self, problem, text):
        """Add up the rewards of all turns. -> float; a list of them if there is no right or wrong,
        so that evaluations report returns"""
        rewards = [turn.reward for turn in self.play(problem, text)]
        return float(sum(rewards)) if self.is_judged else rewards


@torch.no_grad()
def rollout(model, prompts, problems, cfg, uniforms, task):
    """Sample as the rollout of the model's script does; rows without a call are equal to the last
    bit. -> tokens, mask, logps, entropy (B, T), lengths (B,)"""
    script = sys.modules[type(model).__module__]
    calls = call_ids(task)
    B, T = len(prompts), cfg.max_completion_length
    inserted = prompts.new_full((B, T), -1)                     # -1: the policy samples
    cache = {}
    hidden = script.read_prompts(model, prompts, cache)                            # (B, 1, D)
    tokens = prompts.new_full((B, T), PAD)
    mask, logps, entropy = hidden.new_zeros(3, B, T)
    lengths = prompts.new_full((B,), T)
    rows = torch.arange(B, device=prompts.device)               # (b,) rows that have not ended
    for t in range(T):
        # a token for each row, sampled or inserted
        logits = F.linear(hidden, model.embed.weight)                           # (b, 1, V)
        row_uniforms = None if uniforms is None else uniforms[rows, t]
        token = script.sample_token(logits[:, 0], row_uniforms, cfg.temperature)        # (b,)
        is_sampled = inserted[rows, t] < 0                                      # (b,)
        token = token.where(is_sampled, inserted[rows, t])
        logp, H = script.logprobs(logits, token[:, None], cfg.temperature)      # (b, 1) each
        tokens[rows, t] = token
        mask[rows, t] = is_sampled.to(mask)
        logps[rows, t] = logp[:, 0].to(logps)
        entropy[rows, t] = H[:, 0].to(entropy)

        # the environment responds to calls
        for row, i, was_sampled in zip(rows.tolist(), token.tolist(), is_sampled.tolist()):
            if was_sampled and i in calls:
                opening = decode(prompts[row, task.prompt_width:].tolist())     # such as <think>
                text = opening + decode(tokens[row, :t + 1].tolist())
                response = encode(task.respond(problems[row], text))[:T - t - 1]
                inserted[row, t + 1:t + 1 + len(response)] = prompts.new_tensor(response)

        # keep the rows that have not ended
        continues = ~(is_sampled & (token == EOS))
        lengths[rows[~continues]] = t + 1
        rows = rows[continues]
        if len(rows) == 0 or t == T - 1:
            break
        if not continues.all():
            script.take(cache, continues)
        hidden = model.hidden(token[continues, None], cache)                    # (b, 1, D)
    return tokens, mask, logps, entropy, lengths


def sampled_masks(task, examples, ids):
    """Mark the tokens of each completion: 1.0 if the policy writes a token, 0.0 if the environment
    inserts it after a call. list of (T,) -> list of (T,)"""
    calls = call_ids(task)
    masks = []
    for example, row in zip(examples, ids):
        mask = torch.ones(len(row), device=row.device)
        tokens = row.tolist()                           # wait for CUDA once, not at each token
        t = 0
        while t < len(tokens):
            t += 1
            if tokens[t - 1] in calls:
                response = task.respond(example, decode(tokens[:t]))
                num_inserted = len(encode(response))
                mask[t:t + num_inserted] = 0.0
                t += num_inserted
        masks.append(mask)
    return masks


def call_ids(task):
    """List the token ids after which the environment may respond. -> list"""
    return [TOKENIZER.encode_single_token(text) for text in task.call_tokens]


def encode(response):
    """Encode text that an environment inserts; it may contain special tokens. -> list of ids"""
    return TOKENIZER.encode(response, allowed_special="all")
