"""Tasks in which an environment takes turns with the policy. Its response to a call replaces the
tokens that would be sampled next; the policy did not choose them, so their mask is 0.0.
"""
from typing import Any, NamedTuple

import common
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
