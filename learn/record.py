"""Record the calls of functions. Their code is not changed: Python reports each line to a trace
function before it runs."""
import sys


class Recorder:
    """A context that records calls.

    begin: function of the frame of a call. It returns what records the call, and appears in
    self.calls, or None. Its step(frame, event, arg) is called when the call begins, before each
    line, and when the call ends.
    """

    def __init__(self, begin):
        self.begin = begin
        self.calls, self.running = [], []

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def enter(self, frame, event, arg):
        """Called by Python when any function begins. -> the function for its lines, or None"""
        call = self.begin(frame)
        if call is None:
            return None
        self.calls.append(call)
        self.running.append(call)
        return self.step(frame, event, arg)

    def step(self, frame, event, arg):
        self.running[-1].step(frame, event, arg)
        if event == "return":
            self.running.pop()
        return self.step
