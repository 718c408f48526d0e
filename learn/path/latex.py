"""Convert formulas from the ASCII of the docstrings to LaTeX, which GitHub typesets."""
import re

NAMES = {"eps": r"\varepsilon", "lam": r"\lambda", "sigmoid": r"\sigma", "grad": r"\nabla"}
NAMES |= {name: f"\\{name}" for name in (
    "pi", "rho", "beta", "gamma", "delta", "theta", "sum", "log", "exp", "min", "max")}
# a symbol, |o_i|, a call or a group, in which there may be calls
ATOM = r"(?:\w*\((?:[^()]|\([^()]*\))*\)|\|[^|\s]+\||[\w.]+)"
FRACTION = re.compile(rf"({ATOM}) ?/ ?({ATOM})")
WITH_FRACTION = re.compile(r"\(((?:[^()]|\([^()]*\))*?\\frac(?:[^()]|\([^()]*\))*)\)")
TOKEN = re.compile(r"""
    (?P<words> if\ .* ) | (?P<digits> \d[\d.]* ) (?: e(?P<power>-?\d+) )?
  | (?P<kept> \\[a-z]+ ) | (?P<dots> \.\. ) | (?P<given> \ \|\  )
  | (?P<raised> \^ (?: \(.*\) | \w+ ) )
  | (?P<base> [A-Za-z]+ ) (?: _(?P<index> <?[a-z](?:\+1)?\b | [A-Za-z0-9]+ ) )?""", re.X)


def latex(text, has_fractions=True):
    """Convert a formula, with fractions or, for a line of text, with slashes. -> LaTeX"""
    if has_fractions:
        text = FRACTION.sub(
            lambda match: rf"\frac{{{bare(match[1])}}}{{{bare(match[2])}}}", text)
    text = TOKEN.sub(token, text)
    return WITH_FRACTION.sub(r"\\left(\1\\right)", text)


def bare(part):
    """Take the outer parentheses away, which a fraction does not need. -> str"""
    return part[1:-1] if part.startswith("(") else part


def token(match):
    """Convert a name with its index, a number or a sign. -> LaTeX"""
    if match["words"]:
        return rf"\text{{ {match[0]}}}"
    if match["digits"]:
        times = "" if match["digits"] == "1" else rf"{match['digits']} \cdot "
        return f"{times}10^{{{match['power']}}}" if match["power"] else match[0]
    if match["raised"]:
        return f"^{{{latex(bare(match[0][1:]))}}}"
    if not match["base"]:
        return match["kept"] or (r"\ldots " if match["dots"] else r" \mid ")
    base, index = match["base"], match["index"] or ""
    upright = base if len(base) == 1 else rf"\mathrm{{{base}}}"
    if len(index) > 1:
        index = rf"{{\mathrm{{{index}}}}}" if index.isalpha() else f"{{{index}}}"
    return NAMES.get(base, upright) + (f"_{index}" if index else "")
