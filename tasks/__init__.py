"""Tasks besides arithmetic, the rows of --reward, and what wraps tasks or puts them together.

Here is what these files share: how a completion is read, and the base of what wraps a task.
"""
from common import extract as extract  # for the verifiers of tasks


def block(text, name):
    """What stands in the one <name>..</name> block of a text; None without one, or if there is a
    second tag of that name. -> str or None"""
    opening = f"<{name}>"
    closing = f"</{name}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    _, _, rest = text.partition(opening)
    inside, closed, _ = rest.partition(closing)
    return inside if closed else None


class Wrapper:
    """A task that changes something of another task, and is that task in all that it does not
    define."""

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)

    @property
    def state(self):
        return self.task.state

    @state.setter
    def state(self, state):
        self.task.state = state

    @property
    def reward_model(self):
        return self.task.reward_model

    @reward_model.setter
    def reward_model(self, model):
        self.task.reward_model = model
