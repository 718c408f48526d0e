"""What a completion says: the content of its blocks."""
import re


def extract(text):
    """Extract the answer, printable ASCII, from the only <answer> block. -> str, or None"""
    answer = block(text, "answer") or ""
    return answer.strip() if re.fullmatch("[ -~]{1,200}", answer) else None


def block(text, name):
    """Extract the content of the only <name>..</name> block of a text. -> str, or None if there is
    no such block, or a second tag of that name"""
    opening = f"<{name}>"
    closing = f"</{name}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    _, _, rest = text.partition(opening)
    inside, closed, _ = rest.partition(closing)
    return inside if closed else None
